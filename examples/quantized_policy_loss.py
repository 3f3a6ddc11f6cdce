"""The five objectives on three tokens: where they agree, where they part.

    python examples/quantized_policy_loss.py

Each token has an advantage A, a ratio R = pi / pi_prox and a mismatch rho = pi_prox / pi_behav.
The loss is a plain function of log-probs, so it fits into any trainer.
"""

import torch

from qurl.losses import policy_loss
from qurl.objectives import OBJECTIVES

TOKENS = {
    "on-policy sampler": (1.0, 1.3, 1.0),
    "under-sampled token": (1.0, 1.3, 4.0),
    "the same, A < 0": (-1.0, 1.3, 4.0),
}


def loss_and_gradient(
    objective: str, advantage: float, ratio: float, mismatch: float
) -> tuple[float, float]:
    """The loss of one token and its derivative by log pi."""
    logp_prox = torch.tensor([[-1.0]], dtype=torch.float64)
    logp_behav = logp_prox - torch.tensor(mismatch).log()
    logp = (logp_prox + torch.tensor(ratio).log()).requires_grad_()
    mask = torch.ones_like(logp_prox)
    loss, _ = policy_loss(
        logp, logp_prox, logp_behav, advantage * mask, mask, objective=objective, cap=2.0
    )
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.item(), gradient.item()


def main() -> None:
    print(f"{'loss / gradient, C = 2':24}" + "".join(f"{name:>17}" for name in OBJECTIVES))
    for name, token in TOKENS.items():
        pairs = [loss_and_gradient(objective, *token) for objective in OBJECTIVES]
        print(f"{name:24}" + "".join(f"{f'{a:.2f} / {b:.2f}':>17}" for a, b in pairs))


if __name__ == "__main__":
    main()
