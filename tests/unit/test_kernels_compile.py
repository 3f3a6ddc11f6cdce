"""Every kernel compiles for the GPUs that we support, into the instructions that make it fast.

No GPU is needed: a process without Triton's interpreter compiles what the launchers launch.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

pytest.importorskip("triton")

from kernels_compile import (
    ADA,
    AMPERE,
    EARLY,
    HOPPER,
    LAUNCHES,
    MAX_SPILLS,
    OF_LARGE_TENSORS,
    arguments_before_wait,
    before_wait,
    is_repeated,
    overwritten_products,
    read_listing,
)

ROOT = Path(__file__).parents[2]
KERNELS = sorted({name for launch in LAUNCHES for name in launch.kernels})
SHARED_BYTES = {AMPERE: 99 * 1024, ADA: 99 * 1024, HOPPER: 227 * 1024}
"""Shared memory that one program can have."""
STATIC = {"weight", "scale_w", "bias", "q_norm", "k_norm", "kv_scale", "kv_center"}
"""Arguments that only a sync writes: no other kernel of a step does."""

pytestmark = pytest.mark.xdist_group("kernels_compile")


def compile_launches(request, out, *options):
    """By launch and target, the kernels that were compiled, once for all test processes."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(ROOT / "src")
    env["TRITON_CACHE_DIR"] = str(request.config.cache.mkdir("triton"))
    command = [sys.executable, ROOT / "tests" / "kernels_compile.py", *options, "--json", out]
    with FileLock(f"{out}.lock"):
        if not out.exists():
            subprocess.run(command, env=env, check=True, timeout=600)
    results = {
        (launch.name, target): []
        for launch in LAUNCHES
        for target in launch.targets
        if "--all" in options or not is_repeated(launch, target)
    }
    for entry in json.loads(out.read_text()):
        results[entry["launch"], entry["target"]].append(entry)
    return results


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, request, worker_id):
    folder = tmp_path_factory.getbasetemp()
    out = (folder if worker_id == "master" else folder.parent) / "kernels.json"
    return compile_launches(request, out)


def test_every_launch_compiles_the_kernels_it_names(compiled):
    assert not wrong_launches(compiled)


@pytest.mark.parametrize("kernel", KERNELS)
def test_instructions(compiled, kernel):
    """All GPUs and launches of a kernel, so that one failure shows every one."""
    failures = wrong_instructions(compiled, kernel)
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_every_launch_on_every_gpu(tmp_path, request):
    """Also what `is_repeated` leaves out above."""
    compiled = compile_launches(request, tmp_path / "kernels.json", "--all")
    assert len(compiled) == sum(len(launch.targets) for launch in LAUNCHES)
    assert not wrong_launches(compiled)
    failures = [fault for kernel in KERNELS for fault in wrong_instructions(compiled, kernel)]
    assert not failures, "\n".join(failures)


def test_every_launch_is_compiled_for_every_generation(compiled):
    """And with FP8 for Ada, whose other kernels are Ampere's."""
    left_out = {
        (launch.name, target) for launch in LAUNCHES for target in launch.targets
    } - compiled.keys()
    assert {target for _, target in left_out} == {ADA}
    assert all((name, AMPERE) in compiled for name, _ in left_out)


def wrong_launches(compiled):
    """Those that failed or compiled other kernels than they name."""
    failures = []
    for launch in LAUNCHES:
        for target in launch.targets:
            entries = compiled.get((launch.name, target))
            if entries is None:
                continue
            errors = [entry["error"] for entry in entries if "error" in entry]
            names = {entry["kernel"] for entry in entries if "error" not in entry}
            if errors or names != set(launch.kernels):
                failures.append((f"{launch.name} on sm_{target}", names, *errors))
    return failures


def wrong_instructions(compiled, kernel):
    return [
        f"{launch.name} on sm_{target}: {fault}"
        for launch in LAUNCHES
        for target in launch.targets
        for entry in compiled.get((launch.name, target), ())
        if entry.get("kernel") == kernel
        for fault in faults(entry, launch.kernels[kernel], target)
    ]


def faults(entry, look, target):
    """What is wrong with a compiled kernel."""
    instructions, early = entry["instructions"], entry["early"]
    spills = local_accesses(instructions)
    if sum(spills.values()) > MAX_SPILLS.get((target, entry["kernel"]), 0):
        yield f"it spills registers: {spills}"
    if not any(re.match(look.has[target], name) for name in instructions):
        yield f"no instruction matches {look.has[target]}"
    products, waits = (
        sum(n for name, n in instructions.items() if kind in name)
        for kind in ("GMMA", "WARPGROUP.DEPBAR")
    )
    # ptxas waits for each product where it runs out of registers.
    if entry["kernel"].startswith("flash_") and products and waits >= products:
        yield f"it waits {waits} times for {products} products, so none overlaps anything"
    if entry["overwritten"]:
        yield f"it rewrites registers that products may still read: {entry['overwritten']}"
    if entry["shared_bytes"] > SHARED_BYTES[target]:
        yield f"{entry['shared_bytes']} bytes of shared memory"
    overlaps = target >= HOPPER and not OF_LARGE_TENSORS.match(entry["kernel"])
    if (entry["overlaps"], entry["waits"]) != (overlaps, overlaps):
        yield f"it starts early: {entry['overlaps']}, it waits: {entry['waits']}, not {overlaps}"
    # As it was written, and in the instructions that two compilers made of it.
    if not set(entry["early_arguments"]) <= STATIC:
        yield f"it reads {entry['early_arguments']} before it waits"
    expected = ["LDG"] * (look.num_early if entry["waits"] else 0)
    if [name.split(".")[0] for name in early] != expected:
        yield f"before it waits it has {early}, not {len(expected)} loads"


