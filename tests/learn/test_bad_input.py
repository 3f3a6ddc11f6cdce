"""What a user sees when something is wrong: whole runs of a tiny recipe through the command."""

import json
import os
import shutil
import sys

import pytest
import torch
from models import full_disk, tiny_policy
from transformers import GPT2Config, GPT2LMHeadModel

import qurl.train
import qurl.trainer.learner
import qurl.trainer.policy
from qurl.cli import main
from qurl.config import build_config, load_config
from qurl.errors import ConfigError, EngineError
from qurl.run.checkpoint import replace_state
from qurl.run.directory import read_jsonl
from qurl.sampling import Sampler
from qurl.tasks.tokenizer import build_tokenizer

RECIPE = """
steps = 2
run_dir = "run"
device = "cpu"
threads = 1
[model.scratch]
hidden_size = 32
warm_start_steps = 5
warm_start_batch = 8
[batch]
problems = 4
minibatches = 2
[sampling]
max_tokens = 4
group_size = 2
[algo]
kl_coef = 0.0
[optim]
lr = 1e-3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def train(capsys):
    """Runs `qurl train recipe.toml ...`; returns the exit code and stderr."""

    def run(*flags):
        code = main(["train", "recipe.toml", *flags])
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return code, error

    return run


@pytest.fixture
def fails(train):
    """What `qurl train recipe.toml ...` says that ends with this exit code."""

    def run(*flags, code=1):
        found, error = train(*flags)
        assert found == code
        return error

    return run


@pytest.fixture
def llama(folder):
    """A folder with a tiny Llama whose context is 64 tokens, and the flags that train it."""
    tiny_policy().save(folder / "llama")
    (folder / "data.jsonl").write_text('{"prompt": "6*7=", "answer": "42"}\n' * 4)
    words = ["--model.path", "llama", "--task.name", "file", "--task.path", "data.jsonl"]
    return [*words, "--task.reward", "exact"]  # math would import for seconds


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """The folder of a run of one step, to copy."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "recipe.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "recipe.toml", "--steps", "1"]) == 0
    return folder / "run"


@pytest.fixture
def one_step(saved_run, folder):
    """As after `train("--steps", "1")`."""
    shutil.copytree(saved_run, folder / "run")


def steps(folder):
    return [row["step"] for row in read_jsonl(folder / "run" / "metrics.jsonl")]


def alarms(folder):
    events = read_jsonl(folder / "run" / "events.jsonl")
    return [event["message"] for event in events if event["kind"] == "alarm"]


def checkpoints(folder):
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("*"))


def test_a_run_that_can_be_repeated(train, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert train("--model.deterministic", "true") == (0, "")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_the_recipe_itself_is_fine(train, folder):
    assert train() == (0, "")
    assert steps(folder) == [0, 1]
    assert checkpoints(folder) == ["step-000002"]
    assert not (folder / "run" / "crash").exists()


def test_unknown_key(fails, folder):
    (folder / "recipe.toml").write_text(RECIPE + "learning_rate = 1\n[quantization]\nbits = 8\n")
    error = fails(code=2)
    assert "2 mistakes in recipe.toml" in error
    assert "optim.learning_rate = 1 is not a key; [optim] has lr, " in error
    assert "quantization = {'bits': 8} is not a key; the top level has steps" in error
    assert not (folder / "run").exists()


def test_missing_recipe(capsys):
    assert main(["train", "other.toml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: there is no recipe and no run at other.toml")


def test_missing_data(fails, llama):
    error = fails(*llama, "--task.path", "elsewhere.jsonl", code=2)
    assert error.startswith("DataError: data file elsewhere.jsonl does not exist")


def test_missing_model(fails, llama, folder):
    error = fails(*llama, "--model.path", str(folder / "elsewhere"))
    assert error.startswith(f"ModelError: model.path = '{folder}/elsewhere' does not exist")


def test_a_scratch_model_cannot_learn_from_a_file(fails, llama):
    error = fails(*llama, "--model.path", "scratch", code=2)
    assert "model.path = 'scratch' needs a generated task to learn from, not 'file'" in error


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{'prompt': 1}", "data.jsonl line 3: is not valid JSON"),
        ('["prompt"]', "data.jsonl line 3: is a list, not an object with columns"),
        ('{"answer": "42"}', "data.jsonl line 3: no question; one of prompt, question, problem"),
        ('{"prompt": "6*7="}', "data.jsonl line 3: no answer; one of answer, ground_truth"),
        ('{"prompt": " ", "answer": "42"}', "data.jsonl line 3: 'prompt' is empty"),
        ('{"prompt": [], "answer": "42"}', "data.jsonl line 3: 'prompt' is empty"),
    ],
)
def test_a_bad_row_is_named_by_its_line(fails, llama, folder, row, message):
    good = '{"prompt": "6*7=", "answer": "42"}\n'
    (folder / "data.jsonl").write_text(good + good + row + "\n" + good)
    error = fails(*llama, code=2)
    assert error.startswith("DataError: ")
    assert message in error


