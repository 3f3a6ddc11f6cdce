"""The engine's copy of the policy: what is quantized, what is shared, what is refused.

Projections live in engine-owned buffers that are allocated once and rewritten in place, so their
addresses never change. q, k, v are row ranges of one fused buffer, because codes and scales simply
stack; with 128x128 tiles they do where no tile would span two projections. The rows of gate and up
alternate in theirs, so that one tile of a product holds both; with 128x128 tiles they stack too.

Codes are those of the weights that the trainer computes with: its FP32 masters rounded to its
compute dtype. What that rounding hides from the trainer, the actor must not see either: masters
begin on the grid of a checkpoint in BF16, and the first updates are smaller than its steps.

Norms, embedding and lm_head stay in full precision. Where dtype and device agree they share the
trainer's storage, which relies on optimizers that update parameters in place: every sync points at
the parameters anew, and between syncs the engine sees them change.

On a GPU a sync is one CUDA graph of all quantizations and copies, recorded for the addresses that
it reads: as long as the trainer's parameters stay where they are, it is replayed.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurl.errors import ModelError, SyncError
from qurl.ops.target import Target
from qurl.quant import Format, Quantized, get_format, quantize
from qurl.quant.linear import PROJECTIONS
from qurl.rollout.checks import context_length

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_NUM_STREAMS = 4
"""Weights that a sync codes at the same time."""
_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
Place = tuple[int, torch.dtype] | None
"""Address and dtype of a parameter; None where a module has none, like a bias."""
Requantizer = Callable[[Tensor, Quantized, Tensor, torch.dtype], None]
"""Codes a source into a target, counting what changes; the source is rounded to the dtype."""


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder of the Llama family."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None sees everything before."""


class Projection:
    """One matrix multiplication: projections with the same input, stacked along their rows."""

    def __init__(
        self,
        modules: Sequence[nn.Linear],
        format: Format | None,
        dtype: torch.dtype,
        device: torch.device,
        native_codes: bool,
    ) -> None:
        rows, columns = sum(m.out_features for m in modules), modules[0].in_features
        codes_dtype = format.dtype if format is not None and native_codes else torch.float32
        self.weight: Quantized | Tensor
        if format is None:
            self.weight = torch.zeros(rows, columns, dtype=dtype, device=device)
        else:
            self.weight = Quantized(
                torch.zeros(rows, columns, device=device).to(codes_dtype),
                torch.ones(_num_scales(rows, columns, format), device=device),
                format,
            )
        has_bias = any(m.bias is not None for m in modules)
        self.bias = torch.zeros(rows, dtype=dtype, device=device) if has_bias else None

    @property
    def num_codes(self) -> int:
        return self.weight.codes.numel() if isinstance(self.weight, Quantized) else 0

    @property
    def num_bytes(self) -> int:
        weight = self.weight
        return weight.num_bytes if isinstance(weight, Quantized) else weight.nbytes

    def tensors(self) -> Iterator[Tensor]:
        """All that a multiplication reads."""
        if isinstance(self.weight, Quantized):
            yield from (self.weight.codes, self.weight.scale)
        else:
            yield self.weight
        if self.bias is not None:
            yield self.bias


@dataclass
class Layer:
    """Weights of one decoder layer."""

    qkv: tuple[Projection, ...]
    o: Projection
    gate_up: tuple[Projection, ...]
    down: Projection
    window: int | None
    has_alternating_gate: bool
    """Rows of gate_up are gate 0, up 0, gate 1, ...; else all gates come first."""
    norms: dict[str, Tensor] = field(default_factory=dict)
    """By module name: input_layernorm, post_attention_layernorm, and q_norm, k_norm where used."""

    def projections(self) -> Iterator[Projection]:
        yield from (*self.qkv, self.o, *self.gate_up, self.down)


