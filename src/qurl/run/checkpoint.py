"""Checkpoints: written to a temporary folder and renamed, so a kill or full disk harms none.

checkpoints/step-000123/
    policy/            Hugging Face folder, in the dtype of the masters (UAQ still applied and
                       recorded in its config);
                       with LoRA a folder of adapters, as peft writes it
    critic.pt          only if a critic is trained
    optimizer.pt       AdamW state of policy and critic, and the rests of BF16 masters
    optimizer/         in place of it, the shards of several trainers
    state.pt           step, data position, update tracker, random state, and with rollout.ahead
                       the next step's rollouts
    checksums.json     SHA-256 of each file above
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl.config import ModelConfig
from qurl.config.schema import QuantConfig
from qurl.errors import CheckpointError, QurlError
from qurl.trainer.learner import Learner
from qurl.trainer.lora import load_adapters_
from qurl.trainer.parallel.group import LearnerGroup
from qurl.trainer.policy import PLAIN, Policy, load_policy
from qurl.trainer.weight_files import ADAPTER_CONFIG, UNREADABLE, UNWRITABLE

AnyLearner = Learner | LearnerGroup
CHECKSUMS = "checksums.json"
NEEDED = (("policy",), ("optimizer.pt", "optimizer"), ("state.pt",))
"""What a checkpoint must have, each under one of its names."""


def save_checkpoint(
    folder: Path, step: int, learner: AnyLearner, state: Mapping[str, Any], *, keep: int
) -> Path:
    """Write step-NNNNNN atomically and delete all but the newest `keep`."""
    target = folder / f"step-{step:06d}"
    with staged_folder(target) as staging:
        write_state(staging, learner, {"step": step, **state})
        shutil.rmtree(target, ignore_errors=True)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` on success and is deleted on failure."""
    staging = target.with_name(f".{target.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        _let_others_read(staging)
        os.replace(staging, target)
    except QurlError:
        raise
    except UNWRITABLE as error:
        raise CheckpointError(
            f"{target} could not be written: {error}. Nothing else was changed; make room on the "
            "disk or choose another place, then run the same command again"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _let_others_read(folder: Path) -> None:
    """Give files the rights that the umask allows: safetensors 0.8 makes its own private."""
    allowed = folder.stat().st_mode & 0o666
    for path in _files(folder):
        mode = path.stat().st_mode
        if allowed & ~mode:
            path.chmod(mode | allowed)


def save_folder(target: Path, model: Any, tokenizer: Any, *, has_checksums: bool = False) -> Path:
    """Write a whole Hugging Face folder, or none."""
    with staged_folder(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if has_checksums:
            _write_checksums(folder)
    return target


def check_untrained(folder: Path) -> None:
    """Raise CheckpointError if the untrained model of a run, where it has one, is damaged."""
    if damage := _find_changed_file(folder):
        raise CheckpointError(
            f"the untrained model in {folder} is damaged: {damage}. Restore it from a copy, or "
            "remove that folder, and it is made again"
        )


def write_state(folder: Path, learner: AnyLearner, state: Mapping[str, Any]) -> None:
    """Write the files of a checkpoint and flush them to the disk."""
    learner.save(folder)
    torch.save({**state, "torch_rng": torch.get_rng_state()}, folder / "state.pt")
    _write_checksums(folder)
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def replace_state(folder: Path, **changes: Any) -> None:
    """Change entries of a checkpoint's state.pt."""
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    torch.save(state | changes, folder / "state.pt")
    _write_checksums(folder)


def _write_checksums(folder: Path) -> None:
    files = (path for path in _files(folder) if path.name != CHECKSUMS)
    sums = {str(path.relative_to(folder)): _checksum(path) for path in files}
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=2))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(folder: Path, under: str = "") -> str | None:
    """What is wrong with a checkpoint, or with its files `under` a folder; None if nothing is.

    Without its checksums, only the presence of the files is known.
    """
    for names in () if under else NEEDED:
        if not any((folder / name).exists() for name in names):
            return f"{names[0]} is missing"
    return _find_changed_file(folder, under)


def _find_changed_file(folder: Path, under: str = "") -> str | None:
    if not (folder / CHECKSUMS).exists():
        return None
    try:
        sums = dict(json.loads((folder / CHECKSUMS).read_text()))
        for name, checksum in sums.items():
            path = folder / name
            if not name.startswith(under):
                continue
            if not path.is_file():
                return f"{name} is missing"
            if _checksum(path) != checksum:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, TypeError) as error:
        return f"its files cannot be read: {error}"
    return None


