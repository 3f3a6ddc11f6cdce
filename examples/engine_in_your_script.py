"""INT8 rollouts in a script of your own: a transformers model, torch's optimizer, our engine.

    python examples/engine_in_your_script.py

A random tiny Llama learns to say small numbers. Replace it by your model and the reward by yours;
`build_engine("vllm", ...)` takes vLLM instead, with the same four methods.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qurl.losses import policy_loss
from qurl.rollout import build_engine
from qurl.types import Problem, SamplingParams

SHAPE = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    eos_token_id=0,
)


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = build_engine("local", model, quant="int8")
    problems = [Problem(id=str(i), prompt_ids=(5, 9, 2 + i)) for i in range(8)]
    for step in range(9):
        report = engine.sync(model, version=step)
        params = SamplingParams(max_tokens=12, group_size=4, seed=step, ignore_eos=True)
        rollouts = engine.generate(problems, params)
        ids = [[*r.problem.prompt_ids, *c.token_ids] for r in rollouts for c in r.completions]
        ids = torch.tensor(ids)  # [B, T], all of one length here
        behav = torch.tensor([list(c.logprobs) for r in rollouts for c in r.completions])
        reward = (ids[:, 3:] < 32).float().mean(1)
        advantages = ((reward - reward.mean()) / reward.std())[:, None].expand_as(behav)
        for update in range(2):
            logp = model(ids).logits[:, 2:-1].log_softmax(-1).gather(-1, ids[:, 3:, None])[..., 0]
            if update == 0:
                prox = logp.detach()  # of the full-precision policy; behav is the INT8 actor's
            mask = torch.ones_like(behav)
            loss, _ = policy_loss(logp, prox, behav, advantages, mask, objective="acr")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % 4 == 0:
            mismatch = (prox - behav).abs().mean()
            flips = f"{report.code_flip_frac:.0%} of the codes changed"
            print(f"step {step}  reward {reward.mean():.2f}  mismatch {mismatch:.1e}  {flips}")
    print("learned:", bool(reward.mean() > 0.7))


if __name__ == "__main__":
    main()
