"""The related systems: their published numbers, their invariants, and what they do to a batch."""

import io
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from models import group

from benchmarks.brorl import first_order_change, mass_change, simulate
from qurl.advantages import ESTIMATORS, critic_advantages, gae, group_advantages, length_lambda
from qurl.config import build_config, load_config
from qurl.config.rules import find_mistakes, find_warnings
from qurl.errors import ConfigError, ModelError
from qurl.losses import policy_loss
from qurl.sampling import History, Setup, narrow
from qurl.sampling.dots import Dots, selection_logits
from qurl.sampling.e3 import (
    E3Budget,
    E3Thermostat,
    anneal_factor,
    divide_budget,
    next_temperature,
    rank,
)
from qurl.sampling.greso import Greso
from qurl.sampling.pods import Pods, most_varied
from qurl.sampling.predictor import (
    Predictor,
    attend,
    embed,
    fit_line,
    fit_scale,
    load_predictor,
    sharpen,
    train_predictor,
)
from qurl.sampling.replay import RecentReplay
from qurl.sampling.shuffle_r1 import ShuffleR1, draw_rounds, pair_up
from qurl.trainer.batches import minibatches, pad
from qurl.types import Problem

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "systems.json").read_text())


class Numbers:
    """A task whose i-th problem has the prompt [i % 7, i % 3]."""

    name, reward, notes = "numbers", "exact", ()

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return Problem(id=str(index), prompt_ids=(index % 7, 7 + index % 3))


def setup(size=40, **systems):
    tree = {"batch": {"problems": 4}, "steps": 100, "systems": systems}
    return Setup(build_config(tree), Numbers(size), vocabulary=151936)


def answers(*accuracies, id="p", version=0):
    graded = group([5], [[7]] * len(accuracies), list(accuracies), id=id)
    object.__setattr__(graded.rollout, "version", version)
    return graded


