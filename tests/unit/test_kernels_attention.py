"""`attend_pages` against float64. On a CPU Triton's interpreter runs the kernels.

Whatever a query must not see is NaN here: keys after the position or before the window, the rest of
a page, and pages of nobody.

Shapes: B sequences, H heads, D head_dim, P pages of a sequence.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from qurl.ops.flash import Spans
from qurl.ops.flash import attend as flash_attend
from qurl.quant.formats import FORMATS, Quantized, quantize_activation
from qurl.rollout.local.kernels.attention import CHUNK, Tiling, attend_pages, chunks_for
from qurl.rollout.local.kernels.flash_pages import attend_pages_alike

CODED = [name for name, format in FORMATS.items() if not format.is_weight_only]

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BOUNDARIES = [0, 15, 16, 31, 64, CHUNK - 1, CHUNK, CHUNK + 1]


@dataclass(frozen=True)
class Problem:
    q: Tensor
    kv: Tensor
    table: Tensor
    positions: Tensor
    window: int | None
    kv_scale: Tensor | None


def make(
    positions,
    heads=(7, 1),
    head_dim=64,
    page_size=16,
    *,
    window=None,
    dtype=torch.float32,
    has_codes=False,
    seed=0,
) -> Problem:
    """Random queries, keys and values, on pages in random order."""
    generator = torch.Generator().manual_seed(seed)
    (num_heads, kv_heads), batch = heads, len(positions)
    used = [position // page_size + 1 for position in positions]
    num_pages = 1 + sum(used)
    numbers = torch.randn(2, num_pages, page_size, kv_heads, head_dim, generator=generator)
    scale = None
    if has_codes:
        scale = torch.tensor([[0.02], [0.03]]) * (1 + torch.arange(kv_heads))
        numbers = (numbers / scale[:, None, None, :, None]).clamp(-448, 448)
    # A row of the table is longer than what is passed of it.
    order = 1 + torch.randperm(num_pages - 1, generator=generator)
    table = torch.zeros(batch, max(used) + 3, dtype=torch.int32)
    is_seen = torch.zeros(num_pages, page_size, dtype=torch.bool)
    for row, (position, pages) in enumerate(zip(positions, order.split(used), strict=True)):
        table[row, : len(pages)] = pages
        at = torch.arange(max(0, position + 1 - window) if window else 0, position + 1)
        is_seen[pages[at // page_size], at % page_size] = True
    numbers[:, ~is_seen] = math.nan
    return Problem(
        torch.randn(batch, num_heads, head_dim, generator=generator).to(DEVICE, dtype),
        numbers.to(torch.float8_e4m3fn if has_codes else dtype).to(DEVICE),
        table.to(DEVICE)[:, : max(used)],
        torch.tensor(positions, device=DEVICE),
        window,
        None if scale is None else scale.to(DEVICE),
    )


def attend(problem: Problem, format=None, **options):
    positions = problem.positions
    if "num_chunks" not in options:  # else the GPU is not asked, which a capture would not permit
        options["num_chunks"] = chunks_for(int(positions.max()) + 1)
    return attend_pages(
        problem.q,
        problem.kv,
        problem.table,
        positions,
        problem.window,
        problem.kv_scale,
        format,
        **options,
    )


def reference(problem: Problem) -> Tensor:
    """[B, H * D] in float64."""
    q = problem.q.double()
    kv = problem.kv.to(torch.float32).double()
    if problem.kv_scale is not None:
        kv = kv * problem.kv_scale.double()[:, None, None, :, None]
    group = q.shape[1] // kv.shape[3]
    rows = []
    for row, position in enumerate(problem.positions.tolist()):
        first = max(0, position + 1 - problem.window) if problem.window else 0
        pages = problem.table[row].long()
        k, v = (
            x[pages].flatten(0, 1)[first : position + 1].repeat_interleave(group, 1) for x in kv
        )
        scores = torch.einsum("hd,jhd->hj", q[row], k) / math.sqrt(q.shape[2])
        rows.append(torch.einsum("hj,jhd->hd", scores.softmax(-1), v).flatten())
    return torch.stack(rows)


def check(problem: Problem, **options):
    """To the rounding of FP32, or to that of BF16 weights and results, against a row's largest."""
    out = attend(problem, **options)
    assert out.dtype == problem.q.dtype
    expected = reference(problem)
    error = (out.double() - expected).abs().amax(1) / expected.abs().amax(1)
    assert error.max() < (1e-5 if problem.q.dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize(("tokens", "chunks"), [(1, 1), (CHUNK, 1), (CHUNK + 1, 2), (0, 1)])
def test_chunks_for(tokens, chunks):
    assert chunks_for(tokens) == chunks


def test_one_key_by_hand():
    """A softmax over one key is 1, so that the result is its value; here page 2, offset 0."""
    kv = torch.full((2, 3, 16, 2, 64), math.nan, device=DEVICE)
    kv[0, 2, 0] = 1.0
    kv[1, 2, 0] = torch.arange(128.0).reshape(2, 64).to(DEVICE)
    table = torch.tensor([[2]], dtype=torch.int32, device=DEVICE)
    q = torch.ones(1, 6, 64, device=DEVICE)
    out = attend(
        Problem(q, kv, table, torch.zeros(1, dtype=torch.int64, device=DEVICE), None, None)
    )
    assert torch.equal(out.reshape(2, 3, 64), kv[1, 2, 0][:, None].expand(2, 3, 64))


def test_every_code_by_hand():
    """Two heads of 128 dimensions hold the 256 codes of E4M3 once: all but the two NaN are seen."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    kv = torch.zeros(2, 1, 16, 2, 128, device=DEVICE).to(torch.float8_e4m3fn)
    kv[1, 0, 0] = codes.reshape(2, 128)
    scale = torch.tensor([[1.0, 1.0], [0.5, 2.0]], device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    q = torch.zeros(1, 2, 128, device=DEVICE)
    out = attend(Problem(q, kv, zero[:, None].int(), zero, None, scale)).reshape(2, 128)
    expected = codes.float().reshape(2, 128) * scale[1][:, None]
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert out.isnan().nonzero().tolist() == [[0, 127], [1, 127]]


@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"),
    [
        ((1, 1), 64, 16),
        ((6, 1), 64, 64),
        ((7, 1), 128, 16),
        ((16, 2), 64, 128),
        ((24, 2), 32, 16),  # 12 queries per key
        ((3, 1), 80, 20),  # nothing is a power of two
    ],
)
def test_positions_at_boundaries_of_pages_blocks_and_chunks(heads, head_dim, page_size):
    check(make(BOUNDARIES, heads, head_dim, page_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"), [((7, 1), 128, 64), ((12, 2), 64, 16), ((8, 1), 64, 64)]
)
def test_fp8_cache(heads, head_dim, page_size, dtype):
    check(
        make(
            [0, 17, CHUNK - 1, CHUNK + 44], heads, head_dim, page_size, dtype=dtype, has_codes=True
        )
    )


@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.parametrize("page_size", [16, 64])
def test_windows(page_size, has_codes):
    for window in (1, 64, 300, 10**6):
        positions = [0, CHUNK, 2 * CHUNK + 3]
        check(make(positions, (2, 1), 32, page_size, window=window, has_codes=has_codes))


def test_bfloat16():
    check(make([3, CHUNK - 1, CHUNK], (6, 1), 128, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(chunk=256),
        Tiling(chunk=512, block=32, num_warps=2, num_stages=2),
        Tiling(chunk=128, block=128, num_warps=8),
        Tiling(chunk=64, block=16, num_warps=1),
    ],
)
@pytest.mark.parametrize("has_codes", [False, True])
def test_tilings(tiling, has_codes):
    problem = make([5, 130, 300], page_size=16, has_codes=has_codes)
    check(problem, num_chunks=chunks_for(301, tiling.chunk), tiling=tiling)


@pytest.mark.parametrize("has_codes", [False, True])
def test_a_row_depends_neither_on_the_others_nor_on_the_number_of_chunks(has_codes):
    positions = [0, CHUNK + 44, 64, CHUNK, 9]
    problem = make(positions, (6, 1), has_codes=has_codes)
    together = attend(problem)
    assert torch.equal(attend(problem, num_chunks=4), together)
    for rows in (slice(1, 2), slice(2, 5)):
        some = replace(
            problem,
            q=problem.q[rows],
            table=problem.table[rows],
            positions=problem.positions[rows].contiguous(),
        )
        assert torch.equal(attend(some), together[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", CODED)
@pytest.mark.parametrize(("heads", "head_dim"), [((7, 1), 64), ((3, 1), 80)])
def test_codes_are_those_of_the_row_in_the_compute_dtype(heads, head_dim, format, dtype):
    """448 and 240 columns: the last group of 128 has 64 and 112."""
    problem = make([0, 100], heads, head_dim, dtype=dtype)
    coded = attend(problem, FORMATS[format])
    expected = quantize_activation(attend(problem), FORMATS[format])
    assert isinstance(coded, Quantized)
    assert torch.equal(coded.scale, expected.scale)
    assert torch.equal(coded.codes.float(), expected.codes.float())


@pytest.mark.parametrize("size", [1e-30, 1e5, 1e30])
def test_queries_beyond_fp16(size):
    """An FP8 cache is multiplied in FP16, and BF16 queries may be larger and smaller than that."""
    problem = make([0, 40], dtype=torch.bfloat16, has_codes=True)
    check(replace(problem, q=problem.q * size))


@pytest.mark.parametrize("format", [None, "int8", "fp8"])
@pytest.mark.parametrize("place", ["query", "key", "value"])
@pytest.mark.parametrize("has_codes", [False, True])
def test_nan_is_not_lost(place, format, has_codes):
    """In the numbers, or in the scale of the codes; the other rows do not notice."""
    problem = make([40, 70, 3], (2, 1), 32, has_codes=has_codes)
    if place == "query":
        problem.q[1, 0, 3] = math.nan
    else:
        slot = (0 if place == "key" else 1, problem.table[1, 1].item(), 2, 0, 3)
        problem.kv.view(torch.uint8 if has_codes else torch.float32)[slot] = (
            0x7F if has_codes else math.nan
        )
    out = attend(problem, None if format is None else FORMATS[format])
    marks = out.scale if isinstance(out, Quantized) else out
    assert marks.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("size", [math.inf, -math.inf])
def test_infinite_queries_give_nan(size):
    problem = make([40, 70], (2, 1), 32, has_codes=True, dtype=torch.bfloat16)
    problem.q[1, :, 3] = size
    assert attend(problem).isnan().all(1).tolist() == [False, True]


def test_too_few_chunks_or_pages_give_nan():
    """A sequence may outgrow them where the host hears of its end a step late."""
    problem = make([CHUNK - 1, CHUNK, 3], page_size=16)
    assert attend(problem, num_chunks=1).isnan().all(1).tolist() == [False, True, False]
    short = replace(problem, table=problem.table[:, : CHUNK // 16])
    assert attend(short).isnan().all(1).tolist() == [False, True, False]


needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.parametrize("heads", [(28, 4), (12, 2), (32, 8), (16, 1), (32, 1)])
def test_long_contexts(heads, has_codes):
    positions = [8191, 1, 4608, CHUNK - 1, 32767, CHUNK, 700, 10000, *range(2000, 2009)]
    problem = make(positions, heads, 128, 64, dtype=torch.bfloat16, has_codes=has_codes)
    check(problem)
    together = attend(problem)
    for row in (2, 16):
        alone = replace(
            problem,
            q=problem.q[row : row + 1],
            table=problem.table[row : row + 1],
            positions=problem.positions[row : row + 1].contiguous(),
        )
        assert torch.equal(attend(alone), together[row : row + 1])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_offsets_beyond_32_bits(page_size):
    """A cache of 2^31 numbers and more, of which the last pages are read."""
    small = make([300, 100], (7, 1), 128, page_size, dtype=torch.bfloat16)
    used = small.kv.shape[1]
    num_pages = 2**31 // (page_size * 128) + used
    kv = torch.zeros(2, num_pages, *small.kv.shape[2:], dtype=torch.bfloat16, device=DEVICE)
    kv[:, -used:] = small.kv
    large = replace(small, kv=kv, table=small.table + (num_pages - used))
    assert torch.equal(attend(large), attend(small))


@pytest.mark.gpu
@needs_gpu
def test_in_a_cuda_graph():
    """Captured once, replayed with other queries and positions at the same addresses."""
    problem = make([700, 300, 513], (28, 4), 128, 64, dtype=torch.bfloat16, has_codes=True)
    expected = attend(problem, FORMATS["int8"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(problem, FORMATS["int8"], num_chunks=8)
    for _ in range(3):
        graph.replay()
    assert torch.equal(out.codes, expected.codes)
    problem.q.mul_(0.5)
    problem.positions.sub_(100)
    graph.replay()
    assert torch.equal(out.codes, attend(problem, FORMATS["int8"]).codes)


def attend_alike(problem: Problem) -> Tensor:
    pages = (problem.kv, problem.table, problem.positions, problem.window, problem.kv_scale)
    return attend_pages_alike(problem.q, *pages)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((3, 1), 128)])
def test_attention_alike_against_float64(heads, head_dim, has_codes, window):
    options = {"window": window, "has_codes": has_codes, "page_size": 16}
    problem = make([0, 63, 64, 130], heads, head_dim, dtype=torch.bfloat16, **options)
    if has_codes:  # of a cache whose scales are powers of two
        problem = replace(problem, kv_scale=2.0 ** problem.kv_scale.log2().round())
    expected = reference(problem)
    error = (attend_alike(problem).flatten(1).double() - expected).abs().amax(1)
    assert (error / expected.abs().amax(1)).max() < 2**-7


@pytest.mark.parametrize(
    ("head_dim", "window", "has_codes"),
    [(64, None, False), (64, None, True), (64, 40, True), (128, None, True)],
)
def test_attention_alike_has_the_bits_of_the_trainers(head_dim, window, has_codes):
    """Tokens of a sequence as queries of their own, over the sequence's pages.

    Those around the edges of pages and of tiles of keys: of other tokens a query sees no less.
    """
    length, (num_heads, kv_heads), page_size = 150, (6, 2), 16
    positions = torch.tensor([0, 15, 16, 31, 32, 63, 64, 100, 127, 128, 149], device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    shapes = [(length, heads, head_dim) for heads in (num_heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, generator=generator).to(DEVICE, torch.bfloat16) for s in shapes)
    kv, scale = torch.stack((k, v)), None
    if has_codes:
        scale = torch.full((2, kv_heads), 2.0**-5, device=DEVICE)
        codes = (kv.float() * 2**5).to(torch.float8_e4m3fn)
        k, v = (codes.float() * 2**-5).bfloat16()
        kv = codes
    bounds = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    expected = flash_attend(q, k, v, Spans(bounds, length, window))
    num_pages = -(-length // page_size)
    cache = kv.new_zeros(2, num_pages * page_size, kv_heads, head_dim)
    cache[:, :length] = kv
    table = torch.arange(num_pages, dtype=torch.int32, device=DEVICE).repeat(len(positions), 1)
    pages = cache.view(2, num_pages, page_size, kv_heads, head_dim)
    found = attend_pages_alike(q[positions], pages, table, positions, window, scale)
    assert torch.equal(found, expected[positions])


def test_attention_alike_without_a_page_is_nan():
    problem = make([5, 20], dtype=torch.bfloat16)
    problem = replace(problem, table=problem.table[:, :1])
    assert attend_alike(problem).isnan().flatten(1).all(1).tolist() == [False, True]
