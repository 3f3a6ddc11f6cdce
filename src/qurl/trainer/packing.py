"""Forwards without padding: sequences lie end to end in one row.

    padded [B, T]      packed [N], N = 9
    a a a a            token_ids   a a a a b b c c c
    b b . .            positions   0 1 2 3 0 1 0 1 2
    c c c .            bounds      0 4 6 9

The model sees `input_ids` [1, N] and `position_ids` [1, N]. Attention alone keeps the sequences
apart: transformers lets us register our own by name (`attend`). It gets the bounds from the
forward's keywords, under the names that flash attention uses.

Shapes: B sequences, T positions, N tokens, M scored tokens, H heads (H_kv of keys), D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurl.errors import ModelError
from qurl.ops.attention import attend_dense, attend_flash, window_mask
from qurl.ops.device import arithmetic_dtype
from qurl.types import Batch

ATTENTION = "qurl-packed"  # as transformers calls `attend`
ORDINARY_ATTENTION = "sdpa"  # what it replaces


@dataclass(frozen=True)
class Packed:
    """Sequences end to end."""

    token_ids: Tensor  # [N]
    places: Tensor  # [N] of the tokens in the flattened [B, T]
    options: Mapping[str, Any]  # further keywords of the backbone's forward: positions and bounds

    @classmethod
    def of(cls, token_ids: Tensor, lengths: Sequence[int]) -> Packed:
        """The first `lengths[b]` tokens of each row of [B, T]."""
        device = token_ids.device
        counts = torch.tensor(lengths, dtype=torch.int64)
        starts = F.pad(counts.cumsum(0), (1, 0))  # [B + 1]
        rows = torch.arange(len(counts)).repeat_interleave(counts)  # [N]
        positions = torch.arange(len(rows)) - starts[rows]
        places = (rows * token_ids.shape[1] + positions).to(device)
        bounds = starts.int().to(device)
        options = {
            "position_ids": positions.to(device)[None],
            # transformers passes a mask of four dimensions on as it is. Without one it would wait
            # for the device to look for packing in the positions, and build [N, N].
            "attention_mask": torch.empty(1, 1, 0, 0, device=device),
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds),
            **dict.fromkeys(("max_length_q", "max_length_k"), max(lengths)),
        }
        return cls(token_ids.flatten()[places], places, options)


@dataclass(frozen=True)
class BatchLayout:
    """How a batch lies in the model's input, packed or padded, and where its scored tokens are."""

    token_ids: Tensor  # [1, N] packed, [B, T] padded
    options: Mapping[str, Any]  # see `Packed`
    scored: Tensor  # [M] places of the scored tokens in the flattened input
    places: Tensor  # [M] their places in the flattened [B, T]
    shape: tuple[int, int]  # B, T

    @classmethod
    def of(cls, batch: Batch, *, is_packed: bool) -> BatchLayout:
        """Reads lengths and mask. On a GPU the host waits here and not again."""
        is_scored = batch.mask != 0
        is_scored[:, 0] = False  # nothing comes before it
        is_scored, shape = is_scored.flatten(), (len(batch.mask), batch.mask.shape[1])
        if not is_packed:
            scored = is_scored.nonzero().squeeze(-1)
            return cls(batch.token_ids, {}, scored, scored, shape)
        packed = Packed.of(batch.token_ids, batch.lengths.tolist())
        scored = is_scored[packed.places].nonzero().squeeze(-1)
        return cls(packed.token_ids[None], packed.options, scored, packed.places[scored], shape)

    @property
    def targets(self) -> Tensor:
        """The scored tokens [M]."""
        return self.token_ids.flatten()[self.scored]

    def before(self, states: Tensor) -> Tensor:
        """The states [M, ...] that predict the targets, out of [1, N, ...] or [B, T, ...]."""
        return states.flatten(0, 1).index_select(0, self.scored - 1)

    def spread(self, values: Tensor) -> Tensor:
        """Values [M] of the scored tokens at their places in [B, T]; 0 elsewhere."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy(0, self.places, values).view(self.shape)


def use_packed_attention_(model: Any) -> None:
    """Make a transformers model attend with `attend`; refuse one that needs more than windows."""
    if model.config._attn_implementation not in (ORDINARY_ATTENTION, ATTENTION):
        raise ModelError("it does not attend with torch's scaled_dot_product_attention")
    if not getattr(model, "_supports_flash_attn", False):
        raise ModelError("it needs masks to attend: flash attention cannot run it either")
    register_attention()
    model.set_attn_implementation(ATTENTION)
    if _has_window(model) and not _tells_window(model):
        raise ModelError("its sliding window is in its mask alone, which packed sequences lack")


@torch.no_grad()
def try_attention(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Attend once with heads of the model's shape; raises if that does not work on the device."""
    text = model.config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    num_kv = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    query, key = (
        torch.zeros(1, heads, 11, size, device=device, dtype=dtype)
        for heads in (text.num_attention_heads, num_kv)
    )
    bounds = torch.tensor([0, 7, 11], dtype=torch.int32, device=device)
    attend(nn.Module(), query, key, key, None, cu_seq_lens_q=bounds, max_length_q=7)


