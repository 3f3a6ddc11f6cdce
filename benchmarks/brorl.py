"""Why many completions of a problem help: BroRL's mass balance, and its simulator.

    python -m benchmarks.brorl                      # the paper's sizes: minutes on a CPU
    python -m benchmarks.brorl --vocabulary 1280

One softmax over V answers stands for the policy, some of them are right. An update moves
probability by what was sampled; what was not sampled moves, too, and may lose right answers that
the policy knew:

    dQ = eta / N [(Rc - S) Q_neg A_2 + (S - Rw) Q_pos B_2 + S (Q_pos U_neg2 - Q_neg U_pos2)]

Q mass of right answers; A, B, U sampled right, sampled wrong, unsampled answers; X_2 sum of p^2
over a set; S = Rc P_A + Rw P_B. Only the last term can be negative, and it vanishes as N grows.
Writes benchmarks/results/brorl.json.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.scripts import RESULTS, write_result
from qurl.seeds import generator

RIGHT_LOGIT, ANCHOR_LOGIT = 3.0, 5.0
"""Of right answers, and of the first of them; wrong ones have 0."""


def mass_change(
    logits: Tensor,
    is_right: Tensor,
    is_sampled: Tensor,
    *,
    eta: float,
    n: int,
    rc: float,
    rw: float,
) -> float:
    """dQ of one update, by the formula."""
    p = logits.softmax(-1)
    squares, unsampled = p.square(), ~is_sampled
    q_pos = p[is_right].sum()
    q_neg = 1 - q_pos
    s = rc * p[is_right & is_sampled].sum() + rw * p[~is_right & is_sampled].sum()
    gain = (rc - s) * q_neg * squares[is_right & is_sampled].sum()
    gain += (s - rw) * q_pos * squares[~is_right & is_sampled].sum()
    u_neg, u_pos = squares[~is_right & unsampled].sum(), squares[is_right & unsampled].sum()
    return float(eta / n * (gain + s * (q_pos * u_neg - q_neg * u_pos)))


def first_order_change(
    logits: Tensor,
    is_right: Tensor,
    is_sampled: Tensor,
    *,
    eta: float,
    n: int,
    rc: float,
    rw: float,
) -> float:
    """The same by autograd: a gradient step on the sampled rewards, and what it does to Q."""
    z = logits.clone().requires_grad_(True)
    rewards = torch.where(is_right, rc, rw).to(logits.dtype) * is_sampled
    [step] = torch.autograd.grad((rewards * z.softmax(-1)).sum(), z)
    [slope] = torch.autograd.grad(z.softmax(-1)[is_right].sum(), z)
    return float(eta / n * (step * slope).sum())


def simulate(
    n: int, *, vocabulary: int, num_right: int, steps: int, lr: float = 1e-3, seed: int = 0
) -> dict:
    """Train with N samples per step: the mass of right answers, and how many of them lost some."""
    is_right = torch.arange(vocabulary) < num_right
    logits = torch.where(is_right, RIGHT_LOGIT, 0.0)
    logits[0] = ANCHOR_LOGIT
    logits.requires_grad_(True)
    # Gradients are as small as p / N, far below the usual epsilon.
    optimizer = torch.optim.AdamW([logits], lr=lr, eps=1e-20)
    start = logits.detach().softmax(-1)
    masses = [float(start[is_right].sum())]
    for step in range(steps):
        p = logits.softmax(-1)
        drawn = torch.multinomial(
            p.detach(), n, replacement=True, generator=generator(seed, "draw", n, step)
        )
        baseline = torch.where(is_right[drawn], 1.0, -1.0).mean()
        sampled = drawn.unique()  # a set, as in the mass balance
        rewards = torch.where(is_right[sampled], 1.0, -1.0) - baseline
        loss = -(rewards * p[sampled]).sum() / n
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        masses.append(float(logits.detach().softmax(-1)[is_right].sum()))
    end = logits.detach().softmax(-1)
    falls = [a - b for a, b in pairwise(masses) if b < a]
    return {
        "n": n,
        "mass_start": masses[0],
        "mass_end": masses[-1],
        "falling_steps_frac": len(falls) / steps,
        "right_answers_that_lost": float((end < start)[is_right].float().mean()),
        "masses": [round(m, 6) for m in masses[:: max(1, steps // 50)]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, nargs="*", default=[4, 8, 16, 512, 51_200])
    args = parser.parse_args()
    sizes = {"vocabulary": args.vocabulary, "num_right": args.vocabulary * 10 // 128}
    runs = [simulate(n, steps=args.steps, **sizes) for n in args.samples]
    write_result(RESULTS / "brorl.json", **sizes, runs=runs)
    for run in runs:
        shown = {k: round(v, 4) for k, v in run.items() if k != "masses"}
        print(shown)


if __name__ == "__main__":
    main()
