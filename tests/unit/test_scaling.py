"""UAQ leaves the function of every supported family alone, and only the right moves do."""

import copy
import re

import pytest
import torch
from torch import nn

from qurl.errors import ModelError
from qurl.ops import families
from qurl.quant import quantize, quantized_copy, rescale_, unscale_
from qurl.quant.linear import PROJECTIONS
from qurl.quant.scaling import uaq_scale, unscaled_grad_norm

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"attention_bias": True}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {}),
    "gemma3_text": ("Gemma3Text", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [1]}),
}
OPTIONS = [{}, {"o_proj": True}, {"down_proj": True}, {"o_proj": True, "down_proj": True}]


def build(family, dtype=torch.float32):
    """A tiny model whose norms, biases and routers are all random."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else 0.15
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


TOKENS = torch.randint(1, 61, (2, 11), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def gap(model, reference):
    return ((logits(model) - reference).abs().max() / reference.abs().max()).item()


def scale_(model, pattern, factor):
    """Multiply the parameters that match; a wrong UAQ is a right one and such a slip."""
    found = [p for name, p in model.named_parameters() if re.search(pattern, name)]
    assert found, pattern
    with torch.no_grad():
        for parameter in found:
            parameter.mul_(factor)


def test_every_family_is_tested():
    assert FAMILIES.keys() == families.FAMILIES.keys()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_function_stays(family, options):
    model = build(family)
    reference = logits(model)
    assert rescale_(model, 1.5, **options) is model
    assert gap(model, reference) < 1e-5


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.startswith("gemma")])
def test_the_function_stays_in_float64(family, options):
    # Not Gemma: its norms compute in float32 whatever the weights.
    model = build(family, torch.float64)
    reference = logits(model)
    assert gap(rescale_(model, 1.5, **options), reference) < 1e-12


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_power_of_two_changes_no_bit(family, options):
    model = build(family)
    reference, before = logits(model), copy.deepcopy(model.state_dict())
    assert torch.equal(logits(rescale_(model, 2.0, **options)), reference)
    assert torch.equal(logits(unscale_(model)), reference)
    for name, value in model.state_dict().items():
        # w -> (1 + w) - 1 rounds w, but not the 1 + w that Gemma's norms compute with.
        offset = 1.0 if family.startswith("gemma") and "layernorm" in name else 0.0
        assert torch.equal(offset + value, offset + before[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_inverse_restores(family):
    model = build(family)
    before = copy.deepcopy(model.state_dict())
    unscale_(rescale_(model, 1.5, o_proj=True, down_proj=True))
    for name, value in model.state_dict().items():
        assert torch.allclose(value, before[name], rtol=3e-7, atol=3e-7), name


def _factors(model, **options):
    """How `rescale_` with s = 2 multiplied each parameter of layer 0: {name: factor}."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rescale_(model, 2.0, **options)
    factors = {}
    for name, parameter in model.named_parameters():
        ratio = (parameter.detach() / before[name]).unique()
        factors[name.removeprefix("model.layers.0.")] = ratio.tolist()
    return {name: ratio for name, ratio in factors.items() if ratio != [1.0]}


def test_which_weights_move_by_default():
    # With biases, so that they would show; layer 1 moves likewise.
    moved = _factors(build("llama"))
    moved = {name: ratio for name, ratio in moved.items() if "layers.1" not in name}
    assert moved == {
        **{f"self_attn.{p}_proj.weight": [0.5] for p in "qkv"},
        **{f"mlp.{p}_proj.weight": [0.5] for p in ("gate", "up")},
        "input_layernorm.weight": [2.0],
        "post_attention_layernorm.weight": [2.0],
    }


def test_options_move_the_gain_from_v_to_o_and_from_up_to_down():
    moved = _factors(build("llama"), o_proj=True, down_proj=True)
    moved = {name: ratio for name, ratio in moved.items() if "layers.1" not in name}
    assert moved == {
        **{f"self_attn.{p}_proj.weight": [0.5] for p in "qko"},
        **{f"mlp.{p}_proj.weight": [0.5] for p in ("gate", "down")},
        "self_attn.v_proj.bias": [2.0],
        "mlp.up_proj.bias": [2.0],
        "input_layernorm.weight": [2.0],
        "post_attention_layernorm.weight": [2.0],
    }


def test_experts_and_routers_move_and_norms_of_q_and_k_do_not():
    moved = _factors(build("qwen3_moe"))
    assert moved["mlp.gate.weight"] == [0.5]
    assert moved["mlp.experts.gate_up_proj"] == [0.5]
    assert not any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in moved)
    assert "mlp.experts.down_proj" not in moved


