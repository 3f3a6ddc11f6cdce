"""The command line: what it prints, where, and with which exit code."""

import importlib
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from models import tiny_llama, tiny_policy
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from qurl.cli import COMMANDS, HELP, HELP_OF_THEIR_OWN, main
from qurl.run.checkpoint import replace_state
from qurl.run.engines import build_actor
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.lora import add_adapters_, save_adapters
from qurl.trainer.policy import hub_answers, load_model

SRC = str(Path(__file__).parents[2] / "src")


def python(code, *words, env=None, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": SRC, "PATH": ""} | (env or {}),
        check=True,
        **options,
    )


def test_help_imports_nothing_heavy():
    code = "import sys; from qurl.cli import main; main(['--help']); print(*sys.modules)"
    printed = python(code).stdout
    assert printed.startswith(HELP)
    modules = set(printed.removeprefix(HELP).split())
    assert "qurl.cli" in modules
    assert not modules & {"torch", "transformers", "numpy", "tyro", "pydantic", "rich"}


def test_help_is_fast():
    code = "from qurl.cli import main; main(['--help'])"
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        python(code)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", sorted(set(COMMANDS) - HELP_OF_THEIR_OWN))
def test_the_help_of_a_command_imports_nothing_heavy(command, flag):
    code = f"import sys; from qurl.cli import main; main(['{command}', '{flag}'])"
    printed = python(f"{code}; print(*sys.modules)").stdout
    text, _, modules = printed.partition("lists all commands\n")
    assert set(re.findall(r"^  qurl (\w+)", text, re.MULTILINE)) == {command}
    assert "RECIPE is a TOML file" not in text
    assert not set(modules.split()) & {"torch", "transformers", "numpy", "tyro"}


@pytest.mark.parametrize("command", ["train", "eval", "validate"])
def test_the_help_with_all_keys_needs_no_torch(command):
    code = (
        "import sys; from qurl.cli import main\n"
        f"try: main(['{command}', 'arithmetic-cpu', '--help'])\n"
        "except SystemExit as end: print(end.code, *sys.modules)"
    )
    *text, last = python(code).stdout.splitlines()
    assert "--quant.format" in "\n".join(text)
    assert last.split()[0] == "0"
    assert not set(last.split()) & {"torch", "transformers"}


@pytest.mark.parametrize("args", [[], ["-h"], ["--help"], ["help"]])
def test_help(args, capsys):
    assert main(args) == 0
    assert capsys.readouterr().out == HELP


def test_help_lists_every_command_and_no_other():
    assert re.findall(r"^  qurl (\w+) [A-Z[]", HELP, re.MULTILINE) == list(COMMANDS)


def test_version(capsys):
    from qurl import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def fails(args, capsys):
    """Exit code and message of a command that fails: stderr only, no traceback."""
    code = main(args)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return code, captured.err


