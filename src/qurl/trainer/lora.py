"""LoRA: frozen weights, and a trained product of two thin matrices that is added to each.

    W = W0 + s B A        s = alpha / rank;  A [rank, K] random, B [N, rank] 0 at first

`layer.weight` is W, computed whenever it is read: an adapter is a torch parametrization. Engine,
quantizers and fused layers see one dense weight, so rollouts are as fast as without LoRA, and the
trainer multiplies by what the engine codes. W0 is kept in the compute dtype, A and B are FP32
masters. No dW [N, K] is needed for their gradients, which are thin products, too:

    dB = s dy^T (x A^T)        dA = s (dy B)^T x

With `model.base = "nvfp4"` W0 is frozen in codes, and the adapter is not merged but multiplied
beside it (`qurl.quant.coded_linear`).

Saved adapters have peft's file format. Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qurl.errors import ModelError
from qurl.quant import dequantize, quantize
from qurl.quant.coded_linear import CodedLinear
from qurl.quant.linear import PROJECTIONS, projections
from qurl.quant.scaling import uaq_scale
from qurl.seeds import generator
from qurl.trainer.products import as_factor, multiply
from qurl.trainer.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

PREFIX = "base_model.model."
"""What peft puts before a module's name."""
BASE = "qurl_base"
"""Setting of ours in peft's config: the format that W0 is coded in."""
VARIANTS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
"""Settings of peft that make an adapter more than s B A."""


class Adapter(nn.Module):
    """The s B A of one layer, as a parametrization of its weight."""

    def __init__(self, base: Tensor, rank: int, alpha: int, draw: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = base.shape
        a = torch.empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=draw)
        self.A = nn.Parameter(a.to(base.device))
        self.B = nn.Parameter(a.new_zeros(outputs, rank).to(base.device))
        self.scale = alpha / rank
        self.is_on = True

    def forward(self, base: Tensor) -> Tensor:
        """W [N, K] in the precision of A and B."""
        return merge(base, self.A, self.B, self.scale) if self.is_on else base.to(self.A.dtype)

    @torch.no_grad()
    def add_gradients_(self, dy: Tensor, x: Tensor) -> None:
        """Add dA and dB of dy [M, N] and x [M, K]; factors have the dtype of dy, sums are FP32."""
        dy, x, a, b = (as_factor(t, dy.dtype) for t in (dy, x, self.A, self.B))
        narrow_x, narrow_dy = (
            as_factor(self.scale * multiply(wide, thin), dy.dtype)  # [M, rank]
            for wide, thin in ((x, a.T), (dy, b))
        )
        self.B.grad = multiply(dy.T, narrow_x, self.B.grad)
        self.A.grad = multiply(narrow_dy.T, x, self.A.grad)


def merge(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W0 + s B A, not rounded to the dtype of W0."""
    with torch.autocast(base.device.type, enabled=False):
        return ((scale * b) @ a).add_(base)


def add_adapters_(model: Any, rank: int, alpha: int, seed: int, dtype: torch.dtype) -> None:
    """Freeze a model, and give each projection an adapter; the function stays the same.

    Projections, embedding and head are held in `dtype`, all else as it was.
    """
    if (scale := uaq_scale(model)) != 1:
        raise ModelError(
            f"{model.name_or_path} carries UAQ with s = {scale:g}, which model.lora_rank cannot "
            "train; undo it with qurl export, and set model.path to the result"
        )
    layers = list(projections(model))
    if not layers:
        kind = type(model).__name__
        raise ModelError(
            f"{kind} has no layer named like {', '.join(PROJECTIONS)} to adapt; set "
            "model.lora_rank = 0"
        )
    model.requires_grad_(False)
    for name, layer in layers:
        adapter = Adapter(layer.weight, rank, alpha, generator(seed, "lora", name))
        if isinstance(layer, CodedLinear):
            layer.adapter = adapter
            continue
        layer.weight.data = layer.weight.data.to(dtype)
        parametrize.register_parametrization(layer, "weight", adapter, unsafe=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for module, kind in ((embedding, nn.Embedding), (head, nn.Linear)):
        if type(module) is kind:  # others may have a forward of their own
            module.weight.data = module.weight.data.to(dtype)
    if type(embedding) is nn.Embedding:
        model.set_input_embeddings(FrozenEmbedding(embedding))
    if type(head) is nn.Linear:
        model.set_output_embeddings(FrozenHead(head))


class FrozenEmbedding(nn.Embedding):
    """Another's embedding, read as FP32. Gradients pass through what it returns.

    Fused layers have no other input that asks for a gradient.
    """

    def __init__(self, source: nn.Embedding) -> None:
        super().__init__(source.num_embeddings, source.embedding_dim, device="meta")
        self.weight, self.training = source.weight, source.training

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float().requires_grad_(torch.is_grad_enabled())


class FrozenHead(nn.Linear):
    """Another's head, multiplied in the precision of what it gets."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source.in_features, source.out_features, bias=False, device="meta")
        self.weight, self.bias, self.training = source.weight, source.bias, source.training

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), self.bias)


