r"""A task of your own: a function that draws one problem from a random generator.

    python examples/task_multiplication.py
    qurl train recipes/arithmetic-cpu.toml --task.name examples.task_multiplication:draw \
        --task.difficulty 2 --run-dir runs/multiplication

The first line prints three problems, the second trains on them. Splits, seeds, tokens and grading
are made for you; answers must match exactly unless `task.reward` says otherwise.
"""

from random import Random

from qurl.tasks import Draft, load_task


def draw(rng: Random, difficulty: int) -> Draft:
    """A product of two numbers with up to `difficulty` digits."""
    a, b = (rng.randrange(10**difficulty) for _ in range(2))
    # Equal keys are the same problem: 3*4 and 4*3 must be in the same split.
    return Draft(f"{a}*{b}=", str(a * b), key=f"{min(a, b)}*{max(a, b)}")


if __name__ == "__main__":
    for split in ("train", "eval"):
        task = load_task("examples.task_multiplication:draw", split=split, difficulty=2)
        for index in range(3):
            problem = task[index]
            print(f"{problem.id:45} {problem.extra['prompt']:8} {problem.answer}")
