r"""Parts of your own for sampling: cheap budgets, cooling, and short answers only.

    python examples/custom_sampling.py
    qurl train recipes/arithmetic-cpu.toml --batch.subselect examples.custom_sampling:shorter_half \
        --run-dir runs/custom-sampling
"""

from qurl.config import load_config
from qurl.train import train


def half_if_solved(indices, history, group_size):
    """Problems that were solved throughout get half as many completions."""
    solved = {index for index in indices if history.total(index).mean == 1}
    return [group_size // 2 if index in solved else group_size for index in indices]


class Cooling:
    """A temperature that falls to 0.7 of the recipe's over the run."""

    def __init__(self, setup):
        self.num_steps = setup.config.steps

    def __call__(self, step, temperature):
        return temperature * (1 - 0.3 * step / self.num_steps)


def shorter_half(batch, advantages, seed):
    """Train on the shorter half of all completions."""
    return batch.lengths.argsort(stable=True)[: len(batch) // 2]


def main(*flags):
    recipe = load_config("recipes/arithmetic-cpu.toml", ["--run-dir", "runs/sampling", *flags])
    train(recipe, budget=half_if_solved, thermostat=Cooling, subselect=shorter_half)


if __name__ == "__main__":
    main()