def find_adapter(layer: nn.Module) -> Adapter | None:
    if isinstance(layer, CodedLinear):
        return layer.adapter
    if not parametrize.is_parametrized(layer, "weight"):
        return None
    return layer.parametrizations.weight[0]  # type: ignore[index,union-attr]


def adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Name of each adapted layer, and its adapter."""
    for name, layer in projections(model):
        if (adapter := find_adapter(layer)) is not None:
            yield name, adapter


def weight_version(layer: nn.Linear) -> tuple[Any, ...]:
    """Differs as soon as the layer's weight or bias does."""
    adapter = find_adapter(layer)
    parts = [p for p in layer._parameters.values() if p is not None]
    if adapter is not None:
        parts += [adapter.A, adapter.B]
    is_on = adapter is not None and adapter.is_on
    return (is_on, *((part.data_ptr(), part._version) for part in parts))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights alone."""
    found = [adapter for _, adapter in adapters(model)]
    for adapter in found:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.is_on = True


def save_adapters(model: Any, folder: Path) -> None:
    """Write a folder that peft loads; the frozen weights stay where they were loaded from."""
    folder.mkdir(parents=True, exist_ok=True)
    found = dict(adapters(model))
    one = next(iter(found.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name_or_path,
        "r": one.A.shape[0],
        "lora_alpha": round(one.scale * one.A.shape[0]),
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in found}),
    }
    layer = next(layer for _, layer in projections(model))
    if isinstance(layer, CodedLinear):
        config[BASE] = layer.format.name
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tensors = {
        f"{PREFIX}{name}.lora_{part}.weight": getattr(adapter, part).detach().cpu().contiguous()
        for name, adapter in found.items()
        for part in "AB"
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def load_adapters_(model: nn.Module, folder: Path) -> None:
    """Take over the factors that `save_adapters` wrote of a model with the same adapters."""
    saved = load_file(folder / ADAPTER_WEIGHTS)
    for name, adapter in adapters(model):
        for part in "AB":
            getattr(adapter, part).copy_(saved.pop(f"{PREFIX}{name}.lora_{part}.weight"))
    if saved:
        raise ValueError(
            f"{folder / ADAPTER_WEIGHTS} has {next(iter(saved))}, which the model lacks"
        )


def base_of(path: str | Path) -> str | Path:
    """The model that a folder of adapters is for; any other path as it is."""
    config = _read_config(path)
    return path if config is None else config["base_model_name_or_path"]


@torch.no_grad()
def merge_adapters_(model: nn.Module, path: str | Path) -> None:
    """Add what a folder of adapters holds to a plain model; nothing if it is another folder."""
    if (config := _read_config(path)) is None:
        return
    if variants := [name for name in VARIANTS if config.get(name)]:
        raise ValueError(f"{ADAPTER_CONFIG} has {', '.join(variants)}; merge it with peft first")
    saved = load_file(Path(path, ADAPTER_WEIGHTS))
    parameters = dict(model.named_parameters())
    names = {key.removeprefix(PREFIX).partition(".lora_")[0] for key in saved}
    for name in sorted(names):
        a, b = (saved[f"{PREFIX}{name}.lora_{part}.weight"] for part in "AB")
        weight = parameters[f"{name}.weight"]
        if format := config.get(BASE):
            weight.copy_(dequantize(quantize(weight, format)))
        weight.copy_(merge(weight, a, b, config["lora_alpha"] / config["r"]))


def _read_config(path: str | Path) -> dict[str, Any] | None:
    file = Path(path, ADAPTER_CONFIG)
    return json.loads(file.read_text()) if file.is_file() else None
