"""Adapters: one dense weight for all who read it, thin gradients, peft's files."""

import copy
import json
import re

import pytest
import torch
import torch.nn.functional as F
from models import CPU, SHAPE, build_learner, random_batch, tiny_llama, tiny_policy
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from qurl.config import Config, ModelConfig, build_config
from qurl.config.recipe import _with_preset
from qurl.config.rules import find_mistakes, find_warnings
from qurl.config.schema import QuantConfig
from qurl.errors import ModelError, SyncError
from qurl.quant import dequantize, quantize, rescale_
from qurl.quant.linear import projections
from qurl.quant.tracking import UpdateTracker
from qurl.rollout import build_engine
from qurl.rollout.canary import score_with
from qurl.run.export import export
from qurl.run.inputs import check_model_path
from qurl.seeds import generator
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.lora import (
    Adapter,
    adapters,
    add_adapters_,
    load_adapters_,
    save_adapters,
    without_adapters,
)
from qurl.trainer.policy import (
    Policy,
    Untrained,
    hidden_states,
    load_model,
    load_policy,
    load_trained_policy,
)
from qurl.trainer.unified import unify_

RANK, ALPHA = 4, 6
LORA = {"lora_rank": RANK, "lora_alpha": ALPHA}


def randomize_(model, seed=0):
    """As if it had been trained: B is 0 at first."""
    draw = torch.Generator().manual_seed(seed)
    for _, adapter in adapters(model):
        with torch.no_grad():
            adapter.B.copy_(0.05 * torch.randn(adapter.B.shape, generator=draw))


def adapted_policy(model=None, *, quant=None, is_trained=True, **config):
    config = ModelConfig(**LORA, **config)
    options = [] if quant is None else [quant]
    policy = Policy(model or tiny_llama(), build_tokenizer(), config, CPU, *options)
    policy.adapt_(config, seed=0)
    if is_trained:
        randomize_(policy.model)
    return policy


def with_thin_products(model, source):
    """A plain model that computes LoRA as it is defined: y = x W0^T + s (x A^T) B^T."""
    for name, adapter in adapters(source):
        a, b = adapter.A.detach(), adapter.B.detach()

        def add(_, inputs, output, a=a, b=b):
            return output + ALPHA / RANK * (inputs[0] @ a.T) @ b.T

        model.get_submodule(name).register_forward_hook(add)
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(4, 24)[None], use_cache=False).logits


# The model


def test_it_computes_lora():
    policy = adapted_policy()
    expected = logits(with_thin_products(tiny_llama(), policy.model))
    torch.testing.assert_close(logits(policy.model), expected, atol=1e-5, rtol=1e-5)
    assert (expected - logits(tiny_llama())).abs().max() > 0.1


def test_it_begins_as_the_model_that_it_adapts():
    policy = adapted_policy(is_trained=False)
    assert torch.equal(logits(policy.model), logits(tiny_llama()))
    names = [name for name, _ in adapters(policy.model)]
    assert names == [name for name, _ in projections(tiny_llama())]
    for _, adapter in adapters(policy.model):
        bound = adapter.A.shape[1] ** -0.5
        assert 0.8 * bound < float(adapter.A.detach().abs().max()) <= bound
    other = adapted_policy(is_trained=False)
    other.model.lm_head, policy.model.lm_head = None, None  # only adapters are compared
    pairs = zip(adapters(policy.model), adapters(other.model), strict=True)
    assert all(torch.equal(a.A, b.A) for (_, a), (_, b) in pairs)


def test_only_adapters_are_trained():
    """4 x (N + K) numbers for each of 7 projections: q and o 64, k and v 48, MLP 96, 2 layers."""
    policy = adapted_policy()
    learner = build_learner(build_config({"model": LORA}), policy)
    trained = [p for group in learner.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in trained) == RANK * 2 * (2 * 64 + 2 * 48 + 3 * 96)
    assert all(p.requires_grad for p in trained)