def saved(part, other):
    """`other` with the state of `part`, as a checkpoint carries it over."""
    file = io.BytesIO()
    torch.save(part.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


# GRESO


def test_greso_skips_by_what_happened_in_a_row():
    """z = 2 all right, 1 all wrong (a mixed one before it), none of one kind, and unknown."""
    greso, history = Greso(setup()), History(40)
    seen = {0: [(0, 1), (1, 1), (1, 1)], 1: [(0, 1), (0, 0)], 2: [(1, 1), (0, 1)]}
    for index, groups in seen.items():
        for accuracies in groups:
            history.record(index, answers(*accuracies))
    greso.p = {"easy": 0.5, "hard": 0.4}
    assert [greso.chance(i, history) for i in range(4)] == pytest.approx([0.25, 0.4, 1.0, 1.0])
    for _ in range(7):
        history.record(0, answers(1, 1))
    assert greso.chance(0, history) == 0.01


def test_one_right_answer_of_many_is_a_signal():
    """Of 16 answers 1 is right, of 64 all but 1: means of 0.06 and 0.98 are not all wrong or right.
    Equal answers that earn a little are all wrong."""
    greso, history = Greso(setup()), History(40)
    hard, easy, flat = [1] + [0] * 15, [1] * 63 + [0], [0.1] * 4
    for index, accuracies in enumerate((hard, easy, flat)):
        history.record(index, answers(*accuracies))
    assert [greso.chance(index, history) for index in range(3)] == [1, 1, 0.5]
    greso(44, 40, 0, History(40), 0)
    greso.observe(0, [answers(*hard), answers(*easy), answers(*flat), answers(0.5, 0.5)], {})
    assert greso.flat_rate == 0.5
    assert greso.p == pytest.approx({"easy": 0.51, "hard": 0.49})


def test_greso_moves_p_towards_its_targets():
    """Targets 1/12 and 1/6: half all right is too many, none all wrong too few. In the first epoch
    nothing can be skipped, so p has no say in the shares."""
    greso = Greso(setup())
    greso(40, 40, 0, History(40), 0)
    greso.observe(0, [answers(1, 1), answers(1, 0)], {})
    assert greso.p == {"easy": 0.5, "hard": 0.5}
    greso(4, 40, 40, History(40), 0)
    greso.observe(1, [answers(1, 1), answers(1, 0)], {})
    assert greso.p == pytest.approx({"easy": 0.49, "hard": 0.51})
    assert greso.flat_rate == 0.5
    for _ in range(100):
        greso(4, 40, 0, History(40), 0)
        greso.observe(0, [answers(1, 1), answers(1, 0)], {})
    assert greso.p == pytest.approx({"easy": 0.05, "hard": 0.95})


def test_greso_asks_for_what_is_probably_needed():
    """1.5 x 8 at first; then a quarter more than 3 / (1 - 1/2), and never less than a quarter."""
    greso = Greso(setup())
    assert greso.round(8, 8) == 12
    greso.flat_rate = 0.5
    assert greso.round(8, 3) == 8
    greso.flat_rate = 1.0
    assert greso.round(8, 1) == 13
    greso.flat_rate = 0.0
    assert greso.round(8, 1) == 2


def test_greso_asks_solved_problems_less_often_and_resumes_exactly():
    history = History(40)
    for index in range(20):
        history.record(index, answers(1, 1))
    greso = Greso(setup())
    asked = greso(2000, 40, 0, history, seed=0)
    share = sum(index < 20 for index in asked) / 2000
    assert share == pytest.approx(1 / 3, abs=0.04)  # half as often as the others
    resumed = saved(greso, Greso(setup()))
    assert resumed(50, 40, 0, history, seed=0) == greso(50, 40, 0, history, seed=0)
    first = Greso(setup())(2000, 40, 0, history, seed=0)
    assert first == asked


# PODS


@pytest.mark.parametrize("seed", range(12))
def test_pods_finds_the_largest_variance(seed):
    draw = np.random.default_rng(seed)
    size = int(draw.integers(3, 11))
    keep = int(draw.integers(1, size + 1))
    binary = seed % 2
    rewards = draw.integers(0, 2, size).astype(float) if binary else draw.normal(size=size)
    kept = most_varied(torch.tensor(rewards), keep)
    assert len(kept) == len(set(kept.tolist())) == keep
    best = max(np.var(rewards[list(c)]) for c in itertools.combinations(range(size), keep))
    assert np.var(rewards[kept.tolist()]) == pytest.approx(best, abs=1e-12)


def test_pods_balances_binary_rewards():
    rewards = torch.tensor([1.0, 1, 0, 1, 1, 1, 0, 1])
    assert rewards[most_varied(rewards, 4)].sum() == 2
    assert rewards[most_varied(rewards, 6)].sum() == 4


def groups_of(*rewards):
    return [group([5], [[7]] * len(r), list(r), id=str(i)) for i, r in enumerate(rewards)]


@pytest.mark.parametrize("statistics", ["kept", "group"])
def test_pods_trains_on_few_with_either_statistics(statistics):
    graded = groups_of([1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0])
    batch = pad(graded)
    pods = Pods(setup(pods={"keep": 2, "statistics": statistics}))
    narrowed = narrow(graded, pods, ESTIMATORS["grpo"], seed=0)
    kept = batch.select(narrowed.rows)
    assert kept.rewards.tolist() in ([1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0])
    scored = ESTIMATORS["grpo"](as_corrected(batch))
    found = narrowed.advantage(as_corrected(kept))
    if statistics == "group":
        assert torch.equal(found, scored[narrowed.rows][:, : found.shape[1]])
    else:
        assert found[:, 1].abs().tolist() == pytest.approx([0.70711] * 4, rel=1e-4)


def as_corrected(batch):
    from qurl.types import Corrected

    zeros, ones = torch.zeros_like(batch.mask), torch.ones_like(batch.mask)
    added = {"logp_prox": zeros, "logp_ref": zeros, "values": zeros, "entropy": zeros}
    flags = {"has_prox": torch.ones(len(batch), dtype=torch.bool)}
    return batch.into(Corrected, **added, **flags, weight=ones, shrink=ones)


# Shuffle-R1


@pytest.mark.parametrize("case", VECTORS["shuffle_r1"])
def test_shuffle_r1_vectors(case):
    advantages = group_advantages(case["rewards"])
    assert advantages.tolist() == pytest.approx(case["advantages"], rel=1e-9)
    assert pair_up(advantages, 1.0).tolist() == case["pairs"]
    kept = pair_up(advantages, case["keep_ratio"])
    assert kept.tolist() == case["kept"]
    weights = advantages[kept].abs().sum(-1)
    assert weights.tolist() == pytest.approx(case["weights"], rel=1e-9)
    assert (weights / weights.sum()).tolist() == pytest.approx(case["probs"], rel=1e-9)


def test_shuffle_r1_draws_by_weight_and_keeps_the_size():
    """One of two per round: frequencies are the probabilities 3/4 and 1/4."""
    drawn = draw_rounds(torch.tensor([3.0, 1.0]).repeat(1), 2, seed=0)
    assert len(drawn) == 2
    counts = Counter(
        int(i) for seed in range(2000) for i in draw_rounds(torch.tensor([3.0, 1.0]), 2, seed)
    )
    assert counts[0] / 4000 == pytest.approx(0.75, abs=0.02)
    for rounds in (1, 3, 8, 50):
        assert len(draw_rounds(torch.rand(21), rounds, seed=0)) == 21
    assert sorted(draw_rounds(torch.rand(5), 1, seed=0).tolist()) == [0, 1, 2, 3, 4]
    uniform = draw_rounds(torch.zeros(6), 1, seed=0)
    assert sorted(uniform.tolist()) == list(range(6))
    scarce = draw_rounds(torch.tensor([1.0, 0.0, 0.0, 0.0]), 1, seed=0)
    assert sorted(scarce.tolist()) == [0, 1, 2, 3]


def test_shuffle_r1_keeps_pairs_together_and_whole_group_advantages():
    graded = groups_of([1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1])
    batch = pad(graded)
    whole = ESTIMATORS["grpo"](as_corrected(batch))[:, 1]
    part = ShuffleR1(setup(shuffle_r1={"keep": 1.0, "rounds": 2}))
    narrowed = narrow(graded, part, ESTIMATORS["grpo"], seed=3)
    kept = batch.select(narrowed.rows)
    assert (len(kept), narrowed.bundle) == (12, 2)
    found = narrowed.advantage(as_corrected(kept))[:, 1]
    assert torch.equal(found, whole[narrowed.rows])
    order = torch.Generator().manual_seed(0)
    for rows in minibatches(12, 4, order, narrowed.bundle):
        pairs = rows.reshape(-1, 2)
        assert (pairs[:, 0] + 1 == pairs[:, 1]).all()
        assert (pairs[:, 0] % 2 == 0).all()
        assert torch.equal(kept.group[pairs[:, 0]], kept.group[pairs[:, 1]])


def test_shuffle_r1_refuses_odd_groups():
    with pytest.raises(ConfigError, match="pairs completions; a group has 3"):
        pair_up(torch.zeros(3), 0.5)


@pytest.mark.parametrize("rows", [torch.tensor([0, 9]), torch.zeros(0).long(), torch.zeros(2)])
def test_a_sub_selection_that_returns_nonsense_is_an_error(rows):
    with pytest.raises(ConfigError, match=r"batch.subselect returned .* from 0 to 3"):
        narrow(groups_of([1, 0, 0, 1]), lambda *_: rows, ESTIMATORS["grpo"], seed=0)


@pytest.mark.parametrize("advantages", [torch.ones(4), torch.ones(2, 2), [1.0, -1.0]])
def test_a_sub_selection_gives_each_of_its_rows_an_advantage(advantages):
    def subselect(batch, whole, seed):
        return torch.tensor([3, 0]), advantages

    with pytest.raises(ConfigError, match=r"batch.subselect returned advantages .* rows \(2,\)"):
        narrow(groups_of([1, 0, 0, 1]), subselect, ESTIMATORS["grpo"], seed=0)


# DOTS


@pytest.mark.parametrize("case", VECTORS["dots"]["selection"])
def test_dots_selection_vectors(case):
    predicted = torch.tensor(case["pred"], dtype=torch.float64)
    found = selection_logits(predicted, case["alpha"], case["tau"]).softmax(-1)
    assert found.tolist() == pytest.approx(case["probs"], rel=1e-9)


def test_dots_regressor_vector():
    case = VECTORS["dots"]["regressor"]
    query, references, values = (
        torch.tensor(case[key], dtype=torch.float64) for key in ("q", "refs", "ref_values")
    )
    base = attend(query[None], references, values, len(query) ** 0.5)
    assert float(base) == pytest.approx(case["base"], rel=1e-9)
    found = sharpen(base, case["temp"], case["bias"])
    assert float(found) == pytest.approx(case["calibrated"], rel=1e-9)


def test_a_reference_is_predicted_without_itself():
    references = torch.eye(3, dtype=torch.float64)
    values = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    found = attend(references, references, values, 1e-3, torch.arange(3))
    assert found.tolist() == pytest.approx([0.25, 0.75, 0.5])


def test_calibration_is_least_squares():
    predicted = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    values = torch.tensor([0.1, 0.5, 0.4, 0.9], dtype=torch.float64)
    slope, intercept = np.polyfit(predicted.numpy(), values.numpy(), 1)
    assert fit_line(predicted, values) == pytest.approx((slope, intercept))
    assert fit_line(torch.full((4,), 0.3), values) == (0.0, float(values.mean()))


def test_the_predictor_learns_which_problems_are_hard():
    """Policies differ in how far they get; a problem's embedding says how far that must be."""
    draw = torch.Generator().manual_seed(0)
    embeddings = torch.randn(120, 6, generator=draw)
    skills = torch.linspace(-1.5, 1.5, 6)
    tables = torch.sigmoid(3 * (skills[:, None] - embeddings[:, 0]))
    options = {"hidden": 16, "epochs": 12, "batch": 32, "references": 32, "lr": 1e-2}
    predictor = train_predictor(embeddings, tables, **options)
    fresh = torch.randn(200, 6, generator=draw)
    accuracies = torch.sigmoid(3 * (0.3 - fresh[:, 0]))
    with torch.no_grad():
        own = torch.arange(200).where(torch.arange(200) < 40, -1)
        found = predictor(fresh, fresh[:40], accuracies[:40], own)
    error = float((found - accuracies)[40:].abs().mean())
    baseline = float((accuracies[:40].mean() - accuracies)[40:].abs().mean())
    assert error < 0.5 * baseline


def test_a_predictor_is_saved_and_checked(tmp_path):
    torch.manual_seed(0)
    predictor = Predictor(512, hidden=8).eval()
    predictor.save(tmp_path / "predictor.pt")
    loaded = load_predictor(tmp_path / "predictor.pt", 512)
    embeddings, values = torch.randn(5, 512), torch.tensor([0.1, 0.9])
    with torch.no_grad():
        expected = predictor(embeddings, embeddings[:2], values)
        assert torch.equal(loaded(embeddings, embeddings[:2], values), expected)
    with pytest.raises(ConfigError, match=r"embeddings of width 512, .* gives 64"):
        load_predictor(tmp_path / "predictor.pt", 64)
    for name, content in {"missing": None, "empty": b"", "text": b"{}", "zip": b"PK"}.items():
        path = tmp_path / f"{name}.pt"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ModelError, match=rf"predictor = .*{name}.pt' cannot be read: \S"):
            load_predictor(path, 64)


