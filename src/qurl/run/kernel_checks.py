"""Each family of Triton kernels against torch, on numbers of a small model.

The engine's operations run twice on the same inputs, once by kernels and once by torch primitives.
A gap is |found - expected| / |expected| over all numbers of a result; on a GPU kernels round to
BF16, so 0.004 is normal, and a code that rounds the other way makes some 0.01 in FP8.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from triton.errors import TritonError

from qurl.errors import QurlError, first_line
from qurl.ops import coding, flash
from qurl.ops.attention import attend_dense
from qurl.ops.device import default_dtype
from qurl.ops.target import Target
from qurl.quant import dequantize, get_format, quantize
from qurl.quant.formats import Quantized, quantize_activation
from qurl.quant.kernels.requantize import requantize_
from qurl.quant.linear import Partial, finish
from qurl.rollout.local.cache import KVCache
from qurl.rollout.local.decoder import decode, prefill
from qurl.rollout.local.fused import FusedOps
from qurl.rollout.local.ops import LayerCache
from qurl.rollout.local.reference import ReferenceOps
from qurl.rollout.local.sync import WeightSync
from qurl.rollout.local.weights import Weights
from qurl.rollout.sampler import RowParams
from qurl.run.machine import Finding
from qurl.trainer import moments
from qurl.trainer.kernels import adamw8bit, token_scores
from qurl.trainer.layers import fuse_layers_
from qurl.types import KVScales, SamplingParams

BOUND = 0.04
"""Largest gap. A wrong index or a lost scale gives 0.1 and more."""
FAILURES = (QurlError, TritonError, RuntimeError, ValueError, TypeError, AssertionError)
"""What a kernel that does not compile, launch or fit the GPU raises."""
ADVICE = "do not train here; report it with the output of qurl doctor --json"
OPERATIONS = {
    "begin": "embedding",
    "input_norm": "norms and coding",
    "final_norm": "norms and coding",
    "project": "products",
    "head": "products",
    "rotate": "rotations and cache",
    "attend_prompts": "attention over prompts",
    "attend_pages": "attention over pages",
    "mlp": "MLP",
    "sample": "sampling",
}
"""Families of the engine's operations."""
PAGE_SIZE = 16
PROMPTS = ([3, 4, 5, 6, 7], [11, 12, 13])
PAGES = ([1, 3], [2, 4])


def check_kernels(device: torch.device) -> Iterator[Finding]:
    """A line per family; one that cannot run fails alone."""
    has_fp8 = Target.of(device).has_fp8
    formats, kv = (("int8", "fp8"), "fp8") if has_fp8 else (("int8",), "none")
    gaps: dict[str, float] = {}
    for format in ("none", *formats, "nvfp4"):
        try:
            found = engine_gaps(device, format, "none" if format == "none" else kv)
        except FAILURES as error:
            yield broken(f"engine in {format}", error)
        else:
            gaps |= {n: max(gap, gaps.get(n, 0.0), key=_badness) for n, gap in found.items()}
    yield from (judge(f"engine, {name}", gap) for name, gap in gaps.items())
    checks: Mapping[str, Callable[[torch.device], float]] = {
        **{f"weights in {n}": lambda d, n=n: weight_gap(d, n) for n in (*formats, "nvfp4")},
        "trainer, attention": attention_gap,
        "trainer, layers": layer_gap,
        **{f"trainer, gradients in {n}": lambda d, n=n: gradient_gap(d, n) for n in formats},
        "trainer, head": head_gap,
        "trainer, 8-bit AdamW": optimizer_gap,
    }
    for name, check in checks.items():
        try:
            yield judge(name, check(device))
        except FAILURES as error:
            yield broken(name, error)


def judge(name: str, gap: float) -> Finding:
    """NaN is a failure."""
    if gap <= BOUND:
        return Finding("ok", f"kernels of {name}", f"{gap:.1e} from torch")
    return Finding("FAIL", f"kernels of {name}", f"{gap:.1e} from torch, at most {BOUND}", ADVICE)


def broken(name: str, error: BaseException) -> Finding:
    cause = f"{type(error).__name__}: {first_line(error)}"
    return Finding("FAIL", f"kernels of {name}", cause, ADVICE)


