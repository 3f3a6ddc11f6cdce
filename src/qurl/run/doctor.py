"""`qurl doctor`: what this machine offers, and whether it computes the right numbers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

import torch
from packaging.requirements import Requirement

from qurl import __version__
from qurl.config.schema import ScratchConfig
from qurl.errors import QurlError
from qurl.ops.device import pick_device
from qurl.ops.target import Target
from qurl.rollout import build_engine
from qurl.run.budget import GIB
from qurl.run.machine import Finding
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.scratch import build_tiny_llama

DISTRIBUTION = "qurl-rl"
LITTLE_DISK, NO_DISK = 20 * GIB, GIB
"""A checkpoint of 1.5B takes 18 GB: FP32 weights and moments."""
BUSY_SHARE = 0.1
"""Share of a GPU's memory that others may hold without a note."""


def run_doctor(*, as_json: bool, gpus: int | None, device: str | None) -> bool:
    """Print a line per check, or all of them as JSON; False if one failed.

    With `gpus`, so many ranks are checked in place of kernels.
    """
    findings, output = [], sys.stdout
    with redirect_stdout(sys.stderr):  # Ray reports there what the checks kill
        for finding in examine() if gpus is None else examine_ranks(gpus, device or "cuda"):
            findings.append(finding)
            if not as_json:
                print(finding, file=output, flush=True)
    num_failed, num_notes = (sum(f.verdict == v for f in findings) for v in ("FAIL", "note"))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    elif num_failed:
        print(f"\n{num_failed} of {len(findings)} checks failed: see the lines with FAIL")
    else:
        notes = f", with {num_notes} notes" if num_notes else ""
        print(f"\nthis machine is ready for QuRL{notes}")
    return not num_failed


def examine() -> Iterator[Finding]:
    """All checks, in the order in which one explains the next."""
    yield from check_versions()
    device = pick_device("auto")
    yield from check_gpu(device)
    yield from check_memory(device)
    yield check_disk(Path.cwd())
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from qurl.run.kernel_checks import check_kernels  # needs Triton

        yield check_plans(device)
        yield from check_kernels(device)
    else:
        yield check_reference()
        yield Finding(
            "note",
            "kernels",
            "not tested, they need a GPU and Triton",
            "fine for trying things out; models of 0.5B and more need a GPU",
        )


def examine_ranks(gpus: int, device: str) -> Iterator[Finding]:
    """What several GPUs need; `examine` has the rest."""
    from qurl.run.rank_checks import check_ranks

    yield from check_versions()
    if device == "cuda":
        yield from check_gpu(pick_device("auto"))
    if device == "cpu" or torch.cuda.is_available():
        yield from check_ranks(gpus, device)
    else:
        advice = "--device cpu tries the same with processes of this machine"
        yield Finding("FAIL", f"{gpus} GPUs", "torch sees none", advice)


def check_versions() -> Iterator[Finding]:
    """Python and each package that QuRL declares, against what it asks for."""
    yield Finding("ok", "qurl", f"{__version__} on Python {platform.python_version()}")
    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        advice = f"install the package (pip install {DISTRIBUTION}) to check its dependencies"
        yield Finding("note", "packages", "QuRL runs from a folder and is not installed", advice)
        declared = []
    for requirement in map(Requirement, declared):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield check_package(requirement)
    yield check_triton()


def check_package(requirement: Requirement) -> Finding:
    name, advice = requirement.name, f"pip install '{requirement}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("FAIL", name, "not installed", advice)
    if requirement.specifier.contains(version, prereleases=True):
        return Finding("ok", name, version)
    return Finding("FAIL", name, f"{version} does not satisfy {requirement}", advice)


def check_triton() -> Finding:
    if importlib.util.find_spec("triton") is not None:
        try:
            return Finding("ok", "triton", importlib.metadata.version("triton"))
        except importlib.metadata.PackageNotFoundError:  # pytorch-triton of torch's nightly builds
            return Finding("ok", "triton", "installed under another name")
    if torch.cuda.is_available():
        advice = "pip install triton, or set rollout.engine = 'hf' and model.compile = true"
        return Finding("FAIL", "triton", "not installed, and kernels need it", advice)
    return Finding("ok", "triton", "not installed, and not needed without a GPU")


