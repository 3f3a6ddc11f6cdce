"""An engine of your own: the local one, wrapped, counting its streams.

    python examples/custom_engine.py
    qurl train recipes/arithmetic-cpu.toml --rollout.engine examples.custom_engine:CountingEngine

An engine is built with the model, the tokenizer and the format, and has four methods: `sync`,
`stream`, `generate` and `score` (`qurl.rollout.Engine`). Wrapping is the shortest way to one.
"""

from typing import Any

from torch import Tensor, nn

from qurl.config import load_config
from qurl.rollout import Stream, build_engine, generate
from qurl.train import train
from qurl.types import Problem, Rollout, SamplingParams, SyncReport


class CountingEngine:
    """The local engine, counting what it is asked for."""

    def __init__(self, model: nn.Module, tokenizer: Any, **options: Any) -> None:
        self.engine = build_engine("local", model, tokenizer, **options)
        self.num_streams = 0

    def sync(self, source: nn.Module, *, version: int) -> SyncReport:
        return self.engine.sync(source, version=version)

    def stream(self, params: SamplingParams) -> Stream:
        self.num_streams += 1
        return self.engine.stream(params)

    def generate(self, problems: list[Problem], params: SamplingParams) -> list[Rollout]:
        return generate(self, problems, params)

    def score(self, token_ids: list[int]) -> Tensor:
        return self.engine.score(token_ids)


def main(*flags: str) -> None:
    recipe = load_config("recipes/arithmetic-cpu.toml", ["--run-dir", "runs/engine", *flags])
    train(recipe, engine=CountingEngine)


if __name__ == "__main__":
    main()
