r"""An engine of your own: the local one, wrapped, counting its streams.

    python examples/custom_engine.py
    qurl train recipes/arithmetic-cpu.toml --rollout.engine examples.custom_engine:CountingEngine \
        --run-dir runs/custom-engine

An engine is built with the model, the tokenizer and the format, and has these four methods.
"""

from qurl.config import load_config
from qurl.rollout import build_engine, generate
from qurl.train import train


class CountingEngine:
    def __init__(self, model, tokenizer, **options):
        self.engine = build_engine("local", model, tokenizer, **options)
        self.num_streams = 0

    def sync(self, source, *, version):
        return self.engine.sync(source, version=version)

    def stream(self, params):
        self.num_streams += 1
        return self.engine.stream(params)

    def generate(self, problems, params):
        return generate(self, problems, params)

    def score(self, token_ids):
        return self.engine.score(token_ids)


def main(*flags):
    recipe = load_config("recipes/arithmetic-cpu.toml", ["--run-dir", "runs/engine", *flags])
    train(recipe, engine=CountingEngine)


if __name__ == "__main__":
    main()
