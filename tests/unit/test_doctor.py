"""The doctor: what it says of machines that lack something, and of kernels that are wrong."""

import json
import signal
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from qurl.cli import main
from qurl.errors import EngineError, TrainingError
from qurl.ops.target import Target
from qurl.run import doctor, engine_checks, rank_checks
from qurl.run.machine import Finding

CPU = torch.device("cpu")
GIB = 2**30
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None, reason="needs Triton's interpreter"
)


def test_a_machine_without_a_gpu_is_ready_and_says_what_it_lacks(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "read_driver", lambda: None)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"ok    torch: {torch.__version__.split('+')[0]}") for line in lines)
    assert "note  GPU: none; training runs on the CPU, for tiny models only" in lines
    assert any(line.startswith("ok    engine on the CPU: INT8 copy is 0.0") for line in lines)
    assert any(line.startswith("note  kernels: not tested, they need a GPU") for line in lines)
    assert lines[-1] == "this machine is ready for QuRL, with 2 notes"


def test_a_failure_is_the_exit_status_and_json_holds_every_line(capsys, monkeypatch):
    found = [Finding("ok", "a", "fine"), Finding("FAIL", "b", "broken", "mend it")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(found))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok    a: fine",
        "FAIL  b: broken; mend it",
        "",
        "1 of 2 checks failed: see the lines with FAIL",
    ]
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[1] == {
        **{"verdict": "FAIL", "name": "b", "found": "broken", "advice": "mend it"}
    }


def test_unknown_flags_are_refused(capsys):
    assert main(["doctor", "--fast"]) == 2
    assert "got --fast" in capsys.readouterr().err
    for flags, expected in (
        (["--gpus", "two"], "must be a whole number of at least 1"),
        (["--gpus", "--device", "cpu"], "must be a whole number of at least 1"),
        (["--gpus", "1"], "--gpus 1 has nothing to exchange"),
        (["--device", "cpu"], "--device cpu goes with --gpus N"),
        (["--gpus", "2", "--device", "tpu"], "one of cuda, cpu"),
    ):
        assert main(["doctor", *flags]) == 2
        assert expected in capsys.readouterr().err


def test_packages_of_extras_and_of_other_platforms_are_not_checked(monkeypatch):
    declared = [
        "torch>=2",
        "numpy>=1; python_version >= '3'",
        "ray; extra == 'ray'",
        "a; os_name == ''",
    ]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: declared)
    names = [finding.name for finding in doctor.check_versions()]
    assert names == ["qurl", "torch", "numpy", "triton"]


def test_triton_may_come_under_another_name(monkeypatch):
    """Nightly builds of torch install it as pytorch-triton."""

    def version(name):
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert str(doctor.check_triton()) == "ok    triton: installed under another name"


