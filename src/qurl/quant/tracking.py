"""How much of an update the actor sees, measured from one sync to the next.

    update_norm     ||theta_t - theta_{t-1}||^2 / ||theta_{t-1}||^2           Eq. (13)
    quant_error     ||Q(theta_t) - theta_t||^2 / ||theta_t||^2                Eq. (14)
    code_flip_frac  share of the codes that changed
    update_cosine   cos(dQ, dtheta)
    update_proj     <dQ, dtheta> / ||dtheta||^2                               1 = unbiased

with dtheta = theta_t - theta_{t-1} and dQ = Q(theta_t) - Q(theta_{t-1}). Q is all that lies between
the FP32 masters and the actor: rounding to the dtype that the trainer computes in, then the codes
of the format, if any. Sums run over a sample of the output channels of every projection.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from qurl.errors import ModelError
from qurl.quant.formats import Format, dequantize, get_format, quantize
from qurl.quant.linear import PROJECTIONS, quantized_projections

GROUPS: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn_in"),
    "o_proj": "attn_out",
    **dict.fromkeys(("gate_proj", "up_proj"), "mlp_in"),
    "down_proj": "mlp_out",
}
"""Projection -> layer group; UAQ scales the `_in` groups."""


def update_ratios(sums: Sequence[float]) -> dict[str, float]:
    """The metrics of `update_sums`; 0 if the denominator is 0 (no update, zero weights)."""
    update, before, after, error, visible, inner, flips, codes = sums
    fractions = {
        "update_norm": (update, before),
        "quant_error": (error, after),
        "code_flip_frac": (flips, codes),
        "update_cosine": (inner, (visible * update) ** 0.5),
        "update_proj": (inner, update),
    }
    return {name: a / b if b else 0.0 for name, (a, b) in fractions.items()}


class UpdateTracker:
    """Compares the weights at a sync with those of the sync before, in `rows` output channels.

    Weights are rounded to `dtype`, if given, and coded in `format`, as for the actor. The first and
    last `full_layers` decoder layers, which the actor does not quantize, are left out.
    """

    def __init__(
        self,
        format: str,
        rows: int,
        dtype: torch.dtype | None = None,
        full_layers: int = 0,
        scales: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`scales` [N, 1] by projection are kept (`quant.scales = "frozen"`)."""
        self.format, self.scales = None if format == "none" else get_format(format), scales
        self.rows, self.dtype, self.full_layers = rows, dtype, full_layers
        self._snapshot: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        """The metrics since the last call, overall and per group; nothing on the first call."""
        before, self._snapshot = self._snapshot, self._sample(model)
        if not before:
            return {}
        _check_same(before, self._snapshot)
        stacks, rows = self._stacks(), []
        for names in stacks:
            new = torch.cat([self._snapshot[name] for name in names])
            old = torch.cat([before[name].to(new.device) for name in names])
            rows.append(update_sums(old, new, self.format, self.dtype, self._kept_scale(names)))
        keys = list(dict.fromkeys(key for name in before for key in _keys_of(name)))
        totals = {key: torch.zeros(8, dtype=torch.float64) for key in keys}
        # One table, so that a GPU is read once and not per stack.
        for names, row in zip(stacks, torch.stack(rows).cpu() if rows else (), strict=True):
            for key in _keys_of(names[0]):
                totals[key] += row
        return {
            f"uaq/{metric}{key}": value
            for key, total in zip(keys, _over_shards(model, [*totals.values()]), strict=True)
            for metric, value in update_ratios(total.tolist()).items()
        }

    def _kept_scale(self, names: Sequence[str]) -> Tensor | None:
        """Frozen scales of the watched rows of some weights."""
        if self.scales is None:
            return None
        scales = [self.scales[name] for name in names]
        kept = [s[watched_rows(len(s), self.rows, self.format)] for s in scales]
        return torch.cat(kept).to(self._snapshot[names[0]].device)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._snapshot)

    def collect(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint holds of a state: all of it."""
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._snapshot = dict(state)

    def load_share(self, state: Mapping[str, Tensor], model: nn.Module) -> None:
        """Take the rows that this rank of a sharded model holds from the state of a whole one."""
        self._snapshot = {}
        for name, layer in quantized_projections(model, self.full_layers) if state else ():
            held, start = held_rows(layer.weight, self.format)
            rows = watched_rows(len(layer.weight), self.rows, self.format)
            self._snapshot[name] = state[name][(rows >= start) & (rows < start + len(held))]

    def _stacks(self) -> list[list[str]]:
        """Weights of one kind in all layers; one that does not fill its format's tiles, or has a
        scale for all of its rows, is alone."""
        stacks: dict[tuple[object, ...], list[str]] = {}
        for name, weight in self._snapshot.items():
            if not len(weight):  # a rank may hold no row that is watched
                continue
            is_alone = weight.shape[0] % _strip(self.format) != 0 or _has_tensor_scale(self.format)
            key = (name,) if is_alone else (name.rpartition(".")[2], weight.shape, weight.device)
            stacks.setdefault(key, []).append(name)
        return list(stacks.values())

    def _sample(self, model: nn.Module) -> dict[str, Tensor]:
        @functools.cache  # a copy to the device waits for it
        def watched(num_rows: int, start: int, stop: int, device: torch.device) -> Tensor:
            rows = watched_rows(num_rows, self.rows, self.format)
            return (rows[(rows >= start) & (rows < stop)] - start).to(device)

        sample = {}
        for name, layer in quantized_projections(model, self.full_layers):
            weight = layer.weight.detach()  # one at a time, as adapters are merged here
            held, start = held_rows(weight, self.format)
            sample[name] = held[watched(len(weight), start, start + len(held), held.device)]
        if not sample:
            raise ModelError(
                f"{type(model).__name__} has no nn.Linear named like {', '.join(PROJECTIONS)} to "
                "track; set quant.track_rows = 0"
            )
        return sample


def watched_rows(num_rows: int, wanted: int, format: Format | None) -> Tensor:
    """Indices of about `wanted` rows, evenly spread, in whole strips of tiles for block formats."""
    strip = _strip(format)
    num_strips = -(-num_rows // strip)
    taken = min(-(-wanted // strip), num_strips)
    strips = torch.arange(taken) * num_strips // taken
    rows = (strips[:, None] * strip + torch.arange(strip)).flatten()
    return rows[rows < num_rows]


def held_rows(weight: Tensor, format: Format | None = None) -> tuple[Tensor, int]:
    """The rows of a weight that this process holds, and the number of the first.

    Shards that cut through the tiles of a block format would have other codes than the whole.
    """
    if not isinstance(weight, DTensor):
        return weight, 0
    length = -(-len(weight) // weight.device_mesh.size())  # as FSDP cuts
    if format is not None and length < len(weight) and length % _strip(format):
        raise ModelError(
            f"a weight of {len(weight)} rows on {weight.device_mesh.size()} trainers is cut every "
            f"{length} rows, through the tiles of {_strip(format)} rows that {format.name} codes "
            "together; use another parallel.trainers, or quant.track_rows = 0"
        )
    return weight.to_local(), min(weight.device_mesh.get_local_rank() * length, len(weight))


def _over_shards(model: nn.Module, sums: Sequence[Tensor]) -> Tensor:
    """Sums of this process added to those of the other ranks, if the model is sharded."""
    table, parameter = torch.stack(list(sums)), next(model.parameters())
    if not isinstance(parameter, DTensor):
        return table
    table = table.to(parameter.to_local().device)
    return DTensor.from_local(table, parameter.device_mesh, [Partial()]).full_tensor().cpu()


def _keys_of(name: str) -> tuple[str, str]:
    """Suffixes of the metrics that a projection counts in: overall, and its group."""
    return "", "/" + GROUPS[name.rpartition(".")[2]]


def _strip(format: Format | None) -> int:
    return (format.block if format else None) or 1  # rows that share scales


def _has_tensor_scale(format: Format | None) -> bool:
    """NVFP4's g is then that of the watched rows, a little smaller than that of all."""
    return format is not None and format.is_weight_only


def update_sums(
    before: Tensor,
    after: Tensor,
    format: Format | None,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Sums of one weight [N, K] in FP64.

    ||dtheta||^2, ||theta_{t-1}||^2, ||theta_t||^2, ||Q(theta_t) - theta_t||^2, ||dQ||^2,
    <dQ, dtheta>, the number of codes that changed, the number of codes.
    """
    seen = [_seen_by_actor(w, format, dtype, scale) for w in (before, after)]
    (old, old_codes), (new, new_codes) = seen
    before, after = before.double(), after.double()
    update, visible, error = after - before, new - old, new - after
    pairs = [(x, x) for x in (update, before, after, error, visible)] + [(visible, update)]
    flips = (old_codes != new_codes).sum().double()
    sums = [(x * y).sum() for x, y in pairs]
    return torch.stack([*sums, flips, torch.full_like(flips, after.numel())])


def _seen_by_actor(
    weight: Tensor, format: Format | None, dtype: torch.dtype | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Q(weight) in FP64 and its codes; without a format the codes are the rounded numbers."""
    rounded = weight.to(dtype=dtype)
    if format is None:
        return rounded.double(), rounded
    coded = quantize(rounded, format, scale=scale)
    return dequantize(coded).double(), coded.numbers()  # as numbers: FP8 has two zeros


def _check_same(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    for name in sorted(before.keys() | after.keys()):
        old, new = (tuple(x[name].shape) if name in x else None for x in (before, after))
        if old != new:
            reason = "the model, quant.format or quant.track_rows has changed"
            raise ModelError(f"{name}: {old} was watched at the last sync, {new} is now: {reason}")
