"""Graded groups in plain containers and tensors, as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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
            {
                "token_ids": torch.tensor(c.token_ids, dtype=torch.int32),
                "logprobs": torch.tensor(c.logprobs, dtype=torch.float32),
                "trained": torch.tensor(c.trained),
                "versions": torch.tensor(c.versions, dtype=torch.int32),
                "text": c.text,
                "finish": c.finish,
            }
            for c in rollout.completions
        ],
    }


def unpack(packed: Mapping[str, Any]) -> Graded:
    problem = Problem(
        packed["id"], packed["prompt_ids"].tolist(), packed["answer"], {"prompt": packed["prompt"]}
    )
    per_token = ("token_ids", "logprobs", "trained", "versions")
    completions = [
        Completion(text=c["text"], finish=c["finish"], **{k: c[k].tolist() for k in per_token})
        for c in packed["completions"]
    ]
    rollout = Rollout(problem, completions, packed["version"], packed["temperature"])
    return Graded(rollout, packed["rewards"], packed["details"])