def test_bags_of_tokens_know_equal_prompts():
    task = Numbers(21)
    found = embed([task[i] for i in range(21)], "")
    assert found.norm(dim=1).tolist() == pytest.approx([1.0] * 21)
    alike = found @ found.T
    assert alike[0, 0] == pytest.approx(1)
    assert alike[0, 1] < 0.9
    assert fit_scale(found, torch.arange(21).remainder(7) / 7) < 1


def play(dots, history, step, accuracy, count=4, seed=0):
    """One step of the loop: references, selection, outcomes."""
    probed = dots.probe(step, history, seed)
    for index in probed:
        history.record(index, answers(*accuracy(index), version=step))
    chosen = dots(count, history.num_problems, history.num_taken, history, seed)
    graded = [answers(*accuracy(index), version=step) for index in chosen]
    for index, outcome in zip(chosen, graded, strict=True):
        history.record(index, outcome)
    history.num_taken += len(probed) + count
    dots.observe(step, graded, {})
    return probed, chosen


def test_dots_asks_middling_problems_of_which_it_has_never_heard():
    """Prompts with i % 7 < 2 are solved half the time, the others never."""
    accuracy = lambda index: (1, 0) if index % 7 < 2 else (0, 0)  # noqa: E731
    options = {"references": 60, "every": 2, "recent_epochs": 0}
    dots, history = Dots(setup(210, dots=options)), History(210)
    probed, first = play(dots, history, 0, accuracy, count=15)
    assert len(set(probed)) == 60
    none, second = play(dots, history, 1, accuracy, count=15)
    assert none == []
    assert len({*first, *second}) == 30  # without repetition until the next prediction
    assert sum(index % 7 < 2 for index in first + second) >= 27  # by chance it would be 9
    assert dots.metrics(None)["sampling/prediction_error"] < 0.1
    assert len(play(dots, history, 2, accuracy)[0]) == 60


