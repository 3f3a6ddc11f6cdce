"""The operations in Triton against those on torch: a prefill and some decode steps of small models.

On a CPU Triton's interpreter runs the kernels, in FP32, so that what is left are sums in another
order. Float noise can carry an activation over a rounding boundary, after which that row differs by
a code: of quantized models the typical gap must vanish, and the largest stay at the size of a code.
"""

import copy
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from qurl.errors import EngineError
from qurl.quant.coded_linear import code_base_
from qurl.rollout.local.cache import KVCache
from qurl.rollout.local.decoder import choose_ops, decode, decode_sequence, prefill
from qurl.rollout.local.reference import ReferenceOps
from qurl.rollout.local.sync import WeightSync
from qurl.rollout.local.weights import Weights
from qurl.trainer.lora import adapters, add_adapters_
from qurl.types import KVScales
from tests.models import CPU, SHAPE, tiny_llama

V = 61
SIZES = SHAPE | {"vocab_size": V, "hidden_size": 96, "intermediate_size": 160, "head_dim": 24}
"""No size is a power of two, and with 128x128 tiles none is a multiple of a tile."""
FORMATS = ["none", "int8", "fp8", "fp8-block", "nvfp4"]
PAGE_SIZE = 2
PROMPTS = [[3, 4, 5], [11, 12]]
STEPS = [[10, 14], [40, 41]]
"""Tokens of both sequences: one fills its second page and begins its third, one the reverse."""
PAGES = [[2, 5, 1], [4, 3]]


@cache
def make_model(name: str):
    if name == "llama":
        model = tiny_llama(**SIZES, attention_bias=True, mlp_bias=True)
    else:
        torch.manual_seed(0)
        model = {
            "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
            "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
        }[name]()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.2)
    return model.eval()


@dataclass(frozen=True)
class Course:
    """What a set of operations made of the prompts and of the steps."""

    hidden: Tensor  # [prompt tokens, hidden]
    logits: Tensor  # [steps, sequences, V]
    cached: Tensor  # [layers, 2, tokens, kv_heads, head_dim] as numbers

    def gaps_to(self, other: "Course") -> dict[str, Tensor]:
        """Relative to the largest number of each kind."""
        pairs = {k: (getattr(self, k), getattr(other, k)) for k in ("hidden", "logits", "cached")}
        return {kind: (a - b).abs() / b.abs().max() for kind, (a, b) in pairs.items()}


