"""Export: a trained policy as a plain Hugging Face folder, UAQ folded back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from qurl.errors import CheckpointError, ConfigError
from qurl.quant.scaling import uaq_scale, unscale_
from qurl.run.checkpoint import find_policy, staged_folder
from qurl.trainer.policy import load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(source: Path, target: Path, dtype: str = "bfloat16") -> Path:
    """Write the policy of a run (its newest checkpoint) or of one checkpoint to `target`."""
    check_arguments(target, dtype)
    policy = find_policy(source)
    model = load_model(policy, "RUN|CHECKPOINT")
    if uaq_scale(model) != 1.0:
        unscale_(model)
    with export_folder(target) as folder:
        model.to(DTYPES[dtype]).save_pretrained(folder)
        for path in policy.iterdir():  # the tokenizer, as it was saved, but no weights or index
            if not (folder / path.name).exists() and ".safetensors" not in path.name:
                shutil.copy2(path, folder / path.name)
    return target


def check_arguments(target: Path, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists and is no empty folder; choose another one")


@contextmanager
def export_folder(target: Path) -> Iterator[Path]:
    try:
        with staged_folder(target) as folder:
            yield folder
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