def test_predictions_that_say_nothing_are_not_turned_around():
    """Without itself a right reference is predicted lower than a wrong one: the line falls."""
    dots, history = Dots(setup(dots={"references": 20})), History(40)
    draw = torch.Generator().manual_seed(0)
    dots._embeddings = torch.nn.functional.normalize(torch.rand(40, 64, generator=draw), dim=1)
    for index in dots.probe(0, history, 0):
        history.record(index, answers(*(1, 1) if index % 2 else (0, 0)))
    mean = sum(history[index][-1] for index in history) / 20
    assert dots.predict(history).tolist() == pytest.approx([mean] * 40)


def test_dots_without_references_goes_by_its_own_answers():
    """Beta(1, 1): two of four right is 0.5, none of four 1/6; an unknown problem is 0.5."""
    options = {"references": 0, "recent_epochs": 2, "calibrate": False}
    dots, history = Dots(setup(dots=options)), History(40)
    assert dots.probe(0, history, 0) == []
    assert dots.predict(history).tolist() == [0.5] * 40
    history.record(3, answers(1, 1, 0, 0))
    history.record(4, answers(0, 0, 0, 0))
    found = dots.predict(history)
    assert found[3] == 0.5
    assert float(found[4]) == pytest.approx(1 / 6)
    dots.probe(30, history, 0)  # 20 steps are two epochs: too long ago
    assert dots.predict(history)[4] == 0.5


