"""Every kernel compiles for the GPUs that we support, and into the instructions that make it fast.

No GPU is needed: a process without Triton's interpreter compiles what the launchers would launch.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from kernels_compile import (
    AMPERE,
    EARLY,
    HOPPER,
    INSTRUCTION,
    LAUNCHES,
    OF_LARGE_TENSORS,
    arguments_before_wait,
    before_wait,
)

ROOT = Path(__file__).parents[2]
JOBS = [(launch, target) for launch in LAUNCHES for target in launch.targets]
SHARED_BYTES = {AMPERE: 163 * 1024, HOPPER: 227 * 1024}
"""What one program can have."""
STATIC = {"weight", "scale_w", "bias", "q_norm", "k_norm", "kv_scale", "kv_center"}
"""Arguments that only a sync writes: no other kernel of a step does."""

pytestmark = pytest.mark.xdist_group("kernels_compile")
each_job = pytest.mark.parametrize(
    ("launch", "target"), JOBS, ids=[f"{launch.name}-sm_{target}" for launch, target in JOBS]
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, request):
    """By launch and target, what was compiled."""
    out = tmp_path_factory.mktemp("compiled") / "kernels.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(ROOT / "src")
    env["TRITON_CACHE_DIR"] = str(request.config.cache.mkdir("triton"))
    subprocess.run(
        [sys.executable, ROOT / "tests" / "kernels_compile.py", "--json", out],
        env=env,
        check=True,
        timeout=300,
    )
    results = {}
    for entry in json.loads(out.read_text()):
        results.setdefault((entry["launch"], entry["target"]), []).append(entry)
    return results


@each_job
def test_the_launcher_launches_what_is_said(compiled, launch, target):
    entries = compiled[launch.name, target]
    assert not [entry["error"] for entry in entries if "error" in entry]
    assert {entry["kernel"] for entry in entries} == set(launch.kernels)


@each_job
def test_nothing_spills(compiled, launch, target):
    for entry in compiled[launch.name, target]:
        assert not local_accesses(entry["instructions"]), entry["kernel"]


@each_job
def test_instructions(compiled, launch, target):
    for entry in compiled[launch.name, target]:
        pattern = launch.kernels[entry["kernel"]].has[target]
        found = [name for name in entry["instructions"] if re.match(pattern, name)]
        assert found, f"{entry['kernel']} has no {pattern}"


@each_job
def test_a_kernel_that_starts_early_waits(compiled, launch, target):
    for entry in compiled[launch.name, target]:
        assert entry["waits"] == entry["overlaps"], entry["kernel"]
        assert not (entry["overlaps"] and target < HOPPER)


@each_job
def test_nothing_but_static_data_is_read_before_the_wait(compiled, launch, target):
    """As it was written, and in the instructions that two compilers made of it."""
    for entry in compiled[launch.name, target]:
        assert set(entry["early_arguments"]) <= STATIC, entry["kernel"]
        num_early = launch.kernels[entry["kernel"]].num_early if entry["waits"] else 0
        assert [name.split(".")[0] for name in entry["early"]] == ["LDG"] * num_early


def test_every_kernel_of_a_step_overlaps(compiled):
    """All but those that have nothing to hide."""
    overlapping = {
        entry["kernel"]
        for (_, target), entries in compiled.items()
        for entry in entries
        if target == HOPPER and entry["overlaps"]
    }
    names = {name for launch in LAUNCHES for name in launch.kernels}
    assert overlapping == {name for name in names if not OF_LARGE_TENSORS.match(name)}


@each_job
def test_shared_memory_suffices(compiled, launch, target):
    for entry in compiled[launch.name, target]:
        assert entry["shared_bytes"] <= SHARED_BYTES[target], entry["kernel"]


def local_accesses(instructions):
    """Loads and stores of local memory: registers did not suffice."""
    return {name: n for name, n in instructions.items() if re.match(r"(LDL|STL)\b", name)}


def test_what_the_disassembler_prints_is_understood():
    listing = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/             @UP0 UTMALDG.2D [UR8], [UR4] ;
        /*0030*/                   STL.64 [R1], R4 ;
        /*0040*/                   EXIT ;
    """
    names = INSTRUCTION.findall(listing)
    assert names == ["LDC", "LDG.E.128", "UTMALDG.2D", "STL.64", "EXIT"]
    assert local_accesses(dict.fromkeys(names, 1)) == {"STL.64": 1}


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
    assert {name for launch in LAUNCHES for name in launch.kernels} == written


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
