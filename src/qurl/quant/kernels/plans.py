"""Which plan computes which product: measured ones first, a rule of thumb for the rest.

`qurl tune` measures the products (format, N, K, M) of a model and writes a table to the user's
cache; the package ships one for compute capability 9.0. Formats share entries by what they
multiply: "int8", "fp8", "nvfp4" or "bf16"; "fp32" is never measured.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl.errors import EngineError
from qurl.ops.target import Target
from qurl.quant.formats import BLOCK, Format, Quantized
from qurl.quant.kernels.gemm import Plan, library_product, multiply
from qurl.quant.linear import Operand, Product

SHIPPED = {(9, 0): "plans_h200.json"}
"""Tables of the package by compute capability, which decides whether a plan fits: it sets the
shared memory. The number of multiprocessors affects a plan's speed, not its result."""
BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 8192)
"""Numbers of tokens that are measured; others take the plan of the next larger one there is, except
in unified flows."""
STEPS = {"bf16": 64, "fp32": 32}
"""Input channels per step of plain numbers, 128 bytes. Without a measured plan cuBLAS has these."""
FEW_TOKENS = 1024
"""More than these fill a GPU with large tiles."""
PACKED_TOKENS = 256
"""NVFP4 weights of more tokens are decoded for cuBLAS; a guess from their bytes, not measured."""
_FIXED_TOKENS = 64
"""In deterministic mode the cut of K is that of this many tokens, whatever the batch."""

Choice = Plan | None
"""None: the vendor's library is faster (cuBLAS)."""
TableKey = tuple[str, int, int, int]
"""What is multiplied, N, K, M."""


class Plans:
    """The plans of one device."""

    def __init__(
        self, target: Target, *, deterministic: bool = False, unified: bool = False
    ) -> None:
        """With `unified`, trainer and engine must agree to the bit for every number of tokens. Sums
        of integers do; those of FP8 codes do if they are added up in one part. They are fast ones:
        their error is a tenth of the rounding's, and the same on both sides."""
        self.target = target
        self.deterministic, self.unified = deterministic, unified
        own, shipped = user_table(target.name), SHIPPED.get(target.capability or (0, 0))
        tables: dict[str, Mapping[TableKey, Choice]] = {}
        if own.exists():
            tables[f"{own.name} (user's cache)"] = open_table(own)
        if shipped:
            text = resources.files("qurl.quant.kernels").joinpath(shipped).read_text()
            tables[f"{shipped} (package)"] = read_table(text)
        self.source = ", ".join([*tables, "rule of thumb"])
        """Where plans come from; the first that has the product counts."""
        self.table = {key: plan for t in reversed(tables.values()) for key, plan in t.items()}
        self.choose = functools.cache(self._choose)

    def multiply(
        self, kind: str, x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype
    ) -> Product:
        """x W^T + b by the plan of its shape; by our kernel if cuBLAS has no such product."""
        tokens = len(x.codes if isinstance(x, Quantized) else x)
        plan = self.choose(kind, tokens, *weight.shape)
        if plan is None:
            product = library_product(x, weight, bias, dtype, is_fast=self.unified)
            if product is not None:
                return product
            plan = self._rule(kind, bucket_of(tokens), *weight.shape)
        return multiply(x, weight, bias, dtype, plan)

    def _choose(self, kind: str, tokens: int, channels: int, depth: int) -> Choice:
        """The plan for x [tokens, depth] times W [channels, depth]."""
        tokens, shape = bucket_of(tokens), (channels, depth)
        if self.unified and kind.startswith("fp8"):
            return self._choose_whole(kind, tokens, *shape)
        if self.deterministic and kind != "int8":
            return self._choose_fixed(kind, tokens, *shape)
        # The next larger number of tokens that was measured.
        measured = [k for k in self.table if k[:3] == (kind, *shape) and k[3] >= tokens]
        if measured:
            plan = self.table[min(measured)]
            return plan and dataclasses.replace(plan, tokens=min(tokens, plan.tokens))
        if kind in STEPS or (kind == "nvfp4" and tokens > PACKED_TOKENS):
            return None
        return self._rule(kind, tokens, *shape)

    def _choose_whole(self, kind: str, tokens: int, channels: int, depth: int) -> Choice:
        """A plan that adds up a sum in one part: another number of parts has other bits."""
        # Not that of more tokens, whose large tiles would be too few.
        key = (whole_kind(kind), channels, depth, tokens)
        if (plan := self.table.get(key)) is not None:
            return dataclasses.replace(plan, is_fast=True)
        # With many tokens it is faster.
        if library_agrees(kind, self.target) and (key in self.table or tokens > FEW_TOKENS):
            return None
        return self._rule(kind, tokens, channels, depth)

    def _rule(self, kind: str, tokens: int, channels: int, depth: int) -> Plan:
        """A plan without measurements."""
        num_sms = self.target.num_sms
        if self.unified and kind.startswith("fp8"):
            return rule_of_small_tiles(tokens, channels, num_sms)
        return rule_of_thumb(kind, tokens, channels, depth, num_sms)

    def _choose_fixed(self, kind: str, tokens: int, channels: int, depth: int) -> Plan:
        """The order of a floating-point sum is the cut of K: it must not follow the batch."""
        plan = self.table.get((kind, channels, depth, _FIXED_TOKENS))
        if plan is None:
            plan = rule_of_thumb(kind, _FIXED_TOKENS, channels, depth, self.target.num_sms)
        return dataclasses.replace(plan, tokens=min(tokens, plan.tokens))