def test_dots_resumes_exactly_between_two_predictions():
    accuracy = lambda index: (1, 0) if index % 2 else (1, 1)  # noqa: E731
    dots, history = Dots(setup(dots={"references": 8, "every": 3})), History(40)
    play(dots, history, 0, accuracy)
    resumed, copy = saved(dots, Dots(setup(dots={"references": 8, "every": 3}))), History(40)
    copy.load_state_dict(history.state_dict())
    for step in (1, 2, 3, 4):
        assert play(dots, history, step, accuracy) == play(resumed, copy, step, accuracy)


# Replay


@pytest.mark.parametrize("case", VECTORS["dots_replay_loss"])
def test_the_replay_loss_is_decoupled_ppo(case):
    """-min(r_new A, clip(r_new, r_old (1 - eps), r_old (1 + eps)) A) with r = pi / mu."""
    logps = [torch.tensor([[case[key]]], dtype=torch.float64) for key in LOGPS]
    advantages = torch.tensor([[case["advantage"]]], dtype=torch.float64)
    clip = {"clip_low": case["eps"], "clip_high": case["eps"], "objective": "decoupled"}
    loss, _ = policy_loss(*logps, advantages, torch.ones(1, 1), **clip)
    assert float(loss) == pytest.approx(case["loss"], rel=1e-9)


LOGPS = ("logp_new", "logp_prox", "logp_mu")


def fresh_groups(*ids, version, accuracies=(1, 0)):
    return [answers(*accuracies, id=id, version=version) for id in ids]


def test_replay_fills_up_the_batch_with_old_groups():
    replay = RecentReplay(setup(replay={"fresh": 0.5, "capacity": 3}))
    assert replay.num_fresh(4) == 4  # there is nothing to replay yet
    first = fresh_groups("a", "b@1", "c", "d", version=0)
    assert replay.merge(first, 4, seed=0) == first
    assert replay.num_fresh(4) == 2
    second = fresh_groups("e", "b@2", version=1)
    merged = replay.merge(second, 4, seed=1)
    assert merged[:2] == second
    old = merged[2:]
    assert {g.rollout.version for g in old} == {0}
    assert len({g.rollout.problem.id for g in old} & {"b@1", "c", "d"}) == 2
    for g in old:
        [original] = [f for f in first if f.rollout.problem.id == g.rollout.problem.id]
        pairs = zip(g.rollout.completions, original.rollout.completions, strict=True)
        for found, expected in pairs:
            assert found.logprobs == pytest.approx(expected.logprobs, rel=1e-6)
            assert tuple(found.token_ids) == tuple(expected.token_ids)
        assert list(g.rewards) == list(original.rewards)
        assert g.accuracies == original.accuracies


