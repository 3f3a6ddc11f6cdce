"""Grades made-up answers to real problems before a run, and compares its two splits.

A run whose grader does not accept what its prompts ask for learns nothing, in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qurl.errors import ConfigError
from qurl.plugins import is_users_own
from qurl.rewards import Pool
from qurl.rewards.pool import wait_for
from qurl.run.splits import spread_problems
from qurl.tasks import Task
from qurl.types import Problem

FORMS = {
    "\\boxed": "The answer is \\boxed{{{}}}.",
    "<answer>": "<answer>{}</answer>",
    "####": "#### {}",
}
"""What a prompt that holds the mark asks for, about."""
WRONG = "no idea"
NUM_PROBLEMS = 8


@dataclass(frozen=True)
class Rehearsal:
    """Scores of made-up answers."""

    reward: str
    truth: float
    """Score of the best right answer; NaN if no right answer is known."""
    wrong: float
    refused: tuple[str, ...]
    """Ids of the problems whose right answer earns no more than a wrong one."""
    num_tried: int
    num_killed: int

    def __str__(self) -> str:
        if not self.num_tried:
            return f"{self.reward!r} runs; no right answer is known to try it with"
        return f"{self.reward!r} gives the truth {self.truth:g} and a non-answer {self.wrong:g}"

    def check(self, timeout: float) -> str | None:
        """A note for the user, or None; raises ConfigError if the grader cannot be right."""
        if self.num_killed:
            raise ConfigError(
                f"{self.reward!r} was killed at task.grade_timeout = {timeout:g} s, or ran out of "
                "task.grade_memory"
            )
        if not self.refused:
            return None
        if len(self.refused) < self.num_tried:
            return (
                f"{len(self.refused)} of {self.num_tried} right answers that were tried earn no "
                f"more than a wrong one; the first is that of problem {self.refused[0]}"
            )
        if is_users_own(self.reward):
            return f"{self}, alike or worse: is that meant?"
        raise ConfigError(
            f"{self}: a right answer, in the form that the prompt asks for, must earn more than a "
            "wrong one; change task.instruction or task.reward"
        )


def rehearse(task: Task, pool: Pool) -> Rehearsal:
    """Grade a right and a wrong answer to some problems of a task."""
    problems = spread_problems(task, NUM_PROBLEMS)
    texts = [[*_right_answers(task, p, pool.reward), WRONG] for p in problems]
    # All of a problem's answers in one call, as in training: a reward may compare them.
    asked = [pool.submit(t, p.answer, p.extra) for t, p in zip(texts, problems, strict=True)]
    grades = [wait_for(futures) for futures in asked]
    best: dict[str, float] = {}
    worst: dict[str, float] = {}
    for problem, [*right, wrong] in zip(problems, grades, strict=True):
        worst[problem.id] = wrong.score
        if right:
            best[problem.id] = max(grade.score for grade in right)
    return Rehearsal(
        reward=pool.reward,
        truth=max(best.values(), default=float("nan")),
        wrong=max(worst.values()),
        refused=tuple(id for id, score in best.items() if score <= worst[id]),
        num_tried=len(best),
        num_killed=sum(grade.timed_out for group in grades for grade in group),
    )


def _right_answers(task: Any, problem: Problem, reward: str) -> list[str]:
    """The truth in each form that the prompt asks for; without a hint, bare and boxed."""
    if worked := getattr(task, "worked_answer", None):
        return [answer] if (answer := worked(problem)) else []
    reward = problem.extra.get("qurl_reward", reward)
    is_target = reward == "countdown" and problem.answer == str(problem.extra.get("target"))
    if not problem.answer or is_target:
        return []  # the target of a countdown is no expression that reaches it
    prompt = problem.extra.get("prompt", "")
    asked = [form.format(problem.answer) for mark, form in FORMS.items() if mark in prompt]
    return asked or [problem.answer, FORMS["\\boxed"].format(problem.answer)]


def compare_splits(train: Task, held_out: Task) -> str | None:
    """A note if held-out questions are trained on; raises ConfigError if all are the same."""
    ours, theirs = (getattr(task, "questions", set()) for task in (train, held_out))
    if not (common := ours & theirs):
        return None
    if ours == theirs:
        raise ConfigError(
            "the held-out files ask the same questions as the training files: accuracy on trained "
            "questions says nothing about others; hold some rows out"
        )
    return f"{len(common)} of {len(theirs)} held-out questions are in the training files too"
