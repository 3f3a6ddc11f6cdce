"""Our loss in TRL's trainer, against TRL's own `_compute_loss`, to the bit."""

import pytest
import torch
from trl import GRPOTrainer

from qurl.integrations.trl import QurlGRPOTrainer, QurlOptions
from qurl.losses import TokenTerms
from qurl.objectives import Objective, with_facts
from tests.models import tiny_llama
from tests.trl.toy import trainer

CAP = 1.02
"""So low that the small mismatch of the toy is truncated."""


def distance(gradients, others):
    """Of all gradients together, relative to the length of the others."""
    a, b = (torch.cat([x.flatten() for x in side]) for side in (gradients, others))
    return float((a - b).norm() / b.norm())


class Both(QurlGRPOTrainer):
    """Computes both losses and their gradients; trains on ours."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pairs = []

    def _compute_loss(self, model, inputs):
        theirs, their_gradients = self.differentiate(model, self.theirs(model, inputs))
        ours = super()._compute_loss(model, inputs)
        _, our_gradients = self.differentiate(model, ours)
        self.pairs.append((ours.detach(), theirs, our_gradients, their_gradients))
        return ours

    def differentiate(self, model, loss):
        parameters = [p for p in model.parameters() if p.requires_grad]
        return loss.detach(), torch.autograd.grad(loss, parameters, retain_graph=True)

    def theirs(self, model, inputs):
        return GRPOTrainer._compute_loss(self, model, inputs)

    def check(self):
        for ours, theirs, our_gradients, their_gradients in self.pairs:
            assert torch.equal(ours, theirs)
            assert distance(our_gradients, their_gradients) < 1e-6
        assert len({float(ours) for ours, *_ in self.pairs}) == len(self.pairs)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("iterations", [1, 2])
def test_ppo_prox_is_trls_loss(tmp_path, loss_type, iterations):
    made = trainer(
        tmp_path,
        Both,
        QurlOptions(objective="ppo_prox"),
        loss_type=loss_type,
        num_iterations=iterations,
        epsilon_high=0.28,
    )
    made.train()
    assert len(made.pairs) == 8
    made.check()
    logged = [row for row in made.state.log_history if "loss" in row]
    assert max(row["actor/pg_clipfrac"] for row in logged) > 0
    # Theirs is the mean over micro-batches, ours over tokens.
    for row in logged:
        assert row["actor/entropy"] == pytest.approx(row["entropy"], rel=0.02)
        assert row["actor/pg_clipfrac"] == pytest.approx(row["clip_ratio/region_mean"], abs=0.02)


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_with_a_reference_and_two_sided_clipping(tmp_path, loss_type, is_weighted):
    tiny_llama(seed=1).save_pretrained(tmp_path / "model")
    made = trainer(
        tmp_path,
        Both,
        QurlOptions(objective="ppo_prox"),
        {"model": str(tmp_path / "model")},
        loss_type=loss_type,
        beta=0.04,
        delta=1.3,
        use_bias_correction_kl=is_weighted,
        learning_rate=0.02,
    )
    made.train()
    made.check()
    last = made.state.log_history[-2]
    assert last["actor/ref_kl"] > 0
    assert last["actor/pg_clipfrac_lower"] > 0


class Weighted(Both):
    """TRL's loss with the correction that it applies to vLLM's samples, by hand."""

    def theirs(self, model, inputs):
        with torch.no_grad():
            prox, behav = inputs["old_per_token_logps"], inputs["sampling_per_token_logps"]
            rho = torch.where(inputs["completion_mask"].bool(), prox - behav, 0.0).exp()
        objective = self.options.objective
        weight = rho if objective == "decoupled" else rho.clamp(max=CAP)
        bounds = self.epsilon_low, self.epsilon_high
        if objective == "acr":  # clamp takes two tensors or two numbers
            upper = (1 + self.epsilon_high) * rho / weight - 1
            self.epsilon_low, self.epsilon_high = torch.full_like(rho, self.epsilon_low), upper
        self.use_vllm = True
        try:
            return super().theirs(model, inputs | {"importance_sampling_ratio": weight})
        finally:
            self.use_vllm, (self.epsilon_low, self.epsilon_high) = False, bounds

    def check(self):
        for ours, theirs, our_gradients, their_gradients in self.pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
            assert distance(our_gradients, their_gradients) < 1e-5


class AgainstBehav(Both):
    def theirs(self, model, inputs):
        behav = inputs["sampling_per_token_logps"]
        return super().theirs(model, inputs | {"old_per_token_logps": behav})


@pytest.mark.parametrize("objective", ["decoupled", "tis", "acr"])
def test_weighted_objectives(tmp_path, objective):
    options = QurlOptions(objective=objective, cap=CAP)
    made = trainer(tmp_path, Weighted, options, epsilon=0.05, learning_rate=1e-3)
    made.train()
    made.check()
    last = made.state.log_history[-2]
    assert (last["rollout_corr/truncated_frac"] > 0) == (objective != "decoupled")
    assert (last["acr/rescued_frac"] > 0) == (objective == "acr")


def test_ppo_behav(tmp_path):
    made = trainer(tmp_path, AgainstBehav, QurlOptions(objective="ppo_behav"))
    made.train()
    made.check()


@with_facts(Objective(is_weighted=True, is_truncated=True))
def half_of_tis(tokens: TokenTerms) -> torch.Tensor:
    return 0.5 * tokens.weight * tokens.clipped()[0]


def test_an_objective_of_ones_own(tmp_path):
    losses = []
    for objective in (half_of_tis, f"{__name__}:half_of_tis", "tis"):
        made = trainer(tmp_path, options=QurlOptions(objective=objective, cap=CAP), max_steps=1)
        made.train()
        losses.append(made.state.log_history[-1]["train_loss"])
    assert losses[0] == losses[1] == pytest.approx(0.5 * losses[2])
    assert losses[0] != 0


def test_a_micro_batch_without_a_trained_token(tmp_path):
    """`mask_truncated_completions` can leave none: the loss is 0, and nothing is logged of it."""
    made = trainer(tmp_path, Both, QurlOptions(objective="ppo_prox"), max_steps=1)
    made.train()
    inputs = made._buffered_inputs[0]
    masked = inputs | {"completion_mask": torch.zeros_like(inputs["completion_mask"])}
    made.pairs.clear()
    made._compute_loss(made.model, masked)
    ((ours, theirs, *_),) = made.pairs
    assert float(ours) == float(theirs) == 0.0
    made.log({})
    assert "actor/entropy" not in made.state.log_history[-1]
