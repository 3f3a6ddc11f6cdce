"""Linear layers in codes against integer and float64 references."""

import pytest
import torch
from models import SHAPE
from torch import nn

from qurl.errors import ModelError
from qurl.quant.formats import (
    FORMATS,
    Quantized,
    dequantize,
    get_format,
    quantize,
    quantize_activation,
)
from qurl.quant.linear import QuantLinear, linear, matmul_codes, quantized_copy

transformers = pytest.importorskip("transformers")


CODED = [name for name, format in FORMATS.items() if not format.is_weight_only]


def _normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _integer_reference(x: Quantized, weight: Quantized):
    """codes_x @ codes_w^T in int64, rounded once to FP32, then the two scales."""
    products = (x.codes.long() @ weight.codes.long().T).float()
    return products * weight.scale.T * x.scale


def test_by_hand():
    # x codes [127, 64] (1.0 -> 63.5, a tie to even) with a = 2/127; w codes [127, -127], a = 1/127.
    # 127*127 - 64*127 = 8001.
    weight = quantize(torch.tensor([[1.0, -1.0]]), "int8")
    x = torch.tensor([[2.0, 1.0]])
    assert linear(x, weight).item() == pytest.approx(8001 * 2 / 127 / 127, rel=1e-6)


@pytest.mark.parametrize("name", ["int8", "int6", "int4"])
@pytest.mark.parametrize("columns", [1, 96, 1040, 1041, 4096])
def test_integer_codes_multiply_exactly(name, columns):
    weight = quantize(_normal(24, columns, seed=1), name)
    x = quantize_activation(_normal(5, columns), weight.format)
    assert torch.equal(matmul_codes(x, weight), _integer_reference(x, weight))


@pytest.mark.parametrize("columns", [1040, 1041, 4096, 4097])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_worst_case_is_exact(columns, sign):
    # 127 everywhere but one 126: a sum near its bound whose last bit must not be lost.
    format = get_format("int8")
    codes_w = torch.full((3, columns), 127, dtype=torch.int8)
    codes_w[1] = -127
    codes_w[2, -1] = 126
    codes_x = torch.full((2, columns), 127 * sign, dtype=torch.int8)
    codes_x[1, 0] = 1
    x = Quantized(codes_x, torch.ones(2, 1), format)
    weight = Quantized(codes_w, torch.ones(3, 1), format)
    exact = codes_x.long() @ codes_w.long().T
    assert exact.abs().max() > 0.99 * columns * 127**2
    assert torch.equal(matmul_codes(x, weight), exact.float())


