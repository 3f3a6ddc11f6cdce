"""`qurl validate`: checks a recipe before anything is loaded or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qurl.config import load_config
from qurl.config.rules import find_warnings
from qurl.errors import ConfigError, ModelError, QurlError
from qurl.ops.device import pick_device
from qurl.rollout.local.architecture import check_family
from qurl.run.assembly import Choices, build_pool, held_out_problems, load_split
from qurl.run.directory import find_changes
from qurl.tasks.columns import needs_answer
from qurl.tasks.task import Task
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.policy import load_model_config, load_tokenizer


def validate(source: str | None, flags: Sequence[str]) -> bool:
    """Check a recipe as far as possible without reading weights; print a line per check."""
    recipe = Recipe(source, flags)
    print("ok    keys and values")
    for warning in find_warnings(recipe.config):
        print(f"note  {warning}")
    checks: dict[str, Callable[[], str]] = {
        "device": lambda: str(pick_device(recipe.config.device)),
        "parts": recipe.check_parts,
        "run directory": recipe.check_run_dir,
        "model": recipe.check_model,
        "training problems": recipe.check_training_task,
        "held-out problems": recipe.check_held_out,
        "grader": recipe.check_grader,
    }
    is_sound = True
    for name, check in checks.items():
        try:
            print(f"ok    {name}: {check()}")
        except (QurlError, OSError, ValueError) as error:
            is_sound = False
            print(f"FAIL  {name}: {error}")
    return is_sound


class Recipe:
    """A recipe and what the checks so far have read; None if that failed or was not needed."""

    def __init__(self, source: str | None, flags: Sequence[str]) -> None:
        self.config = load_config(source, flags)
        self.tokenizer: Any = None
        self.model_config: Any = None
        self.task: Task | None = None

    def check_parts(self) -> str:
        choices = Choices.of(self.config)
        parts = (choices.objective, choices.advantage, choices.engine, choices.episode)
        return ", ".join(part.__name__ for part in parts if part is not None)

    def check_run_dir(self) -> str:
        changes = find_changes(Path(self.config.run_dir).expanduser(), self.config)
        return f"{self.config.run_dir}, {'a new run' if changes is None else 'a run to resume'}"

    def check_model(self) -> str:
        path = self.config.model.path
        self.tokenizer = build_tokenizer() if path == "scratch" else load_tokenizer(path)
        num_tokens = len(self.tokenizer)
        tokens = f"{num_tokens} tokens, end of sequence {self.tokenizer.eos_token!r}"
        if path == "scratch":
            return f"made from scratch, {tokens}"
        self.model_config = load_model_config(path)
        kind = self.model_config.model_type
        if self.config.rollout.engine == "local":
            check_family(kind)
        vocabulary = self.model_config.get_text_config().vocab_size
        if num_tokens > vocabulary:
            sizes = f"its tokenizer has {num_tokens} tokens, and the model only {vocabulary}"
            raise ModelError(f"model.path = {path!r}: {sizes}")
        return f"{kind}, {tokens}"

    def check_training_task(self) -> str:
        self.task = task = load_split(self.config, "train", self.tokenizer, self.model_config)
        first = f"the first has {len(task[0].prompt_ids)} tokens" if self.tokenizer else ""
        return "; ".join(filter(None, [f"{len(task)} of {task.name}", first, *task.notes]))

    def check_held_out(self) -> str:
        if not self.config.eval.every:
            return "not used (eval.every = 0)"
        task = load_split(self.config, "eval", self.tokenizer, self.model_config)
        return f"{len(held_out_problems(self.config, task))}"

    def check_grader(self) -> str:
        """Grade right answers and a wrong one; your own reward may want others, and must run."""
        task = self.task or load_split(self.config, "train")
        problem = task[0]
        worked = getattr(task, "worked_answer", None)
        boxed = f"The answer is \\boxed{{{problem.answer}}}."
        texts = [worked(problem)] if worked else [problem.answer, boxed]
        with build_pool(self.config, task.reward, task) as pool:
            items = [(text, problem.answer, problem.extra) for text in (*texts, "no idea")]
            *good, bad = pool.grade(items)
        if any(grade.timed_out for grade in (*good, bad)):
            limit = self.config.task.grade_timeout
            raise ConfigError(f"{task.reward!r} was killed at task.grade_timeout = {limit:g} s")
        best = max(grade.score for grade in good)
        scores = f"{task.reward!r} gives the truth {best:g} and a non-answer {bad.score:g}"
        if best > bad.score:
            return scores
        if not needs_answer(task.reward):
            return f"{scores}, alike or worse: is that meant?"
        raise ConfigError(f"{scores}: a right answer must earn more than a wrong one")
