r"""A reward of your own: a plain function of the text, the right answer and the problem's data.

    python examples/custom_reward.py
    qurl train recipes/arithmetic-cpu.toml --task.reward examples.custom_reward:brief \
        --run-dir runs/custom-reward

The first line grades three texts as training would: in processes of their own, with a deadline.
The second trains with it; `module:function` is looked for in the working directory first.
"""

from collections.abc import Mapping
from typing import Any


def brief(text: str, answer: str, extra: Mapping[str, Any]) -> Mapping[str, float]:
    """1 for the right number, minus 0.05 for each character too many.

    Training uses `score`. Dynamic sampling and `reward/accuracy` use `accuracy`, and a held-out
    answer counts as right if it reaches 1. Without `accuracy`, the score is used for both.
    """
    is_right = text.strip() == answer
    waste = max(0, len(text) - len(answer))
    return {"score": float(is_right) - 0.05 * waste, "accuracy": float(is_right), "waste": waste}


def main() -> None:
    from qurl.rewards import GradingPool

    texts = ("25", "25 ", "I think it is 25")
    with GradingPool("examples.custom_reward:brief", workers=1) as pool:
        grades = pool.grade([(text, "25", {"prompt": "3+8+5+9="}) for text in texts])
    for text, grade in zip(texts, grades, strict=True):
        print(f"{text!r:20} score {grade.score:5.2f}   details {dict(grade.details)}")


if __name__ == "__main__":
    main()