def test_unknown_command(capsys):
    code, message = fails(["fly"], capsys)
    assert code == 2
    assert message == f"ConfigError: 'fly' is not a command; use one of {', '.join(COMMANDS)}\n"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (
            ["train", "nowhere.toml"],
            2,
            "ConfigError: there is no recipe and no run at nowhere.toml",
        ),
        (["eval", "nowhere.toml"], 2, "ConfigError: there is no recipe and no run at nowhere.toml"),
        (
            ["validate", "nowhere.toml"],
            2,
            "ConfigError: there is no recipe and no run at nowhere.toml",
        ),
        (["train", "--steps", "0"], 2, "ConfigError: steps = 0: must be greater"),
        (["report"], 2, "ConfigError: expected RUN, got nothing"),
        (["report", "a", "b"], 2, "DataError: a is not a run directory"),
        (["export", "a"], 2, "ConfigError: expected RUN|CHECKPOINT OUT, got a"),
        (["export", "a", "b", "--fast"], 2, "ConfigError: expected RUN|CHECKPOINT OUT, got a b --"),
        (["export", "a", "b", "--dtype"], 2, "ConfigError: --dtype '' is not one of float32"),
        (["train", ""], 2, "ConfigError: the name of the recipe is empty"),
        (["doctor", "x"], 2, "ConfigError: expected no arguments, got x"),
        (["fork", "a"], 2, "ConfigError: expected RUN --at STEP, got a"),
        (["fork", "a", "--at"], 2, "ConfigError: --at '' is not the number of a step"),
        (["export", "nowhere", "b"], 1, "CheckpointError: nowhere is neither a run"),
    ],
)
def test_errors_are_one_message_on_stderr(args, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found_code, found = fails(args, capsys)
    assert found.startswith(message)
    assert found_code == code
    assert list(tmp_path.iterdir()) == []


def test_unknown_flags_are_refused_on_stderr(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--quant.fromat", "int8"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "quant.fromat" in captured.err
    assert "Traceback" not in captured.err


def test_train_help_shows_every_section(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--algo.objective" in text
    assert "--quant.update-scale" in text
    assert "paper: 1.5" in text
    assert "--dry-run" in text


def test_interrupted(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("qurl.config.load_config", interrupt)
    assert fails(["train"], capsys) == (
        130,
        "interrupted; repeat the command to resume a training run that keeps checkpoints\n",
    )


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(
        f'steps = 3\nrun_dir = "{tmp_path / "run"}"\ndevice = "cpu"\n'
        "[model.scratch]\nhidden_size = 32\n[sampling]\nmax_tokens = 4\n"
    )
    return path


def test_dry_run_prints_and_does_nothing(recipe, tmp_path, capsys):
    assert main(["train", str(recipe), "--dry-run", "--steps", "9"]) == 0
    printed = capsys.readouterr().out
    resolved, end = json.JSONDecoder().raw_decode(printed)
    assert resolved["steps"] == 9
    assert resolved["model"]["scratch"]["hidden_size"] == 32
    assert resolved["algo"]["kl_coef"] == 1e-3, "presets are resolved"
    budget = " ".join(printed[end:].split())
    assert "sampled per step at most 1,024" in budget
    assert "memory (GiB) on cpu policy, FP32" in budget
    assert budget.endswith(", estimated")
    assert [p.name for p in tmp_path.iterdir()] == ["r.toml"]


def test_dry_run_checks_the_recipe(recipe, capsys):
    code, message = fails(["train", str(recipe), "--dry-run", "--optim.lr", "-1"], capsys)
    assert code == 2
    assert "optim.lr = -1.0: must be greater than 0" in message


def test_validate(recipe, tmp_path, capsys):
    assert main(["validate", str(recipe), "--batch.minibatches", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    keys and values"
    assert lines[1].startswith("note  ACR cannot act")
    assert lines[2] == "ok    device: cpu"
    assert lines[3] == "ok    parts: acr, grpo"
    assert lines[4] == f"ok    run directory: {tmp_path / 'run'}, a new run"
    assert lines[5] == "ok    packages: no optional ones"
    assert lines[6] == "ok    model: made from scratch, 100 tokens, end of sequence '<eos>'"
    assert lines[7] == "ok    precision: int8 of LlamaForCausalLM"
    assert lines[8] == "ok    weights: made at the start"
    assert re.fullmatch(r"ok    memory: about [\d.]+ of [\d.]+ GiB at the peak", lines[9])
    assert lines[10].startswith("ok    training problems: 10000 of arithmetic; the first has ")
    assert lines[11] == "ok    held-out problems: not used (eval.every = 0)"
    assert lines[12] == "ok    stops: 2 '<eos>'"
    assert lines[13] == "ok    grader: 'exact' gives the truth 1 and a non-answer 0"
    assert lines[14:16] == ["", "The first prompt:"]
    assert re.fullmatch(r"\d(\+\d)+=", lines[16])
    assert [p.name for p in tmp_path.iterdir()] == ["r.toml"]


def test_validate_reports_each_failure(recipe, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    flags = ["--task.name", "file", "--task.path", str(data), "--task.eval_path", str(tmp_path)]
    assert main(["validate", str(recipe), *flags, "--eval.every", "1"]) == 2
    lines = capsys.readouterr().out.splitlines()
    failed = {line.split(": ")[0]: line for line in lines if line.startswith("FAIL")}
    names = ("model", "training problems", "held-out problems")
    assert list(failed) == [f"FAIL  {name}" for name in names]
    assert "needs a generated task to learn from, not 'file'" in failed["FAIL  model"]
    assert f"data file {data} does not exist" in failed["FAIL  training problems"]
    assert "set task.path to a file that is there" in failed["FAIL  training problems"]
    assert f"data file {tmp_path} is a folder" in failed["FAIL  held-out problems"]
    assert "set task.eval_path to a file that is there" in failed["FAIL  held-out problems"]


def validate(recipe, capsys, *flags):
    """The lines that failed, or the last check's."""
    is_sound = main(["validate", str(recipe), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith("ok  " if is_sound else "FAIL")]
    return shown[-1:] if is_sound else shown


def test_validate_looks_at_the_run_directory(recipe, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0}\n')
    [failure] = validate(recipe, capsys)
    assert failure.startswith("FAIL  run directory: run_dir = ")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_validate_looks_at_the_model(recipe, tmp_path, capsys):
    [failure] = validate(recipe, capsys, "--model.path", "/no/such/folder")
    assert failure.startswith("FAIL  model: model.path = '/no/such/folder' does not exist")
    gpt2, small = (tmp_path / name for name in ("gpt2", "small"))
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=100, **shape)).save_pretrained(gpt2)
    build_tokenizer().save_pretrained(gpt2)
    [failure] = validate(recipe, capsys, "--model.path", str(gpt2))
    assert failure.startswith("FAIL  precision: the local engine cannot run model_type = 'gpt2'")
    tiny_llama(vocab_size=90).save_pretrained(small)
    [failure] = validate(recipe, capsys, "--model.path", str(small))
    assert "FAIL  model: " in failure
    assert "has no tokenizer" in failure
    build_tokenizer().save_pretrained(small)
    assert main(["validate", str(recipe), "--model.path", str(small)]) == 0
    printed = capsys.readouterr().out
    note = f"note  model.path = {str(small)!r}: its tokenizer has 100 tokens, and the model only 90"
    assert note in printed, "models with a token for images have such tokenizers"


def test_validate_reads_adapters_and_their_base(recipe, tmp_path, capsys):
    base, folder = tmp_path / "base", tmp_path / "adapters"
    tiny_llama(vocab_size=100).save_pretrained(base)
    model = load_model(base)
    add_adapters_(model, rank=2, alpha=2, seed=0, dtype=torch.float32)
    save_adapters(model, folder)
    build_tokenizer().save_pretrained(folder)
    flags = ["--model.path", str(folder)]
    [_] = validate(recipe, capsys, *flags)
    [failure] = validate(recipe, capsys, *flags, "--model.lora_rank", "2")
    assert f"qurl export {folder} OUT --dtype float32`, and set model.path to OUT" in failure
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    [failure] = validate(recipe, capsys, *flags)
    assert failure.startswith("FAIL  weights: ")
    assert "hold NaN" in failure


def ask_hub(monkeypatch, error):
    """The hub answers like this to us; returns what is asked of it, and then of transformers."""

    def answer(url):
        asked.append(url.rpartition("/resolve/")[2])
        if error is not None:
            raise error

    def load(path, **options):
        loaded.append((path, options.get("local_files_only", False)))
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files, and\n...")

    asked, loaded = [], []
    hub_answers.cache_clear()
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    for kind in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        monkeypatch.setattr(kind, "from_pretrained", load)
    return asked, loaded


def test_a_hub_that_cannot_be_reached_is_tried_once(recipe, capsys, monkeypatch):
    asked, loaded = ask_hub(monkeypatch, TimeoutError())
    [failure] = validate(recipe, capsys, "--model.path", "some/model")
    assert failure.startswith("FAIL  model: model.path = 'some/model' cannot be loaded")
    assert "give a folder with config.json, weights and tokenizer, or a hub name" in failure
    assert failure.endswith("and this machine cannot connect to the hub")
    assert asked == ["main/config.json"]
    assert loaded == [("some/model", True)]


def test_what_ahub_answers_is_left_to_transformers(recipe, capsys, monkeypatch):
    response: Any = SimpleNamespace(status_code=401, headers={}, request=None, text="")
    for error in (None, HfHubHTTPError("it is gated", response=response)):
        _, loaded = ask_hub(monkeypatch, error)
        validate(recipe, capsys, "--model.path", "some/model")
        assert loaded == [("some/model", False)]


def test_without_a_network_commands_that_plan_do_not_wait(recipe, tmp_path):
    """No server listens at the hub's address: the library would try again after 1, 2, 4, 8, 8 s.

    One model is in the cache, in its layout, but has no chat_template.jinja, for example.
    """
    snapshot = tmp_path / "hub/models--some--model/snapshots" / ("0" * 40)
    tiny_policy().save(snapshot)
    (refs := snapshot.parents[1] / "refs").mkdir()
    (refs / "main").write_text(snapshot.name)
    flags = [str(recipe), "--sampling.max_tokens", "4", "--model.path"]
    commands = [["validate"], ["train", "--dry-run"], ["advise", "--gpu", "H100"]]
    for name, found in (("some/model", 0), ("no/model", len(commands))):
        code = f"main = __import__('qurl.cli').cli.main\nfor name, *options in {commands}:"
        code += f"\n main([name, *{[*flags, name]}, *options])"
        done = python(code, env={"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"})
        printed = done.stdout + done.stderr
        assert printed.count("this machine cannot connect to the hub") == found
        assert printed.count("ok    model: llama") == (found == 0)
        assert "Retrying" not in printed


def test_validate_reads_an_end_of_sequence_that_stands_for_none(recipe, tmp_path, capsys):
    tiny_policy().save(tmp_path / "llama")
    (tmp_path / "data.jsonl").write_text('{"prompt": "6*7=", "answer": "42"}\n')
    settings = tmp_path / "llama" / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": -1}))
    flags = ["--model.path", str(tmp_path / "llama"), "--task.name", str(tmp_path / "data.jsonl")]
    assert main(["validate", str(recipe), *flags, "--task.reward", "exact"]) == 0
    assert "ok    stops: 2 '<eos>'\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("batch.subselect", "os:nothing", "batch.subselect = 'os:nothing': os has no 'nothing'"),
        ("sampling.budget", "os:nothing", "sampling.budget = 'os:nothing': os has no 'nothing'"),
        ("sampling.replay", "os:system", "lacks num_fresh, merge (qurl.sampling.parts)"),
        ("rollout.episode", "os:nothing", "rollout.episode = 'os:nothing': os has no 'nothing'"),
        ("rollout.engine", "os:system", "rollout.engine: system(command) must take (model, token"),
        ("task.name", "os:system", "task.name failed: TypeError: system() takes at most 1 argum"),
    ],
)
def test_validate_loads_every_part_of_ones_own(recipe, capsys, key, name, message):
    failures = validate(recipe, capsys, f"--{key}", name, "--task.reward", "exact")
    assert message in failures[0]


def test_validate_asks_about_a_reward_that_knows_no_difference(
    recipe, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same.py").write_text("def score(text, answer, extra):\n    return 0.5\n")
    [last] = validate(recipe, capsys, "--task.reward", "same:score")
    assert last.endswith("gives the truth 0.5 and a non-answer 0.5, alike or worse: is that meant?")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("./own.py:score", "'./own.py' is not the name of a module; for a file my_module.py"),
        ("own.py:score", "'own.py' is not the name of a module"),
        ("nowhere:score", "there is no module 'nowhere' in "),
    ],
)
@pytest.mark.parametrize("command", ["train", "validate"])
def test_a_reward_that_is_not_there(recipe, tmp_path, capsys, command, reward, message):
    assert main([command, str(recipe), "--task.reward", reward]) == 2
    printed = capsys.readouterr()
    assert f"task.reward = {reward!r}: {message}" in printed.out + printed.err
    assert not (tmp_path / "run" / "initial").exists(), "before any work is done"


def test_validate_finds_a_grader_that_hangs(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text("import time\ndef score(*_):\n    time.sleep(60)\n")
    flags = ["--task.reward", "slow:score", "--task.grade_timeout", "0.2"]
    assert main(["validate", str(recipe), *flags]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("FAIL")] == [
        "FAIL  grader: 'slow:score' was killed at task.grade_timeout = 0.2 s, or ran out of "
        "task.grade_memory"
    ]


@pytest.mark.parametrize("reward", ["exact", "math"])
def test_validate_grades_a_file_in_the_format_of_its_reward(recipe, tmp_path, capsys, reward):
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "6*7", "answer": "42"}\n')
    tiny_policy(model=tiny_llama(max_position_embeddings=128)).save(tmp_path / "model")
    flags = ["--task.name", "file", "--task.path", str(data), "--task.reward", reward]
    flags += ["--model.path", str(tmp_path / "model")]
    assert main(["validate", str(recipe), *flags]) == 0
    assert f"'{reward}' gives the truth 1 and a non-answer 0" in capsys.readouterr().out


def test_frozen_scales_are_evaluated_and_audited(recipe, tmp_path, monkeypatch):
    flags = ["--model.scratch.warm-start-steps", "2", "--batch.problems", "4", "--steps", "1"]
    flags += ["--eval.every", "0", "--algo.kl-coef", "0", "--quant.scales", "frozen"]
    run = tmp_path / "run"
    assert main(["train", str(recipe), *flags]) == 0
    [checkpoint] = (run / "checkpoints").iterdir()
    # Those of the weights themselves are smaller.
    scales = torch.load(checkpoint / "state.pt", weights_only=True)["scales"]
    replace_state(checkpoint, scales={name: 1.25 * scale for name, scale in scales.items()})
    engines = []

    def watched(*args, **options):
        engines.append(build_actor(*args, **options))
        return engines[-1]

    for module in ("run.evaluation", "bench.audit"):
        monkeypatch.setattr(f"qurl.{module}.build_actor", watched)
    assert main(["eval", str(run), "--eval.problems", "3"]) == 0
    words = ["--at", "1", "--problems", "8", "--chunks", "4", "--objectives", "tis"]
    assert main(["audit", str(run), *words, "--out", str(tmp_path / "audit.json")]) == 0
    codes = [engine.weights.layers[0].codes().products for engine in engines]
    found = [products["o"].scale for products in codes if products]
    [scale] = (s for name, s in scales.items() if name.endswith("0.self_attn.o_proj"))
    assert len(found) == 2
    for actual in found:
        torch.testing.assert_close(actual.view(-1), 1.25 * scale.view(-1))


def test_a_run_is_trained_evaluated_reported_and_exported(recipe, tmp_path, capsys):
    flags = ["--model.scratch.warm-start-steps", "2", "--batch.problems", "4", "--steps", "1"]
    flags += ["--eval.every", "1", "--eval.problems", "5", "--algo.kl-coef", "0"]
    run = tmp_path / "run"
    assert main(["train", str(recipe), *flags]) == 0
    capsys.readouterr()
    assert main(["eval", str(run), "--eval.problems", "3"]) == 0
    table = capsys.readouterr().out
    assert "3 held-out problems" in table
    assert re.search(r"full\W+int8", table)
    assert main(["eval", str(run), "--model.path", "elsewhere"]) == 2
    assert "leave model.path out" in capsys.readouterr().err
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").exists()
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }


def test_a_recipe_after_the_flags_is_named(capsys):
    assert main(["train", "--steps", "3", "recipe.toml"]) == 2
    assert "the recipe comes before the flags: put recipe.toml first" in capsys.readouterr().err


FAST = "import sys; from qurl.cli import main; code = main(sys.argv[1:]); print(code, *sys.modules)"


def without_torch(folder, *words):
    """Exit code and stderr of a command that must not import torch."""
    done = python(FAST, *words, cwd=folder)
    code, *modules = done.stdout.split()
    assert not set(modules) & {"torch", "transformers"}, done.stderr
    return int(code), done.stderr


def test_mistakes_are_told_before_torch_is_imported(tmp_path):
    data, model = tmp_path / "d.jsonl", tmp_path / "m"
    (tmp_path / "r.toml").write_text(
        f'[model]\npath = "{model}"\n[task]\nname = "file"\npath = "{data}"\n'
    )
    train = ("train", "r.toml")
    for command in ("train", "eval", "validate"):
        words = (command, "r.toml", "--optim.lr", "-1")
        assert "optim.lr = -1.0" in without_torch(tmp_path, *words)[1]
    assert "m' does not exist" in without_torch(tmp_path, *train)[1]
    model.mkdir()
    assert "has no config.json" in without_torch(tmp_path, *train)[1]
    (model / "config.json").write_text('{"model_type": "llama", "hidden_size": -1}')
    assert "hidden_size = -1 must be a number" in without_torch(tmp_path, *train)[1]
    (model / "config.json").write_text('{"model_type": "llama"}')
    assert "has no weights" in without_torch(tmp_path, *train)[1]
    (model / "model.safetensors").touch()
    assert "has no tokenizer" in without_torch(tmp_path, *train)[1]
    (model / "tokenizer.json").touch()
    assert (
        "model.safetensors cannot be read: it has no header" in without_torch(tmp_path, *train)[1]
    )
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert "d.jsonl does not exist" in without_torch(tmp_path, *train)[1]
    data.write_text('{"question": 3, "answer": 1}\n')
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, error = without_torch(tmp_path, *train)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert code == 2
    assert error.startswith(f"DataError: {data} line 1: 'question' is 3; it must be text")
    # What the processor took: other programs of a busy machine do not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_a_reader_that_goes_away_is_no_error():
    code = "import sys; from qurl.cli import main; sys.exit(main(['--help']))"
    command = f'{sys.executable} -c "{code}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", f"sleep 0; {command}"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": SRC, "PATH": "/bin:/usr/bin"},
    )
    assert done.returncode in (0, 141)  # 0 if it was quicker than its reader
    assert done.stderr == ""


def test_a_broken_pipe_while_printing(monkeypatch, capfd):
    def broken(*_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("qurl.cli._run", broken)
    with open("/dev/null", "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        assert main(["--help"]) == 141


def test_a_nul_in_an_argument(capsys):
    assert main(["report", "a\0b"]) == 2
    assert "an argument holds a NUL character" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "export"])
def test_a_file_that_may_not_be_written(capsys, monkeypatch, command):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "run/report.html")

    monkeypatch.setattr("qurl.run.report.write_report", refuse)
    monkeypatch.setattr("qurl.run.export.export", refuse)
    words = ["run", "out"][: 1 + (command == "export")]
    assert main([command, *words]) == 2
    assert capsys.readouterr().err == "DataError: run/report.html: Permission denied\n"