def register_attention() -> None:
    """Let transformers find `attend` by its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _has_window(model: Any) -> bool:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    return (
        getattr(config, "sliding_window", None) is not None
        and getattr(config, "use_sliding_window", True)
        and (kinds is None or "sliding_attention" in kinds)
    )


@torch.no_grad()
def _tells_window(model: Any) -> bool:
    """Whether any layer passes its window to the attention, tried in a forward of one token."""
    from transformers import AttentionInterface

    windows = []

    def listen(*inputs: Any, **options: Any) -> Any:
        windows.append(options.get("sliding_window"))
        return attend(*inputs, **options)

    AttentionInterface.register(ATTENTION, listen)
    try:
        device = next(model.parameters()).device
        model.base_model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device))
    finally:
        AttentionInterface.register(ATTENTION, attend)
    return any(window is not None for window in windows)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [1, H, N, D] and two [1, H_kv, N, D] to [1, N, H, D].

    A `KVRounding` of the module acts on keys and values in the dtype of the computation.
    """
    dtype = arithmetic_dtype(query)
    if (rounding := getattr(module, "kv_rounding", None)) is not None:
        key, value = rounding(key.to(dtype), value.to(dtype))
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    _check_plain(module, options)
    assert max_length_q is not None
    window = sliding_window if sliding_window and sliding_window < max_length_q else None
    q, k, v = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))  # [N, H, D]
    is_fast = q.is_cuda and dtype in (torch.bfloat16, torch.float16)
    attend_packed: Any = attend_flash if is_fast else _attend_padded
    return attend_packed(q, k, v, cu_seq_lens_q, max_length_q, window, scaling)[None], None


@torch.compiler.disable  # its sizes depend on data, and speed does not matter here
def _attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """`attend_flash` for CPUs and FP32, by padding."""
    is_token = torch.arange(longest, device=q.device) < bounds.diff()[:, None]  # [B, T]

    def pad(x: Tensor) -> Tensor:
        padded = x.new_zeros(*is_token.shape, *x.shape[1:])
        padded[is_token] = x
        return padded.transpose(1, 2)  # [B, H, T, D]

    mask = None if window is None else window_mask(longest, window, q.device)
    out = attend_dense(pad(q), pad(k), pad(v), mask, is_causal=mask is None, scale=scale)
    return out.transpose(1, 2)[is_token]


def _check_plain(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse options that packed attention does not compute."""
    extras = ("softcap", "s_aux", "position_bias", "cache")
    found = [name for name in extras if options.get(name) is not None]
    found += ["dropout"] if options.get("dropout") else []
    is_causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        found.append("attention to later tokens")
    if found:
        raise ModelError(f"{type(module).__name__} asks for {', '.join(found)}")
