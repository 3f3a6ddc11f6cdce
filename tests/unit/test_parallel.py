"""Two trainer ranks are one trainer: the same losses, norms, weights, metrics and checkpoints.

One other process is started for the whole file; this one is rank 0. tests/parallel has what takes
longer: whole runs, kills, torchrun, and three ranks.
"""

import functools
import math
import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed.fsdp
from models import CPU, build_learner, random_batch, recompute, tiny_llama, tiny_policy
from torch import nn
from torch.distributed import HashStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from qurl.advantages import ESTIMATORS, critic_advantages
from qurl.config import OptimConfig, build_config
from qurl.errors import CheckpointError, ConfigError, ModelError, RankLost, TrainingError
from qurl.objectives import ADVANTAGES, Advantage, with_facts
from qurl.ops.shelf import shelve
from qurl.quant import quantize, rescale_
from qurl.quant.linear import projections
from qurl.quant.tracking import UpdateTracker
from qurl.rollout import build_engine
from qurl.run import rank_checks
from qurl.run.checkpoint import load_checkpoint, load_saved_policy, save_checkpoint
from qurl.run.colocated import ColocatedEngines
from qurl.seeds import generator
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.batches import Share, deal
from qurl.trainer.coded import CodedWeight
from qurl.trainer.optimizer import apply_gradients, build_optimizer
from qurl.trainer.parallel import processes, sharding
from qurl.trainer.parallel.group import LearnerGroup
from qurl.trainer.parallel.processes import FAILURE, Started, _join_all, lead, spawn
from qurl.trainer.parallel.replicas import ReplicaGroup
from qurl.trainer.parallel.sharding import outline_models, read_outline
from qurl.trainer.parallel.shipping import gather
from qurl.trainer.policy import Policy
from qurl.trainer.ranks import ALONE
from qurl.trainer.saving import load_optimizers, save_optimizers, share_of
from qurl.trainer.unified import UnifiedLinear
from qurl.types import Completion, Graded, Problem, Rollout, SamplingParams

pytestmark = pytest.mark.xdist_group("ranks")  # one other process for all tests
# A large epsilon keeps AdamW's first step, g / (|g| + eps), from magnifying rounding.
OPTIM = {"lr": 1e-2, "eps": 1e-2}
CASES = {
    "grpo, reference, UAQ": {
        "algo": {"name": "grpo", "kl_coef": 0.1, "aggregation": "seq-mean-token-mean"},
        "quant": {"update_scale": 1.5},
        "correction": {"mode": "auto"},
    },
    "ppo, critic, two epochs": {
        "algo": {"name": "ppo", "advantage": "gae", "entropy_coef": 0.01},
        "batch": {"problems": 3, "minibatches": 2, "epochs": 2, "microbatch_tokens": 25},
        "critic": {"lr": 1e-2},
    },
    "dapo, checkpointed": {
        "algo": {"name": "dapo", "clip_high": 0.28, "dual_clip": 10.0},
        "optim": OPTIM | {"weight_decay": 0.1},
        "model": {"gradient_checkpointing": True},
    },
    "one precision flow": {"quant": {"format": "int8", "unified": True}},
}
CLOSE = 1e-5


SMALL = {
    "steps": 10,
    "batch": {"problems": 3, "minibatches": 2, "microbatch_tokens": 25},
    "sampling": {"max_tokens": 9, "group_size": 2},
    "optim": OPTIM,
}


def make_config(case):
    return build_config(SMALL | CASES[case])


def make(case, path=None):
    """A whole learner, as each rank makes it; of a checkpoint with `path`."""
    config = make_config(case)
    reference = tiny_policy(seed=1).freeze_() if config.algo.kl_coef else None
    if path:
        return build_learner(config, load_saved_policy(path, config.model, CPU), reference)
    policy = Policy(tiny_llama(), build_tokenizer(), config.model, CPU, config.quant)
    learner = build_learner(config, policy, reference)
    if config.quant.update_scale > 1:
        rescale_(policy.model, config.quant.update_scale)
    return learner


def batches():
    """Six rows; one row, so that a rank is idle; a mini-batch of which all tokens are rejected."""
    policy = tiny_policy()
    whole, single, rejected = (
        random_batch(policy, seed=seed, rows=rows) for seed, rows in enumerate((6, 1, 6))
    )
    mask = rejected.mask.clone()
    mask[torch.randperm(6, generator=generator(0, "shuffle", 2, 0))[:3]] = 0
    return [whole, single, rejected.replace(mask=mask)]


