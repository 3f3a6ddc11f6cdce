"""One step off: rollouts begun beside an update are the same wherever they are sampled, whatever
comes in between, and after a resume."""

import copy
import threading

import pytest
import torch
from models import as_flags
from safetensors.torch import load_file
from test_learning import gain, run
from test_resume import TINY, Interrupting, rows, run_until
from torch.testing import assert_close

from qurl.config import load_config
from qurl.errors import EngineError
from qurl.losses import acr
from qurl.rollout import build_engine
from qurl.run.assembly import initial_model
from qurl.run.directory import read_jsonl
from qurl.train import train

pytestmark = pytest.mark.xdist_group("ahead")  # one warm start for all tests
STEPS = 6
AHEAD = TINY | {"rollout.ahead": 1, "steps": STEPS}
DAPO = {"algo.name": "dapo", "algo.max_gen_rounds": 40, "algo.gen_multiple": 1}
SYSTEMS = {
    "greso, budgets": {
        **{"sampling.select": "greso", "sampling.budget": "e3", "sampling.chunk": 3},
        **{"algo.dynamic_sampling": True, "algo.max_gen_rounds": 60},
    },
    "dots, replay, thermostat, pairs": {
        **{"sampling.select": "dots", "systems.dots.references": 4, "systems.dots.every": 2},
        **{"sampling.replay": "recent", "sampling.thermostat": "e3"},
        "batch.subselect": "shuffle-r1",
    },
}
SHARED = ("eval/", "timing_s/")
"""Metrics that depend on evaluations."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A warm-started model, which answers some problems."""
    words = ["--task.difficulty", "2", "--model.scratch.hidden_size", "32"]
    config = load_config(None, [*words, "--model.scratch.warm_start_steps", "150"])
    return initial_model(config, tmp_path_factory.mktemp("start"), torch.device("cpu"))


def flags(model, run_dir, keys):
    names = {key.replace("__", "."): value for key, value in keys.items()}
    settings = AHEAD | {"model.path": model, "run_dir": run_dir} | names
    scratch = ("model.scratch.hidden_size", "model.scratch.warm_start_steps")
    return as_flags({key: value for key, value in settings.items() if key not in scratch})


def config(model, run_dir, **keys):
    return load_config(None, flags(model, run_dir, keys))


def weights(run_dir):
    return load_file(run_dir / f"checkpoints/step-{STEPS:06d}/policy/model.safetensors")


def trained(run_dir, num_rows=STEPS):
    """The rows of the steps, without what evaluations add."""
    found = [row for row in rows(run_dir) if row["step"] >= 0]
    assert len(found) == num_rows
    return [{k: v for k, v in row.items() if not k.startswith(SHARED)} for row in found]


def assert_same(one, other):
    for left, right in zip(trained(one), trained(other), strict=True):
        assert left == right
    assert_close(weights(other), weights(one), rtol=0, atol=0)


class Elsewhere:
    """A local engine with weights of its own, as if it were in another process."""

    works_elsewhere = True

    def __init__(self, model, tokenizer, **options):
        self.model = copy.deepcopy(model)
        self.engine = build_engine("local", self.model, tokenizer, **options)
        self.threads = []

    def sync(self, source, *, version):
        self.model.load_state_dict(source.state_dict())
        return self.engine.sync(self.model, version=version)

    def stream(self, params):
        self.threads.append(threading.current_thread())
        return self.engine.stream(params)

    def generate(self, problems, params):
        return self.engine.generate(problems, params)

    def score(self, token_ids):
        return self.engine.score(token_ids)


