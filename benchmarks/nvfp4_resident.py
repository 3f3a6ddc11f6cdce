"""A candidate for NVFP4 products of up to 16 tokens, beside the kernel of the package.

    python -m benchmarks.nvfp4_resident               on a GPU: products of 7B, right, then fast
    python -m benchmarks.nvfp4_resident --compile     anywhere: instructions, registers on Hopper

The package's kernel (`qurl.quant.kernels.packed`) fetches tokens with every tile of weights, and
each round waits for the copy engine, the matrix unit and two barriers. Here the tokens of a part of
K stay in shared memory while a program walks over channels. Each warp loads words of weights
straight into the registers that a matrix unit takes them from, some steps ahead, so no warp waits
for another until a tile is done. Triton cannot be told which thread loads what; Gluon, its lower
level, can.

A tile is CHANNELS x TOKENS. Warps share it by channels and by blocks of K, whose sums are added at
the end:

    step s, warp p of PARTS: block s PARTS + p of 128 input channels
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qurl.bench.products import Chip, Gemm, GemmRun
from qurl.bench.record import Record
from qurl.ops.launch import divide_up, overlapping
from qurl.ops.target import Target
from qurl.quant.formats import Quantized
from qurl.quant.kernels.packed import UNPACK as _UNPACK
from qurl.quant.kernels.plans import Plans
from qurl.quant.kernels.rows import add_norm
from qurl.quant.linear import Operand, Partial, Product
from qurl.quant.nvfp4 import LIFT

UNPACK = gl.constexpr(_UNPACK.value)
REST = gl.constexpr(2.0**126 / LIFT)
BLOCK = 128
TOKENS = 16
SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}
"""N and K of Qwen2.5 7B."""

Times = Mapping[Any, float]
"""Microseconds of a plan of the package and of walks."""


@dataclass(frozen=True)
class Walk:
    """How programs walk over a product."""

    warps: tuple[int, int]
    """Side by side along K and along channels."""
    rows: int
    """Channels of a warp."""
    splits: int
    """Parts of K that the consumer adds."""
    programs: int
    """Per multiprocessor."""
    ahead: int
    """Steps of weights in flight."""

    def steps(self, K: int) -> int:
        return divide_up(divide_up(K // BLOCK, self.warps[0]), self.splits)

    def shared_bytes(self, K: int) -> int:
        """Tokens of a part of K, and the sums that warps add up."""
        parts, along = self.warps
        sums = 4 * TOKENS * self.rows * along * parts
        return 2 * TOKENS * BLOCK * parts * self.steps(K) + sums

    def constants(self, K: int, *, is_gated: bool, is_whole: bool) -> dict[str, Any]:
        parts, along = self.warps
        return {
            "TOKENS": TOKENS,
            "PARTS": parts,
            "CHANNEL_WARPS": along,
            "ROWS": self.rows,
            "STEPS": self.steps(K),
            "SPLITS": self.splits,
            "AHEAD": self.ahead,
            "IS_WHOLE": is_whole,
            "IS_GATED": is_gated,
        }


@gluon.constexpr_function
def words_by_threads(PARTS, CHANNEL_WARPS, ROWS):
    """Words [PARTS, channels, 16] where a matrix unit wants the numbers in them.

    A thread of a warp has rows r and r + 8, and of each the four words of one i / 2.
    """

    def powers(start, stop):
        return [start << i for i in range((stop // start).bit_length() - 1)]

    registers = [[0, 0, 1], [0, 0, 2], [0, 8, 0]]
    registers += [[0, row, 0] for row in powers(16 * CHANNEL_WARPS, ROWS * CHANNEL_WARPS)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, row, 0] for row in powers(16, 16 * CHANNEL_WARPS)]
    warps += [[part, 0, 0] for part in powers(1, PARTS)]
    return gl.DistributedLinearLayout(
        registers, lanes, warps, [], [PARTS, ROWS * CHANNEL_WARPS, 16]
    )


@gluon.jit(do_not_specialize=["M"])
def resident_kernel(
    x,
    words,
    scales,
    outer,
    y,
    bias,
    M,
    N,
    K,
    num_words,
    num_tiles,
    TOKENS: gl.constexpr,
    PARTS: gl.constexpr,
    CHANNEL_WARPS: gl.constexpr,
    ROWS: gl.constexpr,
    STEPS: gl.constexpr,
    SPLITS: gl.constexpr,
    AHEAD: gl.constexpr,
    IS_WHOLE: gl.constexpr,
    IS_GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles y[CHANNELS, TOKENS] of one part of K, `stride` tiles apart.

    IS_WHOLE: N is a multiple of CHANNELS, and K of PARTS x 128 x STEPS x SPLITS.
    """
    CHANNELS: gl.constexpr = CHANNEL_WARPS * ROWS
    WORDS: gl.constexpr = words_by_threads(PARTS, CHANNEL_WARPS, ROWS)
    SUM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PARTS, CHANNEL_WARPS, 1], [1, 16, 8])
    split = gl.program_id(0) % SPLITS
    tile = gl.program_id(0) // SPLITS
    stride = gl.num_programs(0) // SPLITS
    first_block = split * STEPS * PARTS
    num_blocks = num_words // 16

    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None, None]
    row = gl.arange(0, CHANNELS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :, None]
    word = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    block = first_block + part
    words += row * num_words + block * 16 + word
    scales += row * (num_words // 4) + block * 4 + word % 4
    sizes = (N, num_words, num_blocks, num_tiles)
    ring = ()
    for i in gl.static_range(AHEAD):
        later, step = tile + stride * (i // STEPS), i % STEPS
        fetched = _fetch(words, scales, sizes, row, block, later, step, CHANNELS, PARTS, IS_WHOLE)
        ring += (fetched,)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_shared = _tokens_of_part(
        x, M, K, first_block, num_blocks, TOKENS, PARTS, CHANNEL_WARPS, STEPS
    )

    while tile < num_tiles:
        acc = gl.zeros([PARTS, CHANNELS, TOKENS], gl.float32, SUM)
        for i in gl.static_range(STEPS):
            weights = _unpack(ring[0][0], ring[0][1], gl.DotOperandLayout(0, SUM, 2))
            later, step = tile + stride * ((i + AHEAD) // STEPS), (i + AHEAD) % STEPS
            fetched = _fetch(
                words, scales, sizes, row, block, later, step, CHANNELS, PARTS, IS_WHOLE
            )
            ring = ring[1:]
            ring += (fetched,)
            tokens = x_shared.index(i).permute([0, 2, 1]).load(gl.DotOperandLayout(1, SUM, 2))
            acc = mma_v2(weights, tokens, acc)
        _store(y, gl.sum(acc, 0), outer, bias, split, tile, M, N, IS_GATED, SPLITS)
        tile += stride


@gluon.jit
def _fetch(
    words,
    scales,
    sizes,
    row,
    block,
    tile,
    STEP: gl.constexpr,
    CHANNELS: gl.constexpr,
    PARTS: gl.constexpr,
    IS_WHOLE: gl.constexpr,
):
    """Words of a step of a tile, and the two scales of each; past the last tile, its own again."""
    N, num_words, num_blocks, num_tiles = sizes
    tile = gl.minimum(tile, num_tiles - 1)
    first = tile.to(gl.int64) * CHANNELS * num_words + STEP * PARTS * 16
    if IS_WHOLE:
        fetched = gl.load(words + first, eviction_policy="evict_first")
        scale = gl.load(scales + first // 4)
    else:
        mask = (tile * CHANNELS + row < N) & (block + STEP * PARTS < num_blocks)
        fetched = gl.load(words + first, mask, 0, eviction_policy="evict_first")
        scale = gl.load(scales + first // 4, mask, 0)
    return fetched, scale


@gluon.jit
def _tokens_of_part(
    x,
    M,
    K,
    first_block,
    num_blocks,
    TOKENS: gl.constexpr,
    PARTS: gl.constexpr,
    CHANNEL_WARPS: gl.constexpr,
    STEPS: gl.constexpr,
):
    """x [STEPS, PARTS, TOKENS, 128] in shared memory, zero beyond its edges."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    LOAD: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 2, 16], [PARTS, CHANNEL_WARPS, 1], [2, 1, 0]
    )
    shared = gl.allocate_shared_memory(gl.bfloat16, [STEPS, PARTS, TOKENS, 128], SHARED)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, LOAD)))[:, None, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, LOAD)))[None, :, None]
    depth = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, LOAD)))[None, None, :]
    for i in gl.static_range(STEPS):
        block = first_block + i * PARTS + part
        mask = (token < M) & (block < num_blocks)
        async_copy.async_copy_global_to_shared(
            shared.index(i), x + token * K + block * 128 + depth, mask=mask
        )
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()
    return shared


@gluon.jit
def _unpack(words, scales, FACTOR: gl.constexpr):
    """q a / 256 [PARTS, channels, 128] in BF16; no number changes its thread."""
    a, b, c, d = gl.inline_asm_elementwise(
        UNPACK,
        "=&r,=&r,=&r,=&r,r,r",
        [words, scales],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    pairs = gl.join(gl.join(_lanes(a), _lanes(b)), gl.join(_lanes(c), _lanes(d)))
    PARTS: gl.constexpr = words.shape[0]
    CHANNELS: gl.constexpr = words.shape[1]
    # [part, channel, i / 2, pair of groups, i % 2, half of a group, group]
    tile = pairs.reshape(PARTS, CHANNELS, 4, 4, 2, 2, 2).permute(0, 1, 3, 6, 5, 2, 4)
    tile = tile.reshape(PARTS, CHANNELS, 128)
    return gl.convert_layout(tile, FACTOR, assert_trivial=True)


@gluon.jit
def _lanes(bits):
    """The two BF16 numbers in 32 bits, along a new dimension."""
    first = bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    second = (bits >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(first, second)


@gluon.jit
def _store(y, out, outer, bias, split, tile, M, N, IS_GATED: gl.constexpr, SPLITS: gl.constexpr):
    """Store sums [channels, tokens] times the tensor's scale; silu(gate) * up of two channels."""
    CHANNELS: gl.constexpr = out.shape[0]
    TOKENS: gl.constexpr = out.shape[1]
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    out = gl.convert_layout(out, OUT)
    channel = tile * CHANNELS + gl.arange(0, CHANNELS, gl.SliceLayout(1, OUT))
    out *= (gl.load(outer + channel, channel < N, 0.0) * REST)[:, None]
    if bias is not None:
        out += gl.load(bias + channel, channel < N, 0.0).to(gl.float32)[:, None]
    if IS_GATED:
        rounded = out.to(y.dtype.element_ty).to(gl.float32)
        pairs = rounded.reshape(CHANNELS // 2, 2, TOKENS).permute(0, 2, 1)
        gate, up = gl.split(pairs)
        gated = gate / (1.0 + gl.exp(-gate)) * up
        GATED: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, gl.num_warps()], [0, 1])
        gated = gl.convert_layout(gated, GATED)
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, GATED))
        half = tile * (CHANNELS // 2) + gl.arange(0, CHANNELS // 2, gl.SliceLayout(1, GATED))
        at = token[None, :] * (N // 2) + half[:, None]
        mask = (token < M)[None, :] & (half < N // 2)[:, None]
        gl.store(y + at, gated.to(y.dtype.element_ty), mask)
    else:
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, OUT))
        at = (split * M + token)[None, :] * N + channel[:, None]
        gl.store(y + at, out.to(y.dtype.element_ty), (token < M)[None, :] & (channel < N)[:, None])


def multiply_resident(
    x: Tensor, weight: Quantized, bias: Tensor | None, y: Tensor, walk: Walk, *, is_gated: bool
) -> None:
    """Write x W^T of x [M, K] into y [splits, M, N], or silu(gate) * up into y [M, N / 2]."""
    M, (N, K) = len(x), weight.shape
    assert M <= TOKENS
    assert K % BLOCK == 0
    channels = walk.rows * walk.warps[1]
    blocks = walk.warps[0] * walk.steps(K) * walk.splits
    is_whole = N % channels == 0 and BLOCK * blocks == K
    tiles = divide_up(N, channels)
    grid = walk.splits * programs_of_part(walk, tiles, Target.of(x.device).num_sms)
    words, scales = weight.codes.view(torch.int32), weight.scale.view(torch.int32)
    tensors = (x, words, scales, weight.tensor_scale, y, bias)
    resident_kernel[(grid,)](
        *tensors,
        *(M, N, K, words.shape[1], tiles),
        **walk.constants(K, is_gated=is_gated, is_whole=is_whole),
        **overlapping(x.device),
        num_warps=walk.warps[0] * walk.warps[1],
    )


def programs_of_part(walk: Walk, tiles: int, num_sms: int) -> int:
    return max(1, min(tiles, walk.programs * num_sms // walk.splits))


class ResidentRun(GemmRun):
    """A product of the candidate where the plan is a walk."""

    def _run(self, choice: Any, weight: Operand) -> Product | None:
        if not isinstance(choice, Walk):
            return super()._run(choice, weight)
        assert isinstance(self.x, Tensor)
        assert isinstance(weight, Quantized)
        M, N = self.problem.M, self.problem.N
        if self.problem.is_gated:
            gated = self.x.new_empty(M, N // 2)
            multiply_resident(self.x, weight, None, gated, choice, is_gated=True)
            return gated
        is_split = choice.splits > 1
        dtype = torch.float32 if is_split else torch.bfloat16
        y = self.x.new_empty(choice.splits, M, N, dtype=dtype)
        multiply_resident(
            self.x, weight, None if is_split else self.bias, y, choice, is_gated=False
        )
        product = Partial(y, None, None, self.bias, torch.bfloat16) if is_split else y[0]
        add_norm(self.residual, product, self.norm, 1e-6, None, torch.bfloat16, clear=self.amax)
        return product


def walks(N: int, K: int, num_sms: int, *, is_gated: bool) -> list[Walk]:
    """Walks to try, the best shared out first."""
    return sorted(_walks(N, K, num_sms, is_gated), key=lambda w: share_of_time(w, N, K, num_sms))


def _walks(N: int, K: int, num_sms: int, is_gated: bool) -> Iterator[Walk]:
    for warps in ((4, 4), (8, 2), (2, 8), (4, 2), (2, 4), (8, 1), (2, 2), (4, 1), (1, 4)):
        num_warps = warps[0] * warps[1]
        for rows, splits, programs in itertools.product((16, 32), range(1, 13), range(1, 7)):
            walk = Walk(warps, rows, splits, programs, 2)
            if splits > 1 and (is_gated or walk.steps(K) * warps[0] * (splits - 1) >= K // BLOCK):
                continue
            if not 8 <= programs * num_warps <= 20 or walk.steps(K) > 14:
                continue
            if programs * (walk.shared_bytes(K) + 1024) > 226 * 2**10:
                continue
            yield walk


def share_of_time(walk: Walk, N: int, K: int, num_sms: int) -> float:
    """Weights of the busiest multiprocessor, against an equal share; a walk takes at least that."""
    tiles = divide_up(N, walk.rows * walk.warps[1])
    of_part = programs_of_part(walk, tiles, num_sms)
    rounds = divide_up(tiles, of_part)
    per_sm = divide_up(of_part * walk.splits, num_sms)
    channels = walk.rows * walk.warps[1]
    work = per_sm * rounds * channels * walk.steps(K) * walk.warps[0] * BLOCK
    return work * num_sms / (N * K)


def measure(role: str, M: int, candidates: Sequence[Walk], plans: Plans, chip: Chip) -> Times:
    """Median microseconds of the package's kernel and of walks, consumer included, in turn."""
    N, K = SHAPES[role]
    setup = ResidentRun(Gemm(role, "nvfp4", N, K, M), torch.device("cuda"), chip.l2_bytes)
    clocks = {}
    for choice in (plans.choose("nvfp4", M, N, K), *candidates):
        if setup.check(choice):  # type: ignore[arg-type]
            clocks[choice] = setup.clock(choice)  # type: ignore[arg-type]
    for replay in clocks.values():
        replay()
    rounds = [{choice: replay() for choice, replay in clocks.items()} for _ in range(5)]
    return {choice: statistics.median(times[choice] for times in rounds) for choice in clocks}


def prepare(job: tuple[str, Walk]) -> None:
    """Compile a walk into Triton's disk cache."""
    role, walk = job
    setup = ResidentRun(Gemm(role, "nvfp4", *SHAPES[role], TOKENS), torch.device("cuda"))
    setup.launch(walk)  # type: ignore[arg-type]


def compile_for_hopper(role: str, walk: Walk) -> str:
    """Instructions per weight of a walk's loop, registers and shared memory; needs no GPU."""
    _, K = SHAPES[role]
    is_gated = role == "gate_up"
    constants = walk.constants(K, is_gated=is_gated, is_whole=True) | {"PDL": True}
    names = resident_kernel.arg_names
    kinds = {"x": "*bf16", "words": "*i32", "scales": "*i32", "outer": "*fp32", "bias": "*bf16"}
    kinds["y"] = "*bf16" if walk.splits == 1 else "*fp32"
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names
    }
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]] for n in (*kinds, "N", "K", "num_words")
    }
    source = GluonASTSource(
        resident_kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned
    )
    num_warps = walk.warps[0] * walk.warps[1]
    target = GPUTarget("cuda", 90, 32)
    kernel = triton.compile(source, target=target, options={"num_warps": num_warps})
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def ask(*command: str) -> str:
            return subprocess.run(
                [tools / command[0], *command[1:], file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout

        code = ask("nvdisasm", "-c")
        usage = re.findall(r"(REG|STACK):(\d+)", ask("cuobjdump", "--dump-resource-usage"))
    loop = max((len(body) for body in _loops(code)), default=0)
    weights = walk.rows * walk.steps(K) * BLOCK / 32
    return f"{loop / weights:.2f} per weight, {dict(usage)}, {kernel.metadata.shared} bytes shared"


def _loops(code: str) -> Iterator[list[str]]:
    """Instructions between a label and a jump back to it."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in code.splitlines():
        if found := re.match(r"(\.L_x_\d+):", line):
            labels[found[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*)", line):
            instructions.append(found[1])
            jump = re.search(r"BRA `\((\.L_x_\d+)\)", found[1])
            if jump and jump[1] in labels:
                yield instructions[labels[jump[1]] :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="only compile, for Hopper")
    parser.add_argument("--most", type=int, default=16, help="walks per product")
    parser.add_argument("--roles", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[TOKENS])
    arguments = parser.parse_args()
    num_sms = 132 if arguments.compile else Chip.of(torch.device("cuda")).num_sms
    jobs = {
        role: walks(*SHAPES[role], num_sms, is_gated=role == "gate_up")[: arguments.most]
        for role in arguments.roles
    }
    if arguments.compile:
        for role, candidates in jobs.items():
            for walk in candidates:
                share = share_of_time(walk, *SHAPES[role], num_sms)
                print(f"{role:8} {share:.2f} {walk}: {compile_for_hopper(role, walk)}", flush=True)
        return
    device = torch.device("cuda")
    record = Record("nvfp4_resident", None, device)
    jobs = {
        role: [replace(walk, ahead=n) for walk in candidates for n in (2, 3)]
        for role, candidates in jobs.items()
    }
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(prepare, [(role, walk) for role, c in jobs.items() for walk in c], chunksize=4)
    plans, chip = Plans(Target.of(device)), Chip.of(device)
    for role, M in itertools.product(arguments.roles, arguments.tokens):
        times = measure(role, M, jobs[role], plans, chip)
        own = sorted((c for c in times if isinstance(c, Walk)), key=times.__getitem__)
        package = next(us for c, us in times.items() if not isinstance(c, Walk))
        print(f"{role:8} {M:3} tokens: {package:.1f} us in the package", flush=True)
        for walk in own[:4]:
            print(f"    {times[walk]:6.1f} us  {walk}", flush=True)
        rows = [{"us": times[walk], **asdict(walk)} for walk in own]
        record.add(f"{role} {M}", package_us=package, walks=rows)


if __name__ == "__main__":
    main()
