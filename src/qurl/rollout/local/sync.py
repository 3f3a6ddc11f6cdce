"""How a sync writes the trainer's weights into the actor's buffers, and how it checks them.

Codes are those of the weights that the trainer computes with: its masters rounded to its compute
dtype. The actor must not see what that rounding hides from the trainer, and the first updates are
smaller than the steps of BF16. Norms, embedding and lm_head share the trainer's storage where dtype
and device agree, which relies on optimizers that update in place. On a GPU a sync is one CUDA
graph, replayed as long as the trainer's parameters stay where they are.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from qurl.errors import SyncError
from qurl.ops.target import Target
from qurl.quant import Format, Quantized, quantize
from qurl.quant.coded_linear import CodedLinear
from qurl.rollout.local.architecture import NORMS
from qurl.rollout.local.weights import Projection, Weights

_NUM_STREAMS = 4
"""Weights that a sync codes at the same time."""
NOISY = ("input_layernorm", "post_attention_layernorm")
"""Norms that feed projections."""
_PROBE_STEP = 7919
"""A prime, so that the spot check visits every row in the course of the versions."""
Requantizer = Callable[[Tensor, Quantized, Tensor, torch.dtype], None]
"""Codes a source into a target, counting what changes; the source is rounded to the dtype."""


class WeightSync:
    """Keeps the actor's weights in step with the trainer's."""

    def __init__(
        self,
        weights: Weights,
        scales: Mapping[str, Tensor] | None = None,
        *,
        owns_norms: bool = False,
    ) -> None:
        """`scales` [N, 1] by projection are kept in every sync (FlashRL). Noise needs norms that
        the trainer does not share."""
        self.weights, self._scales, self._owns_norms = weights, scales, owns_norms
        self._norms: list[tuple[Tensor, Tensor]] = []
        """Norms that may get noise, ours and the trainer's."""
        self._bases: list[tuple[int, Quantized, Quantized]] = []
        """Layer, and codes of a frozen base, ours and the trainer's."""
        self._pairs: list[tuple[int, Projection, nn.Linear]] = []
        """Layer, rows of the actor's buffer, and the trainer's module that they hold."""
        self._is_planned_for: Callable[[nn.Module], bool] = lambda model: False
        self._transfer: Transfer | None = None
        self._copies: dict[str, Tensor] = {}
        self._copied: list[tuple[Tensor, Tensor]] = []
        """Tensors other than projections that are copied as they are, ours and the trainer's."""
        self._has_loaded = False

    @torch.no_grad()
    def load_(self, model: Any) -> float:
        """Take over the trainer's weights; returns the share of codes that changed.

        0 the first time and without quantization.
        """
        if self._transfer is None or not self._is_planned_for(model):
            self._transfer = None  # also if the plan fails
            self._transfer = self._plan(model)
            self._is_planned_for = watch_parameters(model)
        num_flips = self._transfer.run()
        had_loaded, self._has_loaded = self._has_loaded, True
        return num_flips / self._transfer.num_codes if had_loaded else 0.0

    @torch.no_grad()
    def add_noise_(self, sigma: float, draw: torch.Generator) -> None:
        """Set each layer's two norms to the trainer's plus N(0, sigma^2), until the next sync."""
        assert self._owns_norms, "the trainer would get the noise, too"
        noise = torch.randn(len(self._norms), len(self._norms[0][0]), generator=draw)
        for (ours, theirs), z in zip(self._norms, noise.to(self.weights.device), strict=True):
            ours.copy_(theirs).add_(z, alpha=sigma)

    @torch.no_grad()
    def check(self, version: int) -> None:
        """Spot-check the copy: one row or tile of every weight, another one at each version.

        Quantization noise hides small errors from the canary prompt. This finds a stale, misplaced
        or damaged row exactly.
        """
        if _copies_differ(self._copied, _PROBE_STEP * version):
            raise SyncError(
                f"sync of version {version} failed: a bias, a norm, the embedding or the head in "
                "the engine is not a copy of the trainer's"
            )
        self._check_base(version)
        probes: dict[Any, list[tuple[Tensor, ...]]] = defaultdict(list)
        layers: dict[Any, list[int]] = defaultdict(list)
        for layer, view, module in self._pairs:
            source = module.weight.detach()
            probe = _probe(view.weight, source, _PROBE_STEP * version)
            if _is_computed(module):  # a view would keep all of the computed weight
                probe = (probe[0].clone(), *probe[1:])
            format = view.weight.format if isinstance(view.weight, Quantized) else None
            key = (format, probe[0].shape, source.dtype)
            layers[key].append(layer)
            probes[key].append(probe)
        dtype = self.weights.compute_dtype
        is_frozen = self._scales is not None
        differs = [
            _differ(alike, format, dtype, is_frozen) for (format, *_), alike in probes.items()
        ]
        flaw = "is not the quantized copy of the trainer's"
        _raise_where(differs, layers.values(), version, flaw)

    def _keep_scale(self, view: Projection, name: str) -> None:
        if self._scales is not None and isinstance(view.weight, Quantized):
            view.weight.scale.copy_(self._scales[name])

    def _check_base(self, version: int) -> None:
        """Spot-check a row of codes of each frozen base; adapters are among the copies."""
        alike: dict[Any, list[tuple[int, Quantized, Quantized]]] = defaultdict(list)
        for layer, held, base in self._bases:
            row = _PROBE_STEP * version % base.shape[0]
            only = slice(row, row + 1)
            alike[base.shape[1]].append((layer, held.rows(only), base.rows(only)))
        layers, differs = [], []
        for found in alike.values():  # together, because one by one 32B takes 37,000 operations
            of_layer, helds, bases = zip(*found, strict=True)
            layers.append(of_layer)
            differs.append((_stack(helds) != _stack(bases)).any(-1))
        _raise_where(differs, layers, version, "does not have the codes of the trainer's base")

    def _plan(self, model: Any) -> Transfer:
        """What a sync from this model writes. What it shares is set at once."""
        weights, body = self.weights, model.model
        copies: list[tuple[Tensor, Tensor]] = []
        unquantized: list[tuple[Tensor, Tensor]] = []

        def share(name: str, parameter: Tensor, dtype: torch.dtype, owns: bool = False) -> Tensor:
            """The parameter's own storage where dtype and device agree, else our copy of it."""
            source = parameter.detach()
            if not owns and source.dtype == dtype and source.device == weights.device:
                return source
            if name not in self._copies:
                self._copies[name] = torch.empty(source.shape, dtype=dtype, device=weights.device)
            copies.append((self._copies[name], source))
            return self._copies[name]

        self._pairs, self._bases, self._norms, writings = [], [], [], []
        for index, (layer, source) in enumerate(zip(weights.layers, body.layers, strict=True)):
            for name, module in source.named_modules():
                kind = name.rpartition(".")[2]
                if kind in layer.views:
                    view = layer.views[kind]
                    if shared := _shared_base(view, module):
                        self._bases.append((index, *shared))
                        write_(shared[1], shared[0])  # once: it is frozen
                        copies += _adapter_copies(view, module)
                    elif isinstance(view.weight, Quantized) or _is_computed(module):
                        self._keep_scale(view, f"model.layers.{index}.{name}")
                        writings.append((module, view.weight))
                    else:
                        unquantized.append((view.weight, module.weight.detach()))
                    if not shared:
                        self._pairs.append((index, view, module))
                    if view.bias is not None and module.bias is not None:
                        copies.append((view.bias, module.bias.detach()))
                elif kind in NORMS:
                    name, owns = f"layers.{index}.{kind}", self._owns_norms and kind in NOISY
                    layer.norms[kind] = share(name, module.weight, torch.float32, owns)
                    if owns:
                        self._norms.append((layer.norms[kind], module.weight.detach()))
        # As the trainer has it: the residual stream starts unrounded.
        embedding = body.embed_tokens.weight
        weights.embedding = share("embedding", embedding, embedding.dtype)
        weights.norm = share("norm", body.norm.weight, torch.float32)
        weights.lm_head = share("lm_head", model.lm_head.weight, weights.dtype)
        self._copied = copies
        return Transfer(
            *(writings, copies + unquantized, weights.compute_dtype, weights.device),
            keeps_scales=self._scales is not None,
        )


