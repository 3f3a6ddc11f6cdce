"""Parts of one's own are called once before anything is sampled."""

import pytest
import torch

from qurl.config import load_config
from qurl.errors import ConfigError
from qurl.objectives import Advantage, Objective, with_facts
from qurl.run.choices import Choices
from qurl.run.trial import try_advantage
from qurl.sampling.parts import NoReplay
from qurl.types import Problem

TASK = [Problem(name, (1,), "right") for name in ("easy", "hard")]


def choose(**parts):
    names = ("objective", "advantage", "engine", "task", "reward", "select", "episode", "budget")
    names = (*names, "thermostat", "replay", "subselect")
    config = load_config(None, [])
    choices = Choices.of(config, *(parts.get(name) for name in names))
    try_advantage(choices.advantage, config, TASK)


@with_facts(Objective())
def sound_objective(tokens):
    return tokens.ratio * tokens.advantages


def sound_advantage(batch):
    """The rows are those of whole groups."""
    rewards = batch.rewards.view(-1, load_config(None, []).sampling.group_size)
    return (rewards - rewards.mean(1, keepdim=True)).flatten()[:, None] * batch.mask


class SoundSelector:
    def __init__(self, setup):
        self.setup = setup

    def __call__(self, count, num_problems, *others):
        return range(count)

    def observe(self, step, graded, metrics):
        pass


def looking_up(batch):
    """Accuracy less what a table says of each problem."""
    table = torch.tensor([{"easy": 0.9, "hard": 0.1}[name] for name in batch.problem_ids])
    return (batch.accuracies - table)[:, None] * batch.mask


def test_sound_parts_pass():
    choose(objective=sound_objective, advantage=sound_advantage, select=SoundSelector)
    choose(advantage=looking_up)
    choose(select=SoundSelector(None), replay=NoReplay(), budget=lambda indices, *others: [])


@with_facts(Objective())
def infinite(tokens):
    return tokens.ratio / (tokens.advantages - tokens.advantages)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"objective": with_facts(Objective())(lambda a, b: a)}, r"must take \(tokens\): missing"),
        ({"objective": infinite}, r"algo.objective gave a loss with NaN or infinity"),
        ({"advantage": lambda: 0}, r"algo.advantage: .* must take \(batch\): too many"),
        (
            {"advantage": lambda batch: None},
            r"returned None; it must return a floating",
        ),
        ({"advantage": lambda batch: batch.mask.long()}, r"Tensor \[\d+, 8\] of torch.int64"),
        ({"advantage": lambda batch: batch.mask * torch.nan}, r"returned NaN or infinity"),
        ({"advantage": lambda batch: batch.reward}, r"algo.advantage failed: AttributeError"),
        ({"advantage": lambda batch: (batch.mask,) * 3}, r"or two: advantages and returns"),
        ({"advantage": lambda batch: (batch.mask,)}, r"or two: advantages and returns"),
        ({"select": lambda count: []}, r"sampling.select: .* must take \(count, num_problems, "),
        ({"subselect": lambda batch: []}, r"batch.subselect: .* must take \(batch, advantages, "),
        ({"episode": lambda problem: iter(())}, r"rollout.episode: .* must take \(problem, token"),
        ({"select": type("Bare", (), {})}, r"sampling.select: Bare.* must take \(setup\)"),
        (
            {"select": type("Narrow", (SoundSelector,), {"observe": lambda self, step: None})},
            r"must take \(self, step, graded, metrics\): too many",
        ),
    ],
)
def test_a_mistake_is_refused(parts, message):
    with pytest.raises(ConfigError, match=message):
        choose(**parts)


def test_a_selector_by_name_is_checked_too(tmp_path, monkeypatch):
    (tmp_path / "my_trial.py").write_text("def pick(count):\n    return range(count)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(None, ["--sampling.select", "my_trial:pick"])
    with pytest.raises(ConfigError, match=r"sampling.select: pick\(count\) must take"):
        Choices.of(config)


def test_facts_have_few_values():
    with pytest.raises(ConfigError, match=r"against = 'behave' is not one of prox, behav"):
        Objective(against="behave")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"reads = 'row' is not one of batch, rows, outcomes"):
        Advantage(reads="row")  # type: ignore[arg-type]
