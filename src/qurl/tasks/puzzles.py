"""The built-in generators. `difficulty` is how many numbers there are.

sum         `3+8+5+9=` is `25`
countdown   reach a target from given numbers, each used at most once: `3,7,25:46=` is `25+7*3`
"""

from __future__ import annotations

from random import Random

from qurl.tasks.generated import Draft

COUNTDOWN_INSTRUCTION = (
    "The numbers before the colon are yours, the number after it is the target. Write one "
    "expression that equals the target, using each of your numbers at most once, with + - * / and "
    "parentheses. Answer with the expression only."
)
_LARGEST_NUMBER = 25
_LARGEST_TARGET = 999


def draw_sum(rng: Random, difficulty: int) -> Draft:
    """A sum of `difficulty` digits; the same digits in another order are the same problem."""
    terms = [rng.randrange(10) for _ in range(difficulty)]
    key = "+".join(map(str, sorted(terms)))
    return Draft("+".join(map(str, terms)) + "=", str(sum(terms)), key)


def draw_countdown(rng: Random, difficulty: int) -> Draft:
    """Numbers and a target, made backwards from an expression that uses them all."""
    numbers = [rng.randint(1, _LARGEST_NUMBER) for _ in range(difficulty)]
    expression, target = str(numbers[0]), numbers[0]
    for number in numbers[1:]:
        expression, target = _extend(rng, expression, target, number)
    given = sorted(numbers)
    question = f"{','.join(map(str, given))}:{target}="
    return Draft(question, expression, extra={"numbers": given, "target": target})


def _extend(rng: Random, expression: str, value: int, number: int) -> tuple[str, int]:
    """Add a number with an operation that gives a whole number from 1 to the largest target."""
    inner = f"({expression})" if any(c in expression for c in "+-") else expression
    choices = {
        f"{expression}+{number}": value + number,
        f"{expression}-{number}": value - number,
        f"{inner}*{number}": value * number,
        f"{inner}/{number}": value // number if value % number == 0 else 0,
    }
    fitting = [(e, v) for e, v in choices.items() if 1 <= v <= _LARGEST_TARGET]
    # Never empty: a value too large to add to is large enough to subtract from.
    return rng.choice(fitting)