def test_the_buffer_is_bounded_and_holds_the_newest_mixed_group_of_each_problem():
    replay = RecentReplay(setup(replay={"fresh": 0.5, "capacity": 4}))
    replay.merge(fresh_groups("a", "b", "c", version=0), 3, seed=0)
    flat = fresh_groups("d", version=1, accuracies=(1, 1))
    replay.merge([*fresh_groups("a@1", "e", version=1), *flat], 3, seed=0)
    kept = [(packed["id"], packed["version"]) for packed in replay.state_dict()["buffer"]]
    assert kept == [("c", 0), ("a@1", 1), ("e", 1)]


def test_answers_that_differ_are_mixed_whatever_their_mean():
    """Rewards of -1 and 1 have a mean of 0, and partial credit that all get teaches nothing."""
    replay = RecentReplay(setup(replay={"fresh": 0.5, "capacity": 4}))
    signs = fresh_groups("signs", version=0, accuracies=(-1, 1))
    partial = fresh_groups("partial", version=0, accuracies=(0.5, 0.5))
    replay.merge([*signs, *partial], 2, seed=0)
    assert [packed["id"] for packed in replay.state_dict()["buffer"]] == ["signs"]


def test_replay_resumes_exactly():
    options = {"fresh": 0.5, "capacity": 8}
    replay = RecentReplay(setup(replay=options))
    replay.merge(fresh_groups(*"abcdefgh", version=0), 8, seed=0)
    resumed = saved(replay, RecentReplay(setup(replay=options)))
    more = fresh_groups("i", "j", version=1)
    ours, theirs = (part.merge(more, 6, seed=5) for part in (replay, resumed))
    assert [g.rollout for g in ours] == [g.rollout for g in theirs]


# E3


@pytest.mark.parametrize("case", VECTORS["e3_budget"])
def test_e3_budget_vectors(case):
    arguments = (case["rank"], case["total"], case["n_min"], case["n_max"])
    assert divide_budget(*arguments, official=True) == case["official_algorithm"]
    assert divide_budget(*arguments) == case["capped_variant"]


def test_e3_budgets_keep_the_sum_the_bounds_and_the_order():
    draw = np.random.default_rng(0)
    for _ in range(200):
        ranks = draw.random(int(draw.integers(1, 12))).round(2).tolist()
        total = 8 * len(ranks)
        sizes = divide_budget(ranks, total, 4, 12)
        assert sum(sizes) == total
        assert all(4 <= size <= 12 for size in sizes)
        by_rank = sorted(zip(ranks, sizes, strict=True))
        assert all(a[1] <= b[1] for a, b in itertools.pairwise(by_rank) if a[0] < b[0])
    assert divide_budget([0, 0, 0, 1], 32, 4, 12, official=True) == [4, 4, 4, 20]


def test_e3_ranks_at_the_end_of_an_epoch_and_widens():
    """Of four problems 0 is the easiest and 3 the hardest; 8 +- 2, then 8 +- 4."""
    budget, history = E3Budget(setup(4)), History(4)
    for index, right in enumerate((4, 3, 1, 0)):
        history.record(index, answers(*[1] * right, *[0] * (4 - right)))
    history.num_taken = 4
    assert budget([0, 1, 2, 3], history, 8) == [8] * 4  # these four belong to the first epoch
    assert rank(history) == {0: 0, 1: 0.25, 2: 0.5, 3: 0.75}
    history.num_taken = 8
    assert budget([0, 1, 2, 3], history, 8) == [6, 7, 9, 10]
    history.num_taken = 12
    assert budget([3, 0], history, 8) == [12, 4]
    assert saved(budget, E3Budget(setup(4)))([3, 0], history, 8) == [12, 4]
    history.num_taken = 40
    assert budget([3, 0], history, 512) == [768, 256]  # BroRL's groups: bounds scale with G


def test_e3_length_bias_shortens_easy_answers_only():
    budget = E3Budget(setup(4, e3={"length_coef": 0.5}))
    budget.ranks = {0: 0.1, 1: 0.9}
    graded = [group([5], [[7, 7], [8]], [1.0, 0.0], id=str(i)) for i in range(3)]
    found = [list(g.rewards) for g in budget.shape([0, 1, 2], graded)]
    assert found == [[pytest.approx(0.5), 0.0], [1.0, 0.0], [1.0, 0.0]]
    # A wrong answer keeps its -1, whatever its length.
    [signed] = budget.shape([0], [group([5], [[7, 7], [8]], [1.0, -1.0], id="s")])
    assert list(signed.rewards) == [pytest.approx(0.5), -1.0]


