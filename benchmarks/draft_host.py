"""How long the host takes for a decode step with drafts (HistoSpec), without a GPU.

    python -m benchmarks.draft_host

64 sequences of 8 problems answer in 300 tokens, and each problem has 8 earlier answers. Texts are
synthetic: answers follow pieces of one text, with other tokens between. The device's part, which
draws the tokens, is replaced by pieces of the earlier answers and left out of the time. Median of
five rollouts on one thread. Adds to benchmarks/results/draft_host.json, by commit.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.scripts import RESULTS, write_result
from qurl.rollout import build_engine
from qurl.run.machine import describe_machine
from qurl.types import Problem, SamplingParams

NUM_PROBLEMS, GROUP, LENGTH, VOCABULARY = 8, 8, 300, 4000
RIGHT = 0.75
"""Share of draft tokens that are drawn."""
PATH = RESULTS / "draft_host.json"


class Texts:
    """Problems and earlier answers, and a device that draws what these go on with."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.problems = [Problem(f"p{i}", tuple(self.draw(100))) for i in range(NUM_PROBLEMS)]
        bases = [self.draw(LENGTH) for _ in self.problems]
        self.earlier = [[self.follow(base) for _ in range(GROUP)] for base in bases]
        self.seconds, self.num_steps = 0.0, 0

    def draw(self, count: int) -> list[int]:
        return (5 + self.rng.zipf(1.3, count) % (VOCABULARY - 10)).tolist()

    def follow(self, base: list[int]) -> list[int]:
        text: list[int] = []
        while len(text) < LENGTH:
            start = self.rng.integers(len(base))
            text += base[start : start + int(self.rng.exponential(6)) + 2]
            text += self.draw(1) if self.rng.random() < 0.5 else []
        return text[:LENGTH]

    def verify(self, numbers: np.ndarray, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
        """In place of `Stepper.verify`."""
        start = time.perf_counter()
        tokens, owner = numbers[0], numbers[5]
        drawn = np.roll(tokens, -1)  # the next token of the draft
        is_last = np.append(owner[1:] != owner[:-1], True)
        for place in np.flatnonzero(is_last | (self.rng.random(len(drawn)) > RIGHT)):
            answer = self.earlier[owner[place] // GROUP][self.rng.integers(GROUP)]
            known = answer.index(tokens[place]) + 1 if tokens[place] in answer else LENGTH
            drawn[place] = answer[known if known < LENGTH else self.rng.integers(LENGTH)]
        self.num_steps += 1
        self.seconds += time.perf_counter() - start
        return drawn, np.zeros(len(drawn), np.float32)


def run(model: Any, seed: int) -> float:
    """Milliseconds of the host per step."""
    texts = Texts(seed)
    engine: Any = build_engine(
        "local", model, None, draft_tokens=3 * NUM_PROBLEMS * GROUP, max_batch=NUM_PROBLEMS * GROUP
    )
    engine.stepper.verify = texts.verify
    params = SamplingParams(max_tokens=LENGTH, group_size=GROUP, seed=0, ignore_eos=True)
    start = time.perf_counter()
    with engine.stream(params) as stream:
        stream.submit(texts.problems, (), texts.earlier)
        list(stream)
    return 1e3 * (time.perf_counter() - start - texts.seconds) / texts.num_steps


def main() -> None:
    torch.set_num_threads(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    found = [run(model, seed) for seed in range(5)]
    machine = describe_machine(torch.device("cpu"))
    print(f"{statistics.median(found):.2f} ms of the host per step: {found}")
    runs = json.loads(PATH.read_text())["runs"] if PATH.exists() else []
    row = {"machine": machine, "ms_per_step": statistics.median(found), "of_rollouts": found}
    write_result(PATH, what=(__doc__ or "").splitlines()[0], runs=[*runs, row])


if __name__ == "__main__":
    main()