def check_gpu(device: torch.device) -> Iterator[Finding]:
    """The GPU and the numbers that its matrix units multiply."""
    driver = read_driver()
    if device.type != "cuda":
        yield check_missing_gpu(driver)
        return
    yield Finding("ok", "CUDA", f"{torch.version.cuda}, driver {driver or 'unknown'}")
    target = Target.of(device)
    assert target.capability is not None
    major, minor = target.capability
    yield Finding("ok", "GPU", f"{target.name}, compute capability {major}.{minor}")
    if target.capability < (8, 0):
        advice = "use a GPU of the Ampere generation (A100, RTX 3090) or newer"
        yield Finding("FAIL", "BF16", "no matrix units for it", advice)
        return
    yield Finding("ok", "BF16 and INT8", "in matrix units")
    if target.has_fp8:
        yield Finding("ok", "FP8", "in matrix units")
    else:
        found = "no matrix units for it, which come with compute capability 8.9 (Ada, Hopper)"
        yield Finding("note", "FP8", found, "use quant.format = 'int8' and quant.kv = 'none'")


def check_missing_gpu(driver: str | None) -> Finding:
    """Is there no GPU, or does torch not see it?"""
    if driver is None:
        return Finding("note", "GPU", "none", "training runs on the CPU, for tiny models only")
    if torch.version.cuda is None:
        advice = "install a CUDA build of torch (https://pytorch.org/get-started)"
        return Finding("FAIL", "GPU", "there is one, but this torch is a CPU build", advice)
    found = f"there is one, but torch (CUDA {torch.version.cuda}) cannot use driver {driver}"
    advice = "check CUDA_VISIBLE_DEVICES, and update the driver if it is older than torch's CUDA"
    return Finding("FAIL", "GPU", found, advice)


def read_driver() -> str | None:
    """The version of NVIDIA's driver; None if there is no GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def check_memory(device: torch.device) -> Iterator[Finding]:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        is_busy = total - free > BUSY_SHARE * total
        advice = "other processes hold the rest: see nvidia-smi" if is_busy else ""
        yield Finding("note" if is_busy else "ok", "GPU memory", found, advice)
    if sys.platform == "linux":
        pages = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PHYS_PAGES")
        free, total = (count * os.sysconf("SC_PAGE_SIZE") / GIB for count in pages)
        yield Finding("ok", "memory", f"{total:.1f} GiB, {free:.1f} of it unused")


def check_disk(folder: Path) -> Finding:
    """Room for checkpoints where a run would be written by default."""
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free in {folder}"
    advice = "a checkpoint takes 12 bytes a parameter: 18 GB at 1.5B; set run_dir to a larger disk"
    if free < NO_DISK:
        return Finding("FAIL", "disk", found, advice)
    if free < LITTLE_DISK:
        return Finding("note", "disk", found, advice)
    return Finding("ok", "disk", found)


def check_plans(device: torch.device) -> Finding:
    """Are matrix products tuned for this GPU?"""
    from qurl.quant.kernels.plans import Plans  # needs Triton

    try:
        plans = Plans(Target.of(device))
    except QurlError as error:
        return Finding("FAIL", "plans of products", str(error))
    if plans.table:
        return Finding("ok", "plans of products", plans.source)
    advice = "qurl tune measures the products of your model, about a minute each"
    return Finding("note", "plans of products", "none measured for this GPU", advice)


def check_reference() -> Finding:
    """The engine on torch primitives against the model that it copies."""
    torch.manual_seed(0)
    model = build_tiny_llama(ScratchConfig(), build_tokenizer())
    try:
        gap = build_engine("local", model, quant="int8").sync(model, version=1).canary_gap
    except QurlError as error:
        return Finding("FAIL", "engine on the CPU", str(error), "please report this")
    return Finding("ok", "engine on the CPU", f"INT8 copy is {gap:.2g} from its model (log-probs)")