@pytest.mark.parametrize("case", VECTORS["e3_temperature"]["updates"])
def test_e3_temperature_vectors(case):
    found = next_temperature(case["tau"], case["H_target"], case["H"], case["vocab"])
    assert found == pytest.approx(case["tau_next"], rel=1e-9)


def test_e3_annealing_vectors():
    case = VECTORS["e3_temperature"]["annealing"]
    for point in case["factors"]:
        found = anneal_factor(point["t"], case["t_max"], 0.4, case["eta"])
        assert found == pytest.approx(point["factor"], rel=1e-9)
    assert anneal_factor(0, 480, 0.4, 0.9) == 1


def test_the_thermostat_warms_what_cools_down_and_resumes_exactly():
    thermostat = E3Thermostat(setup())
    assert thermostat(0, 1.0) == 1.0
    thermostat.observe(0, [], {"actor/entropy": 0.3})  # the target
    assert thermostat(1, 1.0) == 1.0
    thermostat.observe(1, [], {"actor/entropy": 0.2})
    warmer = thermostat(2, 1.0)
    assert warmer == pytest.approx(VECTORS["e3_temperature"]["updates"][1]["tau_next"], rel=1e-9)
    thermostat.observe(2, [], {})  # nothing was measured
    assert thermostat(3, 1.0) == warmer
    resumed = saved(thermostat, E3Thermostat(setup()))
    for part in (thermostat, resumed):
        part.observe(3, [], {"actor/entropy": 0.9})
    assert resumed(4, 1.0) == thermostat(4, 1.0) < warmer
    for step in range(4, 400):
        thermostat.observe(step, [], {"actor/entropy": 1e-9})
    assert thermostat(400, 1.0) == 2.0


def test_a_target_that_falls_to_nothing_cools_to_the_lowest_temperature():
    thermostat = E3Thermostat(setup(e3={"anneal_to": 0.0}))
    for step in range(100):
        thermostat.observe(step, [], {"actor/entropy": 0.3})
    assert thermostat.target(100) == 1e-4
    assert thermostat(100, 1.0) == 0.3


# BroRL


def test_brorl_mass_balance_vector():
    case = VECTORS["brorl"]
    logits = torch.tensor(case["logits"], dtype=torch.float64)
    is_right, is_sampled = (torch.zeros(len(logits), dtype=torch.bool) for _ in range(2))
    is_right[case["correct"]], is_sampled[case["sampled"]] = True, True
    options = {"eta": case["eta"], "n": case["N"], "rc": case["Rc"], "rw": case["Rw"]}
    found = mass_change(logits, is_right, is_sampled, **options)
    assert found == pytest.approx(case["delta_Q_theorem"], rel=1e-9)
    direct = first_order_change(logits, is_right, is_sampled, **options)
    assert direct == pytest.approx(case["delta_Q_first_order"], rel=1e-9)


def test_brorl_learning_rate_rule():
    case = VECTORS["brorl"]["lr_rule"]
    optim = {"lr": case["base_lr"], "base_batch": case["base_batch"]}
    tree = {"batch": {"problems": 128}, "sampling": {"group_size": 512}, "optim": optim}
    assert case["new_batch"] == 128 * 512
    assert build_config(tree).peak_lr == pytest.approx(case["new_lr"], rel=1e-12)
    assert build_config({**tree, "optim": {"lr": 1e-6}}).peak_lr == 1e-6


def test_more_samples_lose_fewer_right_answers():
    """Of 100 right answers among 1280, 4 samples a step let many lose probability, 512 none."""
    sizes = {"vocabulary": 1280, "num_right": 100, "steps": 200}
    few, many = (simulate(n, **sizes) for n in (4, 512))
    assert few["right_answers_that_lost"] > 0.1
    assert many["right_answers_that_lost"] == 0
    assert many["falling_steps_frac"] == 0
    assert many["mass_end"] > few["mass_end"] > few["mass_start"]


# VAPO


@pytest.mark.parametrize("case", VECTORS["vapo_lambda"])
def test_vapo_lambda_vectors(case):
    found = length_lambda(torch.tensor([case["length"]], dtype=torch.float64), case["alpha"])
    assert float(found) == pytest.approx(case["lam_policy"], rel=1e-9)