class Transfer:
    """All that a sync writes: weights to quantize or to compute, and tensors to copy as they are.

    On a GPU the first run is recorded and replayed from then on, because launching each kernel from
    Python would take longer than the kernels.
    """

    def __init__(
        self,
        writings: Sequence[tuple[nn.Linear, Quantized | Tensor]],
        copies: Sequence[tuple[Tensor, Tensor]],
        compute_dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_scales: bool = False,
    ) -> None:
        self._keeps_scales = keeps_scales
        codings = [(m, target) for m, target in writings if isinstance(target, Quantized)]
        self._merges = [(m, target) for m, target in writings if isinstance(target, Tensor)]
        self._codings, self._copies, self._compute_dtype = codings, copies, compute_dtype
        self.num_codes = max(1, sum(math.prod(target.shape) for _, target in codings))
        self._kernel = None if keeps_scales else _find_kernel(codings, device)
        counted = [_counted(target) for _, target in codings]
        sizes = [scales.numel() for scales in counted] if self._kernel else []
        self._flips = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._flips_of = self._flips.split(sizes)
        self._num_flips = torch.zeros((), dtype=torch.int64, device=device)
        is_local = all(source.device == device for _, source in copies)
        is_fast = not codings or self._kernel is not None
        self._can_record = device.type == "cuda" and is_local and is_fast
        num_streams = _NUM_STREAMS if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(num_streams)]
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> int:
        """Write everything, wait for it, and return how many codes changed."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._write()  # before recording: a kernel is compiled when it is first launched
            if self._can_record:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._write()
                self._graph = graph
        return int(self._num_flips)

    def _write(self) -> None:
        if self._kernel:
            self._launch(self._kernel)
        else:
            self._num_flips.zero_()
            for module, target in self._codings:
                kept = target.scale if self._keeps_scales else None
                fresh = quantize(module.weight.to(self._compute_dtype), target.format, scale=kept)
                # Compared as numbers: a zero that changes its sign is no flip.
                self._num_flips += (target.numbers() != fresh.numbers()).sum()
                write_(fresh, target)
        for module, target in self._merges:  # one after the other: each is computed here
            target.copy_(module.weight)
        if self._copies:
            targets, sources = zip(*self._copies, strict=True)
            torch._foreach_copy_(targets, sources)

    def _launch(self, kernel: Requantizer) -> None:
        """Several streams at once: most weights are too small to fill a GPU by themselves."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        turns = itertools.cycle(self._streams)
        for (module, target), flips in zip(self._codings, self._flips_of, strict=True):
            with torch.cuda.stream(next(turns)) if self._streams else nullcontext():
                source = module.weight.detach()  # adapters are merged here, in the stream
                kernel(source, target, flips.view_as(_counted(target)), self._compute_dtype)
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        torch.sum(self._flips, 0, dtype=torch.int64, out=self._num_flips)


