"""The decoder's operations in Triton, for GPUs: ten kernels a layer and no host synchronisation.

Plans choose each product by shape (`qurl.quant.kernels.plans`). With `unified`, every operation but
the head has the bits of the trainer's, whatever the batch; attention if `flash` supports its heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qurl.errors import EngineError
from qurl.ops import flash
from qurl.ops.attention import attend_flash
from qurl.ops.target import Target
from qurl.quant import Quantized
from qurl.quant.kernels.gemm import multiply, multiply_gated
from qurl.quant.kernels.plans import Choice, Plans, kind_of
from qurl.quant.kernels.rows import add_norm, as_operand, quantize_rows, swiglu
from qurl.quant.linear import Operand, Product, finish
from qurl.rollout.local.kernels.attention import attend_pages, chunks_for
from qurl.rollout.local.kernels.flash_pages import attend_pages_alike
from qurl.rollout.local.kernels.rope import rotate_and_store
from qurl.rollout.local.kernels.sampling import sample_rows
from qurl.rollout.local.kernels.step import begin_step
from qurl.rollout.local.ops import LayerCache
from qurl.rollout.local.reference import attend_prompts
from qurl.rollout.local.weights import Layer, Projection, Weights
from qurl.rollout.sampler import RowParams, sample, uniform


class FusedOps:
    """Triton kernels; on a CPU they run in Triton's interpreter, for tests."""

    row_multiple = 1

    def __init__(
        self, weights: Weights, *, deterministic: bool = False, unified: bool = False
    ) -> None:
        self.weights = weights
        self.arch, self.dtype = weights.arch, weights.dtype
        self.target = Target.of(weights.device)
        self.kind = kind_of(weights.format, self.target)
        if deterministic and weights.has_shared_base:
            raise EngineError(
                "rollout.deterministic = true does not go with model.base = 'nvfp4' on a GPU: "
                "cuBLAS multiplies the adapters, and its sums follow the batch"
            )
        self.deterministic, self.unified = deterministic, unified
        self.plans = Plans(self.target, deterministic=deterministic, unified=unified)

    def begin(
        self, tokens: Tensor, positions: Tensor, table: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor]:
        return begin_step(self.weights.embedding, tokens, positions, table, page_size)

    def input_norm(self, layer: Layer, x: Tensor, delta: Product | None) -> Operand:
        norm, eps = layer.norms["input_layernorm"], self.arch.norm_eps
        return add_norm(x, delta, norm, eps, layer.format, self.dtype)

    def final_norm(self, x: Tensor, delta: Product | None) -> Tensor:
        h = add_norm(x, delta, self.weights.norm, self.arch.norm_eps, None, self.dtype)
        assert isinstance(h, Tensor)
        return h

    def project(self, projections: Sequence[Projection], h: Operand) -> Product:
        products = [self._project(p, h) for p in projections]
        return products[0] if len(products) == 1 else torch.cat([finish(p) for p in products], -1)

    def rotate(
        self, qkv: Product, layer: Layer, positions: Tensor, cache: LayerCache | None, keep_kv: bool
    ) -> tuple[Tensor, ...]:
        norms = (layer.norms["q_norm"], layer.norms["k_norm"]) if "q_norm" in layer.norms else None
        return rotate_and_store(
            qkv,
            positions,
            (self.weights.cos, self.weights.sin),
            norms,
            cache,
            num_kv_heads=self.arch.num_kv_heads,
            eps=self.arch.norm_eps,
            dtype=self.dtype,
            keep_kv=keep_kv,
        )

    def attend_prompts(
        self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]
    ) -> Operand:
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            bounds = bounds.to(q.device, non_blocking=True)
            out = attend_flash(q, k, v, bounds, max(lengths), layer.window).flatten(1)
        else:
            out = attend_prompts(q, k, v, lengths, layer.window)
        return as_operand(out, layer.format)

    def attend_pages(
        self, layer: Layer, q: Tensor, cache: LayerCache, table: Tensor, positions: Tensor
    ) -> Operand:
        if self.unified and flash.supports(q):
            pages = (cache.data, table, positions, layer.window, cache.scale)
            return as_operand(attend_pages_alike(q, *pages).flatten(1), layer.format)
        num_chunks = chunks_for(table.shape[1] * cache.data.shape[2])
        return attend_pages(
            *(q, cache.data, table, positions, layer.window, cache.scale, layer.format),
            num_chunks=num_chunks,
        )

    def mlp(self, layer: Layer, x: Tensor, delta: Product) -> Product:
        # The norm zeroes it and the product raises it, which saves a kernel.
        amax = torch.empty(x.shape[0], device=x.device)
        norm, eps = layer.norms["post_attention_layernorm"], self.arch.norm_eps
        h = add_norm(x, delta, norm, eps, layer.format, self.dtype, clear=amax)
        return self.project((layer.down,), self._gate_and_up(layer, h, amax))

    def head(self, h: Tensor) -> Tensor:
        lm_head = self.weights.lm_head
        if self.deterministic:
            plan = self._plan(lm_head, h)
            assert plan is not None, "deterministic plans never name the library"
            return finish(multiply(h, lm_head, None, torch.float32, plan))
        if not h.is_cuda:
            return F.linear(h, lm_head).float()
        # Not rounded to BF16, whose last bit at 16 is 1/8: a log-prob would inherit it.
        return torch.mm(h, lm_head.T, out_dtype=torch.float32)

    def sample(
        self, logits: Tensor, keys: Tensor, counters: Tensor, params: RowParams
    ) -> tuple[Tensor, Tensor]:
        if params.has_filter:
            return sample(logits.float(), uniform(keys, counters), params)
        return sample_rows(logits, params.temperature, keys, counters)

    def _gate_and_up(self, layer: Layer, h: Operand, amax: Tensor) -> Operand:
        """silu(gate) * up, in the epilogue of the product if possible."""
        projection = layer.gate_up[0]
        plan = self._plan(projection.weight, h)
        if plan is None or not layer.has_alternating_gate or projection.adapter is not None:
            product = self.project(layer.gate_up, h)
            return swiglu(product, layer.format, self.dtype, layer.has_alternating_gate)
        plan = dataclasses.replace(plan, splits=0)
        weight, bias = projection.weight, projection.bias
        if layer.format is None:
            return multiply_gated(h, weight, bias, self.dtype, plan)
        y = multiply_gated(h, weight, bias, self.dtype, plan, amax)
        return quantize_rows(y, layer.format, amax)

    def _plan(self, weight: Operand, h: Operand) -> Choice:
        rows = (h.codes if isinstance(h, Quantized) else h).shape[0]
        return self.plans.choose(self._kind(weight), rows, *weight.shape)

    def _kind(self, weight: Operand) -> str:
        numbers = "bf16" if self.dtype.itemsize == 2 else "fp32"
        return self.kind if isinstance(weight, Quantized) else numbers

    def _project(self, projection: Projection, h: Operand) -> Product:
        weight, bias, adapter = projection.weight, projection.bias, projection.adapter
        product = self.plans.multiply(self._kind(weight), h, weight, bias, self.dtype)
        if adapter is None:
            return product
        assert isinstance(h, Tensor)
        return adapter.add_(finish(product), h)
