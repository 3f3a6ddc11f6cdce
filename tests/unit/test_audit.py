"""`qurl audit`: bias and variance of gradients, on a bandit that can be enumerated and on a run."""

import json
import math

import pytest
import torch
from models import CPU

from qurl.bench import run_audit
from qurl.bench.audit import HEAD, Auditor, AuditRow, row_of
from qurl.bench.gradients import Moments, Sketcher, group_of
from qurl.cli import main
from qurl.config import load_config
from qurl.errors import ConfigError
from qurl.losses import policy_loss
from qurl.run.assembly import initial_model

pytestmark = pytest.mark.xdist_group("audit")  # one warm start for all tests
ACTIONS, CHUNKS, SAMPLES = 5, 64, 4000


class Bandit:
    """One token, five actions with known rewards; the sampler's logits are off by some noise."""

    def __init__(self, noise: float) -> None:
        draw = torch.Generator().manual_seed(3)
        self.logits = torch.randn(ACTIONS, generator=draw, dtype=torch.float64)
        self.rewards = torch.randn(ACTIONS, generator=draw, dtype=torch.float64)
        off = noise * torch.randn(ACTIONS, generator=draw, dtype=torch.float64)
        self.behav = (self.logits + off).log_softmax(-1)
        self.prox = self.logits.log_softmax(-1)

    def gradient(self, actions, logp_behav, objective, cap=2.0, probs=None):
        """Of -loss; over samples, or exactly if `probs` weighs all actions."""
        logits = self.logits.clone().requires_grad_()
        logp = logits.log_softmax(-1)[actions][:, None]
        advantages = self.rewards[actions][:, None]
        if probs is not None:
            advantages = advantages * probs[:, None] * len(probs)
        fixed = (self.prox[actions][:, None], logp_behav[actions][:, None], advantages)
        loss, _ = policy_loss(logp, *fixed, torch.ones_like(logp), objective=objective, cap=cap)
        loss.backward()
        return -logits.grad

    def sampled(self, logp_behav, objective, seed):
        draw = torch.Generator().manual_seed(seed)
        actions = torch.multinomial(logp_behav.exp(), CHUNKS * SAMPLES, True, generator=draw)
        chunks = actions.view(CHUNKS, SAMPLES)
        return torch.stack([self.gradient(a, logp_behav, objective) for a in chunks])

    def exact(self, logp_behav, objective):
        return self.gradient(torch.arange(ACTIONS), logp_behav, objective, probs=logp_behav.exp())


@pytest.mark.parametrize("objective", ["ppo_prox", "decoupled", "tis"])
def test_the_bias_of_a_bandit_is_found(objective):
    bandit = Bandit(noise=1.0)
    target = bandit.exact(bandit.prox, "ppo_prox")
    estimate = bandit.exact(bandit.behav, objective)
    bias = (estimate - target).square().sum() / target.square().sum()
    on_policy = bandit.sampled(bandit.prox, "ppo_prox", seed=1)
    found = bandit.sampled(bandit.behav, objective, seed=2)
    figures = Moments.of(found, on_policy, found).describe()
    assert figures["bias"].low <= bias <= figures["bias"].high
    assert (figures["bias"].low > 0) == (objective != "decoupled")  # the others are biased here
    cosine = torch.cosine_similarity(estimate, target, dim=0)
    assert figures["cosine"].low - 1e-3 <= cosine <= figures["cosine"].high + 1e-3
    assert figures["change"] == (0, 0, 0)


def test_a_wrong_sign_and_a_missing_weight_are_seen():
    bandit = Bandit(noise=1.0)
    on_policy = bandit.sampled(bandit.prox, "ppo_prox", seed=1)
    found = bandit.sampled(bandit.behav, "decoupled", seed=2)
    figures = Moments.of(-found, on_policy, found).describe()
    assert figures["cosine"].high < 0
    assert figures["bias"].value == pytest.approx(4, rel=0.1)  # |-T - T|^2 / |T|^2
    unweighted = bandit.sampled(bandit.behav, "ppo_prox", seed=2)
    change = Moments.of(unweighted, on_policy, found).describe()["change"]
    assert change.low > 0


