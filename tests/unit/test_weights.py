"""The engine's copy of the weights: layout, syncs, the spot check, and addresses."""

import copy

import pytest
import torch
from models import CPU, tiny_llama
from torch import nn

from qurl.errors import EngineError, SyncError
from qurl.quant import Quantized, quantize
from qurl.quant.linear import frozen_scales
from qurl.rollout import build_engine
from qurl.rollout.canary import ModelShipment
from qurl.rollout.local import sync as module
from qurl.rollout.local.sync import WeightSync, watch_parameters
from qurl.rollout.local.weights import Weights
from qurl.types import Problem, SamplingParams

FORMATS = ["none", "int8", "fp8", "fp8-block", "int4", "nvfp4"]
ALIGNED = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 2}
"""Every projection has a multiple of 128 output channels."""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_sync(model, quant="int8", dtype=torch.float32, **options):
    return WeightSync(Weights(model, quant, dtype, next(model.parameters()).device, **options))


def load(model, quant="int8", dtype=torch.float32, **options):
    sync = make_sync(model, quant, dtype, **options)
    sync.load_(model)
    return sync


def projections(model, layer=0):
    source = model.model.layers[layer]
    return {
        name: getattr(source.self_attn if hasattr(source.self_attn, name) else source.mlp, name)
        for name in MODULES
    }


def change_(model, size=0.02):
    """As an optimizer would: in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
            parameter += size * noise.to(parameter)


def assert_holds(sync, model):
    """Every row, bias and tensor in full precision is the model's."""
    weights, body = sync.weights, model.model
    for number, layer in enumerate(weights.layers):
        for name, linear in projections(model, number).items():
            view, source = layer.views[name], linear.weight.detach()
            if isinstance(view.weight, Quantized):
                fresh = quantize(source.to(weights.compute_dtype), view.weight.format)
                assert torch.equal(view.weight.numbers(), fresh.numbers())
                assert torch.equal(view.weight.scale, fresh.scale)
            else:
                assert torch.equal(view.weight, source.to(weights.dtype))
            if linear.bias is not None:
                assert torch.equal(view.bias, linear.bias.to(weights.dtype))
    assert torch.equal(weights.embedding, body.embed_tokens.weight)
    assert torch.equal(weights.lm_head, model.lm_head.weight.to(weights.dtype))
    assert torch.equal(weights.norm, body.norm.weight.float())
    for layer, source in zip(weights.layers, body.layers, strict=True):
        assert torch.equal(layer.norms["input_layernorm"], source.input_layernorm.weight.float())


# --- layout -----------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("quant", ["int8", "fp8", "int4"])
def test_projections_with_one_input_are_stacked(quant, native):
    model = tiny_llama()
    sync = load(model, quant, native_codes=native)
    (qkv,), (gate_up,) = sync.weights.layers[0].qkv, sync.weights.layers[0].gate_up
    fresh = {name: quantize(m.weight.detach(), quant) for name, m in projections(model).items()}
    assert qkv.weight.codes.dtype == (sync.weights.format.dtype if native else torch.float32)
    for attribute in ("codes", "scale"):
        rows = [getattr(fresh[name], attribute).float() for name in ("q_proj", "k_proj", "v_proj")]
        assert torch.equal(getattr(qkv.weight, attribute).float(), torch.cat(rows))
        gate, up = (getattr(fresh[name], attribute).float() for name in ("gate_proj", "up_proj"))
        alternating = torch.stack((gate, up), 1).flatten(0, 1)
        assert torch.equal(getattr(gate_up.weight, attribute).float(), alternating)


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_biases_lie_as_their_rows_do(quant):
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    sync = load(model, quant)
    gate, up = (projections(model)[name].bias for name in ("gate_proj", "up_proj"))
    assert sync.weights.layers[0].has_alternating_gate
    assert torch.equal(sync.weights.layers[0].gate_up[0].bias, torch.stack((gate, up), 1).flatten())
    assert_holds(sync, model)


@pytest.mark.parametrize("native", [False, True])
def test_tiles_are_stacked_where_none_spans_two_projections(native):
    model = tiny_llama(**ALIGNED)
    sync = load(model, "fp8-block", native_codes=native)
    layer = sync.weights.layers[1]
    assert (len(layer.qkv), len(layer.gate_up)) == (1, 1)
    assert not layer.has_alternating_gate
    modules = projections(model, layer=1)
    fresh = [
        quantize(modules[n].weight.detach(), "fp8-block") for n in ("q_proj", "k_proj", "v_proj")
    ]
    assert torch.equal(layer.qkv[0].weight.scale, torch.cat([q.scale for q in fresh]))
    assert torch.equal(
        layer.qkv[0].weight.codes.float(), torch.cat([q.codes.float() for q in fresh])
    )
    assert_holds(sync, model)