def test_a_prompt_longer_than_allowed_or_than_the_context(fails, llama, folder):
    row = {"prompt": "1+" * 31 + "1=", "answer": "32"}  # 64 characters, as many as the context
    (folder / "data.jsonl").write_text(json.dumps(row) + "\n")
    error = fails(*llama, "--task.max-prompt-tokens", "50", code=2)
    assert "data.jsonl line 1: the prompt has 64 tokens, more than task.max_prompt_tokens" in error
    error = fails(*llama, "--run-dir", "other", code=2)
    assert error.endswith(
        "data.jsonl line 1: the prompt has 64 tokens, more than max_position_embeddings - "
        "sampling.max_tokens = 64 - 4 = 60; change that, or set task.skip_long_prompts\n"
    )
    assert main(["validate", "recipe.toml", *llama]) == 2


def test_completions_that_leave_no_room_for_a_prompt(fails, llama):
    error = fails(*llama, "--sampling.max-tokens", "64", code=2)
    assert error == (
        "ConfigError: sampling.max_tokens = 64 leaves no room for a prompt: the model's "
        "max_position_embeddings is 64; lower sampling.max_tokens\n"
    )


def test_a_data_file_that_changes_under_a_run_is_told(train, llama, folder):
    assert train(*llama, "--steps", "1")[0] == 0
    with (folder / "data.jsonl").open("a") as file:
        file.write('{"prompt": "2+2=", "answer": "4"}\n')
    assert train(*llama, "--steps", "2")[0] == 0
    messages = [event["message"] for event in read_jsonl(folder / "run" / "events.jsonl")]
    assert any("had 4 problems when the run was saved and has 5 now" in m for m in messages)


def test_a_data_file_replaced_by_another_of_the_same_length_is_told(train, llama, folder):
    assert train(*llama, "--steps", "1")[0] == 0
    assert train(*llama, "--steps", "2")[0] == 0
    changed = "the training data has changed since the run was saved"
    assert not any(changed in message for message in warnings(folder))
    (folder / "data.jsonl").write_text('{"prompt": "6*8=", "answer": "48"}\n' * 4)
    assert train(*llama, "--steps", "3")[0] == 0
    assert warnings(folder)[-1] == f"{changed}: the run goes on with other problems"


@pytest.mark.parametrize("command", ["train", "validate"])
def test_what_would_learn_nothing_is_refused_at_the_start(llama, folder, capsys, command):
    def refused(*flags):
        assert main([command, "recipe.toml", *llama, *flags]) in (1, 2)
        printed = capsys.readouterr()
        return printed.out + printed.err

    (folder / "held_out.jsonl").write_text((folder / "data.jsonl").read_text())
    same = ["--task.eval-path", "held_out.jsonl", "--eval.every", "1"]
    assert "held-out files ask the same questions as the training files" in refused(*same)
    asked = ["--task.instruction", "In \\boxed{}.", "--task.reward", "exact"]
    assert "in the form that the prompt asks for, must earn more than a wrong" in refused(*asked)
    config = folder / "llama" / "tokenizer_config.json"
    template = {"chat_template": "{{ raise_exception('no system role') }}"}
    config.write_text(json.dumps(json.loads(config.read_text()) | template))
    assert "data.jsonl line 1: the model's chat template fails on" in refused()
    for file in (folder / "llama").glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in refused()


