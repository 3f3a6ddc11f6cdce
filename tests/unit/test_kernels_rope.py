"""Rotation and cache write against torch on the CPU; without a GPU in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from qurl.quant.linear import Partial, Product, finish
from qurl.rollout.local.kernels.rope import rotate_and_store
from qurl.rollout.local.ops import LayerCache
from qurl.rollout.local.reference import rms_norm, rotate, write_pages_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
EPS = 1e-6
POSITIONS = 64
PAGE_SIZE = 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """A projection's output with everything that the kernel needs, on the CPU."""

    def __init__(
        self,
        num_rows: int = 5,
        heads: tuple[int, int] = (3, 2),
        head_dim: int = 64,
        dtype: torch.dtype = BF16,
        parts: int = 0,
        has_norms: bool = False,
    ) -> None:
        self.num_rows, self.dtype, self.head_dim = num_rows, dtype, head_dim
        self.num_heads, self.num_kv_heads = heads
        columns = (self.num_heads + 2 * self.num_kv_heads) * head_dim
        self.qkv = _make_product(parts, num_rows, columns, dtype)
        generator = torch.Generator().manual_seed(8)
        self.positions = torch.randint(0, POSITIONS, (num_rows,), generator=generator)
        angles = torch.arange(POSITIONS)[:, None] * (random(head_dim // 2, seed=9).abs() + 0.1)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norms = (random(head_dim, seed=10), random(head_dim, seed=11)) if has_norms else None

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v by the reference's functions."""
        heads = finish(self.qkv).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        if self.norms is not None:
            q, k = rms_norm(q, self.norms[0], EPS), rms_norm(k, self.norms[1], EPS)
        cos, sin = self.cos[self.positions], self.sin[self.positions]
        return rotate(q, cos, sin).to(self.dtype), rotate(k, cos, sin).to(self.dtype), v

    def run(
        self,
        slots: Tensor | None = None,
        kv: Tensor | None = None,
        kv_scale: Tensor | None = None,
        kv_center: Tensor | None = None,
        *,
        keep_kv: bool = True,
        rows: slice = slice(None),
    ) -> Any:
        """What the kernel returns, for some of the rows, moved to the CPU; kv changes in place."""
        if kv_scale is not None and kv_center is None:
            kv_center = torch.zeros(self.num_kv_heads, self.head_dim)
        scale, center = (None if x is None else x.to(DEVICE) for x in (kv_scale, kv_center))
        cache = None
        if kv is not None and slots is not None:
            cache = LayerCache(kv, scale, center, slots[rows].to(DEVICE))
        heads = rotate_and_store(
            _take_rows(self.qkv, rows),
            self.positions[rows].to(DEVICE),
            (self.cos.to(DEVICE), self.sin.to(DEVICE)),
            None if self.norms is None else (self.norms[0].to(DEVICE), self.norms[1].to(DEVICE)),
            cache,
            num_kv_heads=self.num_kv_heads,
            eps=EPS,
            dtype=self.dtype,
            keep_kv=keep_kv,
        )
        return tuple(t.cpu() for t in heads) if keep_kv else heads[0].cpu()

    def empty_layers(self, num_pages: int, dtype: torch.dtype | None = None) -> Tensor:
        """Three layers of a cache, full of ones, on the device."""
        shape = (3, 2, num_pages, PAGE_SIZE, self.num_kv_heads, self.head_dim)
        return torch.ones(shape).to(dtype or self.dtype).to(DEVICE)


def _make_product(parts: int, rows: int, columns: int, dtype: torch.dtype) -> Product:
    if parts == 0:
        return random(rows, columns, seed=1).to(dtype)
    if parts == 1:  # FP32 parts, as of an unquantized product
        return Partial(random(1, rows, columns, seed=1), None, None, None, dtype)
    generator = torch.Generator().manual_seed(1)
    acc = torch.randint(-(2**20), 2**20, (parts, rows, columns), generator=generator)
    scales = random(rows, 1, seed=3).abs() * 1e-3, random(columns, 1, seed=4).abs() * 1e-3
    return Partial(acc.int(), *scales, random(columns, seed=2).to(dtype), dtype)


def _take_rows(product: Product, rows: slice) -> Product:
    if isinstance(product, Tensor):
        return product[rows].contiguous().to(DEVICE)
    scale_x, scale_w, bias = (
        None if t is None else t.to(DEVICE)
        for t in (product.scale_x, product.scale_w, product.bias)
    )
    acc = product.acc[:, rows].contiguous().to(DEVICE)
    return Partial(acc, None if scale_x is None else scale_x[rows], scale_w, bias, product.dtype)


def assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert torch.equal(a, e)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("parts", [0, 1, 2, 5])
def test_rotation_has_the_bits_of_the_reference(parts, dtype):
    case = Case(parts=parts, dtype=dtype)
    assert_equal(case.run(), case.expected())


@pytest.mark.parametrize(
    ("num_rows", "heads", "head_dim"),
    [
        (1, (1, 1), 2),
        (17, (2, 1), 64),
        (3, (5, 5), 80),
        (2, (14, 2), 96),
        (2, (28, 4), 128),
        (2, (3, 1), 256),
        (33, (1, 1), 6),
    ],
)
def test_shapes(num_rows, heads, head_dim):
    case = Case(num_rows, heads, head_dim, parts=2)
    assert_equal(case.run(), case.expected())


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("parts", [0, 2])
def test_heads_are_normed_before_they_turn(parts, head_dim):
    case = Case(head_dim=head_dim, dtype=FP32, parts=parts, has_norms=True)
    q, k, v = case.run()
    expected_q, expected_k, expected_v = case.expected()
    torch.testing.assert_close(q, expected_q, rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(k, expected_k, rtol=1e-6, atol=3e-6)
    assert torch.equal(v, expected_v)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(dtype):
    case = Case(dtype=dtype, parts=2)
    # The last slot of page 0, the first of page 1, the last of all, and two pages in between.
    slots = torch.tensor([3, 4, 6 * PAGE_SIZE - 1, 9, 13])
    layers = case.empty_layers(6)
    q, k, v = case.run(slots, layers[1])
    assert_equal((q, k, v), case.expected())
    expected = case.empty_layers(6).cpu()
    write_pages_(LayerCache(expected[1], None), k, v, slots)
    assert torch.equal(layers.cpu(), expected)


def test_without_keep_kv_only_q_comes_back():
    case = Case()
    slots = torch.arange(5) + 2
    layers, others = case.empty_layers(2), case.empty_layers(2)
    q, *_ = case.run(slots, layers[0])
    assert torch.equal(case.run(slots, others[0], keep_kv=False), q)
    assert torch.equal(layers, others)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_fp8_cache(dtype):
    case = Case(dtype=dtype, head_dim=80, parts=2)
    # From all but one value clamped to all below the smallest code.
    kv_scale = torch.tensor([[1e-3, 7e-3], [1.0, 3e4]])
    slots = torch.tensor([0, 3, 4, 7, 1])
    kv_center = random(2, 80, seed=12)
    layers = case.empty_layers(2, FP8)
    found = case.run(slots, layers[2], kv_scale, kv_center)
    expected, (q, k, v) = case.empty_layers(2, FP8).cpu(), case.expected()
    kept = write_pages_(LayerCache(expected[2], kv_scale, kv_center), k, v, slots)
    assert_equal(found, (q, *kept))  # attention over the prompt sees what the pages hold
    assert torch.equal(layers.cpu().float(), expected.float())
    assert expected[2, 0].float().abs().max() == 448


def test_fp8_cache_clamps_what_would_overflow():
    case = Case(num_rows=1, dtype=FP32)
    assert isinstance(case.qkv, Tensor)
    case.qkv[0, -4:] = torch.tensor([1e30, -1e30, float("inf"), -float("inf")])
    layers = case.empty_layers(1, FP8)
    case.run(torch.tensor([0]), layers[0], torch.full((2, 2), 1e-25))
    assert layers[0, 1, 0, 0, -1, -4:].float().tolist() == [448, -448, 448, -448]


@pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "no-norms"])
def test_a_row_does_not_depend_on_the_others(has_norms):
    case = Case(num_rows=17, parts=2, has_norms=has_norms)
    together = case.run()
    for rows in (slice(0, 1), slice(8, 9), slice(14, 17)):
        assert_equal(case.run(rows=rows), tuple(t[rows] for t in together))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("cache_dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_nan_stays_nan_in_its_head(cache_dtype):
    case = Case(num_rows=2, has_norms=True)
    assert isinstance(case.qkv, Tensor)
    key, value = (case.num_heads * 64 + 5, (case.num_heads + 2 + 1) * 64 + 40)
    case.qkv[1, [key, value]] = float("nan")
    layers = case.empty_layers(1, cache_dtype)
    scale = torch.ones(2, case.num_kv_heads) if cache_dtype == FP8 else None
    q, k, v = case.run(torch.tensor([0, 1]), layers[0], scale)
    assert not q.isnan().any()
    assert k.isnan().any(-1).tolist() == [[False, False], [True, False]]
    assert v.isnan().any(-1).tolist() == [[False, False], [False, True]]
    stored = layers[0, :, 0, :2].cpu()
    # As codes: E4M3 has one NaN, 0x7F with either sign.
    is_nan = stored.view(torch.uint8) & 0x7F == 0x7F if cache_dtype == FP8 else stored.isnan()
    assert torch.equal(is_nan[0], k.isnan())
    assert torch.equal(is_nan[1], v.isnan())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_slots_beyond_two_to_the_31_elements():
    case = Case(num_rows=2, heads=(1, 1), head_dim=128)
    num_pages = 2**31 // (PAGE_SIZE * 128) + 2
    kv = torch.zeros(2, num_pages, PAGE_SIZE, 1, 128, dtype=BF16, device=DEVICE)
    slots = torch.tensor([0, num_pages * PAGE_SIZE - 1])
    _, k, v = case.run(slots, kv)
    flat = kv.flatten(1, 2)[:, slots.to(DEVICE)].cpu()
    assert torch.equal(flat[0], k)
    assert torch.equal(flat[1], v)
