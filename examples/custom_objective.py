r"""An objective of your own: CISPO, which clips the importance weight instead of the update.

    python examples/custom_objective.py
    qurl train recipes/arithmetic-cpu.toml --algo.objective examples.custom_objective:cispo \
        --run-dir runs/custom-objective

The function sees each token's ratio, advantage, weight, shrink and bounds, and returns what is
maximised. Its facts say how the loop prepares the weight.
"""

from torch import Tensor

from qurl.config import load_config
from qurl.losses import TokenTerms
from qurl.objectives import Objective, with_facts
from qurl.train import train


@with_facts(Objective(is_weighted=True, is_truncated=True, against="prox"))
def cispo(tokens: TokenTerms) -> tuple[Tensor, dict[str, Tensor]]:
    """w * sg(min(R, 1 + eh)) * A * log R: every token keeps a gradient, none a large one."""
    clipped = tokens.ratio.detach().minimum(tokens.upper)
    surrogate = tokens.weight * clipped * tokens.advantages * tokens.ratio.log()
    is_clipped = (tokens.ratio > tokens.upper) & tokens.keep
    return surrogate, {"cispo/clip_frac": is_clipped.sum() / tokens.keep.sum().clamp(min=1)}


def main(*flags: str) -> None:
    recipe = load_config("recipes/arithmetic-cpu.toml", ["--run-dir", "runs/cispo", *flags])
    train(recipe, objective=cispo)


if __name__ == "__main__":
    main()