def graded_of(batch):
    """Rollouts of one completion that pad to the batch; all but the first token is the response."""
    groups = []
    for row, length in enumerate(batch.lengths.tolist()):
        first, *token_ids = batch.token_ids[row, :length].tolist()
        completion = Completion(
            token_ids=token_ids,
            logprobs=batch.logp_behav[row, 1:length].tolist(),
            text=f"text {row}",
            finish="stop",
            trained=batch.mask[row, 1:length].bool().tolist(),
        )
        problem = Problem(batch.problem_ids[row], [first])
        rollout = Rollout(problem, [completion], 0, batch.temperature)
        details = [{"accuracy": float(batch.accuracies[row])}]
        groups.append(Graded(rollout, [float(batch.rewards[row])], details))
    return groups


def dealt(learner, batch, number):
    return learner.deal(graded_of(batch), torch.arange(len(batch)), batch.bundle, number)


def step(learner, batch, number):
    """The batch as dealt and as trained, with its advantages and other returns; and metrics."""
    sampled = dealt(learner, batch, number)
    scored = learner.recompute(sampled, number)

    @with_facts(Advantage(needs_critic=True))
    def known(corrected):
        return batch.advantages * corrected.mask, corrected.mask * (number + 1)

    updated = learner.update(learner.compare(learner.correct(scored), known), number)
    return sampled, *updated


def train(learner):
    """Three steps: what was logged, and the log-probs and weights at the end."""
    tracker = learner.watch(UpdateTracker("int8", 5))
    assert tracker.measure(learner.whole_model()) == {}
    rows = []
    for number, batch in enumerate(batches()):
        sampled, trained, metrics = step(learner, batch, number)
        metrics |= learner.describe(trained, sampled)
        rows.append(metrics | tracker.measure(learner.whole_model()))
    return rows, trained, weights(learner)


def weights(learner):
    return {name: p.detach().clone() for name, p in learner.whole_model().named_parameters()}


def assert_close(found, expected, tolerance=CLOSE):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=name)


@pytest.fixture(scope="module")
def workers():
    with lead(2, "cpu", threads=1) as started:
        yield started


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one(workers, case):
    expected_rows, expected_batch, expected = train(make(case))
    group = LearnerGroup(workers, make(case))
    rows, trained, found = train(group)
    batch = group.whole(trained)
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, rel=CLOSE, abs=CLOSE)
    assert rows[2]["actor/skipped_updates"] == 1
    assert rows[0]["uaq/code_flip_frac"] > 0
    for name in ("logp", "values"):  # rejected tokens have none
        ours, theirs = (getattr(b, name) * b.mask for b in (batch, expected_batch))
        torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=0)
    assert_close(found, expected)
    assert group.version == 3


REPLICAS = {
    "ppo, critic, two epochs": {},
    "grpo, reference, UAQ": {},
    "adapters": {"model": {"lora_rank": 4}},
    "hAdam": {"optim": OPTIM | {"name": "hadam"}},
    "BF16 masters": {"model": {"compute_dtype": "bfloat16"}, "optim": {"masters": "bf16"}},
}


def make_whole(case):
    if case in CASES:
        return make(case)
    config = build_config(SMALL | REPLICAS[case])
    policy = Policy(tiny_llama(), build_tokenizer(), config.model, CPU, config.quant)
    if config.model.lora_rank:
        policy.adapt_(config.model, seed=0)
    learner = build_learner(config, policy)
    learner.narrow_masters_()
    return learner


@pytest.mark.parametrize("case", REPLICAS)
def test_two_replicas_are_one(workers, case):
    expected_rows, _, expected = train(make_whole(case))
    group = ReplicaGroup(workers, functools.partial(make_whole, case))
    rows, _, found = train(group)
    # Sums of another order are rounded to BF16.
    close = 2e-2 if case == "BF16 masters" else CLOSE
    for row, expected_row in zip(rows, expected_rows, strict=True):
        names = [name for name in expected_row if not name.startswith("uaq/")]
        assert {n: row[n] for n in names} == pytest.approx(
            {n: expected_row[n] for n in names}, rel=close, abs=close
        )
    assert_close(found, expected, close)
    before = weights(make_whole(case))
    assert any((expected[name] - weight).abs().max() > 1e-3 for name, weight in before.items())


def test_checkpoints_of_replicas_are_those_of_one(workers, tmp_path):
    """Trained on with two replicas, with two shards, and with two replicas again."""
    case, parts = "ppo, critic, two epochs", batches()
    alone = make(case)
    expected = [step(alone, batch, number)[2] for number, batch in enumerate(parts)]
    learner, found = ReplicaGroup(workers, functools.partial(make, case)), []
    for number, batch in enumerate(parts):
        if number:
            saved = save_checkpoint(tmp_path, number, learner, {}, keep=9)
            assert (saved / "optimizer.pt").exists() == (number == 1)
            if number == 1:
                learner = LearnerGroup(workers, make(case, saved))
            else:
                learner = ReplicaGroup(workers, functools.partial(make, case, saved))
            load_checkpoint(saved, learner)
        found.append(step(learner, batch, number)[2])
    for row, expected_row in zip(found, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=CLOSE, abs=CLOSE)
    assert_close(weights(learner), weights(alone))