def _counted(weight: Quantized) -> Tensor:
    """The scales by which the fused quantizer counts flips."""
    return weight.scale if weight.tensor_scale is None else weight.tensor_scale


def write_(source: Quantized, target: Quantized) -> None:
    """Copy codes and scales into buffers, which may hold codes as FP32 numbers."""
    is_alike = source.codes.dtype == target.codes.dtype
    target.codes.copy_(source.codes if is_alike else source.numbers())
    for stored, fresh in zip(target.tensors()[1:], source.tensors()[1:], strict=True):
        stored.copy_(fresh)


def watch_parameters(model: nn.Module) -> Callable[[nn.Module], bool]:
    """A test whether a model is this one, with every parameter where it is now.

    It reads the dicts of their owners: `model.parameters()` takes five times as long, a good part
    of a small model's sync.
    """

    def address(parameter: nn.Parameter | None) -> tuple[int, torch.dtype] | None:
        return None if parameter is None else (parameter.data_ptr(), parameter.dtype)

    modules = list(model.modules())
    children = [(m._modules, dict(m._modules)) for m in modules if m._modules]
    places = [(m._parameters, n, address(p)) for m in modules for n, p in m._parameters.items()]
    return lambda other: (
        other is model
        and all(current == recorded for current, recorded in children)
        and all(address(owner.get(name)) == recorded for owner, name, recorded in places)
    )


def _find_kernel(
    codings: Sequence[tuple[nn.Linear, Quantized]], device: torch.device
) -> Requantizer | None:
    """The fused quantizer, where device, format and sources permit."""
    if not codings or device.type != "cuda":
        return None
    from qurl.quant.kernels.requantize import SOURCE_DTYPES, requantize_

    sources = (module.weight for module, _ in codings)
    has_sources = all(
        s.dtype in SOURCE_DTYPES and s.device == device and s.is_contiguous() for s in sources
    )
    format = codings[0][1].format
    has_format = format.is_integer or format.is_weight_only or Target.of(device).has_fp8
    return requantize_ if has_sources and has_format else None