def test_vapo_critic_and_policy_have_lambdas_of_their_own():
    """Responses of 2 and 4 tokens with alpha = 0.5: lambda 0 and 0.5; the critic's is 1."""
    batch = as_corrected(pad([group([5], [[7, 7], [8, 8, 8, 8]], [1.0, 0.0])]))
    draw = torch.Generator().manual_seed(0)
    batch = batch.replace(values=torch.rand(batch.mask.shape, generator=draw) * batch.mask)
    advantages, returns = critic_advantages(batch, lam_alpha=0.5, critic_lam=1.0)
    outcome = torch.zeros_like(batch.mask)
    outcome[0, 2] = 1.0
    for row, lam in enumerate((0.0, 0.5)):
        expected, _ = gae(outcome[row], batch.values[row], batch.mask[row], lam=lam)
        torch.testing.assert_close(advantages[row], expected)
    _, monte_carlo = gae(outcome, batch.values, batch.mask, lam=1.0)
    torch.testing.assert_close(returns, monte_carlo)
    assert returns[0, 1:3].tolist() == pytest.approx([1.0, 1.0])


# What goes together


@pytest.mark.parametrize(
    ("flags", "mistake"),
    [
        ("--batch.subselect shuffle-r1 --sampling.group_size 7", "sampling.group_size = 7 is odd"),
        ("--batch.subselect shuffle-r1 --sampling.budget e3", "makes groups of odd size"),
        ("--batch.subselect pods --algo.name vapo", "algo.advantage = 'gae' values; use 'grpo'"),
        ("--batch.subselect pods --systems.pods.keep 1", "systems.pods.keep = 1 leaves nothing"),
        ("--sampling.replay recent --algo.objective ppo_prox", "old groups need the weight of"),
        ("--sampling.budget e3 --sampling.group_size 2", "makes groups of 1"),
        ("--sampling.select greso,dots", "is not one of shuffle, greso, dots"),
        ("--sampling.thermostat warm", "'warm' is not one of off, e3, nor module:name"),
        ("--sampling.thermostat e3 --systems.e3.lowest 2", "must lie below systems.e3.highest"),
        ("--algo.name vapo --algo.advantage grpo", "algo.name = 'vapo' means 'gae'"),
        (
            "--sampling.select dots --systems.dots.references 0 --systems.dots.recent_epochs 0",
            "leave nothing to predict from",
        ),
        ("--sampling.select dots --systems.dots.predictor p.pt", "set systems.dots.encoder"),
        (
            "--sampling.budget e3 --sampling.group_size 3 --algo.name reinforce_pp "
            "--algo.dynamic_sampling --systems.e3.spread 0.6",
            "makes groups of 1",
        ),
        (
            "--sampling.thermostat e3 --sampling.temperature 0.2",
            "sampling.temperature = 0.2 must lie within systems.e3.lowest = 0.3",
        ),
        (
            "--batch.problems 1 --batch.subselect shuffle-r1 --batch.minibatches 3",
            "batch.minibatches = 3: batch.subselect = 'shuffle-r1' keeps only 2 pairs",
        ),
        (
            "--batch.problems 1 --batch.subselect pods --batch.minibatches 5",
            "batch.minibatches = 5: batch.subselect = 'pods' keeps only 4 completions",
        ),
    ],
)
def test_what_cannot_work_is_refused(flags, mistake):
    with pytest.raises(ConfigError) as error:
        load_config(None, flags.split())
    assert mistake in str(error.value)


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--batch.subselect pods --systems.pods.keep 8", "PODS cannot act"),
        ("--sampling.replay recent --systems.replay.fresh 1.0", "replay cannot act"),
        ("--sampling.budget e3", "a problem counts by the number of its completions"),
        ("--systems.greso.p 0.4", "systems.greso.p is not used: sampling.select = 'shuffle'"),
        ("--systems.e3.spread 0.4", "neither sampling.budget nor sampling.thermostat is 'e3'"),
    ],
)
def test_what_cannot_act_gets_a_warning(flags, warning):
    config = load_config(None, flags.split())
    assert any(warning in found for found in find_warnings(config))


def test_plain_recipes_have_no_word_of_the_systems():
    assert not find_mistakes(load_config(None))
    assert not any("systems" in warning for warning in find_warnings(load_config(None)))