@torch.no_grad()
def change_one_bit_on_rank_1(post):
    weight = post.learner.policy.model.model.norm.weight
    weight[3] += post.ranks.rank * 2.0**-23


def test_replicas_that_differ_are_found(workers):
    group = ReplicaGroup(workers, functools.partial(make, "dapo, checkpointed"))
    workers.run(change_one_bit_on_rank_1)
    with pytest.raises(TrainingError, match=r"different weights: policy model\.norm\.weight"):
        step(group, batches()[0], 0)


def test_engines_of_replicas_sync_from_their_own_weights(workers):
    group = ReplicaGroup(workers, functools.partial(make_whole, "adapters"))
    step(group, batches()[0], 0)
    engines = ColocatedEngines(workers, "int8", {})
    alone = build_engine("local", group.whole_model(), quant="int8")
    reports = [engine.sync(group.source(engine), version=1) for engine in (engines, alone)]
    assert reports[0].canary_gap == reports[1].canary_gap
    problems = [Problem(str(i), [1, 2, 3 + i], "") for i in range(4)]
    params = SamplingParams(max_tokens=9, seed=3, group_size=2)
    found, expected = (engine.generate(problems, params) for engine in (engines, alone))
    by_id = {rollout.problem.id: rollout for rollout in found}
    for rollout in expected:
        ours = by_id[rollout.problem.id].completions
        assert [c.token_ids for c in ours] == [c.token_ids for c in rollout.completions]
    engines.close()


def test_checkpoints_of_two_ranks_and_of_one_are_read_by_either(workers, tmp_path):
    """Trained on with two ranks, with one, and with two again, against one all the way."""
    case, parts = "ppo, critic, two epochs", batches()
    alone = make(case)
    expected = [step(alone, batch, number)[2] for number, batch in enumerate(parts)]

    learner = LearnerGroup(workers, make(case))
    found = [step(learner, parts[0], 0)[2]]
    saved = {}
    for number in (1, 2):
        saved[number] = save_checkpoint(tmp_path, number, learner, {"at": number}, keep=9)
        if number == 1:
            learner = make(case, saved[number])
        else:
            learner = LearnerGroup(workers, make(case, saved[number]))
        assert load_checkpoint(saved[number], learner)["at"] == number
        found.append(step(learner, parts[number], number)[2])
    for row, expected_row in zip(found, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=CLOSE, abs=CLOSE)
    assert_close(weights(learner), weights(alone))
    assert (saved[1] / "optimizer" / ".metadata").exists()
    assert (saved[2] / "optimizer.pt").exists()

    exported = AutoModelForCausalLM.from_pretrained(saved[1] / "policy")
    assert type(exported).__name__ == "LlamaForCausalLM"
    ids = torch.arange(5)[None]
    logits = load_saved_policy(saved[1], make_config(case).model, CPU).model(ids)
    torch.testing.assert_close(exported(ids).logits, logits.logits)


def make_wide(width, rows):
    torch.manual_seed(0)
    return nn.Linear(width, rows)


def step_in_8_bits(ranks, shape, numbers, source=None, target=None):
    """These steps of AdamW with moments in 8 bits, from saved states and to others."""
    model = make_wide(*shape)
    if source is not None:
        model.load_state_dict(torch.load(source / "model.pt"))
    if ranks.size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks.size,)))
    config = OptimConfig(moments="8bit", weight_decay=0.1)
    optimizers = {"policy": (model, build_optimizer(model, config, lr=1e-2))}
    if source is not None:
        load_optimizers(source, optimizers, ranks)
    for number in numbers:
        draw = torch.Generator().manual_seed(number)
        for weight in model.parameters():
            gradient = torch.randn(weight.shape, generator=draw)
            weight.grad = share_of(gradient, weight)
        apply_gradients(optimizers["policy"][1], lr=1e-2, grad_clip=1e3)  # norms are rounded
    whole = {name: gather(weight.detach()) for name, weight in model.named_parameters()}
    if target is not None:
        if ranks.rank == 0:
            torch.save(whole, target / "model.pt")
        save_optimizers(target, optimizers, ranks)
    return whole