def test_the_variance_is_that_of_a_mini_batch():
    """Chunks are T plus noise of variance 4 in each of two directions; |T|^2 = 25."""
    draw = torch.Generator().manual_seed(0)
    noise = 2 * torch.randn(2, 400, 2, generator=draw)
    target, found = torch.tensor([3.0, 4.0]) + noise
    figures = Moments.of(found, target, found).describe(batches_per_chunk=5)
    assert figures["variance"].value == pytest.approx(5 * 8 / 25, rel=0.15)
    assert figures["variance"].low < 5 * 8 / 25 < figures["variance"].high
    assert figures["bias"].low < 0 < figures["bias"].high


def test_a_target_lost_in_noise_gives_no_number():
    draw = torch.Generator().manual_seed(0)
    found, target = torch.randn(2, 16, 8, generator=draw)
    moments = Moments.of(found, target, found)
    assert all(math.isnan(x.value) for x in moments.describe().values())
    assert all(math.isfinite(x.value) for x in moments.sizes().values())


def test_a_row_says_what_is_lost_in_noise():
    draw = torch.Generator().manual_seed(0)
    found, noise = torch.randn(2, 16, 8, generator=draw)
    shares = dict.fromkeys(("clipped", "truncated", "rescued"), 0.0)

    def row(found, target):
        moments = Moments.of(found, target, found)
        arm = (0, "grpo", "int8", "acr", 2.0)
        return row_of(AuditRow(*arm, {"all": moments.describe() | moments.sizes()}, shares))

    lost, known = row(found, noise), row(found + 5, noise + 5)
    assert lost.count("lost in noise") == 3
    assert "nan" not in lost
    assert "lost" not in known
    assert len(lost) == len(known) == len(HEAD)
    assert row(found, noise + 5).count("lost in noise") == 1, "the direction of the estimate"


def test_sizes_are_those_of_the_means():
    """Chunks scatter by 0.1 around means with |G|^2 = 4, |T|^2 = 9 and |G - O|^2 = 1."""
    draw = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(3, 64, 2, generator=draw)
    means = torch.tensor([[2.0, 0.0], [0.0, 3.0], [2.0, 1.0]])
    sizes = Moments.of(*(means[:, None] + noise)).sizes()
    found = [sizes[name] for name in ("estimate", "target", "difference")]
    assert [x.value for x in found] == pytest.approx([4, 9, 1], rel=0.03)
    assert all(x.low < x.value < x.high for x in found)


def test_moments_of_layer_groups_add_up_to_those_of_the_whole():
    draw = torch.Generator().manual_seed(0)
    g, t, o = torch.randn(3, 8, 6, generator=draw)
    parts = [Moments.of(g[:, c], t[:, c], o[:, c]) for c in (slice(2), slice(2, 6))]
    whole = Moments.of(g, t, o)
    for part, expected in zip(
        vars(parts[0] + parts[1]).values(), vars(whole).values(), strict=True
    ):
        torch.testing.assert_close(part, expected)


def test_a_sketch_keeps_inner_products(monkeypatch):
    """A count sketch of n numbers in b buckets errs by about |x| |y| / sqrt(b)."""
    monkeypatch.setattr("qurl.bench.gradients.NUM_BUCKETS", 4096)
    model = torch.nn.ModuleDict({"mlp": torch.nn.Linear(200, 200), "norm": torch.nn.LayerNorm(8)})
    draw = torch.Generator().manual_seed(0)
    vectors = []
    sketcher = Sketcher(model)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw) + 0.3
        whole = torch.cat([p.grad.flatten() for p in model["mlp"].parameters()])
        vectors.append((whole, sketcher.take()))
    assert all(p.grad is None for p in model.parameters())
    (x, sketched_x), (y, sketched_y) = vectors
    assert sketched_x["mlp"].shape == (4096,)
    assert sketched_x["other"].shape == (16,)
    error = sketched_x["mlp"] @ sketched_y["mlp"] - x @ y
    assert abs(error) < 4 * x.norm() * y.norm() / math.sqrt(4096)