def local_accesses(instructions):
    """Loads and stores of local memory, which replace missing registers."""
    return {name: n for name, n in instructions.items() if re.match(r"(LDL|STL)\b", name)}


def test_what_the_disassembler_prints_is_understood():
    listing = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/             @UP0 UTMALDG.2D [UR8], [UR4] ;
        /*0030*/                   STL.64 [R1], R4 ;
        /*0040*/                   EXIT ;
    """
    names = [instruction.name for instruction in read_listing(listing)]
    assert names == ["LDC", "LDG.E.128", "UTMALDG.2D", "STL.64", "EXIT"]
    assert local_accesses(dict.fromkeys(names, 1)) == {"STL.64": 1}


@pytest.mark.parametrize(("wait", "is_overwritten"), [("0x1", True), ("0x0", False)])
def test_factors_that_are_overwritten_are_found(wait, is_overwritten):
    """The last two products of a round form a group, which the next round may find under way."""
    listing = f"""
        /*0000*/                   LDS.128 R8, [R2] ;
        /*0010*/                   LDS.64 R12, [R2+0x100] ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R12, gdesc[UR8], R24 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, {wait} ;
        /*0060*/               @P0 BRA 0x10 ;
        /*0070*/                   EXIT ;
    """
    found = overwritten_products(list(read_listing(listing)))
    assert [i.address for i in found] == ([0x30] if is_overwritten else [])


def test_what_happens_before_the_wait_is_found():
    names = ["S2R", "CCTL.E.PF2", "LDG.E.128", "ACQBULK", "STG.E", "EXIT"]
    assert [name for name in before_wait(names) if EARLY.match(name)] == ["LDG.E.128"]
    assert not before_wait(["LDG.E", "EXIT"])
    for name in (
        "LDG.E",
        "STG.E.64",
        "ST.E",
        "UTMALDG.2D",
        "ATOMG.E.MAX",
        "RED.E",
        "BRA",
        "CALL.REL",
    ):
        assert EARLY.match(name)
    for name in ("LDGDEPBAR", "LDC", "LDS.128", "STS", "S2R", "CCTL.E.PF2"):
        assert not EARLY.match(name)


def test_what_is_read_before_the_wait_is_found():
    ttir = """
  tt.func @a_kernel(%x: !tt.ptr<f32> loc(#a), %w: !tt.ptr<i8>, %d: !tt.tensordesc<i8>, %n: i32) {
    %at = tt.addptr %w, %n : !tt.ptr<i8>, i32 loc(#b)
    %at_0 = tt.splat %at : !tt.ptr<i8> -> tensor<4x!tt.ptr<i8>>
    %unread = tt.addptr %x, %n : !tt.ptr<f32>, i32
    %values = tt.load %at_0, %mask : tensor<4x!tt.ptr<i8>>
    %0 = tt.elementwise_inline_asm "griddepcontrol.wait; // dummy $0" {} -> i32
    %values_1 = tt.load %x : !tt.ptr<f32>
"""
    assert arguments_before_wait(ttir) == {"w"}
    sooner = ttir.replace("    %0 =", "    %tile = tt.descriptor_load %d[%n] : x\n    %0 =")
    assert arguments_before_wait(sooner) == {"w", "d"}
    assert arguments_before_wait(ttir.replace("griddepcontrol.wait", "")) == set()


# Kernels end in "_kernel"; other jitted functions are parts of them and cannot be launched.


def jitted_functions(source):
    """Names of functions with a `triton.jit` decorator, with or without arguments."""
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def launched_names(source):
    """Names in `name[grid](...)`."""
    return {
        node.func.value.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }


SOURCES = [path.read_text() for path in sorted((ROOT / "src" / "qurl").rglob("*.py"))]


def test_every_kernel_is_compiled_here():
    written = {
        name for source in SOURCES for name in jitted_functions(source) if name.endswith("_kernel")
    }
    assert set(KERNELS) == written


def test_every_kernel_is_named_so():
    for source in SOURCES:
        launched = jitted_functions(source) & launched_names(source)
        assert all(name.endswith("_kernel") for name in launched)


def test_a_kernel_would_be_found():
    source = """
@triton.jit
def plain_kernel(x): ...

@triton.jit(do_not_specialize=["n"])
def _part(x, n): ...

def launch(x):
    _part[(1,)](x, 1)
"""
    assert jitted_functions(source) == {"plain_kernel", "_part"}
    assert jitted_functions(source) & launched_names(source) == {"_part"}