def step_on_all_ranks(post, *arguments):
    return step_in_8_bits(post.ranks, *arguments)


@pytest.mark.parametrize(("shape", "tops"), [((768, 33), (33, 3)), ((384, 32), (48,))])
def test_moments_in_8_bits_are_those_of_one(workers, tmp_path, shape, tops):
    """To the bit: on two ranks, then on one, and on two again, against one all the way.

    The ranks have 17 and 16 rows of three blocks each, or 16 of one and a half.
    """
    expected = step_in_8_bits(ALONE, shape, range(6))
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    workers.run(step_on_all_ranks, shape, range(2), None, first)
    step_in_8_bits(ALONE, shape, range(2, 4), first, second)
    found = workers.run(step_on_all_ranks, shape, range(4, 6), second)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(expected["weight"], make_wide(*shape).weight)
    states = torch.load(second / "optimizer.pt")["policy"]["state"].values()
    coded = next(state for state in states if "m_top" in state)
    assert (coded["m"].dtype, coded["m_top"].shape) == (torch.int8, tops)


def test_rows_that_blocks_of_moments_would_cut_are_refused(workers):
    learner = make("dapo, checkpointed")
    optim = replace(learner.config.optim, moments="8bit")
    learner.policy.model.lm_head = nn.Linear(32, 130, bias=False)  # 65 rows: 8 blocks and a bit
    learner.config = replace(learner.config, optim=optim)
    with pytest.raises(ConfigError, match=r"which lm_head\.weight with rows of 32 would cut"):
        LearnerGroup(workers, learner)


def test_moments_in_8_bits_train_on_ranks(workers):
    """Sums of another order move a few codes to the next."""
    expected = train(make_in_8_bits())
    found = train(LearnerGroup(workers, make_in_8_bits()))
    assert_close(found[2], expected[2], 1e-3)
    before = weights(make_in_8_bits())
    assert max(float((expected[2][n] - before[n]).abs().max()) for n in before) > 1e-2


def make_in_8_bits():
    config = make_config("dapo, checkpointed")
    config = replace(config, optim=replace(config.optim, moments="8bit"))
    shape = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.05}
    policy = Policy(tiny_llama(**shape), build_tokenizer(), config.model, CPU, config.quant)
    return build_learner(config, policy)


def test_an_update_tracker_is_saved_whole(workers):
    """Snapshots of either kind of learner fit the other, and the last one can be had again."""
    case = "dapo, checkpointed"
    alone, group = make(case), LearnerGroup(workers, make(case))
    one, two = (learner.watch(UpdateTracker("fp8", 5)) for learner in (alone, group))
    batch = batches()[0]
    for tracker in (one, two):
        tracker.measure(alone.whole_model())
    before = two.state_dict()
    whole = one.collect(one.state_dict())
    for learner in (alone, group):
        step(learner, batch, 0)
    expected = one.measure(alone.whole_model())
    assert two.measure(group.whole_model()) == pytest.approx(expected, rel=CLOSE)
    for name, rows in two.collect(before).items():
        assert torch.equal(rows, whole[name]), name
    two.load_state_dict(whole)
    assert two.measure(group.whole_model()) == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("field", ["advantages", "logp_behav"])
def test_a_loss_that_is_not_finite_on_one_rank_stops_both(workers, field):
    case = "dapo, checkpointed"
    group, batch = LearnerGroup(workers, make(case)), batches()[0]
    before = weights(group)
    first = torch.randperm(6, generator=generator(0, "shuffle", 0, 0))[:3]
    row = deal(batch.lengths.tolist(), [first], 2)[1][0]
    values = getattr(batch, field).clone()
    values[row, batch.lengths[row] - 1] = math.nan
    with pytest.raises(TrainingError, match="trainer rank 1: the loss of step 0 is nan") as error:
        step(group, batch.replace(**{field: values}), 0)
    kept = error.value.batch
    assert kept.token_ids.tolist() == batch.token_ids.tolist()
    assert getattr(kept, field)[row].isnan().any()
    assert group.version is None
    assert_close(weights(group), before, 0.0)  # both ranks still answer


def test_what_all_ranks_refuse_is_one_error(workers, tmp_path):
    group = LearnerGroup(workers, make("dapo, checkpointed"))
    (tmp_path / "nowhere").write_text("a file")
    with pytest.raises(CheckpointError, match=r"nowhere.* could not be written"):
        group.save(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="Define your objective at the top of a module"):
        LearnerGroup(workers, make_with_own_objective())
    assert weights(group)


def make_with_own_objective():
    """One that other processes cannot import."""
    learner = make("dapo, checkpointed")
    learner.objective = lambda *inputs: None
    return learner


