r"""An advantage of your own: the mean of the group as a baseline, scaled by the batch's spread.

    python examples/custom_advantage.py
    qurl train recipes/arithmetic-cpu.toml --algo.advantage examples.custom_advantage:batch_scaled \
        --run-dir runs/custom-advantage

The function gets the batch after correction and returns one number per token, [B, T]. To train a
critic too, set the fact `needs_critic`, read `batch.values`, and return (advantages, returns).
This one does not look at `batch.logp_prox`, which saves part of a forward: `needs_prox=False`.
"""

from torch import Tensor

from qurl.advantages import group_advantages
from qurl.config import load_config
from qurl.objectives import Advantage, with_facts
from qurl.train import train
from qurl.types import Corrected


@with_facts(Advantage(needs_group=True, needs_prox=False))
def batch_scaled(batch: Corrected) -> Tensor:
    """(R - mean of the group) / (std of the batch): easy and hard problems weigh alike."""
    centered = group_advantages(batch.rewards, "dr_grpo", group=batch.group)  # [B]
    scaled = centered / (centered.std() + 1e-6)
    return scaled[:, None] * batch.mask  # [B, T]


def main(*flags: str) -> None:
    recipe = load_config("recipes/arithmetic-cpu.toml", ["--run-dir", "runs/scaled", *flags])
    train(recipe, advantage=batch_scaled)


if __name__ == "__main__":
    main()