# Each slip is what a wrong UAQ would have done besides; (family, parameters, factor).
SLIPS = {
    "biases scaled with their weights": ("qwen2", r"[qkv]_proj\.bias", 1 / 1.5),
    "router forgotten (mixtral)": ("mixtral", r"mlp\.gate\.weight", 1.5),
    "router forgotten (qwen2_moe)": ("qwen2_moe", r"mlp\.gate\.weight", 1.5),
    "router forgotten (qwen3_moe)": ("qwen3_moe", r"mlp\.gate\.weight", 1.5),
    "shared expert forgotten": ("qwen2_moe", r"shared_expert\.(gate|up)_proj", 1.5),
    "shared expert's gate forgotten": ("qwen2_moe", r"shared_expert_gate", 1.5),
    "k forgotten": ("llama", r"k_proj\.weight", 1.5),
    "QK-norm scaled": ("qwen3", r"[qk]_norm", 1.5),
    "final norm and tied lm_head scaled": ("qwen2", r"embed_tokens", 1 / 1.5),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_changes_the_function(slip):
    family, pattern, factor = SLIPS[slip]
    model = build(family)
    reference = logits(model)
    rescale_(model, 1.5)
    scale_(model, pattern, factor)
    if "tied" in slip:
        # With its own lm_head this would be right: the norm compensates. Tied, it is not.
        assert model.lm_head.weight is model.model.embed_tokens.weight
        scale_(model, r"^model\.norm", 1.5)
    assert gap(model, reference) > 1e-3


def test_scaling_v_without_its_bias_changes_the_function():
    model = build("qwen2")
    reference = logits(model)
    rescale_(model, 1.5, o_proj=True)
    scale_(model, r"v_proj\.bias", 1 / 1.5)
    assert gap(model, reference) > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gate_instead_of_up_changes_the_function(family):
    model = build(family)
    reference = logits(model)
    scale_(model, r"down_proj\.weight", 1 / 1.5)
    right, wrong = copy.deepcopy(model), copy.deepcopy(model)
    scale_(right, r"up_proj\.", 1.5)
    scale_(wrong, r"gate_proj\.", 1.5)
    assert gap(right, reference) < 1e-5
    assert gap(wrong, reference) > 1e-3


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_gemma_as_if_its_norm_were_plain_changes_the_function(family):
    model = build(family)
    reference = logits(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rescale_(model, 1.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not torch.equal(parameter, before[name]) and parameter.dim() == 1:
                parameter.copy_(1.5 * before[name])
    assert gap(model, reference) > 1e-3


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_sandwich_norms_that_follow_a_projection_stay(family):
    moved = _factors(build(family))
    norms = {name for name in moved if "norm" in name and "layers.1" not in name}
    assert norms == {"input_layernorm.weight", "pre_feedforward_layernorm.weight"}


class ListedExperts(nn.ModuleList):
    """The experts of a fused block as one MLP each, as other versions of transformers have them."""

    def __init__(self, fused):
        super().__init__()
        for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True):
            mlp = nn.Module()
            gate, up = gate_up.chunk(2)
            for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                layer.weight = nn.Parameter(weight.detach().clone())
                setattr(mlp, name, layer)
            self.append(mlp)

    def forward(self, x, indices, weights):
        out = torch.zeros_like(x)
        for i, mlp in enumerate(self):
            y = mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
            out += y * (weights * (indices == i)).sum(-1, keepdim=True)
        return out


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_as_separate_layers(family, options):
    model = build(family)
    reference = logits(model)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = ListedExperts(layer.mlp.experts)
    assert gap(model, reference) < 1e-5
    rescale_(model, 1.5, **options)
    assert gap(model, reference) < 1e-5
    scale_(model, r"experts\.2\.up_proj", 1.5)
    assert gap(model, reference) > 1e-3


def _projection_codes(model, format="int8"):
    return {
        name: quantize(layer.weight.detach(), format).codes.float()
        for name, layer in model.named_modules()
        if name.rsplit(".", 1)[-1] in PROJECTIONS
    }


@pytest.mark.parametrize("format", ["int8", "fp8", "fp8-block", "int4"])
@pytest.mark.parametrize(("scale", "dtype"), [(2.0, torch.float32), (1.5, torch.float64)])
def test_codes_are_those_of_the_unscaled_model(format, scale, dtype):
    model = build("llama", dtype)
    before = _projection_codes(model, format)
    after = _projection_codes(rescale_(model, scale), format)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_codes_differ_at_ties_only_in_float32():
    model = build("llama")
    before = _projection_codes(model)
    after = _projection_codes(rescale_(model, 1.5))
    changes = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert changes.abs().max() <= 1
    assert changes.count_nonzero() <= 1e-4 * changes.numel() + 1


def test_the_quantized_actor_is_the_same_bit_for_bit():
    model = build("qwen2")
    before = logits(quantized_copy(model, "int8"))
    assert torch.equal(logits(quantized_copy(rescale_(model, 2.0), "int8")), before)


@pytest.mark.parametrize(("s", "is_same"), [(2.0, True), (1.5, False)])
def test_a_trainer_in_bf16_rounds_once_more(s, is_same):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    before, after = (quantize(w.bfloat16(), "int8").codes for w in (weight, weight / s))
    assert torch.equal(before, after) == is_same
    assert (before != after).float().mean() < 0.1


def test_what_shrinks_is_the_absolute_error(vectors):
    expected = vectors("systems.json")["uaq"]
    weight = torch.randn(64, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def error(w):
        q = quantize(w, "int8")
        return (q.codes * q.scale - w).norm()

    small = weight / expected["s"]
    assert (error(weight) / error(small)).item() == pytest.approx(
        expected["absolute_quant_error_ratio"], rel=1e-9
    )
    assert (error(weight) / weight.norm()).item() == pytest.approx(
        (error(small) / small.norm()).item(), rel=1e-9
    )


def test_it_is_never_applied_twice():
    model = build("llama")
    rescale_(model, 1.5, down_proj=True)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match=r"applied already .*'scale': 1.5"):
        rescale_(model, 1.5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert uaq_scale(model) == 1.5


def test_there_must_be_something_to_undo():
    model = build("llama")
    with pytest.raises(ModelError, match="nothing to undo"):
        unscale_(model)
    with pytest.raises(ValueError, match=r"scale = 2\.0, but UAQ was applied with 1\.5"):
        unscale_(rescale_(model), 2.0)
    unscale_(model, 1.5)
    unscale_(rescale_(model))
    with pytest.raises(ModelError, match="nothing to undo"):
        unscale_(model)
    assert uaq_scale(model) == 1.0


def test_the_record_survives_saving(tmp_path):
    model = build("qwen2")
    reference = logits(model)
    rescale_(model, 1.5, o_proj=True).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.qurl_uaq == {"scale": 1.5, "o_proj": True, "down_proj": False}
    assert uaq_scale(loaded) == 1.5
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(ModelError, match="applied already"):
        rescale_(loaded)
    unscale_(loaded).save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert uaq_scale(plain) == 1.0
    assert gap(plain, reference) < 1e-5


def test_parameters_keep_their_identity_for_the_optimizer():
    model = build("llama")
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    rescale_(model)
    assert before == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


@pytest.mark.parametrize("scale", [0.0, -1.5, float("inf"), float("nan")])
def test_scale_must_be_finite_and_positive(scale):
    with pytest.raises(ValueError, match="must be finite and positive"):
        rescale_(build("llama"), scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_not_rounded(dtype):
    model = build("llama", dtype)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match="load the model in float32"):
        rescale_(model, 1.5)
    assert uaq_scale(model) == 1.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_half_precision_takes_powers_of_two_where_these_are_exact():
    model = build("llama", torch.bfloat16)
    reference = logits(model)
    assert torch.equal(logits(rescale_(model, 2.0)), reference)
    # 2 (1 + w) - 1 is not exact in bfloat16.
    with pytest.raises(ModelError, match=r"input_layernorm.weight in torch.bfloat16"):
        rescale_(build("gemma", torch.bfloat16), 2.0)


def test_an_unknown_layout_is_refused():
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"model type 'gpt2'; it knows llama, mistral, qwen2"):
        rescale_(model)
    with pytest.raises(ModelError, match="model type None"):
        rescale_(nn.Linear(2, 2))


def test_an_unexpected_structure_is_refused_before_anything_moves():
    extra, missing = build("llama"), build("llama")
    extra.model.layers[1].mlp.side_proj = nn.Linear(32, 4)
    missing.model.layers[1].mlp.up_proj = nn.Identity()
    for model, message in (
        (extra, r"layers.1 of llama has mlp.side_proj.bias, mlp.side_proj.weight"),
        (missing, r"layers.1 of llama lacks mlp.up_proj.weight"),
    ):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ModelError, match=message):
            rescale_(model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_mixture_without_its_router_or_with_turned_experts_is_refused():
    model = build("mixtral")
    model.model.layers[0].mlp.gate = nn.Identity()
    with pytest.raises(ModelError, match=r"lacks mlp.gate.weight"):
        rescale_(model)
    model = build("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.transpose(1, 2).contiguous())
    with pytest.raises(ModelError, match=r"UAQ expects \[experts, 2 x intermediate, hidden\]"):
        rescale_(model)


def test_layers_that_share_weights_are_refused():
    model = build("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(ModelError, match="shares weights between layers"):
        rescale_(model)


def test_a_backbone_without_a_head_can_be_scaled():
    model = build("llama").model
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        reference = model(tokens).last_hidden_state
        rescale_(model, 2.0)
        assert torch.equal(model(tokens).last_hidden_state, reference)


@pytest.mark.parametrize("options", [{}, {"o_proj": True, "down_proj": True}])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen2_moe"])
def test_gradients_without_uaq_can_be_told_from_those_with_it(family, options):
    model = build(family)
    norms = []
    for scale in (1.0, 1.5):
        if scale != 1.0:
            rescale_(model, scale, **options)
        model.zero_grad()
        model(TOKENS).logits.square().mean().backward()
        squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
        norms.append((torch.stack(squares).sum().sqrt().item(), unscaled_grad_norm(model)))
    (plain, same), (scaled, unscaled) = norms
    assert same == pytest.approx(plain, rel=1e-5)
    assert unscaled == pytest.approx(plain, rel=1e-3)
    assert abs(scaled - plain) > 0.01 * plain
