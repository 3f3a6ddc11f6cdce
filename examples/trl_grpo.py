"""TRL's GRPO with INT8 rollouts and ACR: a tiny model learns to write digits, on a CPU in seconds.

    python examples/trl_grpo.py

Only the import, the class and `options` differ from a script for TRL's own GRPOTrainer.
"""

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import GRPOConfig

from qurl.integrations.trl import QurlGRPOTrainer, QurlOptions
from qurl.tasks.tokenizer import build_tokenizer

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
BATCH = {"per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 12}
# Two updates per generation: with one, nothing is clipped, and acr equals tis.
UPDATES = {"steps_per_generation": 2, "max_steps": 24, "learning_rate": 1e-2}
PLACE = {"use_cpu": True, "bf16": False, "logging_steps": 2, "report_to": "none"}


def share_of_digits(completions: list[str], **_: object) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


set_seed(0)
tokenizer = build_tokenizer()
ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
trainer = QurlGRPOTrainer(
    model=LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE, **HEADS, **ends)),
    reward_funcs=share_of_digits,
    args=GRPOConfig("runs/trl", **BATCH, **UPDATES, **PLACE),
    train_dataset=Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(64)]}),
    processing_class=tokenizer,
    options=QurlOptions(quant="int8", objective="acr", cap=2.0),
)
trainer.train()