def test_blocks_that_shards_would_cut_are_refused(workers):
    group = LearnerGroup(workers, make("dapo, checkpointed"))
    tracker = group.watch(UpdateTracker("fp8-block", 5))
    with pytest.raises(ModelError, match=r"cut every 16 rows, .* that fp8-block codes together"):
        tracker.measure(group.whole_model())


def listen(post):
    """Keep the weights that unified layers see in forwards."""
    seen = post.held["seen"] = {}

    def keep(name, layer, _):
        assert isinstance(layer.weight, CodedWeight)
        codes, scale = layer.weight.coded.codes, layer.weight.coded.scale
        seen[name] = codes.float(), scale.clone()

    for name, layer in post.learner.policy.model.named_modules():
        if isinstance(layer, UnifiedLinear):
            layer.register_forward_pre_hook(functools.partial(keep, name))


def tell(post):
    return post.ranks.pool(post.held["seen"])


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_unified_weights_are_gathered_as_codes(workers, format):
    """Those of the whole weights, to the bit, on both ranks and after an update."""
    group = LearnerGroup(workers, make_unified(format))
    workers.run(listen)
    for number in (0, 1):
        batch = batches()[0]
        expected = {
            name: quantize(layer.weight.detach(), format)
            for name, layer in projections(group.whole_model())
        }
        group.recompute(dealt(group, batch, number), number)
        of_ranks = workers.run(tell)
        for name, coded in expected.items():
            for seen in of_ranks:
                assert torch.equal(seen[name][0], coded.codes.float()), name
                assert torch.equal(seen[name][1], coded.scale), name
        step(group, batch, number)


def make_unified(format, **shape):
    config = build_config(
        {"batch": {"minibatches": 2}, "quant": {"format": format, "unified": True}, "optim": OPTIM}
    )
    return build_learner(config, Policy(tiny_llama(**shape), None, config.model, CPU, config.quant))


def test_unified_weights_that_cannot_be_shared_evenly_are_refused(workers):
    odd = make_unified("int8", intermediate_size=63)
    with pytest.raises(ModelError, match=r"gate_proj has 63 rows, which 2 trainers cannot share"):
        LearnerGroup(workers, odd)
    with pytest.raises(ModelError, match="evenly, in whole tiles of 128"):
        LearnerGroup(workers, make_unified("fp8-block"))


def test_rows_are_dealt_by_length():
    """10 goes first, then 7, then 5 to the rank with fewer tokens, and so on."""
    lengths, everything = [5, 10, 3, 7, 1], torch.arange(5)
    assert deal(lengths, [everything], 2) == [[1, 2], [0, 3, 4]]
    assert deal(lengths, [everything], 1) == [[0, 1, 2, 3, 4]]
    assert deal([4], [torch.arange(1)], 3) == [[0], [], []]
    parts = [torch.tensor([1, 0]), torch.tensor([4, 2, 3])]
    assert deal(lengths, parts, 2) == [[1, 3], [0, 2, 4]], "mini-batch by mini-batch"


def test_a_share_knows_its_places():
    share = Share(torch.tensor([1, 4, 5]), 6)
    assert share.of(torch.tensor([5, 0, 1])).tolist() == [2, 0]
    assert share.of(torch.tensor([0, 2])).tolist() == []


def shelve_here(post, rollouts):
    """Each rank puts every other rollout on its own shelf, as if it had sampled it."""
    own = rollouts[post.ranks.rank :: post.ranks.size]
    shelved = [shelve(rollout, [post.held["shelf"].address]) for rollout in own]
    return [rollout for share in post.gather(shelved) for rollout in share]


def count_shelved(post):
    return post.ranks.total(len(post.held["shelf"]))


def test_tokens_go_to_their_rank_and_not_through_the_driver(workers):
    """The driver deals rows by number; ranks hold the batch of one device, and then drop it."""
    case = "dapo, checkpointed"
    group, alone = LearnerGroup(workers, make(case)), make(case)
    batch = random_batch(tiny_policy(), rows=8, longest=60)
    graded, rows = graded_of(batch), torch.tensor([4, 2, 2, 7, 0, 1])
    rollouts = workers.run(shelve_here, [g.rollout for g in graded])
    by_id = {r.completions[0].text: group.shelves.adopt(r) for r in rollouts}
    away = [replace(g, rollout=by_id[g.rollout.completions[0].text]) for g in graded]
    assert workers.run(count_shelved) == 8
    group.traffic.take()
    found, expected = (x.deal(g, rows, 2, 0) for x, g in ((group, away), (alone, graded)))
    num_tokens = sum(len(g.rollout.completions[0].token_ids) for g in graded)
    assert group.traffic.take() < 600 * len(rows), "no token is in it"
    whole = group.whole(found)
    for name in ("token_ids", "mask", "logp_behav", "rewards", "group", "lengths"):
        assert torch.equal(getattr(whole, name), getattr(expected, name)), name
    assert (whole.bundle, whole.problem_ids) == (2, expected.problem_ids)
    assert group.traffic.take() > 16 * num_tokens / 2, "now they came here, from the other rank"
    assert torch.equal(group.fetch(found, torch.tensor([5, 1])).lengths, expected.lengths[[5, 1]])
    del rollouts, by_id, away
    group.deal(graded, rows, 2, 1)
    assert workers.run(count_shelved) == 0


