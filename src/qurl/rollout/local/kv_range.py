"""The range of keys and values, for a cache that holds codes.

    center = mean of the keys of a head;   amax = largest |key - center|, and largest |value|

The cache stores k - center. Attention needs no correction: q . (k - c) differs from q . k by the
same number for every key, which softmax ignores. If the bias of k_proj is large (Qwen2.5), k -
center is a tenth as large as k; this halves the log-prob gap of an FP8 cache (docs/log.md).

A key turns with its position. So each key of the sample is turned to positions over the whole
context: fast channels then have a mean near 0, slow ones a mean that holds everywhere.

Shapes: N tokens of the sample, H_kv key heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qurl.rollout.local.reference import rotate
from qurl.rollout.local.weights import Weights

_FIRST_TURN = 32


@dataclass(frozen=True)
class KVRange:
    """What a sample of keys and values shows, layer by layer."""

    center: Tensor  # [layers, H_kv, D] of the keys
    amax: Tensor  # [layers, 2, H_kv] of key - center, and of the values
    cos: Tensor  # [turns, D / 2]
    sin: Tensor  # [turns, D / 2]

    @staticmethod
    def empty(weights: Weights) -> KVRange:
        arch, device = weights.arch, weights.device
        turns = [0]
        while (turn := max(2 * turns[-1], _FIRST_TURN)) < weights.max_positions:
            turns.append(turn)
        angles = torch.tensor(turns, device=device).float()[:, None] * weights.inv_freq
        return KVRange(
            center=torch.zeros(arch.num_layers, arch.num_kv_heads, arch.head_dim, device=device),
            amax=torch.zeros(arch.num_layers, 2, arch.num_kv_heads, device=device),
            cos=angles.cos(),
            sin=angles.sin(),
        )

    def observe_(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keys, rotated to their positions, and values [N, H_kv, D] of one layer."""
        turned = rotate(
            k.expand(len(self.cos), *k.shape).flatten(0, 1),
            self.cos.repeat_interleave(len(k), 0),
            self.sin.repeat_interleave(len(k), 0),
        )  # [turns * N, H_kv, D]
        center = turned.mean(0)
        self.center[layer] = center
        self.amax[layer, 0] = (turned - center).abs().amax((0, 2))
        self.amax[layer, 1] = v.abs().amax((0, 2))