def test_tiles_that_would_span_two_projections_stay_apart():
    model = tiny_llama(**ALIGNED | {"intermediate_size": 224})
    sync = load(model, "fp8-block")
    assert (len(sync.weights.layers[0].qkv), len(sync.weights.layers[0].gate_up)) == (1, 2)
    assert_holds(sync, model)


# --- syncs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_sync_takes_over_the_present_weights(quant, dtype):
    model, other = tiny_llama(0), tiny_llama(1)
    sync = load(model, quant, dtype)
    assert_holds(sync, model)
    change_(model)
    sync.load_(model)
    assert_holds(sync, model)
    sync.load_(other)
    assert_holds(sync, other)
    up = other.model.layers[1].mlp.up_proj
    up.weight = nn.Parameter(up.weight.detach() * 0.5)
    sync.load_(other)
    assert_holds(sync, other)


def test_the_share_of_codes_that_changed():
    model = tiny_llama()
    sync = make_sync(model)
    assert sync.load_(model) == 0.0
    assert sync.load_(model) == 0.0
    with torch.no_grad():
        weight = model.model.layers[0].self_attn.k_proj.weight
        weight[2] *= -1
    changed = int((quantize(weight.detach(), "int8").codes[2] != 0).sum())
    num_codes = sum(m.weight.numel() for n in (0, 1) for m in projections(model, n).values())
    assert sync.load_(model) == changed / num_codes


def test_addresses_change_with_a_parameter_that_is_made_anew():
    model = tiny_llama(attention_bias=True)
    sync = load(model)
    before = sync.weights.addresses()
    # Codes, scale and bias of qkv and o; codes and scale of gate_up and down; two norms.
    # Then embedding, norm, lm_head, cos and sin.
    assert len(before) == 2 * (3 + 3 + 2 + 2 + 2) + 5
    change_(model)
    sync.load_(model)
    assert sync.weights.addresses() == before
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())
    sync.load_(model)
    after = sync.weights.addresses()
    assert [a != b for a, b in zip(before, after, strict=True)].count(True) == 1
    assert model.model.norm.weight.data_ptr() in after


def replace_module(model):
    linear = nn.Linear(32, 64, bias=False)
    model.model.layers[1].mlp.up_proj = linear


def replace_parameter(model):
    down = model.model.layers[0].mlp.down_proj
    down.weight = nn.Parameter(down.weight.detach() * 0.5)


def replace_storage(model):
    norm = model.model.layers[1].input_layernorm
    norm.weight.data = norm.weight.data * 0.5


def replace_bias(model):
    bias = model.model.layers[1].self_attn.k_proj.bias
    model.model.layers[1].self_attn.k_proj.bias = nn.Parameter(bias.detach() + 1)


def untie(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone() + 1)


@pytest.mark.parametrize(
    "change", [replace_module, replace_parameter, replace_storage, replace_bias, untie]
)
def test_a_plan_lasts_until_a_parameter_lies_elsewhere(change):
    model = tiny_llama(attention_bias=True, tie_word_embeddings=True)
    sync = load(model)
    transfer = sync._transfer
    change_(model)
    sync.load_(model)
    assert sync._transfer is transfer
    change(model)
    sync.load_(model)
    assert sync._transfer is not transfer
    assert_holds(sync, model)


def test_another_model_has_another_plan():
    model = tiny_llama()
    sync = load(model)
    transfer = sync._transfer
    other = copy.copy(model)  # with the very same parameters
    sync.load_(other)
    assert sync._transfer is not transfer


def test_a_bias_that_comes_or_goes_is_seen():
    linear = nn.Linear(3, 2)
    has_bias = watch_parameters(linear)
    bias, linear.bias = linear.bias, None
    assert not has_bias(linear)
    has_none = watch_parameters(linear)
    assert has_none(linear)
    linear.bias = bias
    assert has_bias(linear)
    assert not has_none(linear)


def test_a_recording_that_fails_leaves_none_behind(monkeypatch):
    """The next sync writes everything again; it must not replay half a graph."""

    def fail(graph, **options):
        raise RuntimeError("capture failed")

    model = tiny_llama()
    sync = load(model)
    transfer = sync._transfer
    change_(model)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", object)
        patch.setattr(torch.cuda, "graph", fail)
        patch.setattr(transfer, "_can_record", True)
        with pytest.raises(RuntimeError, match="capture failed"):
            sync.load_(model)
    assert transfer._graph is None
    change_(model)
    sync.load_(model)
    assert_holds(sync, model)


def test_copies_in_another_precision_keep_their_addresses():
    sync = load(tiny_llama(0), "int8", torch.bfloat16)
    copy = sync.weights.lm_head.data_ptr()
    sync.load_(tiny_llama(1))
    assert sync.weights.lm_head.data_ptr() == copy


