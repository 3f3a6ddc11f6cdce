"""`qurl fork`: a new run that goes on from a checkpoint of another, with some keys changed.

Without a changed key it repeats the rest of the original to the bit, so whatever differs comes from
the keys.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qurl.config import Config, load_config, to_json
from qurl.errors import CheckpointError, ConfigError
from qurl.objectives import ADVANTAGES
from qurl.run.checkpoint import (
    checkpoint_step,
    find_damage,
    list_checkpoints,
    replace_state,
    staged_folder,
)
from qurl.run.directory import (
    CONFIG,
    EVALS,
    INITIAL,
    METRICS,
    SAMPLES,
    compare_recipes,
    forget_evaluations,
    forget_steps,
    is_among,
    log_event,
)
from qurl.run.inputs import check_inputs
from qurl.run.report.compare import PROBLEMS

FIXED = (
    *("model.path", "model.scratch", "model.lora_rank", "model.lora_alpha"),
    *("optim.name", "optim.moments", "optim.masters", "quant.update_scale"),
    *("experimental.norm_fed_lr_scale", "experimental.dither"),
    *("experimental.scale_o_proj", "experimental.scale_down_proj"),
)
"""Keys and sections that the weights and optimizer states of a checkpoint depend on."""
TRACKED = ("quant.format", "quant.full_layers", "quant.track_rows")
"""Keys that choose the weights whose updates are measured."""


def fork(source: Path, step: int, flags: Sequence[str]) -> Path:
    """Make the run directory of a fork of `source` at `step`; `qurl train` goes on from there.

    Its name is `run_dir`, by default that of the source with "-at-STEP" behind it.
    """
    original = load_config(source)
    checkpoint = _find_checkpoint(source, step)
    named = source if source.name.strip(".") else source.resolve()  # "." has no name of its own
    default = f"{named}-at-{step}"
    config = load_config(source, ["--run-dir", default, *flags])
    changes = compare_recipes(original, config)
    changes.pop("run_dir", None)
    _check(config, changes, checkpoint)
    check_inputs(config)
    target = Path(config.run_dir).expanduser()
    if target.exists():
        raise ConfigError(f"run_dir = {config.run_dir!r} exists already; choose another --run-dir")
    with staged_folder(target) as folder:
        shutil.copytree(checkpoint, folder / "checkpoints" / checkpoint.name)
        if any(key in changes for key in TRACKED):
            # Other weights are watched now.
            replace_state(folder / "checkpoints" / checkpoint.name, tracker={})
        if (source / INITIAL).exists():
            shutil.copytree(source / INITIAL, folder / INITIAL)
        for name in (METRICS, SAMPLES, EVALS):
            if (source / name).exists():
                shutil.copy2(source / name, folder / name)
        forget_steps(folder, step)
        has_files = config.task.eval_path or config.task.eval_sets
        if any(is_among(key, PROBLEMS if has_files else (*PROBLEMS, "seed")) for key in changes):
            forget_evaluations(folder)
        (folder / CONFIG).write_text(to_json(config), encoding="utf-8")
        listed = ", ".join(f"{key} {a!r} -> {b!r}" for key, (a, b) in changes.items())
        message = f"forked from {source} at step {step}; changed: {listed or 'nothing'}"
        log_event(folder, "fork", message, source=str(source), step=step, changes=changes)
    return target


def _find_checkpoint(source: Path, step: int) -> Path:
    found = {checkpoint_step(path): path for path in list_checkpoints(source / "checkpoints")}
    if step not in found:
        others = f"those of steps {', '.join(map(str, found))}" if found else "none at all"
        raise CheckpointError(
            f"{source} has no checkpoint of step {step}, only {others}; save.every and save.keep "
            "of a run say which are kept"
        )
    if damage := find_damage(found[step]):
        raise CheckpointError(f"{found[step]} is damaged: {damage}; fork at another step")
    return found[step]


def _check(config: Config, changes: Mapping[str, Any], checkpoint: Path) -> None:
    fixed = [key for key in changes if is_among(key, FIXED)]
    advantage = ADVANTAGES.get(config.algo.advantage)
    if advantage and advantage.needs_critic and not (checkpoint / "critic.pt").exists():
        fixed.append("algo.advantage")
    if fixed:
        raise ConfigError(
            f"a fork cannot change {', '.join(fixed)}: its checkpoint depends on them. Start a new "
            f"run instead; with model.path = {str(checkpoint / 'policy')!r} it has these weights"
        )
    if config.steps < (step := checkpoint_step(checkpoint)):
        raise ConfigError(f"steps = {config.steps}, but the fork starts after {step} steps already")