def build_model(device: torch.device) -> Any:
    """One layer of Qwen2, with heads and widths that every kernel takes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 320}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config: dict[str, Any] = {**sizes, **heads, "initializer_range": 0.1}
    model: Any = Qwen2ForCausalLM(Qwen2Config(**config))
    return model.to(device).eval()


class Twin:
    """Operations that also run by torch on the CPU, and keep the largest gap of each family."""

    def __init__(self, weights: Weights, reference: Weights) -> None:
        self.weights = weights
        self.row_multiple = FusedOps.row_multiple
        self.gaps: dict[str, float] = {}
        self._kernels, self._reference = FusedOps(weights), ReferenceOps(reference)
        pairs = zip(
            (*weights.layers, *weights.projections()),
            (*reference.layers, *reference.projections()),
            strict=True,
        )
        self._counterparts = {id(one): other for one, other in pairs}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        family = OPERATIONS[name]

        def run(*args: Any, **options: Any) -> Any:
            copies = self._copy(args)
            found = getattr(self._kernels, name)(*args, **options)
            expected = getattr(self._reference, name)(*copies, **options)
            # Both also change their arguments: x += delta, and the cache.
            gap = _largest_gap(_tensors((found, args)), _tensors((expected, copies)))
            self.gaps[family] = max(gap, self.gaps.get(family, 0.0), key=_badness)
            return found

        return run

    def _copy(self, value: Any) -> Any:
        """The same on the CPU: weights are the reference's own, all else is copied."""
        if id(value) in self._counterparts:
            return self._counterparts[id(value)]
        if isinstance(value, Tensor):
            return value.to("cpu", copy=True)
        if isinstance(value, (tuple, list)):
            return type(value)(self._copy(item) for item in value)
        if isinstance(value, (Quantized, Partial, LayerCache, RowParams)):
            fields = dataclasses.fields(value)
            copied = {f.name: self._copy(getattr(value, f.name)) for f in fields}
            return dataclasses.replace(value, **copied)
        return value


@torch.no_grad()
def engine_gaps(device: torch.device, format: str, kv: str) -> dict[str, float]:
    """Gaps by family of a prefill, one decode step and one sample."""
    weights, reference = (
        load_weights(build_model(place), format, default_dtype(device), place)
        for place in (device, torch.device("cpu"))
    )
    ops: Any = Twin(weights, reference)
    cache = make_cache(weights, kv)
    prefill(ops, PROMPTS, cache, PAGES)
    tokens, positions = (
        torch.tensor(row, device=device) for row in ([9, 10], [len(p) for p in PROMPTS])
    )
    table = torch.zeros(2, 64 // PAGE_SIZE, dtype=torch.int32, device=device)
    table[:, :2] = torch.tensor(PAGES)
    logits = decode(ops, cache, tokens, positions, table)
    params = RowParams.stack([SamplingParams(1)], device)
    ops.sample(logits, positions, positions, params)
    return ops.gaps


def load_weights(model: Any, format: str, dtype: torch.dtype, device: torch.device) -> Weights:
    weights = Weights(model, format, dtype, device, native_codes=True)
    WeightSync(weights).load_(model)
    return weights


def make_cache(weights: Weights, kv: str) -> KVCache:
    arch, device = weights.arch, weights.device
    shape = (arch.num_layers, 2, 5, PAGE_SIZE, arch.num_kv_heads, arch.head_dim)
    if kv == "none":
        return KVCache(torch.zeros(shape, dtype=weights.dtype, device=device))
    data = torch.zeros(shape, device=device).to(torch.float8_e4m3fn)
    scale = torch.full((arch.num_layers, 2, arch.num_kv_heads), 2.0**-6, device=device)
    center = torch.zeros(arch.num_layers, arch.num_kv_heads, arch.head_dim, device=device)
    return KVCache(data, KVScales(scale, center))


def weight_gap(device: torch.device, format: str) -> float:
    """Coding a weight, as a sync does."""
    weight = _normal(device, 16, 128)
    expected = quantize(weight, format)
    found = quantize(torch.zeros_like(weight), format)
    counted = found.scale if found.tensor_scale is None else found.tensor_scale
    requantize_(weight, found, torch.zeros_like(counted, dtype=torch.int32))
    return gap_of(dequantize(found), dequantize(expected))


def attention_gap(device: torch.device) -> float:
    """Attention and its gradients over two packed sequences."""
    lengths, size = (40, 24), 64
    shapes = enumerate((4, 2, 2))  # heads of queries, keys and values
    leaves = [_normal(device, sum(lengths), h, size, seed=i).bfloat16() for i, h in shapes]
    bounds = torch.tensor([0, 40, 64], dtype=torch.int32, device=device)
    upstream = _normal(device, sum(lengths), 4, size)
    found = _gradients(
        leaves, upstream.bfloat16(), lambda q, k, v: flash.attend(q, k, v, flash.Spans(bounds, 40))
    )

    def dense(*heads: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths) for x in heads), strict=True)
        rows = [[x.transpose(0, 1)[None] for x in part] for part in parts]
        attended = [attend_dense(*part, is_causal=True) for part in rows]
        return torch.cat([x[0].transpose(0, 1) for x in attended])

    return _largest_gap(found, _gradients([x.float() for x in leaves], upstream, dense))