def _is_computed(module: nn.Linear) -> bool:
    """Whether reading the weight computes it."""
    return is_parametrized(module, "weight") or isinstance(module, CodedLinear)


def _shared_base(view: Projection, module: nn.Module) -> tuple[Quantized, Quantized] | None:
    """The actor's weight and the trainer's, if that is frozen in the same codes."""
    held = view.weight
    if not isinstance(held, Quantized) or not isinstance(module, CodedLinear):
        return None
    return (held, module.base) if module.format == held.format else None


def _adapter_copies(view: Projection, module: Any) -> list[tuple[Tensor, Tensor]]:
    low, adapter = view.adapter, module.adapter
    return [] if low is None else [(low.a, adapter.A.detach()), (low.b, adapter.B.detach())]


def _raise_where(
    differs: list[Tensor], layers: Iterable[Sequence[int]], version: int, flaw: str
) -> None:
    """Raise if any projection of these layers differs."""
    if not differs:
        return
    pairs = zip(itertools.chain(*layers), torch.cat(differs).tolist(), strict=True)
    if failed := [layer for layer, is_bad in pairs if is_bad]:
        raise SyncError(
            f"sync of version {version} failed: a projection of layer {min(failed)} in the "
            f"engine {flaw}"
        )


def _stack(rows: Sequence[Quantized]) -> Tensor:
    """Codes and scales of rows as numbers [n, K + K / 16 + 1]."""
    codes, scales, outer = (
        torch.cat(parts) for parts in zip(*(row.tensors() for row in rows), strict=True)
    )
    numbers = replace(rows[0], codes=codes).numbers()
    return torch.cat([numbers, scales.float(), outer], 1)


def _probe(weight: Quantized | Tensor, source: Tensor, number: int) -> tuple[Tensor, ...]:
    """The `number`-th row or tile, modulo their count: its source, what is stored, its scales."""
    row = number % len(source)
    if not isinstance(weight, Quantized):
        return source[row], weight[row]
    block = weight.format.block
    if block is None:
        part = weight.rows(slice(row, row + 1))
        return source[row], part.numbers()[0], *part.tensors()[1:]
    down, across = divmod(number % weight.scale.numel(), weight.scale.shape[1])
    at = (slice(down * block, (down + 1) * block), slice(across * block, (across + 1) * block))
    rows, columns = source[at].shape
    padding = (0, block - columns, 0, block - rows)
    return F.pad(source[at], padding), F.pad(weight.codes[at], padding), weight.scale[down, across]


def _copies_differ(copies: Sequence[tuple[Tensor, Tensor]], number: int) -> bool:
    """Whether the `number`-th row of any copy is not the source's; vectors count as one row."""
    alike: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for pair in copies:
        row = number % len(pair[0])
        target, source = (t[row] if t.dim() > 1 else t for t in pair)
        alike[target.shape, target.dtype, source.dtype, source.device].append((target, source))
    stacks = [map(torch.stack, zip(*pairs, strict=True)) for pairs in alike.values()]
    differs = [(source.to(target) != target).any() for target, source in stacks]
    return bool(torch.stack(differs).any()) if differs else False


def _differ(
    probes: Sequence[tuple[Tensor, ...]],
    format: Format | None,
    dtype: torch.dtype,
    is_frozen: bool = False,
) -> Tensor:
    """Which probes [n], all of one shape, are not what quantizing their source in `dtype` gives."""
    source, stored, *scales = (torch.stack(parts) for parts in zip(*probes, strict=True))
    if format is None:
        return (source.to(stored.dtype) != stored).any(-1)
    # The scale of a whole tensor is not that of a row of it, nor a frozen one.
    given = scales[-1].view(-1, 1) if format.is_weight_only or is_frozen else None
    fresh = quantize(source.flatten(0, -2).to(dtype), format, scale=given)
    pairs = ((fresh.numbers(), stored.float()), (fresh.scale.float(), scales[0].float()))
    differs = [(a.reshape(len(probes), -1) != b.reshape(len(probes), -1)).any(-1) for a, b in pairs]
    return differs[0] | differs[1]