def test_an_architecture_that_only_the_hf_engine_runs(train, fails, llama, folder):
    """Each message names the key that leads on, until the run works."""
    torch.manual_seed(0)
    shape = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**shape, **ends)).save_pretrained(folder / "gpt2")
    build_tokenizer().save_pretrained(folder / "gpt2")
    flags = [*llama, "--model.path", "gpt2", "--quant.track-rows", "0"]
    error = fails(*flags, "--run-dir", "a")
    assert "ModelError: the local engine cannot run model_type = 'gpt2'" in error
    assert 'Set rollout.engine = "hf"' in error
    flags += ["--rollout.engine", "hf"]
    error = fails(*flags, "--run-dir", "b")
    assert "ModelError: GPT2LMHeadModel has no layer named like q_proj" in error
    assert train(*flags, "--quant.format", "none") == (0, "")
    assert steps(folder) == [0, 1]


def write_reward(folder, body):
    (folder / "mine.py").write_text(f"def reward(text, answer, extra):\n    {body}\n")
    return ["--task.reward", "mine:reward", "--task.grade-workers", "1"]


def grading_evidence(folder):
    crash = folder / "run" / "crash" / "step-000000"
    assert [p.name for p in sorted(crash.iterdir())] == ["error.txt", "grading.json"]
    return json.loads((crash / "grading.json").read_text()), (crash / "error.txt").read_text()


def test_a_reward_that_is_nan(fails, folder):
    error = fails(*write_reward(folder, "return float('nan')"))
    assert error.startswith("RewardError: reward 'mine:reward' failed: RewardError: the reward")
    assert "returned score = nan; it must be a finite number; it was grading" in error
    evidence, text = grading_evidence(folder)
    assert evidence["answer"].isdigit()
    assert evidence["text"] in error
    assert text == error
    [alarm] = alarms(folder)
    assert alarm == "step 0 stopped the run; evidence in run/crash/step-000000"
    assert not (folder / "run" / "metrics.jsonl").exists()


def test_a_reward_that_raises(fails, folder):
    error = fails(*write_reward(folder, "return {}['no such key']"))
    assert "reward 'mine:reward' failed: KeyError: 'no such key'; it was grading" in error
    evidence, _ = grading_evidence(folder)
    assert "mine.py" in evidence["traceback"]
    assert "line 2, in reward" in evidence["traceback"]
    assert len(alarms(folder)) == 1


def test_a_reward_that_raises_later_costs_one_step(train, folder):
    """The weights of the step are saved, and the same command goes on with it."""
    flags = write_reward(folder, LETTERS)
    assert train(*flags, "--run_dir", "whole", "--steps", "3") == (0, "")
    body = 'if __import__("os").path.exists("broken"): raise KeyError("late")'
    write_reward(folder, f"{body}\n    {LETTERS}")
    real = qurl.trainer.learner.Learner.update

    def update(self, batch, step):
        (folder / "broken").touch() if step == 1 else None
        return real(self, batch, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qurl.trainer.learner.Learner, "update", update)
        code, error = train(*flags, "--steps", "3")
    assert code == 1
    assert "KeyError: 'late'" in error
    assert alarms(folder)[0].endswith("the same command then continues with step 2")
    assert checkpoints(folder) == ["step-000002"]
    (folder / "broken").unlink()
    assert train(*flags, "--steps", "3") == (0, "")
    rewards = [
        [row.get("reward/mean") for row in read_jsonl(folder / name / "metrics.jsonl")]
        for name in ("run", "whole")
    ]
    assert rewards[0] == rewards[1]


def test_a_reward_that_always_hangs(fails, folder):
    flags = write_reward(folder, "import time; time.sleep(60)")
    error = fails(*flags, "--task.grade_timeout", "0.1", "--batch.problems", "1")
    assert error.startswith("RewardTimeout: reward 'mine:reward' was killed on all 2 completions")