def newest_sound(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest undamaged checkpoint, and what is wrong with each newer one.

    Raises if there are checkpoints and all of them are damaged.
    """
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(list_checkpoints(folder)):
        damage = find_damage(checkpoint)
        if damage is None:
            return checkpoint, damaged
        damaged[checkpoint] = damage
    if damaged:
        listed = "; ".join(f"{path}: {damage}" for path, damage in damaged.items())
        raise CheckpointError(
            f"no checkpoint is undamaged: {listed}. Restore one from a copy, or choose another "
            "run_dir to start again"
        )
    return None, {}


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither resumed from nor counted."""
    target = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(target, ignore_errors=True)
    return checkpoint.rename(target)


def load_saved_policy(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    quant: QuantConfig = PLAIN,
    **options: bool,
) -> Policy:
    """Load the policy of a checkpoint."""
    with naming_unreadable(folder):
        return load_policy(folder / "policy", config, device, quant, **options)


def load_saved_adapters(folder: Path, policy: Policy) -> None:
    """Give a policy with adapters those of a checkpoint."""
    with naming_unreadable(folder):
        load_adapters_(policy.model, folder / "policy")


def load_checkpoint(folder: Path, learner: AnyLearner) -> dict[str, Any]:
    """Restore optimizers, critic and random state of a loaded policy; return the other state."""
    with naming_unreadable(folder):
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        learner.load(folder)
        torch.set_rng_state(state.pop("torch_rng"))
        _check_state(state, checkpoint_step(folder))
    return state


def load_frozen_scales(folder: Path) -> dict[str, Tensor] | None:
    """The scales that a run keeps, if it does; None if the folder has no state."""
    if not (folder / "state.pt").is_file():
        return None
    with naming_unreadable(folder):
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        return state.get("scales")


def _check_state(state: Mapping[str, Any], step: int) -> None:
    """Raise ValueError unless the run can go on from it, at `step`."""
    position = state.get("position", 0)
    if state["step"] != step:
        raise ValueError(f"its state.pt is of step {state['step']!r}")
    if not isinstance(position, int) or position < 0:
        raise ValueError(f"its state.pt has position = {position!r}")
    for key in ("history", "accuracies", "hooks", "pending", "fingerprints"):
        if not isinstance(state.get(key, {}), dict):
            raise ValueError(f"its state.pt has {key} that no run writes")


@contextmanager
def naming_unreadable(folder: Path) -> Iterator[None]:
    """Say which checkpoint is damaged, or is none of this version, and what to do."""
    try:
        yield
    except UNREADABLE as error:
        cause = error.__cause__ or error
        reason = f"it lacks {cause}" if isinstance(cause, KeyError) else str(cause)
        raise CheckpointError(
            f"checkpoint {folder} cannot be read: {reason or type(cause).__name__}. Remove "
            "that folder to resume from the one before it"
        ) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = (path for path in folder.glob("step-*") if path.name[len("step-") :].isdecimal())
    return sorted(found, key=checkpoint_step)


def latest_checkpoint(folder: Path) -> Path | None:
    return next(reversed(list_checkpoints(folder)), None)


def checkpoint_step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def find_policy(source: Path) -> Path:
    """The policy folder of a run directory, of a checkpoint, or of a policy folder itself."""
    checkpoint = latest_checkpoint(source / "checkpoints")
    for folder in (checkpoint / "policy" if checkpoint else source, source / "policy", source):
        has_config = any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
        if has_config and list(folder.glob("*.safetensors*")):
            if damage := find_damage(folder.parent, under="policy"):
                raise CheckpointError(
                    f"checkpoint {folder.parent} is damaged: {damage}; name another checkpoint"
                )
            return folder
    raise CheckpointError(
        f"{source} is neither a run with a checkpoint nor a checkpoint; expected "
        f"{source}/checkpoints/step-NNNNNN/policy or {source}/policy"
    )