@pytest.mark.learn
def test_killed_and_resumed_goes_on_with_the_pending_rollouts(model, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(config(model, whole, **DAPO))
    words = flags(model, broken, DAPO)
    run_until(words, broken, 4)
    train(load_config(None, words))

    assert_same(whole, broken)
    assert rows(whole) == rows(broken)
    for name in ("samples.jsonl", "evals.jsonl"):
        assert read_jsonl(whole / name) == read_jsonl(broken / name)
    found = trained(whole)
    assert [row["rollout_corr/age"] for row in found] == [0.0] + [1.0] * (STEPS - 1)
    assert max(row["sampling/rounds"] for row in found) > 1  # refills come from the same weights


@pytest.mark.learn
@pytest.mark.slow
@pytest.mark.parametrize(("system", "step"), [*zip(SYSTEMS, (STEPS - 2, 2), strict=True)])
def test_systems_resume_with_pending_rollouts(system, step, model, tmp_path):
    """One of them before the last step, which begins nothing."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    keys = SYSTEMS[system] | {"save.every": 0}
    train(config(model, whole, **keys))
    with pytest.raises(KeyboardInterrupt):
        train(config(model, broken, **keys), trackers=[Interrupting(step)])
    train(config(model, broken, **keys))
    assert_same(whole, broken)
    assert read_jsonl(whole / "samples.jsonl") == read_jsonl(broken / "samples.jsonl")


@pytest.mark.learn
def test_evaluations_do_not_disturb_pending_rollouts(model, tmp_path):
    often, never = tmp_path / "often", tmp_path / "never"
    train(config(model, often, eval__every=1, **DAPO))
    train(config(model, never, eval__every=0, **DAPO))
    assert_same(often, never)


@pytest.mark.learn
def test_an_engine_elsewhere_samples_the_same_while_the_trainer_updates(model, tmp_path):
    """Its second stream goes on only when the trainer is in the middle of an update."""
    engines, is_updating = [], threading.Event()

    def objective(tokens):
        is_updating.set()
        return acr(tokens)

    objective.facts = acr.facts

    class Waiting(Elsewhere):
        def stream(self, params):
            if self.threads and not is_updating.wait(timeout=30):
                raise AssertionError("no update began while rollouts were pending")
            is_updating.clear()
            return super().stream(params)

    def build(*parts, **options):
        engines.append(Waiting(*parts, **options))
        return engines[-1]

    here, there = tmp_path / "here", tmp_path / "there"
    keys = {"eval__every": 0}
    train(config(model, here, **keys))
    train(config(model, there, **keys), engine=build, objective=objective)
    assert_same(here, there)
    [engine] = engines
    assert len(engine.threads) == STEPS
    assert threading.main_thread() not in engine.threads


@pytest.mark.learn
def test_a_failure_in_the_background_stops_the_run(model, tmp_path):
    class Broken(Elsewhere):
        def stream(self, params):
            if len(self.threads) == 3:
                raise EngineError("the fourth rollouts failed")
            return super().stream(params)

    with pytest.raises(EngineError, match="the fourth rollouts failed"):
        train(config(model, tmp_path, eval__every=0), engine=Broken)
    assert len(rows(tmp_path)) == 2
    assert (tmp_path / "crash" / "step-000002" / "error.txt").exists()


class Failing(Elsewhere):
    """It is in this process after all, and fails once."""

    works_elsewhere, is_broken = False, False

    def stream(self, params):
        if Failing.is_broken and len(self.threads) == 3:
            raise EngineError("the fourth rollouts failed")
        return super().stream(params)


@pytest.mark.learn
def test_a_failure_before_the_update_is_resumed_without_loss(model, tmp_path, monkeypatch):
    """What was pending then is saved, though no checkpoint was due."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    keys = {"save__every": 0, "eval__every": 0}
    train(config(model, whole, **keys), engine=Failing)
    monkeypatch.setattr(Failing, "is_broken", True)
    with pytest.raises(EngineError, match="fourth"):
        train(config(model, broken, **keys), engine=Failing)
    monkeypatch.setattr(Failing, "is_broken", False)
    assert [path.name for path in (broken / "checkpoints").iterdir()] == ["step-000002"]
    train(config(model, broken, **keys), engine=Failing)
    assert_same(whole, broken)


@pytest.mark.learn
@pytest.mark.slow
def test_one_step_off_learns_and_tells_age_from_quantization(tmp_path):
    """Without it, the gain of these 24 steps is about as large: 0.16."""
    found = run(tmp_path, steps=24, rollout__ahead=1, eval__every=0)
    assert gain(found, span=6) > 0.1
    first, *others = ((r["rollout_corr/k3_kl_age"], r["rollout_corr/k3_kl_quant"]) for r in found)
    assert first[0] < 1e-6 < min(age for age, _ in others)
    assert sum(age for age, _ in others) > 3 * sum(quant for _, quant in others) > 0