@dataclass(frozen=True)
class Part:
    """One projection of the trainer, and the rows of the engine's buffers that hold it."""

    layer: int
    module: nn.Linear
    projection: Projection
    rows: slice

    @property
    def source(self) -> Tensor:
        return self.module.weight.detach()

    @property
    def weight(self) -> Quantized | Tensor:
        stored, rows = self.projection.weight, self.rows
        if not isinstance(stored, Quantized):
            return stored[rows]
        block = stored.format.block
        scales = slice(rows.start // block, -(-rows.stop // block)) if block else rows
        return Quantized(stored.codes[rows], stored.scale[scales], stored.format)

    @property
    def bias(self) -> Tensor | None:
        return None if self.projection.bias is None else self.projection.bias[self.rows]


@dataclass(frozen=True)
class Probe:
    """What shares one scale, a row or a tile, of the trainer's weight and as it is stored."""

    layer: int
    source: Tensor
    stored: Tensor
    scale: Tensor | None

    @staticmethod
    def of(part: Part, number: int) -> Probe:
        """The `number`-th row or tile, counted round and round."""
        weight, source = part.weight, part.source
        if not isinstance(weight, Quantized):
            row = number % len(source)
            return Probe(part.layer, source[row], weight[row], None)
        block = weight.format.block
        down, across = divmod(number % weight.scale.numel(), weight.scale.shape[1])
        scale = weight.scale[down, across]
        if block is None:
            return Probe(part.layer, source[down], weight.codes[down], scale)
        at = (slice(down * block, (down + 1) * block), slice(across * block, (across + 1) * block))
        tile, codes = _pad_tile(source[at], block), _pad_tile(weight.codes[at], block)
        return Probe(part.layer, tile, codes, scale)


class Transfer:
    """All that a sync writes: weights to quantize, and tensors to copy as they are.

    On a GPU it is recorded when it first runs and replayed from then on, because launching each
    kernel from Python would take longer than the kernels.
    """

    def __init__(
        self,
        codings: Sequence[tuple[Tensor, Quantized]],
        copies: Sequence[tuple[Tensor, Tensor]],
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._codings = codings
        self._copies = copies
        self._compute_dtype = compute_dtype
        self._kernel = _find_kernel(codings, device)
        sizes = [target.scale.numel() for _, target in codings] if self._kernel else []
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
            for source, target in self._codings:
                self._num_flips += _requantize_(source, target, self._compute_dtype)
        if self._copies:
            targets, sources = zip(*self._copies, strict=True)
            torch._foreach_copy_(targets, sources)

    def _launch(self, kernel: Requantizer) -> None:
        """Several streams at once: most weights are too small to fill a GPU by themselves."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        turns = itertools.cycle(self._streams)
        for (source, target), flips in zip(self._codings, self._flips_of, strict=True):
            with torch.cuda.stream(next(turns)) if self._streams else nullcontext():
                kernel(source, target, flips.view_as(target.scale), self._compute_dtype)
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        torch.sum(self._flips, 0, dtype=torch.int64, out=self._num_flips)


@dataclass(frozen=True)
class Whereabouts:
    """Where all parameters of a model lie.

    Looked up in the dicts of their owners: `model.parameters()` takes five times as long, which
    would be a good part of a small model's sync.
    """

    model: nn.Module
    children: Sequence[tuple[dict[str, nn.Module | None], dict[str, nn.Module | None]]]
    """Of each module, now and then."""
    places: Sequence[tuple[dict[str, nn.Parameter | None], str, Place]]
    """Of each parameter: its owner's dict, its name there, and where it was."""

    @staticmethod
    def of(model: nn.Module) -> Whereabouts:
        modules = list(model.modules())
        return Whereabouts(
            model,
            [(m._modules, dict(m._modules)) for m in modules if m._modules],
            [(m._parameters, n, _place(p)) for m in modules for n, p in m._parameters.items()],
        )

    def hold_for(self, model: nn.Module) -> bool:
        """Whether it is the same model, with every parameter where it was."""
        return (
            model is self.model
            and all(now == then for now, then in self.children)
            and all(_place(owner.get(name)) == place for owner, name, place in self.places)
        )


@dataclass(frozen=True)
class SyncPlan:
    """A sync from parameters at given addresses, and what is shared with them."""

    whereabouts: Whereabouts
    transfer: Transfer
    norms: Sequence[Mapping[str, Tensor]]
    """Of each layer."""
    embedding: Tensor
    norm: Tensor
    lm_head: Tensor


class Weights:
    """All weights of the actor."""

    def __init__(
        self,
        model: Any,
        quant: str,
        dtype: torch.dtype,
        device: torch.device,
        native_codes: bool | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """`native_codes`: keep codes in the format's 8 bits, as the kernels read them. A CPU
        multiplies them as FP32 numbers, so it keeps them as such. None: native on a GPU.
        `compute_dtype`: the trainer's; None: as `dtype`, that of the decoder."""
        self.arch = read_architecture(model)
        self.dtype = dtype
        self.compute_dtype = compute_dtype or dtype
        self.device = device
        self.format = None if quant == "none" else get_format(quant)
        self.native_codes = device.type == "cuda" if native_codes is None else native_codes
        self.is_loaded = False
        body = model.model
        self.layers = [
            self._allocate_layer(layer, window)
            for layer, window in zip(body.layers, self.arch.windows, strict=True)
        ]
        self.inv_freq = body.rotary_emb.inv_freq.float().clone()
        self.rope_scale = float(body.rotary_emb.attention_scaling)
        self.max_positions = context_length(body.config) or 32768
        self._copies: dict[str, Tensor] = {}
        self._plan: SyncPlan | None = None
        self.embedding: Tensor
        self.norm: Tensor
        self.lm_head: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(p.num_bytes for layer in self.layers for p in layer.projections())

    def addresses(self) -> tuple[int, ...]:
        """Of all tensors that the decoder reads; recorded decoding holds while they are equal."""
        tensors = [t for layer in self.layers for p in layer.projections() for t in p.tensors()]
        tensors += [t for layer in self.layers for t in layer.norms.values()]
        tensors += [self.embedding, self.norm, self.lm_head]
        return tuple(t.data_ptr() for t in tensors)

    @torch.no_grad()
    def load_(self, model: Any) -> float:
        """Take over the trainer's weights; returns the share of codes that changed.

        0 the first time, when there is nothing to compare with, and without quantization.
        """
        if self._plan is None or not self._plan.whereabouts.hold_for(model):
            self._plan = self._make_plan(model)
        plan = self._plan
        flips = plan.transfer.run()
        for layer, norms in zip(self.layers, plan.norms, strict=True):
            layer.norms.update(norms)
        self.embedding, self.norm, self.lm_head = plan.embedding, plan.norm, plan.lm_head
        num_codes = sum(p.num_codes for layer in self.layers for p in layer.projections())
        was_loaded, self.is_loaded = self.is_loaded, True
        return flips / num_codes if num_codes and was_loaded else 0.0

    @torch.no_grad()
    def check(self, model: Any, version: int) -> None:
        """Spot-check the copy: one row or tile of every projection, another one at each version.

        The canary prompt sees whether the whole computes sensibly, but quantization noise hides a
        small error there; this finds a stale, misplaced or damaged row exactly.
        """
        classes: dict[tuple[torch.Size, torch.dtype], list[Probe]] = defaultdict(list)
        for part in self._parts(model):
            probe = Probe.of(part, 7919 * version)
            classes[probe.source.shape, probe.source.dtype].append(probe)
        layers = [probe.layer for probes in classes.values() for probe in probes]
        differs = torch.cat(
            [_differ(probes, self.format, self.compute_dtype) for probes in classes.values()]
        )
        if failed := [
            layer for layer, is_bad in zip(layers, differs.tolist(), strict=True) if is_bad
        ]:
            raise SyncError(
                f"sync of version {version} failed: a projection of layer {min(failed)} in the "
                "engine is not the quantized copy of the trainer's"
            )

    def _allocate_layer(self, source: Any, window: int | None) -> Layer:
        attention, mlp = source.self_attn, source.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        return Layer(
            qkv=tuple(self._allocate(group) for group in self._fuse(qkv)),
            o=self._allocate([attention.o_proj]),
            gate_up=tuple(self._allocate(g) for g in self._fuse((mlp.gate_proj, mlp.up_proj))),
            down=self._allocate([mlp.down_proj]),
            window=window,
            has_alternating_gate=self.format is None or self.format.block is None,
        )

    def _allocate(self, modules: Sequence[nn.Linear]) -> Projection:
        return Projection(modules, self.format, self.dtype, self.device, self.native_codes)

    def _fuse(self, modules: Sequence[nn.Linear]) -> tuple[Sequence[nn.Linear], ...]:
        """Which projections share a buffer: all, unless a tile would span two of them."""
        block = (self.format and self.format.block) or 1
        can_fuse = all(m.out_features % block == 0 for m in modules)
        return (modules,) if can_fuse else tuple([m] for m in modules)

    def _parts(self, model: Any) -> Iterator[Part]:
        for index, (layer, source) in enumerate(zip(self.layers, model.model.layers, strict=True)):
            for projection, modules in self._pairs(layer, source):
                alternates = layer.has_alternating_gate and projection in layer.gate_up
                for module, rows in zip(modules, _rows_of(modules, alternates), strict=True):
                    yield Part(index, module, projection, rows)

    def _pairs(self, layer: Layer, source: Any) -> Iterator[tuple[Projection, Sequence[nn.Linear]]]:
        """Each projection of the engine with the trainer's modules that it holds."""
        attention, mlp = source.self_attn, source.mlp
        qkv = self._fuse((attention.q_proj, attention.k_proj, attention.v_proj))
        gate_up = self._fuse((mlp.gate_proj, mlp.up_proj))
        yield from zip(layer.qkv + layer.gate_up, qkv + gate_up, strict=True)
        yield layer.o, [attention.o_proj]
        yield layer.down, [mlp.down_proj]

    def _make_plan(self, model: Any) -> SyncPlan:
        codings: list[tuple[Tensor, Quantized]] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for part in self._parts(model):
            weight = part.weight
            if isinstance(weight, Quantized):
                codings.append((part.source, weight))
            else:
                copies.append((weight, part.source))
            if part.bias is not None and part.module.bias is not None:
                copies.append((part.bias, part.module.bias.detach()))

        def share(name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
            """The parameter's own storage where dtype and device agree, else our copy of it."""
            source = parameter.detach()
            if source.dtype == dtype and source.device == self.device:
                return source
            if name not in self._copies:
                self._copies[name] = torch.empty(source.shape, dtype=dtype, device=self.device)
            copies.append((self._copies[name], source))
            return self._copies[name]

        body = model.model
        norms = [
            {
                kind: share(f"layers.{index}.{kind}", module.weight, torch.float32)
                for name, module in layer.named_modules()
                if (kind := name.rpartition(".")[2]) in _NORMS
            }
            for index, layer in enumerate(body.layers)
        ]
        embedding = share("embedding", body.embed_tokens.weight, self.dtype)
        norm = share("norm", body.norm.weight, torch.float32)
        is_tied = model.lm_head.weight is body.embed_tokens.weight
        lm_head = embedding if is_tied else share("lm_head", model.lm_head.weight, self.dtype)
        transfer = Transfer(codings, copies, self.compute_dtype, self.device)
        return SyncPlan(Whereabouts.of(model), transfer, norms, embedding, norm, lm_head)


def _place(parameter: nn.Parameter | None) -> Place:
    return None if parameter is None else (parameter.data_ptr(), parameter.dtype)


def _rows_of(modules: Sequence[nn.Linear], alternates: bool) -> Iterator[slice]:
    """The rows of each module in the buffer that they share."""
    num_rows, start = sum(m.out_features for m in modules), 0
    for index, module in enumerate(modules):
        stop = start + module.out_features
        yield slice(index, num_rows, len(modules)) if alternates else slice(start, stop)
        start = stop


def _num_scales(rows: int, columns: int, format: Format) -> tuple[int, int]:
    block = format.block
    return (-(-rows // block), -(-columns // block)) if block else (rows, 1)


def _find_kernel(
    codings: Sequence[tuple[Tensor, Quantized]], device: torch.device
) -> Requantizer | None:
    """The fused quantizer, where device, format and sources permit."""
    if not codings or device.type != "cuda" or find_spec("triton") is None:
        return None
    from qurl.quant.kernels.requantize import SOURCE_DTYPES, requantize_

    has_fp8, format = Target.of(device).has_fp8, codings[0][1].format
    has_sources = all(
        s.dtype in SOURCE_DTYPES and s.device == device and s.is_contiguous() for s, _ in codings
    )
    if not has_sources or not (format.is_integer or has_fp8):
        return None
    return requantize_


def _requantize_(source: Tensor, target: Quantized, dtype: torch.dtype) -> Tensor:
    """Rewrite codes and scale in place; returns how many codes changed."""
    fresh = quantize(source.to(dtype), target.format)
    # Compared as numbers: a zero that changes its sign is no flip.
    flips = (target.codes.float() != fresh.codes.float()).sum()
    target.codes.copy_(fresh.codes)
    target.scale.copy_(fresh.scale)
    return flips


def _differ(probes: Sequence[Probe], format: Format | None, dtype: torch.dtype) -> Tensor:
    """Which probes [n], all of one shape, are not what quantizing their source in `dtype` gives."""
    source = torch.stack([p.source for p in probes])
    stored = torch.stack([p.stored for p in probes])
    if format is None:
        return (source.to(stored.dtype) != stored).any(-1)
    fresh = quantize(source.flatten(0, -2).to(dtype), format)
    scale = torch.stack([p.scale for p in probes if p.scale is not None])
    differs = fresh.codes.float() != stored.flatten(0, -2).float()
    return differs.view(len(probes), -1).any(-1) | (fresh.scale.flatten() != scale)


def _pad_tile(x: Tensor, block: int) -> Tensor:
    rows, columns = x.shape
    return F.pad(x, (0, block - columns, 0, block - rows))


def read_architecture(model: Any) -> Architecture:
    """The shape of the model, or a ModelError that names what the local engine cannot compute."""
    config = model.config
    if config.model_type not in MODEL_TYPES:
        raise ModelError(refusal(f"model_type = {config.model_type!r}", MODEL_TYPES))
    if config.hidden_act != "silu":
        raise ModelError(refusal(f"hidden_act = {config.hidden_act!r}", ("silu",)))
    rotary = model.model.rotary_emb
    if rotary.rope_type not in ROPE_TYPES:
        raise ModelError(refusal(f"rope_type = {rotary.rope_type!r}", ROPE_TYPES))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rotary.inv_freq.shape[-1] * 2 != head_dim:
        raise ModelError(refusal("partial rotary embedding", ("rotation of the whole head",)))
    _check_layers(model)
    return Architecture(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        windows=_windows(config),
    )


def _check_layers(model: Any) -> None:
    """Every weight must be one that the decoder uses, and every projection a plain linear layer."""
    for name, module in model.model.layers.named_modules():
        kind = name.rpartition(".")[2]
        if kind in PROJECTIONS and type(module) is not nn.Linear:
            raise ModelError(
                refusal(f"model.layers.{name} of type {type(module).__name__}", ("nn.Linear",))
            )
        has_weights = next(module.parameters(recurse=False), None) is not None
        if has_weights and kind not in PROJECTIONS + _NORMS:
            raise ModelError(refusal(f"weights in model.layers.{name}", PROJECTIONS + _NORMS))
    if getattr(model.lm_head, "bias", None) is not None:
        raise ModelError(refusal("lm_head with a bias", ("lm_head without bias",)))


def _windows(config: Any) -> tuple[int | None, ...]:
    """Sliding window of each layer, as transformers applies it to the four model types."""
    if config.model_type == "llama":
        return (None,) * config.num_hidden_layers
    if config.model_type == "mistral":
        return (config.sliding_window,) * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": config.sliding_window}
    if unknown := set(config.layer_types) - set(known):
        raise ModelError(refusal(f"layer_types with {sorted(unknown)}", tuple(known)))
    return tuple(known[kind] for kind in config.layer_types)


def refusal(what: str, supported: Sequence[str]) -> str:
    return (
        f"the local engine cannot run {what}; it supports {', '.join(supported)}. "
        'Set rollout.engine = "hf" to sample with transformers instead'
    )