def test_parameters_belong_to_a_layer_group():
    names = {
        "model.embed_tokens.weight": "embedding and head",
        "model.layers.0.self_attn.q_proj.weight": "attention",
        "model.layers.1.mlp.down_proj.weight": "mlp",
        "model.norm.weight": "other",
    }
    assert {name: group_of(name) for name in names} == names


def test_bad_flags_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--formats int9 is not one of none, int8"):
        run_audit([str(tmp_path), "--at", "1", "--formats", "int9"])
    with pytest.raises(ConfigError, match="--chunks 2 is too few for an interval; use 4 or more"):
        run_audit([str(tmp_path), "--at", "1", "--problems", "16", "--chunks", "2"])
    for size in ("10", "0", "-4"):
        with pytest.raises(ConfigError, match=f"--problems {size} must be a multiple of --chunks"):
            run_audit([str(tmp_path), "--at", "1", "--problems", size, "--chunks", "4"])
    for flag in ("--objectives", "--caps", "--updates"):
        with pytest.raises(ConfigError, match=f"{flag} is empty; give one value or more"):
            run_audit([str(tmp_path), "--at", "1", flag])


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Makes a run of one step from the demo's model, which is made once; its folder."""
    recipe = "recipes/arithmetic-cpu.toml"
    model = initial_model(load_config(recipe), tmp_path_factory.mktemp("start"), CPU)

    def run(folder, *flags):
        words = ["--steps", "1", "--run-dir", str(folder / "run"), "--eval.every", "0"]
        assert main(["train", recipe, "--model.path", str(model), *words, *flags]) == 0
        return folder / "run"

    return run


def test_a_run_is_audited(train, tmp_path, capsys, monkeypatch):
    """Every number of updates starts from the weights and moments of the checkpoint."""
    starts, update = [], Auditor._update

    def watched(self, *args):
        optimizer = self.learner.optimizer.state_dict()["state"].values()
        tensors = [x for state in optimizer for x in state.values() if torch.is_tensor(x)]
        tensors += (x.detach() for x in self.policy.model.parameters())
        starts.append([float(x.double().abs().sum()) for x in tensors])
        update(self, *args)

    monkeypatch.setattr(Auditor, "_update", watched)
    sizes = ["--batch.problems", "8", "--batch.minibatches", "2", "--sampling.group-size", "4"]
    run = train(tmp_path, *sizes, "--quant.format", "int4")
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    words = ["--at", "1", "--problems", "16", "--chunks", "4", "--updates", "0", "2", "2"]
    assert main(["audit", str(run), *words]) == 0
    out = run / "audit.json"
    assert sorted(path.relative_to(run) for path in run.rglob("*") if path != out) == before
    [entries] = json.loads(out.read_text())["results"].values()
    figures = [entry["figures"] for entry in entries]
    arms = [(f["updates"], f["format"], f["objective"]) for f in figures]
    assert {f["advantage"] for f in figures} == {"grpo"}
    objectives = ("ppo_prox", "decoupled", "tis", "acr")
    assert arms == [(u, f, o) for u in (0, 2, 2) for f in ("none", "int4") for o in objectives]
    assert starts[0] == starts[1]
    assert len(starts) == 2
    assert set(figures[0]["groups"]) == {"all", "embedding and head", "attention", "mlp", "other"}
    assert all(f["shares"]["clipped"] == 0 for f in figures if f["updates"] == 0)
    assert "saved to" in capsys.readouterr().out


