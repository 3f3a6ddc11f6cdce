"""Sample from a quantized copy, score with the full-precision model, look at the mismatch.

    python examples/sample_and_compare.py

A random tiny Llama stands in for your model: any Llama, Mistral, Qwen2 or Qwen3 works the same.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qurl.config import ModelConfig
from qurl.correction import mismatch_metrics
from qurl.quant import rescale_
from qurl.rollout import build_engine
from qurl.trainer.batches import pad
from qurl.trainer.policy import Policy
from qurl.types import Batch, Graded, Problem, Rollout, SamplingParams

SHAPE = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
    eos_token_id=0,
)
SHOWN = (
    "rollout_corr/kl",
    "rollout_corr/rollout_is_max",
    "training/rollout_probs_diff_mean",
)


def main() -> None:
    torch.manual_seed(0)
    policy = Policy(LlamaForCausalLM(SHAPE), None, ModelConfig(), torch.device("cpu"))
    problems = [Problem(id=str(i), prompt_ids=(5, 9, 2 + i)) for i in range(8)]
    params = SamplingParams(max_tokens=32, group_size=4, seed=1)
    for quant in ("none", "int8", "fp8", "int4"):
        engine = build_engine("local", policy.model, quant=quant)
        batch = to_batch(engine.generate(problems, params))
        with torch.no_grad():
            logp_prox = policy.score(batch).logp
        metrics = mismatch_metrics(logp_prox, batch.logp_behav, batch.mask, cap=2.0)
        print(f"{quant:5}", "  ".join(f"{name} {metrics[name]:.4g}" for name in SHOWN))

    engine = build_engine("local", policy.model, quant="int8")
    before = engine.generate(problems, params)
    rescale_(policy.model, 2.0)  # UAQ
    report = engine.sync(policy.model, version=1)
    is_same = token_ids(engine.generate(problems, params)) == token_ids(before)
    print(f"after UAQ with s = 2: {report.code_flip_frac:.0%} of the codes changed,", end=" ")
    print(f"the same tokens: {is_same}")


def to_batch(rollouts: list[Rollout]) -> Batch:
    """Ungraded rollouts as tensors: every reward is 0."""
    return pad(
        [
            Graded(r, [0.0] * len(r.completions), [{"accuracy": 0.0}] * len(r.completions))
            for r in rollouts
        ]
    )


def token_ids(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [tuple(c.token_ids) for r in rollouts for c in r.completions]


if __name__ == "__main__":
    main()