def test_a_single_fp32_sum_would_not_be_exact():
    """The reason for cutting K: the naive product fails on the same kind of input."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(100, 128, (2, 8, 4097), generator=generator).to(torch.int8)
    naive = codes[0].float() @ codes[1].float().T
    exact = (codes[0].long() @ codes[1].long().T).float()
    format = get_format("int8")
    x, w = (Quantized(c, torch.ones(8, 1), format) for c in codes)
    assert not torch.equal(naive, exact)
    assert torch.equal(matmul_codes(x, w), exact)


def test_fp8_codes_multiply_within_fp32():
    weight = quantize(_normal(32, 700, seed=1), "fp8")
    x = quantize_activation(_normal(6, 700), weight.format)
    exact = (
        (x.codes.double() @ weight.codes.double().T) * x.scale.double() * weight.scale.double().T
    )
    bound = 1e-5 * dequantize(x).double().abs() @ dequantize(weight).double().abs().T
    assert ((matmul_codes(x, weight) - exact).abs() <= bound).all()


@pytest.mark.parametrize("shape", [(128, 128), (130, 300), (5, 7), (256, 129)])
def test_blocks_multiply_like_their_dequantized_selves(shape):
    rows, columns = shape
    weight = quantize(_normal(rows, columns, seed=1), "fp8-block")
    x = quantize_activation(_normal(2, 3, columns), weight.format)
    dense_x = dequantize(x).double()
    exact = dense_x @ dequantize(weight).double().T
    bound = 1e-5 * dense_x.abs() @ dequantize(weight).double().abs().T
    assert ((matmul_codes(x, weight) - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_result_has_the_dtype_of_x_whatever_that_of_the_bias(name, dtype):
    weight = quantize(_normal(9, 32, seed=1), name)
    x, bias = _normal(2, 3, 32, dtype=dtype), _normal(9, seed=2)
    plain, with_bias = linear(x, weight), linear(x, weight, bias)
    assert plain.dtype == with_bias.dtype == dtype
    assert plain.shape == (2, 3, 9)
    exact = matmul_codes(quantize_activation(x, weight.format), weight)
    assert torch.equal(with_bias, (exact + bias).to(dtype))  # one rounding, not two


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.02), ("fp8", 0.06), ("fp8-block", 0.06)])
def test_the_layer_approximates_the_dense_one(name, bound):
    source = nn.Linear(320, 96)
    x = _normal(4, 320)
    dense, quantized = source(x), QuantLinear(source, get_format(name))(x)
    assert 0 < (quantized - dense).norm() / dense.norm() < bound


def test_the_layer_is_a_copy():
    source = nn.Linear(8, 4)
    layer, x = QuantLinear(source, get_format("int8")), _normal(2, 8)
    before = layer(x)
    with torch.no_grad():
        source.weight.zero_()
        source.bias.zero_()
    assert torch.equal(layer(x), before)


def test_tokens_do_not_depend_on_their_batch():
    weight = quantize(_normal(64, 1100, seed=1), "int8")
    x = _normal(7, 1100)
    assert torch.equal(linear(x, weight)[3:4], linear(x[3:4], weight))


@pytest.fixture
def model():
    config = transformers.Qwen2Config(**SHAPE | {"intermediate_size": 64})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_copy_replaces_the_projections_only(model, name):
    before = {key: value.clone() for key, value in model.state_dict().items()}
    clone = quantized_copy(model, name)
    replaced = {key for key, layer in clone.named_modules() if isinstance(layer, QuantLinear)}
    assert replaced == {
        f"model.layers.{i}.{block}"
        for i in range(2)
        for block in (
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        )
    }
    kept = clone.state_dict()
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= kept.keys()
    assert all(torch.equal(value, before[key]) for key, value in kept.items())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in clone.parameters())


def test_quantized_copy_shares_no_memory_with_its_source(model):
    tokens = torch.arange(10)[None]
    clone = quantized_copy(model, "int8")
    with torch.no_grad():
        before = clone(tokens).logits
        for parameter in model.parameters():
            parameter.add_(1.0)
        assert torch.equal(clone(tokens).logits, before)


def test_quantized_copy_computes_with_codes(model):
    layer = model.model.layers[1].self_attn.q_proj
    copy = quantized_copy(model, "int8").model.layers[1].self_attn.q_proj
    x = _normal(3, 32)
    expected = linear(x, quantize(layer.weight.detach(), "int8"), layer.bias.detach())
    assert torch.equal(copy(x), expected)


def test_fused_experts_are_not_left_out_in_silence():
    config = transformers.MixtralConfig(**SHAPE, num_local_experts=2)
    with pytest.raises(ModelError, match=r"experts in one tensor \(model.layers.0.mlp.experts"):
        quantized_copy(transformers.AutoModelForCausalLM.from_config(config), "int8")


def test_a_model_without_projections_is_refused():
    with pytest.raises(ModelError, match=r"Sequential has no layer named like q_proj"):
        quantized_copy(nn.Sequential(nn.Linear(4, 4)), "int8")


def test_a_copy_in_part_is_refused():
    """OPT has out_proj, fc1 and fc2: an "int8" actor would be mostly unquantized."""
    config = transformers.OPTConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=1,
        ffn_dim=32,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        max_position_embeddings=32,
    )
    with pytest.raises(ModelError, match=r"quantized only in part: .*fc1"):
        quantized_copy(transformers.OPTForCausalLM(config), "int8")