def pairs_of(batch):
    """Groups of two rows, which may go to different ranks."""
    groups, graded = [], graded_of(batch)
    for first, last in zip(graded[::2], graded[1::2], strict=True):
        completions = [*first.rollout.completions, *last.rollout.completions]
        rollout = replace(first.rollout, completions=completions)
        rewards, details = [*first.rewards, *last.rewards], [*first.details, *last.details]
        groups.append(Graded(rollout, rewards, details))
    return groups


def odd_advantage(batch):
    """Reads the whole batch: more for tokens of longer sequences than the mean."""
    return (batch.lengths - batch.lengths.float().mean())[:, None] * batch.mask


@pytest.mark.parametrize("is_whitened", [False, True])
@pytest.mark.parametrize(
    "estimate",
    [
        ESTIMATORS["grpo"],
        with_facts(ADVANTAGES["gae"])(functools.partial(critic_advantages, lam=0.9)),
        odd_advantage,
    ],
    ids=["outcomes", "rows", "batch"],
)
def test_advantages_on_ranks_are_those_of_one(workers, estimate, is_whitened):
    batch, found = random_batch(tiny_policy(), rows=8), []
    for learner in (make_whitened(is_whitened), LearnerGroup(workers, make_whitened(is_whitened))):
        sampled = learner.deal(pairs_of(batch), torch.arange(8), 1, 0)
        scored = learner.recompute(sampled, 0)
        trainable = learner.whole(learner.compare(learner.correct(scored), estimate))
        found.append((trainable.advantages, trainable.returns))
    assert found[0][0].std() > 0.1
    torch.testing.assert_close(found[0], found[1], atol=CLOSE, rtol=0)


def make_whitened(is_whitened):
    critic = {"name": "ppo", "advantage": "gae", "whiten": is_whitened}
    config = build_config({"algo": critic, "batch": {"problems": 4, "minibatches": 2}})
    return build_learner(config, tiny_policy())


def test_a_group_of_one_exchanges_nothing():
    assert (ALONE.most(3), ALONE.total(3), ALONE.pool("x")) == (3, 3, ["x"])
    with pytest.raises(ModelError, match="as it was raised"), ALONE.agreeing(ModelError):
        raise ModelError("as it was raised")


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"model": {"compile": True}}, "model.compile = true"),
        ({"model": {"lora_rank": 8}}, "model.lora_rank = 8"),
        ({"optim": {"masters": "bf16"}}, "optim.masters = 'bf16'"),
    ],
)
def test_what_is_not_built_for_shards_is_refused_by_name(section, named):
    from qurl.config import check_combinations

    config = build_config({"parallel": {"trainers": 2}} | section)
    with pytest.raises(ConfigError, match=f"{named} is not built for the shards"):
        check_combinations(config, "recipe")
    check_combinations(replace(config, parallel=replace(config.parallel, shard=False)), "recipe")


def test_the_driver_of_several_trainers_is_no_client_of_ray():
    from qurl.config import check_combinations

    config = build_config({"parallel": {"trainers": 2, "address": "ray://head:10001"}})
    with pytest.raises(ConfigError, match=r"'ray://head:10001' .* must be on a machine of the"):
        check_combinations(config, "recipe")


def test_tied_embeddings_are_one_weight(workers):
    """The head and the embedding are one parameter, whose gradient has two parts."""
    expected = train(make_tied())
    found = train(LearnerGroup(workers, make_tied()))
    assert_close(found[2], expected[2])


def make_tied():
    policy = tiny_policy(model=tiny_llama(tie_word_embeddings=True))
    return build_learner(make_config("dapo, checkpointed"), policy)


