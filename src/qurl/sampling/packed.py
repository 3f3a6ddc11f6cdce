"""Graded groups in plain containers and tensors, as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from qurl.ops.shelf import FIELDS
from qurl.types import Completion, Graded, Problem, Rollout


def pack(group: Graded) -> dict[str, Any]:
    """A group as `unpack` takes it back. Of the task's own data, only the prompt is kept."""
    rollout, problem = group.rollout, group.rollout.problem
    return {
        "name": problem.name,
        "id": problem.id,
        "prompt_ids": torch.tensor(problem.prompt_ids, dtype=torch.int32),
        "answer": problem.answer,
        "prompt": str(problem.extra.get("prompt", "")),
        "version": rollout.version,
        "temperature": rollout.temperature,
        "rewards": [float(reward) for reward in group.rewards],
        "details": [{k: float(v) for k, v in detail.items()} for detail in group.details],
        "completions": [
            {"text": c.text, "finish": c.finish}
            | {k: torch.from_numpy(np.array(getattr(c, k), dtype)) for k, dtype in FIELDS.items()}
            for c in rollout.completions
        ],
    }


def unpack(packed: Mapping[str, Any]) -> Graded:
    problem = Problem(
        packed["id"], packed["prompt_ids"].tolist(), packed["answer"], {"prompt": packed["prompt"]}
    )
    completions = [
        Completion(text=c["text"], finish=c["finish"], **{k: c[k].tolist() for k in FIELDS})
        for c in packed["completions"]
    ]
    rollout = Rollout(problem, completions, packed["version"], packed["temperature"])
    return Graded(rollout, packed["rewards"], packed["details"])