@pytest.mark.parametrize("quant", ["int8", "fp8-block"])
def test_a_sync_by_the_kernel_is_the_same(quant, monkeypatch):
    """The kernel in Triton's interpreter, as it would be used on a GPU."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU the other tests use the kernel")
    from qurl.quant.kernels.requantize import requantize_

    monkeypatch.setattr(module, "_find_kernel", lambda codings, device: requantize_)
    small = {"num_hidden_layers": 1, "intermediate_size": 32}  # the interpreter is slow
    model = tiny_llama(**small)
    sync = load(model, quant, native_codes=True)
    assert_holds(sync, model)
    change_(model)
    monkeypatch.undo()
    reference = load(tiny_llama(**small), quant, native_codes=True)
    assert sync.load_(model) == reference.load_(model) > 0
    assert_holds(sync, model)


# --- the spot check ---------------------------------------------------------------------------


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("native", [False, True])
def test_a_sound_copy_passes_at_every_version(quant, native):
    model = tiny_llama(**ALIGNED | {"intermediate_size": 224})
    sync = load(model, quant, native_codes=native)
    for version in range(12):
        sync.check(version)


def damage_code(part, row, column):
    codes = part.weight.codes if isinstance(part.weight, Quantized) else part.weight
    codes[row, column] = 3.0 if float(codes[row, column]) != 3 else 2.0


@pytest.mark.parametrize("quant", ["none", "int8", "fp8", "int4", "nvfp4"])
@pytest.mark.parametrize("name", MODULES)
def test_one_wrong_code_is_found_in_its_turn(quant, name):
    model = tiny_llama()
    sync = load(model, quant, native_codes=True)
    source = projections(model, layer=1)[name]
    part = sync.weights.layers[1].views[name]
    damage_code(part, row=5, column=7)
    for version in range(source.out_features):
        if 7919 * version % source.out_features != 5:
            sync.check(version)
            continue
        with pytest.raises(EngineError, match=f"version {version} failed: a projection of layer 1"):
            sync.check(version)


def test_one_wrong_code_of_a_tile_is_found_in_its_turn():
    model = tiny_llama(**ALIGNED | {"intermediate_size": 224})
    sync = load(model, "fp8-block")
    part = sync.weights.layers[0].views["down_proj"]
    assert part.weight.scale.shape == (1, 2)
    damage_code(part, row=100, column=190)
    sync.check(0)
    with pytest.raises(EngineError, match="layer 0"):
        sync.check(1)


@pytest.mark.parametrize("quant", ["int8", "fp8-block"])
def test_a_scale_off_by_one_unit_is_found(quant):
    model = tiny_llama()
    sync = load(model, quant)
    sync.weights.layers[1].down.weight.scale.mul_(1 + 2**-22)
    sync.weights.layers[0].o.weight.scale.mul_(1 + 2**-22)
    with pytest.raises(EngineError, match="version 9 failed: a projection of layer 0"):
        sync.check(9)


def test_a_sync_that_did_not_happen_is_found():
    model = tiny_llama()
    sync = load(model)
    up = model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        up.weight *= 1.01
    with pytest.raises(EngineError, match="layer 1"):
        sync.check(0)


@pytest.mark.parametrize("quant", FORMATS[1:])
def test_codes_are_of_the_weights_that_the_trainer_computes_with(quant):
    """An update that the trainer's BF16 does not show is not shown to the actor either."""
    model = tiny_llama(**ALIGNED).to(torch.bfloat16).float()
    sync = load(model, quant, compute_dtype=torch.bfloat16)
    full = load(model, quant)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name:  # a quarter of BF16's step, at most, from numbers on its grid
                parameter *= 1 + 2**-10 * torch.randn(parameter.shape, generator=draw).sign()
    assert sync.load_(model) == 0
    assert full.load_(model) > 0
    assert_holds(sync, model)
    sync.check(3)
    change_(model)
    assert sync.load_(model) > 0
    assert_holds(sync, model)
    sync.check(4)


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16], ids=str)
def test_a_recorded_sync(quant, master):
    """Recorded at the first sync, replayed at the next, recorded anew for other parameters."""
    model = tiny_llama(**ALIGNED, attention_bias=True).to("cuda", master)
    other = copy.deepcopy(model)
    sync = load(model, quant, torch.bfloat16)
    reference = make_sync(model, quant, torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_find_kernel", lambda codings, device: None)
        reference.load_(model)
    graph = sync._transfer._graph
    assert graph is not None
    for _ in range(2):
        change_(model)
        assert sync.load_(model) == reference.load_(model)
        assert sync._transfer._graph is graph
        assert_holds(sync, model)
        sync.check(5)
    change_(other, size=0.1)
    sync.load_(other)
    assert sync._transfer._graph not in (None, graph)
    assert_holds(sync, other)
    change_(other)
    sync.load_(other)
    assert_holds(sync, other)
    layer = other.model.layers[0]
    layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight.detach() * 2)
    sync.load_(other)
    assert_holds(sync, other)
    sync.check(6)