def layer_gap(device: torch.device) -> float:
    """Norms, gate and rotation of the fused layers, and all gradients, in FP32."""
    plain = build_model(device).train()
    fused = copy.deepcopy(plain)
    if not fuse_layers_(fused):
        raise ValueError("the fused layer does not compute what its model does")
    ids = torch.arange(48, device=device).view(2, 24)
    results = []
    for model in (fused, plain):
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append([logits, *(gradients[name] for name in sorted(gradients))])
    return _largest_gap(*results)


def gradient_gap(device: torch.device, format: str) -> float:
    """Gradients as codes."""
    numbers, channel_scale = _normal(device, 40, 96), _normal(device, 96, seed=1).abs()
    coded = get_format(format)
    codes = torch.zeros(40, 96, dtype=coded.dtype, device=device)
    scale = torch.zeros(40, device=device)
    coding.code_gradient(numbers, channel_scale, codes, scale, coded.largest)
    expected = dequantize(quantize_activation(numbers * channel_scale, coded))
    return gap_of(codes.float() * scale[:, None], expected)


def head_gap(device: torch.device) -> float:
    """Log-probs, entropies and the gradient of the logits."""
    logits, targets = _normal(device, 8, 320), torch.arange(8, device=device)
    logp, log_z, entropy = token_scores.score_rows(logits, targets, 0.5)
    ones = torch.ones_like(logp)
    gradient = token_scores.logit_gradients(
        logits.clone(), targets, log_z, ones, factor=0.5, dtype=torch.float32
    )
    leaf = logits.double().requires_grad_()
    scores = (leaf * 0.5).log_softmax(-1)
    chosen = scores.gather(-1, targets[:, None]).squeeze(-1)
    chosen.sum().backward()
    entropies = -(scores.exp() * scores).sum(-1)
    return _largest_gap([logp, entropy, gradient], [chosen, entropies, leaf.grad])


def optimizer_gap(device: torch.device) -> float:
    """Two updates with 8-bit moments, against torch on the CPU."""
    cpu = torch.device("cpu")
    group = {"betas": (0.9, 0.95), "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8}
    results = []
    for place, update_ in ((device, adamw8bit.update_), (cpu, moments.update_)):
        weight = _normal(cpu, 1024).to(place)
        held = moments.make_moments(weight, is_coded=True)
        for step in (1, 2):
            gradient = _normal(cpu, 1024, seed=step).to(place)
            update_(weight, gradient, **held, update=moments.Update.of(group, step, 1.0))
        results.append([weight - _normal(cpu, 1024).to(place)])
    return _largest_gap(*results)


def gap_of(found: Tensor, expected: Tensor) -> float:
    """Relative, over all numbers; whole numbers must agree."""
    if not expected.dtype.is_floating_point:
        return (found.cpu() != expected.cpu()).double().mean().item()
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    size = expected.norm()
    return ((found - expected).norm() / (size if size else 1.0)).item()


def _largest_gap(found: Iterable[Tensor], expected: Iterable[Any]) -> float:
    gaps = torch.tensor([gap_of(a, b) for a, b in zip(found, expected, strict=True)])
    return gaps.max().item()  # NaN if one is


def _gradients(
    leaves: Iterable[Tensor], upstream: Tensor, function: Callable[..., Tensor]
) -> list[Tensor]:
    """The result of a function and its gradients."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    result = function(*leaves)
    return [result, *torch.autograd.grad(result, leaves, upstream)]


def _normal(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _badness(gap: float) -> float:
    return math.inf if math.isnan(gap) else gap


def _tensors(value: Any) -> list[Tensor]:
    """All numbers of a result, codes and unfinished products as what they stand for."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Quantized):
        return [dequantize(value)]
    if isinstance(value, Partial):
        return [finish(value)]
    if isinstance(value, LayerCache):
        return [value.data.float()]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
