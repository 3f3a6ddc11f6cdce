"""A tracker of your own: it gets each step's metrics, here to keep the best held-out accuracy.

    python examples/custom_tracker.py

A tracker that raises is turned off with a warning; metrics.jsonl has everything anyway.
"""

from collections.abc import Mapping

from qurl.config import load_config
from qurl.train import train


class BestAccuracy:
    """Remembers the step with the best held-out accuracy in full precision."""

    def __init__(self) -> None:
        self.best = (0.0, -1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        accuracy = metrics.get("eval/full/accuracy")
        if accuracy is not None:
            self.best = max(self.best, (accuracy, step))

    def close(self) -> None:
        print(f"best held-out accuracy {self.best[0]:.1%}, after step {self.best[1]}")


def main(*flags: str) -> None:
    recipe = load_config("recipes/arithmetic-cpu.toml", ["--run-dir", "runs/tracked", *flags])
    train(recipe, trackers=[BestAccuracy()])


if __name__ == "__main__":
    main()