def test_out_of_memory_says_what_to_lower(fails, folder, monkeypatch):
    def score(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(qurl.trainer.policy.Policy, "score", score)
    error = fails()
    assert error.startswith("TrainingError: the trainer ran out of GPU memory (CUDA out of memory)")
    assert "lower batch.microbatch_tokens = 16384 or rollout.kv_memory_frac = 0.8" in error
    assert len(alarms(folder)) == 1


def test_a_reward_that_is_not_there(train, fails):
    code, error = train("--task.reward", "absent:reward", "--task.grade-workers", "1")
    assert code != 0
    assert "there is no module 'absent' in " in error
    error = fails("--task.reward", "f1", code=2)
    assert (
        "task.reward = 'f1' is not one of auto, math, exact, countdown, code, gym:<name>" in error
    )


LETTERS = "return float(sum(map(ord, text)) % 7)"
"""A reward that differs within every group, so that there is something to learn."""


RUIN = ("--optim.lr", "1000", "--optim.weight-decay", "1e36")
"""The first update multiplies the weights by a number that overflows."""


def test_a_loss_that_is_nan(fails, folder):
    error = fails(*write_reward(folder, LETTERS), *RUIN)
    assert error.startswith("TrainingError: the loss of step 0 is nan (actor/pg_clipfrac = ")
    assert "No update was made with it; the batch and the weights are in the crash folder" in error
    crash = folder / "run" / "crash" / "step-000000"
    files = {p.name for p in crash.iterdir()}
    assert files == {
        "error.txt",
        "policy",
        "optimizer.pt",
        "state.pt",
        "batch.pt",
        "checksums.json",
    }
    batch = torch.load(crash / "batch.pt")
    assert batch["token_ids"].shape[0] == 8
    assert batch["advantages"].shape == batch["mask"].shape
    assert torch.load(crash / "state.pt")["step"] == 0
    assert len(alarms(folder)) == 1
    assert not (folder / "run" / "checkpoints").exists()


def test_weights_that_are_ruined_do_not_sample(fails, folder):
    flags = [*write_reward(folder, LETTERS), *RUIN, "--batch.minibatches", "1"]
    error = fails(*flags)
    assert error.startswith("SyncError: sync of version 1 failed on the canary prompt: the train")


def test_dither_where_nothing_is_rounded(fails):
    error = fails("--experimental.dither", "true", code=2)
    assert error.startswith("ConfigError: experimental.dither = true, but the trainer computes in")


def test_no_group_with_mixed_outcomes(fails, folder):
    flags = write_reward(folder, "return 0.0")
    error = fails(*flags, "--algo.dynamic-sampling", "true", "--algo.max-gen-rounds", "2")
    assert "dynamic sampling found 0 groups with mixed outcomes among 8" in error
    assert "4 are needed: the problems are too easy or too hard" in error


def test_a_full_disk_while_saving(train, folder):
    """The run stops, the checkpoint before stays whole, and the same command resumes from it."""
    flags = ["--save.every", "1"]
    assert train(*flags, "--steps", "1") == (0, "")
    with full_disk(20_000):
        code, error = train(*flags)
    assert code == 1
    assert error.startswith("CheckpointError: run/checkpoints/step-000002 could not be written")
    assert "Nothing else was changed; make room" in error
    assert checkpoints(folder) == ["step-000001"]
    assert train(*flags) == (0, "")
    assert steps(folder) == [0, 1]
    assert checkpoints(folder) == ["step-000001", "step-000002"]


def test_a_full_disk_while_the_scratch_model_is_written(train, folder):
    with full_disk(20_000):
        code, error = train()
    assert code == 1
    assert error.startswith("CheckpointError: run/initial could not be written")
    assert not (folder / "run" / "initial").exists()
    assert train() == (0, "")


class CountingTracker:
    def __init__(self):
        self.steps = []

    def log(self, step, metrics):
        self.steps.append(step)

    def close(self):
        self.steps.append("closed")


def test_a_tracker_of_ones_own_hears_of_every_step():
    tracker = CountingTracker()
    qurl.train.train(load_config("recipe.toml"), trackers=[tracker])
    assert tracker.steps == [0, 1, "closed"]


def test_a_full_disk_does_not_hide_what_went_wrong(train, folder, one_step, monkeypatch):
    real = qurl.trainer.learner.policy_loss

    def poisoned(*args, **options):
        loss, stats = real(*args, **options)
        return loss * float("nan"), stats

    monkeypatch.setattr(qurl.trainer.learner, "policy_loss", poisoned)
    with full_disk(20_000):
        code, error = train()
    assert code == 1
    assert error.startswith("TrainingError: the loss of step 1 is nan")
    alarm = alarms(folder)[-1]
    assert alarm.startswith("step 1 stopped the run; its evidence cannot be written: ")
    assert checkpoints(folder) == ["step-000001"]


def flip_a_bit(file):
    """What a bad disk does: the size stays, and the file may even load."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("file", ["optimizer.pt", "policy/model.safetensors", "state.pt"])
def test_a_damaged_checkpoint_is_left_out_aloud(train, folder, file):
    flags = ["--save.every", "1", "--save.keep", "3"]
    assert train(*flags) == (0, "")
    whole = (folder / "run" / "metrics.jsonl").read_text()
    flip_a_bit(folder / "run" / "checkpoints" / "step-000002" / file)
    assert train(*flags) == (0, "")
    assert checkpoints(folder) == ["damaged-step-000002", "step-000001", "step-000002"]
    [damaged, repeated] = warnings(folder)
    assert damaged == (
        f"step-000002 is damaged ({file} does not match its checksum), kept as "
        "damaged-step-000002: resumed at 1"
    )
    assert repeated.startswith("1 logged steps have no checkpoint after them")
    again = (folder / "run" / "metrics.jsonl").read_text()
    names = ("reward/mean", "actor/pg_loss", "actor/grad_norm")
    both = [[json.loads(line) for line in text.splitlines()] for text in (whole, again)]
    assert [[row[n] for n in names if n in row] for row in both[0]] == [
        [row[n] for n in names if n in row] for row in both[1]
    ]


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_an_untrained_model_that_is_damaged(train, fails, folder, one_step, file, capsys):
    """It is the reference of the KL term, so that a run with other weights in it learns another."""
    flip_a_bit(folder / "run" / "initial" / file)
    error = fails()
    reason = f"the untrained model in run/initial is damaged: {file} does not match its checksum"
    assert error.startswith(f"CheckpointError: {reason}. Restore it from a copy, or remove that")
    assert main(["validate", "recipe.toml"]) == 2
    assert f"FAIL  run directory: {reason}" in capsys.readouterr().out
    shutil.rmtree(folder / "run" / "initial")
    assert train() == (0, "")


@pytest.mark.parametrize("file", ["optimizer.pt", "policy/model.safetensors", "checksums.json"])
def test_a_run_whose_only_checkpoint_is_torn(fails, folder, one_step, file, capsys):
    torn = folder / "run" / "checkpoints" / "step-000001" / file
    torn.write_bytes(torn.read_bytes()[:100])
    error = fails()
    assert error.startswith(
        "CheckpointError: no checkpoint is undamaged: run/checkpoints/step-0000"
    )
    assert "Restore one from a copy, or choose another run_dir" in error
    assert main(["validate", "recipe.toml"]) == 2
    assert "FAIL  run directory: no checkpoint is undamaged" in capsys.readouterr().out
    if file != "optimizer.pt":
        assert main(["export", "run", "out"]) == 1
        assert "is damaged: " in capsys.readouterr().err


@pytest.mark.parametrize("file", ["optimizer.pt", "state.pt", "policy/model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"PK\x03\x04" + b"x" * 200])
def test_a_damaged_checkpoint_without_checksums(fails, folder, one_step, file, content):
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    (checkpoint / "checksums.json").unlink()
    (checkpoint / file).write_bytes(content)
    error = fails()
    assert error.startswith("CheckpointError: checkpoint run/checkpoints/step-000001 cannot be")
    assert "Remove that folder" in error


@pytest.mark.parametrize(
    "change",
    [
        *({"step": None}, {"step": 9}, {"position": -1}, {"position": "x"}, {"accuracies": [1]}),
        *({"history": [1]}, {"fingerprints": None}),
    ],
)
def test_a_state_that_no_run_writes(fails, folder, one_step, change):
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    replace_state(checkpoint, **change)
    error = fails()
    assert error.startswith("CheckpointError: checkpoint run/checkpoints/step-000001 cannot be")
    assert "its state.pt " in error


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tracker": "x"}, "dictionary update sequence element"),
        ({"tracker": None}, "'NoneType' object is not iterable"),
        ({"history": {}}, "it lacks 'num_taken'"),
    ],
)
def test_a_state_of_another_version(fails, folder, one_step, change, reason):
    replace_state(folder / "run" / "checkpoints" / "step-000001", **change)
    error = fails()
    assert error.startswith(
        f"CheckpointError: checkpoint run/checkpoints/step-000001 cannot be read: {reason}"
    )
    assert "Remove that folder to resume from the one before it" in error


@pytest.mark.parametrize("value", ["abc", None, {"a": 1}])
@pytest.mark.parametrize("eval_every", ["0", "1"])
def test_a_row_with_something_other_than_numbers(fails, folder, one_step, value, eval_every):
    path = folder / "run" / "metrics.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"reward/mean": value}) + "\n")
    error = fails("--eval.every", eval_every, code=2)
    assert error.startswith("DataError: step 0 in metrics.jsonl of the run: ")
    assert "; mend or remove that line" in error


def test_a_checkpoint_without_its_files_is_left_out_aloud(train, folder):
    assert train() == (0, "")
    (folder / "run" / "checkpoints" / "step-000003").mkdir()
    assert train("--steps", "4") == (0, "")
    assert checkpoints(folder) == ["damaged-step-000003", "step-000002", "step-000004"]
    assert warnings(folder)[0].startswith("step-000003 is damaged (policy is missing)")


def test_another_recipe_in_the_same_run_dir(fails, one_step):
    error = fails("--optim.lr", "2e-3", code=2)
    assert "optim.lr: 0.001 there, 0.002 here" in error


def warnings(folder):
    events = read_jsonl(folder / "run" / "events.jsonl")
    return [event["message"] for event in events if event["kind"] == "warning"]


def test_steps_that_were_not_saved_are_made_again_aloud(train, folder):
    """A run that was killed before its first checkpoint."""
    assert train() == (0, "")
    assert train("--steps", "3") == (0, "")  # nothing is lost
    assert warnings(folder) == []
    shutil.rmtree(folder / "run" / "checkpoints")
    assert train("--steps", "3") == (0, "")
    [warning] = warnings(folder)
    assert warning.startswith("3 logged steps have no checkpoint after them and are repeated")
    assert steps(folder) == [0, 1, 2]


def test_updates_without_tokens_are_said_aloud(train, folder):
    assert train("--correction.reject", "seq_max_k2:1e-30") == (0, "")
    assert warnings(folder) == [f"step {step}: 2 updates had no token left" for step in (0, 1)]


def test_a_policy_that_carries_uaq_is_trained_without(train, folder):
    assert train("--quant.update_scale", "2") == (0, "")
    scaled = folder / "run" / "checkpoints" / "step-000002" / "policy"
    flags = ["--model.path", str(scaled), "--run_dir", "next"]
    assert train(*flags) == (0, "")
    events = read_jsonl(folder / "next" / "events.jsonl")
    unused, warning = [event["message"] for event in events if event["kind"] == "warning"]
    assert unused.startswith("model.scratch.hidden_size, model.scratch.warm_start_steps")
    assert "carried UAQ with s = 2 from an earlier run; it was folded back" in warning
    config = json.loads((folder / "next/checkpoints/step-000002/policy/config.json").read_text())
    assert config.get("qurl_uaq") is None


def test_combinations_are_checked_for_callers_from_python(folder):
    config = build_config({"sampling": {"group_size": 1}, "run_dir": "never"})
    with pytest.raises(ConfigError, match="compares completions of one problem"):
        qurl.train.train(config)
    assert not (folder / "never").exists()


def evaluated(folder):
    """Numbers of updates; row k - 1 of metrics.jsonl holds the evaluation after k updates."""
    rows = read_jsonl(folder / "run" / "metrics.jsonl")
    lines = read_jsonl(folder / "run" / "evals.jsonl")
    by_row = [row["step"] + 1 for row in rows if "eval/full/accuracy" in row]
    assert by_row == [line["step"] for line in lines if line["precision"] == "full"]
    return by_row


def test_an_evaluation_stays_when_a_run_is_extended(train, folder):
    flags = ["--eval.every", "2", "--eval.problems", "4"]
    assert train(*flags, "--steps", "3") == (0, "")
    assert evaluated(folder) == [0, 2, 3]
    assert train(*flags, "--steps", "5") == (0, "")
    assert evaluated(folder) == [0, 2, 3, 4, 5]
    assert steps(folder) == [-1, 0, 1, 2, 3, 4]
    assert train("--eval.every", "0", "--eval.problems", "4", "--steps", "5") == (0, "")
    assert evaluated(folder) == [0, 2, 3, 4, 5]


def test_an_evaluation_survives_a_step_that_fails(train, folder):
    flags = ["--eval.every", "2", "--eval.problems", "4"]
    assert train(*flags, "--steps", "3") == (0, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "collect", fail)
        assert train(*flags, "--steps", "5")[0] == 1
    assert evaluated(folder) == [0, 2, 3]
    assert train(*flags, "--steps", "5") == (0, "")
    assert evaluated(folder) == [0, 2, 3, 4, 5]


def fail(*_):
    raise EngineError("no room")


def test_an_engine_that_fails_after_its_sync_costs_one_step(train, folder):
    real = Sampler.collect

    def collect(sampler):
        return fail() if sampler.step == 1 else real(sampler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "collect", collect)
        code, error = train()
    assert (code, error) == (1, "EngineError: no room\n")
    assert checkpoints(folder) == ["step-000001"]


def test_an_engine_that_cannot_be_built_is_named(fails, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    text = "def engine(model, tokenizer, **options):\n    return {}['weights']\n"
    (folder / "broken_engine.py").write_text(text)
    error = fails("--rollout.engine", "broken_engine:engine", code=2)
    assert error.startswith("ConfigError: rollout.engine failed: KeyError: 'weights' (")
    assert "broken_engine.py, line 2)" in error


def test_a_part_that_cannot_take_its_state_back_costs_no_checkpoint(train, folder, monkeypatch):
    """Its error does not advise to remove one, as that of a damaged checkpoint does."""
    monkeypatch.syspath_prepend(folder)
    (folder / "forgetful.py").write_text(FORGETFUL)
    own = ("--sampling.select", "forgetful:Forgetful")
    assert train(*own, "--steps", "1") == (0, "")
    code, error = train(*own, "--steps", "2")
    assert code == 2
    reason = "ConfigError: sampling.select: load_state_dict failed: KeyError: 'count' ("
    assert error.startswith(reason)
    assert "forgetful.py, line 12)" in error
    assert "Remove" not in error


FORGETFUL = """\
class Forgetful:
    def __init__(self, setup):
        self.taken = 0

    def __call__(self, count, num_problems, num_taken, history, seed):
        return list(range(count))

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["count"]
"""


def test_eval_tells_what_failed(train, capsys):
    assert train("--save.every", "1") == (0, "")
    assert main(["eval", "run", "--task.reward", "nope:reward"]) == 2
    assert "there is no module 'nope'" in capsys.readouterr().err


def test_a_resume_that_fails_touches_nothing(train, fails, llama, folder):
    (folder / "held_out.jsonl").write_text('{"prompt": "6*8=", "answer": "48"}\n')
    flags = [*llama, "--task.eval_path", "held_out.jsonl", "--eval.every", "1"]
    assert train(*flags) == (0, "")
    before = [(folder / "run" / name).read_bytes() for name in ("metrics.jsonl", "evals.jsonl")]
    (folder / "held_out.jsonl").unlink()
    error = fails(*flags, "--steps", "4", code=2)
    assert "set task.eval_path to a file that is there" in error
    after = [(folder / "run" / name).read_bytes() for name in ("metrics.jsonl", "evals.jsonl")]
    assert after == before


OWN_ENGINE = """
from dataclasses import replace
from qurl.rollout import build_engine
from qurl.rollout.engine import QueueStream, generate


class Own:
    def __init__(self, model, tokenizer, **options):
        self.engine = build_engine("hf", model, tokenizer, **options)

    def sync(self, source, *, version):
        return self.engine.sync(source, version=version)

    def score(self, token_ids):
        return self.engine.score(token_ids)

    def generate(self, problems, params):
        return self.engine.generate(problems, params)

    def stream(self, params):
        def play(waiting):
            for rollout in self.generate([asked.problem for asked in waiting], params):
                group = rollout.completions
                group = [replace(c, logprobs=[CHANGE for _ in c.logprobs]) for c in group]
                yield replace(rollout, completions=group)

        return QueueStream(params, play)
"""


@pytest.mark.parametrize(
    ("change", "code", "message", "evidence"),
    [
        ("1.0", 1, "= 1.0 is not the logarithm", "EngineError"),
        ("1 / 0", 2, "the stream failed: ZeroDivisionError", "Traceback (most recent"),
    ],
)
def test_an_engine_of_ones_own_that_errs_stops_the_run(
    folder, train, monkeypatch, change, code, message, evidence
):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_engine", raising=False)
    (folder / "own_engine.py").write_text(OWN_ENGINE.replace("CHANGE", change))
    found, error = train("--rollout.engine", "own_engine:Own")
    assert (found, message in error) == (code, True), error
    assert evidence in (folder / "run/crash/step-000000/error.txt").read_text()
