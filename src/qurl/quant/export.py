"""Export: a trained policy as a plain Hugging Face folder, UAQ folded back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from qurl.checkpoint import find_policy
from qurl.errors import ConfigError
from qurl.quant.scaling import uaq_scale, unscale_

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(source: Path, target: Path, dtype: str = "bfloat16") -> Path:
    """Write the policy of a run (its newest checkpoint) or of one checkpoint to `target`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists and is no empty folder; choose another one")
    policy = find_policy(source)
    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    if uaq_scale(model) != 1.0:
        unscale_(model)
    model.to(DTYPES[dtype]).save_pretrained(target)
    for path in policy.iterdir():  # the tokenizer, as it was saved, but no weights or their index
        if not (target / path.name).exists() and ".safetensors" not in path.name:
            shutil.copy2(path, target / path.name)
    return target