def test_the_same_rollouts_are_judged_by_several_advantages(train, tmp_path):
    """At a checkpoint of PPO, whose own group has one completion."""
    out = tmp_path / "audit.json"
    sizes = ["--batch.problems", "8", "--batch.minibatches", "2", "--sampling.group-size", "1"]
    run = train(tmp_path, *sizes, "--algo.name", "ppo", "--algo.advantage", "gae")
    words = [str(run), "--at", "1", "--problems", "16", "--chunks", "4", "--out", str(out)]
    words += ["--formats", "int4", "--objectives", "ppo_prox", "decoupled"]
    advantages = ["--advantages", "gae", "grpo"]
    with pytest.raises(
        ConfigError, match=r"--advantages grpo compares .* --group is 1; set it to 2"
    ):
        run_audit([*words, *advantages])
    run_audit([*words, *advantages, "--group", "4"])
    [entries] = json.loads(out.read_text())["results"].values()
    figures = [entry["figures"] for entry in entries]
    arms = [(f["advantage"], f["objective"]) for f in figures]
    assert arms == [(a, o) for a in ("gae", "grpo") for o in ("ppo_prox", "decoupled")]
    sizes = [f["groups"]["all"]["target"][0] for f in figures]
    assert sizes[0] == sizes[1] != sizes[2] == sizes[3], "each advantage has its own target"
    assert {entry["settings"]["group"] for entry in entries} == {4}


def test_the_actor_is_as_noisy_as_in_the_runs_next_step(train, tmp_path, monkeypatch):
    """Only the target's rollouts are those of the policy itself."""
    noises, sample = [], Auditor._sample

    def watched(self, engine, problems, purpose, *others):
        graded = sample(self, engine, problems, purpose, *others)
        clean = self.policy.model.model.layers[0].input_layernorm.weight
        noises.append((purpose, engine.weights.layers[0].norms["input_layernorm"] - clean.detach()))
        return graded

    monkeypatch.setattr(Auditor, "_sample", watched)
    out = tmp_path / "audit.json"
    sizes = ["--batch.problems", "4", "--batch.minibatches", "1", "--sampling.group-size", "4"]
    noise = ["--quant.noise", "aqn", "--systems.aqn.start", "0.05", "--systems.aqn.end", "0.05"]
    run = train(tmp_path, *sizes, *noise)
    words = [str(run), "--at", "1", "--problems", "4", "--chunks", "4", "--updates", "1"]
    run_audit([*words, "--objectives", "tis", "--out", str(out)])
    purposes = ["estimate none", "estimate int8", "train", "target"]
    assert [purpose for purpose, _ in noises] == purposes
    first, *others, target = [noise for _, noise in noises]
    assert 0.02 < float(first.std()) < 0.1
    assert all(torch.equal(first, other) for other in others)
    assert not target.any()


def test_a_run_of_more_mini_batches_than_problems_is_audited(train, tmp_path, capsys):
    out = tmp_path / "audit.json"
    sizes = ["--batch.problems", "1", "--batch.minibatches", "2", "--sampling.group-size", "4"]
    run = train(tmp_path, *sizes)
    words = [str(run), "--at", "1", "--problems", "4", "--chunks", "4", "--updates", "1"]
    run_audit([*words, "--formats", "none", "--objectives", "tis", "--out", str(out)])
    assert "saved to" in capsys.readouterr().out


def test_an_advantage_that_the_run_cannot_compute_is_refused(train, tmp_path):
    sizes = ["--batch.problems", "8", "--batch.minibatches", "2", "--sampling.group-size", "4"]
    run = train(tmp_path, *sizes)
    audit = [str(run), "--at", "1", "--problems", "16", "--chunks", "4", "--advantages"]
    with pytest.raises(ConfigError, match="--advantages gae needs a critic, and the run has none"):
        run_audit([*audit, "gae"])
    with pytest.raises(ConfigError, match=r"--advantages gea is not one of .*gae"):
        run_audit([*audit, "gea"])