def test_a_bf16_trainer_holds_frozen_weights_in_bf16():
    """Norms stay FP32. The weights fit BF16 here, so nothing is lost."""
    model = tiny_llama(tie_word_embeddings=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    plain = tiny_policy(model=copy.deepcopy(model), compute_dtype="bfloat16")
    policy = adapted_policy(model, is_trained=False, compute_dtype="bfloat16")
    batch = random_batch(plain)
    assert torch.equal(policy.score(batch).logp, plain.score(batch).logp)
    assert torch.equal(logits(policy.model), logits(plain.model))
    dtypes = {name: p.dtype for name, p in policy.model.named_parameters()}
    narrow = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert {name.rpartition(".")[2] for name in narrow} == {"original", "weight"}
    assert "model.embed_tokens.weight" in narrow
    assert dtypes["model.norm.weight"] == torch.float32
    assert policy.model.lm_head.weight is policy.model.get_input_embeddings().weight


def test_what_is_multiplied_is_rounded_after_merging():
    """1 + 2^-9 is lost in BF16, but 1 + 2^-9 + 2^-9 is not: B A must not be rounded into W0."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    adapter = Adapter(layer.weight, 1, 1, generator(0))
    with torch.no_grad():
        adapter.A.fill_(2**-8)
        adapter.B.fill_(1.0)
    merged = adapter(layer.weight.detach().bfloat16()).detach()
    assert merged.dtype == torch.float32
    assert float(merged) == 1 + 2**-8


def test_models_that_cannot_be_adapted():
    with pytest.raises(ModelError, match=r"has no layer named like q_proj.*lora_rank = 0"):
        add_adapters_(nn.Sequential(nn.Linear(2, 2)), RANK, ALPHA, 0, torch.float32)
    with pytest.raises(ModelError, match=r"carries UAQ with s = 1.5.*qurl export"):
        add_adapters_(rescale_(tiny_llama()), RANK, ALPHA, 0, torch.float32)


# Gradients


def exact_gradients(base, adapter, x, dy):
    """dA and dB by autograd in float64."""
    a, b = (t.detach().double().requires_grad_() for t in (adapter.A, adapter.B))
    y = F.linear(x.double(), base.double() + ALPHA / RANK * b @ a)
    return torch.autograd.grad(y, (a, b), dy.double())


def relative(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_thin_gradients(dtype, bound):
    layer = nn.Linear(30, 50)
    adapter = Adapter(layer.weight, RANK, ALPHA, generator(0))
    nn.init.normal_(adapter.B)
    x, dy = torch.randn(2, 17, 30).to(dtype), torch.randn(2, 17, 50).to(dtype)
    for i in range(2):  # micro-batches add up
        adapter.add_gradients_(dy[i], x[i])
    da, db = exact_gradients(
        layer.weight.detach(), adapter, x.flatten(0, 1).double(), dy.flatten(0, 1).double()
    )
    assert adapter.A.grad.dtype == adapter.B.grad.dtype == torch.float32
    assert relative(adapter.A.grad, da) < bound
    assert relative(adapter.B.grad, db) < bound


def test_gradients_of_a_policy():
    """Against autograd through the layers as LoRA defines them, in float64."""
    policy = adapted_policy()
    batch = random_batch(policy)
    (policy.score(batch).logp * batch.advantages).sum().backward()

    model = tiny_llama().double()
    factors = {
        name: [t.detach().double().requires_grad_() for t in (adapter.A, adapter.B)]
        for name, adapter in adapters(policy.model)
    }
    for name, (a, b) in factors.items():

        def add(_, inputs, output, a=a, b=b):
            return output + ALPHA / RANK * (inputs[0] @ a.T) @ b.T

        model.get_submodule(name).register_forward_hook(add)
    logp = model(input_ids=batch.token_ids, use_cache=False).logits.log_softmax(-1)
    logp = logp[:, :-1].gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
    (logp * (batch.advantages * batch.mask)[:, 1:]).sum().backward()
    for name, adapter in adapters(policy.model):
        for found, exact in zip((adapter.A, adapter.B), factors[name], strict=True):
            assert relative(found.grad, exact.grad) < 1e-4, name
    grads = {name for name, p in policy.model.named_parameters() if p.grad is not None}
    assert {name.rpartition(".")[2] for name in grads} == {"A", "B"}


def fused_twins(quant=None):
    """A model of plain layers and one of fused layers, with the same adapters."""
    pytest.importorskip("triton")
    from qurl.trainer.layers import fuse_layers_, unify_layers_

    torch.manual_seed(0)
    plain = Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"num_hidden_layers": 1})).eval().to(DEVICE)
    nn.init.normal_(plain.model.layers[0].self_attn.q_proj.bias)
    fused = copy.deepcopy(plain)
    assert fuse_layers_(fused) == 1
    if quant is not None:
        unify_(plain, quant, torch.float32)
        assert unify_layers_(fused, quant, torch.float32)
    for model in (plain, fused):
        add_adapters_(model, RANK, ALPHA, 0, torch.float32)
        randomize_(model)
    return plain, fused


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of fused layers
IDS = torch.arange(4, 9, device=DEVICE)[None]


@pytest.mark.parametrize("format", ["none", "int8"])
def test_fused_layers(format):
    quant = None if format == "none" else QuantConfig(format=format, unified=True)
    twins = fused_twins(quant)
    upstream = torch.randn(1, IDS.shape[1], SHAPE["hidden_size"]).to(DEVICE)
    states = [hidden_states(model, IDS, torch.float32) for model in twins]
    torch.testing.assert_close(*states, atol=1e-5, rtol=1e-4)
    for found in states:
        (found * upstream).sum().backward()
    for (name, a), (_, b) in zip(*map(adapters, twins), strict=True):
        assert relative(b.A.grad, a.A.grad.double()) < 1e-4, name
        assert relative(b.B.grad, a.B.grad.double()) < 1e-4, name
    grads = {name for name, p in twins[1].named_parameters() if p.grad is not None}
    assert {name.rpartition(".")[2] for name in grads} == {"A", "B"}


def test_copies_of_weights_follow_the_adapters():
    pytest.importorskip("triton")
    from qurl.trainer.projection import Projection

    layer = nn.Module()
    layer.q_proj, layer.k_proj = nn.Linear(6, 5), nn.Linear(6, 3)
    base = torch.cat([layer.q_proj.weight, layer.k_proj.weight]).detach().bfloat16()
    layer.get_input_embeddings = layer.get_output_embeddings = lambda: None
    found = Projection([layer.q_proj, layer.k_proj])
    add_adapters_(layer, RANK, ALPHA, 0, torch.bfloat16)
    for seed in (1, 2):
        randomize_(layer, seed)
        merged = torch.cat([layer.q_proj.weight, layer.k_proj.weight]).detach().bfloat16()
        assert torch.equal(found.weight(torch.bfloat16), merged)
        assert not torch.equal(merged, base)
        with without_adapters(layer):
            assert torch.equal(found.weight(torch.bfloat16), base)


# Reference


@pytest.mark.parametrize("is_unified", [False, True])
def test_the_reference_is_the_policy_without_adapters(is_unified):
    quant = QuantConfig(format="int8", unified=is_unified)
    policy = adapted_policy(quant=quant)
    plain = Policy(tiny_llama(), build_tokenizer(), ModelConfig(), CPU, quant)
    batch = random_batch(policy)
    before = policy.score(batch).logp
    assert torch.equal(Untrained(policy).score(batch).logp, plain.score(batch).logp)
    assert torch.equal(policy.score(batch).logp, before)
    assert (before - plain.score(batch).logp).abs().max() > 0.01


# Engine


def merged_copy(policy):
    """A plain model with W0 + s B A as weights."""
    model = tiny_llama()
    weights = {name: layer.weight.detach() for name, layer in projections(policy.model)}
    with torch.no_grad():
        for name, layer in projections(model):
            layer.weight.copy_(weights[name])
    return model


@pytest.mark.parametrize("kind", ["local", "hf"])
@pytest.mark.parametrize("format", ["none", "int8", "fp8", "fp8-block"])
def test_the_engine_sees_merged_weights(kind, format):
    """It computes the same, to the bit, as an engine of the merged model; so its gap is no more."""
    policy = adapted_policy(is_trained=False)
    engine = build_engine(kind, policy.model, None, quant=format)
    randomize_(policy.model)
    report = engine.sync(policy.model, version=1)
    dense = build_engine(kind, merged_copy(policy), None, quant=format)
    plain_gap = dense.sync(merged_copy(policy), version=1).canary_gap
    ids = list(range(4, 40))
    assert torch.equal(engine.score(ids), dense.score(ids))
    assert report.canary_gap == pytest.approx(plain_gap, abs=1e-6)
    if format == "none":
        assert report.canary_gap < 1e-5
    else:
        assert report.code_flip_frac > 0.1


def test_a_damaged_row_is_found():
    policy = adapted_policy()
    engine = build_engine("local", policy.model, None, quant="int8")
    load = engine._sync.load_

    def damage(model):
        flips = load(model)
        engine.weights.layers[1].down.weight.codes[:, 0] += 1
        return flips

    engine._sync.load_ = damage
    with pytest.raises(SyncError, match="projection of layer 1"):
        engine.sync(policy.model, version=1)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_one_precision_flow(format):
    """Trainer and engine code the same merged weights: what is left is the order of sums."""
    policy = adapted_policy(quant=QuantConfig(format=format, unified=True))
    engine = build_engine("local", policy.model, None, quant=format)
    ids = list(range(4, 40))
    found, expected = engine.score(ids), score_with(policy.model, ids, format)
    assert (found - expected).abs().max() < 1e-5


def test_one_precision_flow_with_gradient_checkpointing():
    """The forward codes new weights, and its repetition in the backward pass finds the codes."""
    gradients, batch = [], random_batch(tiny_policy())
    for is_frugal in (False, True):
        quant = QuantConfig(format="int8", unified=True)
        policy = adapted_policy(quant=quant, gradient_checkpointing=is_frugal)
        policy.score(batch).logp.sum().backward()
        gradients.append([p.grad for p in policy.model.parameters() if p.requires_grad])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def test_updates_of_merged_weights_are_tracked():
    """||s B A||^2 over ||W0||^2, here of all rows."""
    policy = adapted_policy(is_trained=False)
    tracker = UpdateTracker("int8", rows=1000)
    assert tracker.measure(policy.model) == {}
    randomize_(policy.model)
    metrics = tracker.measure(policy.model)
    old = {name: layer.weight.detach() for name, layer in projections(tiny_llama())}
    update = sum(
        float((ALPHA / RANK * adapter.B @ adapter.A).detach().square().sum())
        for _, adapter in adapters(policy.model)
    )
    norm = sum(float(weight.square().sum()) for weight in old.values())
    assert metrics["uaq/update_norm"] == pytest.approx(update / norm, rel=1e-5)
    assert 0 < metrics["uaq/code_flip_frac"] < 1


# Files


@pytest.fixture
def saved(tmp_path):
    """A saved base, and the folder of a policy that adapts it."""
    tiny_llama().save_pretrained(tmp_path / "base")
    build_tokenizer().save_pretrained(tmp_path / "base")
    policy = adapted_policy(load_model(tmp_path / "base"))
    policy.save(tmp_path / "policy")
    return policy, tmp_path / "policy"


def test_the_files_are_those_of_peft(saved):
    _, folder = saved
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder.with_name("base"))
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert config["target_modules"] == sorted(
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    )
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2
    key = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
    assert tensors[key.format("A")].shape == (RANK, 64)
    assert tensors[key.format("B")].shape == (32, RANK)
    assert not list(folder.glob("model*.safetensors"))


def test_peft_loads_them(saved):
    peft = pytest.importorskip("peft")
    policy, folder = saved
    theirs = peft.PeftModel.from_pretrained(load_model(folder.with_name("base")), folder)
    torch.testing.assert_close(logits(theirs), logits(policy.model), atol=1e-5, rtol=1e-5)


def test_a_folder_of_adapters_is_loaded_merged(saved):
    policy, folder = saved
    model = load_model(folder)
    for (name, layer), (_, other) in zip(
        projections(model), projections(policy.model), strict=True
    ):
        assert torch.equal(layer.weight, other.weight), name
    assert torch.equal(logits(model), logits(policy.model))


def test_adapters_are_not_stacked(saved):
    """What is saved names one base, and without the first adapters it is another model."""
    policy = load_policy(saved[1], ModelConfig(**LORA), CPU)
    message = r"holds adapters, which .* would lack; .*qurl export"
    with pytest.raises(ModelError, match=message):
        policy.adapt_(ModelConfig(**LORA), seed=0)
    with pytest.raises(ModelError, match=message):  # before anything is loaded
        check_model_path(Config(model=ModelConfig(path=str(saved[1]), **LORA)))
    check_model_path(Config(model=ModelConfig(path=str(saved[1]))))


def test_adapters_are_loaded_to_the_bit(saved):
    policy, folder = saved
    other = adapted_policy(is_trained=False)
    load_adapters_(other.model, folder)
    assert torch.equal(logits(other.model), logits(policy.model))
    extra = load_file(folder / "adapter_model.safetensors") | {"more": torch.zeros(1)}
    save_file(extra, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="has more, which the model lacks"):
        load_adapters_(other.model, folder)


def test_an_export_is_merged(saved, tmp_path):
    policy, folder = saved
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    folder.rename(checkpoint / "policy")
    path = export(tmp_path / "run", tmp_path / "out", "float32")
    names = {file.name for file in path.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    assert not any(name.startswith("adapter") for name in names)
    assert torch.equal(logits(load_model(path)), logits(policy.model))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("/gone/base", r"'/gone/base' does not exist \(seen from"),
        ("runs/lora/initial", r"'runs/lora/initial' does not exist \(seen from"),
        (None, r"None must name the whole model that they adapt"),
    ],
)
def test_a_base_that_was_moved_is_named(saved, base, message):
    file = saved[1] / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    with pytest.raises(
        ModelError, match=rf"adapter_config.json: base_model_name_or_path = {message}"
    ):
        load_model(saved[1])


def test_variants_of_lora_are_refused(saved):
    _, folder = saved
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora; merge it with peft first"):
        load_model(folder)


def test_a_scale_is_saved_as_it_is(tmp_path):
    """alpha / rank = 10 / 7 has no exact float, and alpha is still 10."""
    model = tiny_llama()
    add_adapters_(model, 7, 10, 0, torch.float32)
    save_adapters(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 10


# Rules


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"algo": {"name": "ppo"}}, "'gae' trains a whole critic"),
        ({"quant": {"update_scale": 1.5}}, "raise model.lora_alpha instead"),
        ({"experimental": {"dither": True}}, "freezes what"),
        ({"experimental": {"norm_fed_lr_scale": 2.0}}, "freezes what"),
        ({"model": {"compile": True, **LORA}}, "cannot be compiled"),
    ],
)
def test_what_does_not_go_with_lora(sections, message):
    config = build_config(_with_preset({"model": LORA} | sections))
    assert any(message in mistake for mistake in find_mistakes(config))


def test_a_small_learning_rate_gets_a_warning():
    for lr, is_warned in ((1e-6, True), (1e-5, False)):
        warnings = find_warnings(build_config({"model": LORA, "optim": {"lr": lr}}))
        assert any("10 times the usual rate" in warning for warning in warnings) == is_warned


# A frozen base in codes (QeRL)


def coded_policy(model=None, **config):
    return adapted_policy(model, base="nvfp4", **config)


def base_in_codes(model):
    """A plain model whose projections are what their NVFP4 codes stand for."""
    with torch.no_grad():
        for _, layer in projections(model):
            layer.weight.copy_(dequantize(quantize(layer.weight, "nvfp4")))
    return model


def test_adapters_stay_beside_a_coded_base():
    policy = coded_policy()
    expected = logits(with_thin_products(base_in_codes(tiny_llama()), policy.model))
    torch.testing.assert_close(logits(policy.model), expected, atol=1e-5, rtol=1e-5)
    assert (expected - logits(policy.model)).abs().max() < 1e-4
    with without_adapters(policy.model):
        torch.testing.assert_close(
            logits(policy.model), logits(base_in_codes(tiny_llama())), atol=1e-5, rtol=1e-5
        )
    trained = [n for n, p in policy.model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".adapter." in name for name in trained)


def test_gradients_pass_through_a_coded_base():
    """Those of the same layer with one dense weight, by autograd."""
    policy = coded_policy()
    layer = policy.model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, layer.in_features, generator=generator(0, "x")).requires_grad_()
    layer(x).square().sum().backward()
    a, b = (p.detach().clone().requires_grad_() for p in (layer.adapter.A, layer.adapter.B))
    x2 = x.detach().clone().requires_grad_()
    weight = dequantize(layer.base) + layer.adapter.scale * b @ a
    F.linear(x2, weight).square().sum().backward()
    for found, expected in ((x, x2), (layer.adapter.A, a), (layer.adapter.B, b)):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["local", "hf"])
def test_an_engine_shares_the_coded_base(kind):
    policy = coded_policy()
    engine = build_engine(kind, policy.model, quant="nvfp4")
    ids = list(range(5, 40))
    expected = score_with(policy.model, ids)
    torch.testing.assert_close(engine.score(ids), expected, atol=2e-4, rtol=0)
    randomize_(policy.model, seed=1)
    report = engine.sync(policy.model, version=1)
    assert report.canary_gap < 1e-4, "nothing is quantized twice"
    moved = score_with(policy.model, ids)
    assert (moved - expected).abs().max() > 0.01
    torch.testing.assert_close(engine.score(ids), moved, atol=2e-4, rtol=0)


def test_a_coded_base_without_adapters_is_shared_too():
    policy = Policy(tiny_llama(), build_tokenizer(), ModelConfig(base="nvfp4"), CPU)
    engine = build_engine("local", policy.model, quant="nvfp4")
    held = engine.weights.layers[0].views["v_proj"].weight
    base = policy.model.model.layers[0].self_attn.v_proj.base
    assert torch.equal(held.numbers(), base.numbers())
    assert torch.equal(held.scale.float(), base.scale.float())
    assert engine.sync(policy.model, version=3).canary_gap < 1e-4


def test_an_engine_in_full_precision_merges_a_coded_base():
    policy = coded_policy()
    ids = list(range(5, 40))
    engine = build_engine("local", policy.model, quant="none")
    torch.testing.assert_close(engine.score(ids), score_with(policy.model, ids), atol=2e-4, rtol=0)


def test_damage_to_a_coded_base_or_an_adapter_in_the_engine_is_found():
    policy = coded_policy()
    engine = build_engine("local", policy.model, quant="nvfp4")
    view = engine.weights.layers[1].views["up_proj"]
    view.adapter.b[0, 0] += 0.5
    with pytest.raises(SyncError, match="is not a copy"):
        engine._sync.check(0)
    engine.sync(policy.model, version=0)
    view.weight.codes[0, 3] += 1
    with pytest.raises(SyncError, match=r"layer 1 .* codes of the trainer's base"):
        engine._sync.check(0)


def test_weights_are_not_widened_before_they_are_coded(tmp_path):
    """The codes are the same, and main memory need not hold 4 bytes a weight."""
    tiny_llama().bfloat16().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    assert load_model(tmp_path, is_narrow=True).dtype == torch.bfloat16
    policy = load_policy(tmp_path, ModelConfig(**LORA, base="nvfp4"), CPU)
    wide = Policy(load_model(tmp_path), None, ModelConfig(**LORA, base="nvfp4"), CPU)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert torch.equal(logits(policy.model), logits(wide.model))


def test_weights_are_not_rounded_to_a_dtype_that_only_the_config_names(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    assert load_model(tmp_path, is_narrow=True).dtype == torch.float32


def test_saved_adapters_name_the_format_of_their_base(tmp_path):
    """A merged model is what the run computed with."""
    tiny_llama().save_pretrained(tmp_path / "base")
    build_tokenizer().save_pretrained(tmp_path / "base")
    policy = coded_policy(load_model(tmp_path / "base"))
    policy.save(tmp_path / "adapters")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["qurl_base"] == "nvfp4"
    merged = load_model(tmp_path / "adapters")
    torch.testing.assert_close(logits(merged), logits(policy.model), atol=1e-5, rtol=1e-5)
    trained = load_trained_policy(tmp_path / "adapters", ModelConfig(**LORA, base="nvfp4"), CPU)
    assert torch.equal(logits(trained.model), logits(policy.model))
    again = coded_policy(load_model(tmp_path / "base"), is_trained=False)
    load_adapters_(again.model, tmp_path / "adapters")
    assert torch.equal(logits(again.model), logits(policy.model))


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ({"model": {"base": "nvfp4"}}, r"base = 'nvfp4' is frozen; set model.lora_rank"),
        ({"quant": {"format": "int8"}}, r"needs quant.format = 'nvfp4', not 'int8'"),
        ({"rollout": {"engine": "vllm"}}, r"base = 'nvfp4' needs rollout.engine = 'local' or 'hf'"),
        ({"quant": {"format": "nvfp4", "full_layers": 1}}, r"set quant.full_layers = 0"),
        ({"alarms": {"truncated": "full"}}, r"truncated = 'full': .* leaves no full precision"),
        ({"quant": {"format": "nvfp4", "unified": True}}, r"quant.unified = true needs"),
        ({"quant": {"format": "nvfp4", "update_scale": 1.5}}, r"raise model.lora_alpha instead"),
    ],
)
def test_what_does_not_go_with_a_coded_base(settings, mistake):
    sound = {"model": {**LORA, "base": "nvfp4"}, "quant": {"format": "nvfp4"}}
    assert not find_mistakes(build_config(sound))
    found = find_mistakes(build_config(sound | settings))
    assert any(re.search(mistake, text) for text in found), found


def test_a_coded_base_is_evaluated_as_it_is_and_needs_no_correction():
    coded = {"model": {**LORA, "base": "nvfp4"}, "quant": {"format": "nvfp4"}}
    plain = {"algo": {"objective": "ppo_prox"}, "optim": {"lr": 1e-4}, "eval": {"every": 2}}
    config = build_config(coded | plain)
    assert config.eval_precisions == ("nvfp4",)
    assert not config.has_full_engine
    assert not [w for w in find_warnings(config) if "correct" in w]
    noisy = coded | {"quant": {"format": "nvfp4", "noise": "aqn"}}
    assert [w for w in find_warnings(build_config(noisy | plain)) if "correct" in w]
    merged = build_config({"model": LORA, "quant": {"format": "nvfp4"}})
    assert [w for w in find_warnings(merged) if "set model.base = 'nvfp4'" in w]
