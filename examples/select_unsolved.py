r"""A selection of your own: skip problems that the policy solves already.

    python examples/select_unsolved.py
    qurl train recipes/arithmetic-cpu.toml --sampling.select examples.select_unsolved:unsolved \
        --run-dir runs/unsolved

The first line prints what it chooses, the second trains with it.
"""

from collections.abc import Mapping, Sequence

from qurl.sampling import shuffle


def unsolved(
    count: int,
    num_problems: int,
    num_taken: int,
    accuracies: Mapping[int, Sequence[float]],
    seed: int,
) -> list[int]:
    """The next problems of the random order, those last solved by the whole group at the end."""
    candidates = shuffle(4 * count, num_problems, num_taken, accuracies, seed)
    solved = {index for index, seen in accuracies.items() if seen[-1] == 1}
    return sorted(candidates, key=lambda index: index in solved)[:count]


if __name__ == "__main__":
    first = unsolved(4, 100, 0, {}, seed=0)
    print("nothing is known:", first)
    print("the first is solved:", unsolved(4, 100, 0, {first[0]: [0.5, 1.0]}, seed=0))