def test_validate_finds_a_run_directory_that_cannot_be_written(recipe, capsys, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    [found] = validate(recipe, capsys)
    assert found.startswith("FAIL  run directory: run_dir = ")
    assert "cannot be written: no permission in " in found


DOTS = ("--sampling.select", "dots", "--systems.dots.encoder")


@pytest.mark.parametrize(
    ("flags", "failure"),
    [
        (["--track.tensorboard"], "packages: track.tensorboard needs the package 'tensorboard'"),
        (["--track.wandb", "x"], "packages: track.wandb needs the package 'wandb'"),
        (["--rollout.engine", "vllm"], "packages: rollout.engine = 'vllm' needs the package"),
        (["--parallel.engines", "1"], "packages: parallel.engines or parallel.address needs"),
        (["--run-dir", "r.toml/run"], "run directory: run_dir = 'r.toml/run': r.toml is no folder"),
        (["--experimental.dither"], "precision: experimental.dither = true needs"),
        (["--quant.full-layers", "1"], "precision: quant.full_layers = 1 leaves none of the 2"),
        (["--sampling.stop-ids", "100"], "stops: stop id 100 is not in the model's vocabulary"),
        (["--sampling.stop", "a<eos>"], "stops: stop = 'a<eos>' holds the special token '<eos>'"),
        (["--model.scratch.hidden-size", "8192", "--model.scratch.layers", "128"], "memory: about"),
        ([*DOTS, "./gone"], "model: systems.dots.encoder = './gone' does not exist"),
        ([*DOTS, "o/n", "--systems.dots.predictor", "p.pt"], "model: systems.dots.predictor = 'p"),
    ],
)
def test_validate_finds_what_train_would(recipe, tmp_path, capsys, monkeypatch, flags, failure):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qurl.run.validate.find_spec", lambda name: None)
    [found] = validate(recipe, capsys, *flags)
    assert found.startswith(f"FAIL  {failure}")


def test_validate_finds_a_place_that_cannot_hold_a_run(recipe, capsys):
    [found] = validate(recipe, capsys, "--run-dir", "a" * 300)
    assert found.endswith("File name too long")
    [found] = validate(recipe, capsys, "--run-dir", "/proc/run")
    assert found.startswith("FAIL  run directory: run_dir = '/proc/run': ")


def test_validate_reads_the_logs_of_a_run(recipe, tmp_path, capsys):
    flags = ["--model.scratch.warm-start-steps", "1", "--batch.problems", "4", "--steps", "1"]
    assert main(["train", str(recipe), *flags]) == 0
    (tmp_path / "run" / "samples.jsonl").write_text("[]\n")
    for command in ("validate", "train"):
        assert main([command, str(recipe), *flags]) == 2
        printed = capsys.readouterr()
        assert "samples.jsonl, line 1 is no record of a run: []" in printed.out + printed.err


@pytest.mark.parametrize(
    ("code", "key", "reason"),
    [
        ("def a(:", "algo.objective", ": own cannot be imported: SyntaxError: invalid syntax"),
        ("import no", "rollout.engine", ": own cannot be imported: ModuleNotFoundError: No module"),
        ("def a(*_): return 'x'", "sampling.select", "sampling.select returned x; it must return"),
        ("def a(*_): return None", "sampling.select", "sampling.select returned None; it must"),
        ("def a(*_): return None", "task.name", "task own:a drew None, not a qurl.tasks.Draft"),
        (
            "from qurl.tasks import Draft\ndef a(*_): return Draft('1+1=', 2)",
            "task.name",
            "its question and answer must be text",
        ),
        ("def a(texts, *_): return [1]", "task.reward", "the reward returned [1] for 2 texts"),
    ],
)
def test_validate_tries_parts_of_your_own(recipe, tmp_path, capsys, monkeypatch, code, key, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    importlib.invalidate_caches()
    (tmp_path / "own.py").write_text(code)
    found = validate(recipe, capsys, f"--{key}", "own:a")
    assert reason in found[0]


@pytest.mark.parametrize("select", ["shuffle", "greso", "dots"])
def test_validate_knows_our_selectors(recipe, capsys, select):
    [last] = validate(recipe, capsys, "--sampling.select", select)
    assert last.startswith("ok    grader")