def whole_kind(kind: str) -> str:
    """Under this name the table has the best plan that does not cut K, for unified flows."""
    return f"{kind}-unified"


def library_agrees(kind: str, target: Target) -> bool:
    """Whether cuBLAS has the bits of our kernel, with K in one part; seen on Hopper only."""
    return kind == "fp8" and target.capability == (9, 0)


def bucket_of(tokens: int) -> int:
    return next((b for b in BUCKETS if b >= tokens), BUCKETS[-1])


def rule_of_thumb(kind: str, tokens: int, channels: int, depth: int, num_sms: int) -> Plan:
    """Tiles of 64 or 128 channels, and K cut until there are two tiles per multiprocessor."""
    tile_tokens = min(tokens, 128)
    tile_channels = 128 if channels >= 128 * num_sms or tokens > 64 else 64
    step = STEPS.get(kind, BLOCK)
    if kind == "nvfp4" and tokens <= 32:
        step = 2 * BLOCK  # as many bytes; with more tokens their numbers fill the memory
    tiles = -(-tokens // tile_tokens) * -(-channels // tile_channels)
    # Unpacked weights take registers.
    is_large = tile_tokens * tile_channels > 64 * (64 if kind == "nvfp4" else 128)
    splits = min(2 * num_sms // tiles, -(-depth // step) // 4, 16)
    return Plan(
        tokens=tile_tokens,
        channels=tile_channels,
        depth=step,
        splits=splits if splits > 1 else 0,
        warps=8 if is_large else 4,
        stages=3 if is_large else 4,
    )


def rule_of_small_tiles(tokens: int, channels: int, num_sms: int) -> Plan:
    """A plan that does not cut K: tiles so small that there is one for every multiprocessor."""
    if tokens > FEW_TOKENS:
        return Plan(128, 128, BLOCK, warps=8, stages=3, is_fast=True)
    size = min(tokens, 128)
    while size > 32 and -(-tokens // size) * -(-channels // 64) < num_sms:
        size //= 2
    return Plan(size, 64, BLOCK, stages=4 if size > 32 else 6, is_fast=True)


def kind_of(format: Format | None, target: Target) -> str:
    """What is multiplied; raises where the device cannot."""
    if format is None:
        return "bf16"
    if format.is_integer or format.is_weight_only:
        return "int8" if format.is_integer else format.name
    if not target.has_fp8:
        raise EngineError(
            f"quant.format = {format.name!r} needs FP8 matrix instructions (compute capability 8.9 "
            f"or newer), and {target.name} has {target.capability}; use quant.format = 'int8'"
        )
    return "fp8-block" if format.block else "fp8"


def user_table(name: str) -> Path:
    """Where `qurl tune` keeps the table of the GPU that torch calls `name`."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "qurl", "plans", f"{name.replace(os.sep, '-')}.json")


def open_table(path: Path) -> Mapping[TableKey, Choice]:
    try:
        return read_table(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{path} is no table of plans ({error!r}); remove it and measure again with qurl tune"
        ) from error


def read_table(text: str) -> Mapping[TableKey, Choice]:
    """Entries "kind,N,K,M": {plan fields} or null, of a JSON file."""
    plans = json.loads(text)["plans"]
    return {_parse_key(k): None if v is None else Plan(**v) for k, v in plans.items()}


def write_table(plans: Mapping[TableKey, Choice], about: Mapping[str, Any]) -> str:
    """`about` is a JSON object of any depth."""
    entries = {
        ",".join(map(str, key)): None if plan is None else _measured_fields(plan)
        for key, plan in sorted(plans.items())
    }
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
    return f'{{"about": {json.dumps(dict(about))},\n "plans": {{\n{lines}\n }}}}\n'


def _measured_fields(plan: Plan) -> dict[str, int]:
    """All but how sums are added up, which the flow decides."""
    return {key: value for key, value in dataclasses.asdict(plan).items() if key != "is_fast"}


def _parse_key(text: str) -> TableKey:
    kind, *sizes = text.split(",")
    channels, depth, tokens = map(int, sizes)
    return kind, channels, depth, tokens