@pytest.mark.parametrize(("num_gpus", "found"), [(0, "torch sees none"), (1, "torch sees 1")])
def test_too_few_gpus_are_a_failure(num_gpus, found, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(doctor, "check_gpu", lambda _: [])
    assert main(["doctor", "--gpus", "2"]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL"))
    assert line.startswith(f"FAIL  2 GPUs: {found}")


class Fakes:
    """Ranks whose commands return what they are told to."""

    def __init__(self, result):
        self.post, self.result = SimpleNamespace(ranks=SimpleNamespace(size=2)), result

    def run(self, function, *arguments):
        return self.result


@pytest.mark.parametrize(
    ("result", "verdict", "found"),
    [
        ((0, 3e11), "ok", "right, 300.0 GB/s"),
        ((0, 2e9), "note", "right, 2.0 GB/s"),
        ((1, 3e11), "FAIL", "wrong on 1 ranks"),
    ],
)
def test_exchanges_between_gpus(result, verdict, found):
    finding = rank_checks.check_exchange(Fakes(result), "all-reduce", torch.device("cuda"))
    assert (finding.verdict, finding.found) == (verdict, found)
    assert finding.name == "all-reduce of 2 ranks (NCCL)"
    assert bool(finding.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("error", "verdict", "found"),
    [
        ("trainer rank 1 was killed by signal 9. The others", "ok", "noticed after"),
        ("the network is down", "FAIL", "reported as 'the network is down'"),
        (None, "FAIL", "nobody noticed"),
    ],
)
def test_a_kill_must_be_named(error, verdict, found, monkeypatch):
    killed = []
    monkeypatch.setattr(rank_checks.os, "kill", lambda *process: killed.append(process))

    def whole_model():
        if error is not None:
            raise TrainingError(error)

    group = SimpleNamespace(whole_model=whole_model)
    finding = rank_checks.check_kill(Fakes([10, 11]), group)
    assert killed == [(11, signal.SIGKILL)]
    assert finding.verdict == verdict
    assert found in finding.found


@pytest.mark.parametrize("gap", [1e-3, float("nan")])
def test_weights_that_differ_are_a_failure(gap):
    assert rank_checks.judge_gap("2 trainers against one", 1e-6).verdict == "ok"
    finding = rank_checks.judge_gap("2 trainers against one", gap)
    assert finding.verdict == "FAIL"
    assert finding.advice.startswith("do not train")


def test_a_broken_exchange_is_a_line_and_not_a_traceback(monkeypatch):
    def fail(*_):
        raise RuntimeError("NCCL error: unhandled system error\nmore lines")

    monkeypatch.setattr(rank_checks, "check_trainers", fail)
    (finding,) = rank_checks.check_ranks(2, "cpu")
    assert finding.found == "RuntimeError: NCCL error: unhandled system error"
    assert "NCCL_DEBUG=INFO" in finding.advice


def test_a_broken_group_of_engines_is_a_line_too(monkeypatch):
    def fail(*_):
        raise EngineError("engine 0 did not start within parallel.timeout = 120 s")

    monkeypatch.setattr(rank_checks, "check_trainers", lambda *_: [])
    monkeypatch.setattr(rank_checks, "check_engine_group", fail)
    (finding,) = rank_checks.check_ranks(2, "cpu")
    assert (finding.verdict, finding.name) == ("FAIL", "engines in other processes")
    assert "EngineError: engine 0 did not start" in finding.found


def test_engines_without_ray_are_not_called_fine(monkeypatch):
    monkeypatch.setattr(engine_checks, "find_spec", lambda _: None)
    (finding,) = engine_checks.check_engine_group(2, CPU)
    assert finding.verdict == "note"
    assert finding.found == "not tested: pip install 'qurl-rl[ray]'"


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ({"a": [(1, 2)], "b": [(3,)]}, "ok"),
        ({"a": [(1, 2)], "b": [(4,)]}, "FAIL"),
        ({"a": [(1, 2)]}, "FAIL"),
        ({"a": [(1, 2)], "b": [(3,)], "c": [(3,)]}, "FAIL"),
    ],
)
def test_other_tokens_are_a_failure(found, verdict):
    expected = {"a": [(1, 2)], "b": [(3,)]}
    assert engine_checks.compare("tokens", found, expected).verdict == verdict


def test_an_engine_that_does_not_join_is_a_failure():
    group = SimpleNamespace(name="actor", version=2)
    members = [SimpleNamespace(versions={"actor": version}) for version in (2, 1)]
    fleet = SimpleNamespace(members=members)
    finding = engine_checks.check_replacement(fleet, group, {})
    assert finding.verdict == "FAIL"
    assert "did not join at the sync" in finding.found


@pytest.mark.parametrize(
    ("requirement", "verdict", "found"),
    [
        ("torch>=2.0", "ok", torch.__version__.split("+")[0]),
        ("torch>=99", "FAIL", "does not satisfy torch>=99"),
        ("no-such-package>=1", "FAIL", "not installed"),
    ],
)
def test_packages(requirement, verdict, found):
    finding = doctor.check_package(Requirement(requirement))
    assert finding.verdict == verdict
    assert found in finding.found
    assert finding.advice == ("" if verdict == "ok" else f"pip install '{requirement}'")