@pytest.mark.parametrize("quant", ["none", "int8", "fp8", "fp8-block"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_shipment_is_the_same_as_a_sync_from_the_model(quant, is_tied):
    before, after = (tiny_llama(seed=s, tie_word_embeddings=is_tied) for s in (0, 1))
    near = build_engine("local", before, quant=quant)
    far = build_engine("local", before, quant=quant, is_empty=True)
    reports = near.sync(after, version=1), far.sync(ModelShipment(after), version=1)
    assert reports[0].canary_gap == reports[1].canary_gap
    problems = [Problem(str(i), [1, 2, 3 + i], "") for i in range(4)]
    params = SamplingParams(max_tokens=9, seed=3, group_size=2)
    assert near.generate(problems, params) == far.generate(problems, params)
    flips = near.sync(before, version=2), far.sync(ModelShipment(before), version=2)
    assert flips[0].code_flip_frac == flips[1].code_flip_frac
    assert (flips[0].code_flip_frac > 0) == (quant != "none")


def test_an_engine_without_weights_samples_nothing():
    engine = build_engine("local", tiny_llama(), quant="int8", is_empty=True)
    with pytest.raises(EngineError, match="no weights have arrived yet; sync again"):
        engine.generate([Problem("a", [1, 2], "")], SamplingParams(max_tokens=2))


class Lost(ModelShipment):
    """A shipment that loses, renames or bends a weight on its way."""

    def __init__(self, model, change):
        super().__init__(model)
        self.change = change

    def pack(self, packing):
        for chunk in super().pack(packing):
            self.change(chunk)
            yield chunk


NAME = "model.layers.1.mlp.up_proj.weight"


def test_a_shipment_with_a_missing_or_unknown_weight_is_refused():
    engine = build_engine("local", tiny_llama(), quant="int8", is_empty=True)
    with pytest.raises(SyncError, match=f"the shipment lacks {NAME}_scale"):
        engine.sync(Lost(tiny_llama(), lambda chunk: chunk.pop(f"{NAME}_scale")), version=1)
    unknown = Lost(tiny_llama(), lambda c: c.update({"model.other.weight": c[NAME]}))
    with pytest.raises(SyncError, match=r"the engine has nothing for model\.other\.weight"):
        engine.sync(unknown, version=1)
    with pytest.raises(SyncError, match=f"has .* for {NAME}"):
        engine.sync(Lost(tiny_llama(), lambda c: c.update({NAME: c[NAME][1:]})), version=1)
    engine.sync(ModelShipment(tiny_llama()), version=1)


def test_a_buffer_that_differs_from_what_was_shipped_is_found(monkeypatch):
    """As if a write had been lost: too small for the canary prompt."""
    engine = build_engine("local", tiny_llama(), quant="int8", is_empty=True)
    write = engine._receiver._write

    def write_badly(name, tensor):
        num_flips = write(name, tensor)
        if name == NAME:
            engine._receiver._targets[name][3, 5] += 1
        return num_flips

    monkeypatch.setattr(engine._receiver, "_write", write_badly)
    with pytest.raises(SyncError, match=f"version 1 failed: {NAME} in the engine is not what was"):
        engine.sync(ModelShipment(tiny_llama()), version=1)


# --- frozen scales ----------------------------------------------------------------------------


def test_frozen_scales_clamp_what_has_grown():
    model = tiny_llama()
    scales = frozen_scales(model, "int8", torch.float32)
    weights = Weights(model, "int8", torch.float32, CPU)
    sync, dynamic = WeightSync(weights, scales), load(model)
    sync.load_(model)
    for ours, theirs in zip(weights.projections(), dynamic.weights.projections(), strict=True):
        assert torch.equal(ours.weight.codes, theirs.weight.codes), "as at the first sync"
    up = model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        up.weight *= 2
    sync.load_(model)
    sync.check(3)
    held = weights.layers[1].views["up_proj"].weight
    assert torch.equal(held.scale, scales["model.layers.1.mlp.up_proj"])
    expected = (up.weight.detach() / held.scale).clamp(-127, 127).round()
    assert torch.equal(held.codes, expected)
    assert (held.codes.abs() == 127).float().mean() > 0.1
    held.codes[:, 0] += 1
    with pytest.raises(EngineError, match="layer 1"):
        sync.check(3)


def test_rotations_are_on_the_engines_device():
    """The model of an engine in another process has its weights nowhere, and rotations on a CPU."""
    weights = Weights(tiny_llama(), "int8", torch.bfloat16, torch.device("meta"))
    assert {x.device.type for x in (weights.inv_freq, weights.cos, weights.sin)} == {"meta"}