def test_an_outline_has_all_but_the_numbers():
    model = tiny_llama(tie_word_embeddings=True)
    policy = tiny_policy(model=model)
    empty, reference = read_outline(outline_models(policy, None))
    assert reference is None
    assert empty.is_packed == policy.is_packed
    assert empty.model.lm_head.weight is empty.model.get_input_embeddings().weight
    tensors = [*empty.model.named_parameters(), *empty.model.named_buffers()]
    assert all(tensor.is_meta for _, tensor in tensors)
    shapes = {name: tensor.shape for name, tensor in tensors}
    assert shapes == {n: t.shape for n, t in (*model.named_parameters(), *model.named_buffers())}


def find_empty(post):
    """Names of tensors on this rank that have no numbers, whoever holds them."""
    model = post.learner.policy.model
    held = ((f"{n}.{k}", x) for n, m in model.named_modules() for k, x in vars(m).items())
    tensors = [*model.named_parameters(), *model.named_buffers(), *held]
    empty = [name for name, x in tensors if isinstance(x, torch.Tensor) and x.is_meta]
    return post.ranks.pool((empty, float(model.model.rotary_emb.factors.sum())))


def test_all_tensors_of_a_model_get_to_the_ranks(workers):
    """Buffers, and those that are neither buffers nor parameters."""
    learner = make("dapo, checkpointed")
    learner.policy.model.model.rotary_emb.factors = torch.arange(12.0).view(3, 4).T
    LearnerGroup(workers, learner)
    assert workers.run(find_empty) == [([], 66.0)] * 2


def whole_bytes_while_sharding(post, outline):
    """The most bytes of weights that are neither empty nor shards, at any time, on each rank."""
    policy, reference = read_outline(outline)
    learner = build_learner(make_config("dapo, checkpointed"), policy, reference)
    most = 0

    def fully_shard(module, **options):
        nonlocal most
        held = {p for p in policy.model.parameters() if not (p.is_meta or isinstance(p, DTensor))}
        most = max(most, sum(4 * p.numel() for p in held))
        return torch.distributed.fsdp.fully_shard(module, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "fully_shard", fully_shard)
        sharding.shard_(learner, post.ranks)
    return post.ranks.pool(most)


def test_a_rank_holds_whole_weights_of_one_layer_at_a_time(workers):
    model = tiny_llama(num_hidden_layers=4, intermediate_size=512)
    outline = outline_models(tiny_policy(model=model), None)
    layer = sum(4 * weight.numel() for weight in model.model.layers[0].parameters())
    whole = sum(4 * weight.numel() for weight in model.parameters())
    assert workers.run(whole_bytes_while_sharding, outline) == [layer, layer]
    assert layer < whole / 4


@pytest.mark.parametrize("case", ["grpo, reference, UAQ", "one precision flow"])
@pytest.mark.parametrize("quant", ["none", "int8", "fp8-block"])
def test_engines_sync_from_shards_as_from_the_whole(case, quant, workers):
    """Each rank codes its rows, and the codes of all are those of the whole."""
    group = LearnerGroup(workers, make(case))
    engines = [build_engine("local", tiny_llama(), quant=quant, is_empty=True) for _ in range(2)]
    by_shards = engines[0].sync(group.source(engines[0]), version=1)
    by_model = engines[1].sync(group.whole_model(), version=1)
    assert by_shards.canary_gap == pytest.approx(by_model.canary_gap, abs=1e-5)
    problems = [Problem(str(i), [1, 2, 3 + i], "") for i in range(4)]
    params = SamplingParams(max_tokens=9, seed=3, group_size=2)
    assert engines[0].generate(problems, params) == engines[1].generate(problems, params)


@torch.no_grad()
def change_on_rank_1(post):
    for weight in post.learner.policy.model.parameters():
        weight.to_local().add_(post.ranks.rank)


def test_the_doctor_compares_ranks_with_one_device(workers):
    """Whole, with a kill and a resume: tests/parallel."""
    for name in rank_checks.EXCHANGES:
        assert rank_checks.check_exchange(workers, name, CPU).verdict == "ok"
    alone = rank_checks.make_learner("cpu")
    before = rank_checks.copy_weights(alone.policy.model)
    rank_checks.take_step(alone, 0)
    expected = rank_checks.copy_weights(alone.policy.model)
    assert rank_checks.largest_gap(before, expected) > 100 * rank_checks.CLOSE, "a step moves them"
    group = LearnerGroup(workers, rank_checks.make_learner("cpu"))
    rank_checks.take_step(group, 0)
    found = rank_checks.copy_weights(group.whole_model())
    assert rank_checks.judge_gap("", rank_checks.largest_gap(found, expected)).verdict == "ok"
    assert rank_checks.check_sync(group).verdict == "ok"
    wrong = LearnerGroup(workers, rank_checks.make_learner("cpu"))
    workers.run(change_on_rank_1)
    rank_checks.take_step(wrong, 0)
    found = rank_checks.copy_weights(wrong.whole_model())
    assert rank_checks.judge_gap("", rank_checks.largest_gap(found, expected)).verdict == "FAIL"