@pytest.mark.parametrize(
    ("driver", "cuda", "verdict", "found"),
    [
        (None, None, "note", "none"),
        ("580.1", None, "FAIL", "this torch is a CPU build"),
        ("470.1", "13.0", "FAIL", "torch (CUDA 13.0) cannot use driver 470.1"),
    ],
)
def test_why_torch_sees_no_gpu(driver, cuda, verdict, found, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    finding = doctor.check_missing_gpu(driver)
    assert finding.verdict == verdict
    assert found in finding.found


@pytest.mark.parametrize(
    ("capability", "verdicts"),
    [
        ((7, 5), {"BF16": "FAIL"}),
        ((8, 6), {"BF16 and INT8": "ok", "FP8": "note"}),
        ((9, 0), {"BF16 and INT8": "ok", "FP8": "ok"}),
    ],
)
def test_what_a_gpu_multiplies(capability, verdicts, monkeypatch):
    monkeypatch.setattr(doctor, "read_driver", lambda: "580.1")
    monkeypatch.setattr(Target, "of", lambda _: Target("A GPU", capability, 100))
    findings = {f.name: f for f in doctor.check_gpu(torch.device("cuda"))}
    assert findings["GPU"].found == f"A GPU, compute capability {capability[0]}.{capability[1]}"
    assert {name: findings[name].verdict for name in verdicts} == verdicts
    if verdicts.get("FP8") == "note":
        assert findings["FP8"].advice == "use quant.format = 'int8' and quant.kv = 'none'"


def test_memory_that_others_hold(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    finding = next(iter(doctor.check_memory(torch.device("cuda"))))
    assert str(finding) == (
        "note  GPU memory: 60.0 of 80.0 GiB free; other processes hold the rest: see nvidia-smi"
    )


@pytest.mark.parametrize(("free", "verdict"), [(100, "ok"), (5, "note"), (0.5, "FAIL")])
def test_disk(free, verdict, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free * GIB))
    assert doctor.check_disk(tmp_path).verdict == verdict


@interpreted
def test_plans_of_this_gpu_or_the_advice_to_measure_them(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Target, "of", lambda _: Target("NVIDIA H100", (9, 0), 132))
    assert doctor.check_plans(CPU).verdict == "ok"
    monkeypatch.setattr(Target, "of", lambda _: Target("NVIDIA A10", (8, 6), 72))
    finding = doctor.check_plans(CPU)
    assert finding.verdict == "note"
    assert finding.advice.startswith("qurl tune")
    table = tmp_path / "qurl" / "plans" / "NVIDIA A10.json"
    table.parent.mkdir(parents=True)
    table.write_text("{}")
    assert "is no table of plans" in doctor.check_plans(CPU).found


@interpreted
def test_every_family_of_kernels_agrees_with_torch(monkeypatch):
    """Without FP8, to save time; the FP8 kernels have tests of their own."""
    from qurl.run import kernel_checks

    without_fp8 = SimpleNamespace(of=lambda _: SimpleNamespace(has_fp8=False))
    monkeypatch.setattr(kernel_checks, "Target", without_fp8)
    findings = list(kernel_checks.check_kernels(CPU))
    assert [str(f) for f in findings if f.verdict != "ok"] == []
    names = {f.name.removeprefix("kernels of ") for f in findings}
    engine = {f"engine, {family}" for family in set(kernel_checks.OPERATIONS.values())}
    trainer = {"attention", "layers", "gradients in int8", "head", "8-bit AdamW"}
    assert names == engine | {f"trainer, {name}" for name in trainer} | {
        "weights in int8",
        "weights in nvfp4",
    }


def wrong_norm(ops, layer, x, delta):
    from qurl.rollout.local.fused import FusedOps

    h = FusedOps.final_norm(ops, x, delta)
    h[0] *= 1.5
    return h


@interpreted
def test_a_wrong_kernel_of_the_engine_is_found(monkeypatch):
    from qurl.rollout.local.fused import FusedOps
    from qurl.run import kernel_checks

    monkeypatch.setattr(FusedOps, "input_norm", wrong_norm)
    gaps = kernel_checks.engine_gaps(CPU, "none", "none")
    bad = {name for name, gap in gaps.items() if kernel_checks.judge(name, gap).verdict == "FAIL"}
    assert bad == {"norms and coding"}, "not what reads the wrong numbers afterwards"


@interpreted
@pytest.mark.parametrize("fault", ["half", "nan"])
def test_a_wrong_kernel_of_the_trainer_is_found(fault, monkeypatch):
    from qurl.ops import coding
    from qurl.run import kernel_checks

    right = coding.code_gradient

    def wrong(g, channel_scale, codes, scale, largest):
        right(g, channel_scale, codes, scale, largest)
        scale[3:9] = float("nan") if fault == "nan" else scale[3:9] / 2

    assert kernel_checks.gradient_gap(CPU, "int8") < 1e-6
    monkeypatch.setattr(coding, "code_gradient", wrong)
    gap = kernel_checks.gradient_gap(CPU, "int8")
    finding = kernel_checks.judge("trainer, gradients in int8", gap)
    assert finding.verdict == "FAIL"
    assert finding.advice.startswith("do not train here")


@interpreted
def test_a_kernel_that_does_not_run_fails_alone(monkeypatch):
    from qurl.run import kernel_checks

    def refuse(*_):
        raise RuntimeError("out of resources: shared memory\nmore lines")

    for name in ("engine_gaps", "weight_gap", "attention_gap", "layer_gap", "gradient_gap"):
        monkeypatch.setattr(kernel_checks, name, refuse)
    findings = {f.name: f for f in kernel_checks.check_kernels(CPU)}
    failed = findings["kernels of engine in int8"]
    assert failed.verdict == "FAIL"
    assert failed.found == "RuntimeError: out of resources: shared memory"
    assert findings["kernels of trainer, 8-bit AdamW"].verdict == "ok"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_this_gpu():
    from qurl.run.kernel_checks import check_kernels

    assert [str(f) for f in check_kernels(torch.device("cuda")) if f.verdict != "ok"] == []