@torch.no_grad()
def run(model, quant: str, *, is_fused: bool, has_codes=False, deterministic=False, full_layers=0):
    options = {"native_codes": is_fused, "full_layers": full_layers}
    weights = Weights(model, quant, torch.float32, CPU, **options)
    WeightSync(weights).load_(model)
    if is_fused:
        from qurl.rollout.local.fused import FusedOps

        ops = FusedOps(weights, deterministic=deterministic)
    else:
        ops = ReferenceOps(weights)
    kv = make_cache(weights, has_codes)
    hidden = prefill(ops, PROMPTS, kv, PAGES)
    num_rows = -(-len(PROMPTS) // ops.row_multiple) * ops.row_multiple
    table = torch.zeros(num_rows, 4, dtype=torch.int32)
    for row, pages in enumerate(PAGES):
        table[row, : len(pages)] = torch.tensor(pages)
    logits = []
    for step, sampled in enumerate(STEPS):
        tokens, positions = torch.zeros(2, num_rows, dtype=torch.int64)
        tokens[:2] = torch.tensor(sampled)
        positions[:2] = torch.tensor([len(p) + step for p in PROMPTS])
        logits.append(decode(ops, kv, tokens, positions, table)[:2])
    return Course(hidden, torch.stack(logits), read_cache(kv))


def read_cache(kv: KVCache) -> Tensor:
    """Keys and values of the tokens of both sequences."""
    slots = [
        PAGE_SIZE * pages[at // PAGE_SIZE] + at % PAGE_SIZE
        for prompt, pages in zip(PROMPTS, PAGES, strict=True)
        for at in range(len(prompt) + len(STEPS))
    ]
    numbers = kv.data.float().flatten(2, 3)
    if kv.scales is not None:
        numbers *= kv.scales.scale[:, :, None, :, None]
    return numbers[:, :, slots]


def make_cache(weights: Weights, has_codes: bool) -> KVCache:
    arch = weights.arch
    dtype = torch.float8_e4m3fn if has_codes else torch.float32
    shape = (arch.num_layers, 2, 6, PAGE_SIZE, arch.num_kv_heads, arch.head_dim)
    scale = torch.linspace(0.01, 0.02, arch.num_layers * 2 * arch.num_kv_heads)
    scale = scale.view(arch.num_layers, 2, arch.num_kv_heads)
    if not has_codes:
        return KVCache(torch.zeros(shape).to(dtype))
    center = torch.linspace(-1, 1, scale[:, 0].numel() * arch.head_dim)
    center = center.view(arch.num_layers, arch.num_kv_heads, arch.head_dim)
    return KVCache(torch.zeros(shape).to(dtype), KVScales(scale, center))


def assert_near(fused: Course, reference: Course, quant: str) -> None:
    for kind, gaps in fused.gaps_to(reference).items():
        assert gaps.median() < 1e-6, kind
        assert gaps.max() < (1e-5 if quant == "none" else 0.1), kind


interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None,
    reason="needs Triton's interpreter; on a GPU the contract suite does this",
)


@interpreted
@pytest.mark.parametrize(
    ("name", "quant"),
    [
        *(("llama", quant) for quant in FORMATS),
        *(("qwen2", quant) for quant in ("none", "int8")),
        *(("qwen3", quant) for quant in ("none", "fp8")),
    ],
)
def test_a_course_equals_the_references(name, quant):
    model = make_model(name)
    fused, reference = (run(model, quant, is_fused=f) for f in (True, False))
    assert_near(fused, reference, quant)


@interpreted
@pytest.mark.parametrize(
    ("name", "quant"), [("llama", "none"), ("qwen2", "int8"), ("qwen3", "fp8")]
)
def test_with_an_fp8_cache(name, quant):
    model = make_model(name)
    fused, reference = (run(model, quant, is_fused=f, has_codes=True) for f in (True, False))
    assert_near(fused, reference, "fp8")
    exact = run(model, quant, is_fused=False)
    assert exact.gaps_to(reference)["cached"].median() > 1e-3, "the cache did hold codes"


@interpreted
@pytest.mark.parametrize("quant", ["int8", "fp8-block"])
def test_with_layers_in_full_precision(quant):
    model = tiny_llama(**SIZES | {"num_hidden_layers": 3}, attention_bias=True)
    fused, reference = (run(model, quant, is_fused=f, full_layers=1) for f in (True, False))
    assert_near(fused, reference, quant)
    everywhere = run(model, quant, is_fused=False)
    assert everywhere.gaps_to(reference)["logits"].median() > 1e-3


@interpreted
def test_adapters_beside_a_base_in_codes():
    model = copy.deepcopy(make_model("llama"))
    code_base_(model, "nvfp4", CPU)
    add_adapters_(model, 4, 8, seed=0, dtype=torch.float32)
    for _, adapter in adapters(model):
        torch.nn.init.normal_(adapter.B, std=0.1)
    fused, reference = (run(model, "nvfp4", is_fused=f) for f in (True, False))
    assert_near(fused, reference, "none")
    base = run(make_model("llama"), "nvfp4", is_fused=False)
    assert base.gaps_to(reference)["logits"].median() > 1e-3, "adapters do something"
    with pytest.raises(EngineError, match=r"deterministic = true does not go with model\.base"):
        run(model, "nvfp4", is_fused=True, deterministic=True)


@interpreted
def test_deterministic_plans_compute_the_same():
    model = make_model("qwen2")
    fused = run(model, "fp8", is_fused=True, deterministic=True)
    assert_near(fused, run(model, "fp8", is_fused=False), "fp8")


@torch.no_grad()
@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_sequence_decoded_in_one_step_is_its_prefill(name, page_size):
    """13 tokens as rows of one step, over pages in order."""
    model = make_model(name)
    weights = Weights(model, "none", torch.float32, CPU)
    WeightSync(weights).load_(model)
    arch = weights.arch
    shape = (arch.num_layers, 2, 6, page_size, arch.num_kv_heads, arch.head_dim)
    kv = KVCache(torch.zeros(shape))
    ids = [(7 * i + 2) % V for i in range(13)]
    expected = model(input_ids=torch.tensor([ids])).logits[0]
    logits = decode_sequence(ReferenceOps(weights), kv, ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


# --- which operations -------------------------------------------------------------------------


def without_triton(monkeypatch):
    """As if it were not installed, also for modules that have imported it already."""
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("qurl.rollout.local.fused", "qurl.quant.kernels.gemm"):
        monkeypatch.delitem(sys.modules, name, raising=False)


GPU_WEIGHTS = SimpleNamespace(
    device=torch.device("cuda"), arch=None, format=None, dtype=torch.bfloat16
)


def test_a_gpu_needs_triton(monkeypatch):
    without_triton(monkeypatch)
    with pytest.raises(EngineError, match=r'needs Triton on a GPU.*or set rollout.engine = "hf"'):
        choose_ops(GPU_WEIGHTS)


def test_another_module_that_is_missing_is_not_mistaken_for_triton(monkeypatch):
    monkeypatch.delitem(sys.modules, "qurl.rollout.local.fused", raising=False)
    monkeypatch.setitem(sys.modules, "qurl.quant.kernels.plans", None)
    with pytest.raises(ModuleNotFoundError, match=r"qurl\.quant\.kernels\.plans"):
        choose_ops(GPU_WEIGHTS)


def test_a_cpu_needs_no_triton(monkeypatch):
    without_triton(monkeypatch)
    weights = SimpleNamespace(device=CPU, arch=None, format=None, dtype=torch.float32)
    assert isinstance(choose_ops(weights, deterministic=True), ReferenceOps)