def make_bfloat16(is_checkpointed):
    model = {"compute_dtype": "bfloat16", "gradient_checkpointing": is_checkpointed}
    config = build_config({"batch": {"problems": 3, "minibatches": 1}, "model": model})
    return build_learner(config, tiny_policy(model=tiny_llama(intermediate_size=80), **model))


def count_saved(post, batch, shares):
    """How many tensors of each dtype and shape autograd keeps for the backward pass."""
    share = Share(torch.tensor(shares[post.ranks.rank]), len(batch))
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr(), storage.nbytes()] = (tensor.dtype, tensor.shape[-2:])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        post.learner.update(batch.select(share.rows), 0, share)
    return Counter((dtype, tuple(shape)) for dtype, shape in found.values())


def test_what_autograd_keeps_on_a_shard(workers):
    """`qurl.run.shares` and `activation_bytes` count it: two layers of H = 32 and an MLP of 80.

    Of the projections a BF16 copy each. Of a rank's tokens, in each layer, 6 H and 4 MLP in BF16
    (attention aside), and 4 H in FP32; two more of the last norm.
    """
    batch = recompute(make_bfloat16(False), random_batch(tiny_policy(), rows=6))
    shares = deal(batch.lengths.tolist(), [torch.arange(6)], 2)
    tokens = sum(batch.lengths[shares[0]].tolist())
    saved = {}
    for is_checkpointed in (False, True):
        LearnerGroup(workers, make_bfloat16(is_checkpointed))
        saved[is_checkpointed] = workers.run(count_saved, batch, shares)
    narrow, wide = torch.bfloat16, torch.float32
    kept = saved[False]
    copies = {shape: kept[narrow, shape] for shape in ((32, 32), (32, 16), (32, 80), (80, 32))}
    assert copies == {(32, 32): 2 * 2, (32, 16): 2 * 2, (32, 80): 2 * 2, (80, 32): 2}
    assert (kept[narrow, (tokens, 32)], kept[narrow, (tokens, 80)]) == (6 * 2, 4 * 2)
    assert kept[wide, (tokens, 32)] == 4 * 2 + 2
    assert not any(dtype == narrow for dtype, _ in saved[True]), "checkpointed layers keep none"


class Unstartable:
    """A process; rank 2 cannot be started."""

    killed: ClassVar[list[int]] = []

    def __init__(self, target, args, daemon):
        self.rank = args[1]

    def start(self):
        if self.rank == 2:
            raise OSError("no memory is left")

    def kill(self):
        self.killed.append(self.rank)


def test_ranks_end_if_one_of_them_cannot_be_started(monkeypatch):
    context = SimpleNamespace(Process=Unstartable)
    get_context = "qurl.trainer.parallel.processes.multiprocessing.get_context"
    monkeypatch.setattr(get_context, lambda method: context)
    with pytest.raises(OSError, match="no memory is left"), spawn(4, "cpu", 1):
        pass
    assert Unstartable.killed == [1]


class Fates:
    """Followers that end as they are told."""

    def __init__(self, ended):
        self.ended = ended

    def find_ended(self):
        return self.ended


@pytest.mark.parametrize("says_why", [False, True])
def test_a_rank_that_ends_before_all_have_joined_is_not_waited_for(monkeypatch, says_why):
    """As in torch, where rank 0 then waits for half an hour, in the store that holds the news."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    returned, ended = threading.Event(), {1: "was killed by signal 9"}

    def wait(own, *_):
        try:
            own.wait(["over"], timedelta(seconds=10))
        finally:
            returned.set()

    if says_why:
        store.set(FAILURE, "trainer rank 1: a bug")
        store.set(f"{FAILURE}/1", "")
    monkeypatch.setattr(processes, "join", wait)
    fate = "rank 1: a bug" if says_why else "rank 1 was killed by signal 9"
    with pytest.raises(TrainingError, match=f"trainer {fate}, before all ranks had") as failure:
        _join_all(Started(store, Fates(ended)), 2, "cpu")
    assert not returned.is_set()
    assert not isinstance(failure.value, RankLost), "a second group of this process would hang"
    store.set("over", "")


def test_what_the_leader_itself_fails_at_is_its_own_error(monkeypatch):
    monkeypatch.setattr(processes, "NEWS_SECONDS", 0)
    monkeypatch.setattr(processes, "join", lambda *_: int("two"))
    with pytest.raises(ValueError, match="invalid literal"):
        _join_all(Started(HashStore(), Fates({})), 2, "cpu")
