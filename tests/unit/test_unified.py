"""Projections in codes: gradients against float64, gaps to the engine, and what others see."""

import copy

import pytest
import torch
from models import CPU, SHAPE, build_learner, random_batch, tiny_llama, tiny_policy
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qurl.config import Config, ModelConfig, build_config
from qurl.config.schema import QuantConfig
from qurl.errors import ModelError
from qurl.quant import rescale_
from qurl.quant.formats import Quantized, dequantize, quantize, quantize_activation
from qurl.quant.kv import KVRounding, set_kv_scales_
from qurl.quant.linear import QuantLinear, finish, full_precision, linear, projections
from qurl.quant.tracking import UpdateTracker
from qurl.rollout import build_engine
from qurl.rollout.canary import score_with
from qurl.rollout.local.decoder import decode_sequence, prefill
from qurl.rollout.local.engine import LocalEngine
from qurl.trainer.batches import pad
from qurl.trainer.packing import Packed
from qurl.trainer.policy import Policy, hidden_states, load_policy
from qurl.trainer.unified import UnifiedLinear, unify_
from qurl.types import Graded, Problem, SamplingParams

FORMATS = ("int8", "fp8", "fp8-block", "int6", "int4")
MODES = ("bf16", "dgrad", "all")
SHAPES = {"2D": (5, 24, 40), "ragged": (37, 150, 193), "3D": (3, 11, 70, 131)}


def unified(layer: nn.Linear, format: str, backward: str = "bf16", dtype=torch.float32):
    owner = nn.ModuleDict({"q_proj": layer})
    quant = QuantConfig(format=format, unified=True, backward=backward)  # type: ignore[arg-type]
    return unify_(owner, quant, dtype)["q_proj"]  # type: ignore[index]


def make_case(shape, *, has_bias: bool, format: str, backward: str):
    """A layer [N, K], inputs [..., M, K] with a row of zeros, and output gradients, too."""
    *rows, num_out, num_in = shape
    draw = torch.Generator().manual_seed(0)
    plain = nn.Linear(num_in, num_out, bias=has_bias)
    with torch.no_grad():
        plain.weight.copy_(torch.randn(num_out, num_in, generator=draw))
        plain.weight[3] = 0.0
    # Tokens of very different sizes: scales that run along a sum must not be lost.
    sizes = torch.rand(*rows, 1, generator=draw).mul(6).sub(3).exp()
    x = torch.randn(*rows, num_in, generator=draw) * sizes
    g = torch.randn(*rows, num_out, generator=draw)
    x.view(-1, num_in)[1] = 0.0
    g.view(-1, num_out)[2] = 0.0
    return unified(plain, format, backward), x.requires_grad_(), g


def grid_steps(values: torch.Tensor, is_integer: bool) -> torch.Tensor:
    """Half of the largest distance between codes around each value, along the last dimension."""
    largest = values.abs().amax(-1, keepdim=True)
    if is_integer:
        return (largest / 127 / 2).expand_as(values)
    # E4M3: 3 bits of mantissa, so half a step is 2^-4 of a number; below 2^-6 it is 2^-10.
    return torch.maximum(values.abs() / 16, largest / 448 / 1024)


def in_groups(rounding, values: torch.Tensor, *others) -> torch.Tensor:
    parts = zip(*(t.split(128, -1) for t in (values, *others)), strict=True)
    return torch.cat([rounding(*part) for part in parts], -1)


def expected_gradients(layer, x, g):
    """Straight-through gradients in float64, and by how much coded gradients may differ.

    The bound adds up the rounding of each coded operand, times the other operand:
    |dx - dx'| <= sum_n |delta g| |W_hat|, likewise for dW.
    """
    format = layer.coder.format
    weight = dequantize(quantize(layer.weight.detach(), format)).double()
    x_hat = dequantize(quantize_activation(x.detach(), format)).double().flatten(0, -2)
    g = g.double().flatten(0, -2)
    steps = lambda values: grid_steps(values, format.is_integer)  # noqa: E731
    if format.block is not None:
        dg, dgt, dxt = (in_groups(steps, t) for t in (g, g.T, x_hat.T))
        to_x = dg @ weight.abs()
        to_weight = dgt @ x_hat.abs() + (g.T.abs() + dgt) @ dxt.T
    else:
        # Of rows of zeros no gradient of the other operand needs a code.
        scale_w = weight.abs().amax(-1, keepdim=True) / format.largest
        scale_x = x_hat.abs().amax(-1, keepdim=True) / format.largest
        to_x = steps(g * scale_w.T) @ (weight / scale_w).abs().nan_to_num()
        to_weight = steps((g * scale_x).T) @ (x_hat / scale_x).abs().nan_to_num()
    gradients = (g @ weight).view(x.shape), g.T @ x_hat, g.sum(0)
    return gradients, (to_x.view(x.shape), to_weight)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backward", MODES)
@pytest.mark.parametrize("format", FORMATS)
def test_gradients_are_straight_through(format, backward, shape, has_bias):
    layer, x, g = make_case(shape, has_bias=has_bias, format=format, backward=backward)
    layer(x).backward(g)
    (dx, dweight, dbias), bounds = expected_gradients(layer, x, g)
    is_coded = {"bf16": (False, False), "dgrad": (True, False), "all": (True, True)}[backward]
    found = (x.grad, layer.weight.grad)
    for got, want, bound, coded in zip(found, (dx, dweight), bounds, is_coded, strict=True):
        error = (got.double() - want).abs()
        sums = 1e-6 * want.abs().max()
        assert (error <= coded * bound + sums).all()
        assert (error.max() > 10 * sums) == coded  # coded gradients are not exact by accident
        assert not coded or error.norm() < 0.06 * want.norm() or format == "fp8-block"
    if has_bias:
        torch.testing.assert_close(layer.bias.grad.double(), dbias, rtol=1e-5, atol=1e-6)


def test_the_folded_gradients_by_hand():
    # W = [[127], [-254]]: codes 127 and -127, scales 1 and 2. x = 127: code 127, scale 1.
    plain = nn.Linear(1, 2, bias=False)
    plain.weight.data = torch.tensor([[127.0], [-254.0]])
    layer = unified(plain, "int8", "all")
    x = torch.tensor([[127.0]], requires_grad=True)
    layer(x).backward(torch.tensor([[1.0, 0.3]]))
    # g scale_w = [1, 0.6], coded with 1/127: [127, 76] (76.2). dx = (127 - 76) 127 / 127 = 51,
    # where the exact one is 127 - 0.3 * 254 = 50.8.
    assert x.grad.item() == pytest.approx(51.0, rel=1e-6)
    # Each channel of g has one token, which is its own largest: dW = g x is exact.
    assert layer.weight.grad.flatten().tolist() == pytest.approx([127.0, 38.1], rel=1e-6)


@pytest.mark.parametrize("backward", MODES)
@pytest.mark.parametrize("format", FORMATS)
def test_gradients_of_a_bf16_trainer(format, backward):
    """Products in BF16 have its relative error, and gradients come in the dtype of the inputs."""
    layer, x, g = make_case((6, 64, 96), has_bias=True, format=format, backward=backward)
    exact, _ = expected_gradients(layer, x, g)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(g.bfloat16())
    found = (x.grad, layer.weight.grad, layer.bias.grad)
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == torch.float32
        assert (got.double() - want).norm() < (0.01 if backward == "bf16" else 0.08) * want.norm()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_forwards_are_the_engines_to_the_bit(format, dtype, has_bias):
    plain, x = nn.Linear(70, 50, bias=has_bias), torch.randn(2, 7, 70)
    engine = QuantLinear(plain, quantize(plain.weight.detach(), format).format, dtype)
    assert torch.equal(unified(plain, format, dtype=dtype)(x), engine(x))


def test_what_is_kept_for_the_backward_is_codes():
    policy, plain = unified_policy("int8"), tiny_policy()
    batch = random_batch(plain)

    def kept(policy):
        """Bytes of the activations that projections keep: each storage once, no weights."""
        weights = {p.data_ptr() for p in policy.model.parameters()}
        weights |= {
            m.coded_weight(m.weight).codes.data_ptr()
            for m in policy.model.modules()
            if isinstance(m, UnifiedLinear)
        }
        found = {}

        def pack(t):
            is_activation = t.dim() > 1 and t.shape[-1] in (32, 64) and t.data_ptr() not in weights
            if is_activation:
                found[t.data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            scores = policy.score(batch).logp.sum()
        del scores
        return found.values()

    num_tokens = int(batch.lengths.sum())
    coded = [t for t in kept(policy) if t.dtype == torch.int8]
    # Per layer: inputs of q, k, v (32 numbers), of o (32), of gate and up (32), of down (64).
    assert sum(t.nbytes for t in coded) == 2 * num_tokens * (32 + 32 + 32 + 64)
    bytes_plain, bytes_coded = (sum(t.nbytes for t in kept(p)) for p in (plain, policy))
    # Inputs of projections shrink by 4. Norms and gates keep theirs, down's input among them.
    assert bytes_coded < bytes_plain - 2 * num_tokens * 3 * 32


# The gap to the engine.


def make_model(family: str, **changes):
    torch.manual_seed(0)
    shape = SHAPE | {"hidden_size": 64, "intermediate_size": 160} | changes
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        return model.eval()
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 16} | shape)).eval()
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


def unified_policy(
    format: str,
    model=None,
    backward: str = "bf16",
    kv: str = "none",
    full_layers=0,
    device=CPU,
    **config,
) -> Policy:
    options: dict = {"format": format, "backward": backward, "kv": kv, "full_layers": full_layers}
    quant = QuantConfig(unified=True, **options)
    return Policy(model or tiny_llama(), None, ModelConfig(**config), device, quant)


def mean_gap(policy: Policy, engine) -> float:
    """Mean |logp_prox - logp_behav| of what an engine samples."""
    problems = [Problem(str(i), tuple(range(3 + i, 9 + 2 * i)), "") for i in range(4)]
    params = SamplingParams(max_tokens=24, group_size=4, seed=1)
    rollouts = engine.generate(problems, params)
    batch = pad([Graded(r, [0.0] * 4, [{"accuracy": 0.0}] * 4) for r in rollouts])
    with torch.no_grad():
        gaps = (policy.score(batch).logp - batch.logp_behav) * batch.mask
    return float(gaps.abs().sum() / batch.mask.sum())


@pytest.mark.parametrize("uaq", [1.0, 1.5])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("format", FORMATS)
def test_there_is_nothing_to_correct(format, family, uaq):
    model = make_model(family)
    policy = unified_policy(format, model)
    if uaq != 1:
        with torch.no_grad():
            policy.score(random_batch(tiny_policy()))  # codes exist before the weights change
        rescale_(model, uaq)
    engine = build_engine("local", model, quant=format)
    gap = mean_gap(policy, engine)
    assert gap < 1e-5
    if uaq == 1:
        assert mean_gap(Policy(make_model(family), None, ModelConfig(), CPU), engine) > 100 * gap


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv", ["none", "fp8"])
@pytest.mark.parametrize(("family", "head_dim"), [("qwen2", 64), ("qwen2", 128), ("qwen3", 128)])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_gpu_computes_the_engines_bits(format, family, head_dim, kv, monkeypatch):
    """Residual streams after all layers: the trainer's, by prefill, and by decoding in batches."""
    shape = {"hidden_size": 4 * head_dim, "intermediate_size": 704, "num_hidden_layers": 4}
    model = make_model(family, **shape, head_dim=head_dim, max_position_embeddings=512)
    policy = unified_policy(format, model.cuda(), kv=kv, device=torch.device("cuda"))
    engine = build_engine("local", model, quant=format, kv=kv, unified=True)
    if kv == "fp8":
        set_kv_scales_(model, engine.sync(model, version=1).kv_scales)
    ids = torch.randint(3, 99, (200,), device="cuda")
    streams = []

    def keep(x, delta):
        streams.append(x + finish(delta).float())
        return x.to(engine.weights.dtype)

    monkeypatch.setattr(engine._ops, "final_norm", keep)
    engine.weights.extend_rotations_(len(ids))
    cache = engine.memory.make_small(len(ids))
    prefill(engine._ops, [ids.tolist()], cache, [range(1, cache.data.shape[2])])
    lengths = (200, 17, 1)
    for length in lengths:
        decode_sequence(engine._ops, engine.memory.make_small(length), ids[:length].tolist())
    packed = Packed.of(ids[None], [len(ids)])
    kept = []
    model.model.layers[-1].register_forward_hook(lambda *call: kept.append(call[-1]))
    with torch.no_grad():
        hidden_states(model, packed.token_ids[None], policy.compute_dtype, **packed.options)
    for length, stream in zip((200, *lengths), streams, strict=True):
        assert torch.equal(stream[:length], kept[0][0, :length])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_keys_and_values_are_rounded_on_both_sides(format, family):
    policy = unified_policy(format, make_model(family), kv="fp8")
    engine = build_engine("local", policy.model, quant=format, kv="fp8")
    unrounded = mean_gap(policy, engine)
    set_kv_scales_(policy.model, engine.sync(policy.model, version=1).kv_scales)
    gap = mean_gap(policy, engine)
    assert gap < 1e-5
    assert unrounded > 100 * gap
    assert mean_gap(Policy(make_model(family), None, ModelConfig(), CPU), engine) > 100 * gap


@pytest.mark.parametrize("kv", ["none", "fp8"])
@pytest.mark.parametrize("format", ["int8", "fp8-block"])
def test_layers_at_either_end_stay_in_full_precision(format, kv):
    model = make_model("qwen3", num_hidden_layers=4)
    policy = unified_policy(format, model, kv=kv, full_layers=1)
    engine = LocalEngine(model, quant=format, kv=kv, full_layers=1)
    expected = [False, True, True, False]
    ups = [layer.mlp.up_proj for layer in model.model.layers]
    assert [isinstance(up, UnifiedLinear) for up in ups] == expected
    views = [layer.views["up_proj"].weight for layer in engine.weights.layers]
    assert [isinstance(view, Quantized) for view in views] == expected
    report = engine.sync(model, version=1)
    if report.kv_scales is not None:
        set_kv_scales_(model, report.kv_scales)
    assert mean_gap(policy, engine) < 1e-5
    assert mean_gap(unified_policy(format, make_model("qwen3", num_hidden_layers=4)), engine) > 1e-3


def test_engines_agree_on_the_layers_that_stay():
    model, ids = make_model("llama", num_hidden_layers=3), list(range(5, 30))
    local, dense = (build_engine(k, model, quant="int4", full_layers=1) for k in ("local", "hf"))
    torch.testing.assert_close(local.score(ids), dense.score(ids), rtol=0, atol=1e-5)
    everywhere = build_engine("hf", model, quant="int4").score(ids)
    assert (everywhere - dense.score(ids)).abs().mean() > 0.1
    before = local.score(ids)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[:, 0] += 1e-3  # too small for a code of INT4
    for engine in (local, dense):
        engine.sync(model, version=1)
    torch.testing.assert_close(local.score(ids), dense.score(ids), rtol=0, atol=1e-5)
    assert (local.score(ids) - before).abs().max() > 1e-4
    with pytest.raises(ModelError, match="full_layers = 2 leaves none of the 3"):
        build_engine("local", model, quant="int4", full_layers=2)


def test_rounding_of_keys_and_values_by_hand():
    rounding = KVRounding()
    k, v = (torch.tensor([[[[9.25, 2000.0]]]], requires_grad=True) for _ in range(2))
    assert rounding(k, v) == (k, v)  # no scales yet
    # (9.25 - 1) / 0.5 = 16.5 has the code 16, and 3998 is clamped to 448. 9.25 / 2 = 4.625 lies
    # between the codes 4.5 and 5.
    rounding._scales = torch.tensor([[0.5], [2.0]]), torch.ones(1, 2)
    rounded = rounding(k, v)
    assert rounded[0].flatten().tolist() == [8.0, 224.0]
    assert rounded[1].flatten().tolist() == [9.0, 896.0]
    (3 * rounded[0] + 5 * rounded[1]).sum().backward()
    assert k.grad.flatten().tolist() == [3.0, 3.0]  # straight through, clamped ones too
    assert v.grad.flatten().tolist() == [5.0, 5.0]


def test_neither_the_canary_nor_full_precision_rounds_keys_and_values():
    policy, plain = unified_policy("int8", kv="fp8"), unified_policy("int8")
    batch, ids = random_batch(tiny_policy()), list(range(5, 30))
    before = policy.score(batch).logp
    scales = LocalEngine(policy.model, quant="int8", kv="fp8").memory.scales
    set_kv_scales_(policy.model, scales)
    assert not torch.equal(policy.score(batch).logp, before)
    assert torch.equal(score_with(policy.model, ids, "int8"), score_with(plain.model, ids, "int8"))
    with full_precision(policy.model):
        assert torch.equal(policy.score(batch).logp, tiny_policy().score(batch).logp)
    assert not torch.equal(policy.score(batch).logp, before)


def test_the_reference_rounds_as_the_policy_does():
    config = build_config({"quant": {"unified": True, "kv": "fp8"}})
    policy, reference = (unified_policy("int8", kv="fp8") for _ in range(2))
    learner, batch = build_learner(config, policy, reference=reference), random_batch(tiny_policy())
    learner.round_kv_(LocalEngine(policy.model, quant="int8", kv="fp8").memory.scales)
    assert torch.equal(policy.score(batch).logp, reference.score(batch).logp)
    assert not torch.equal(policy.score(batch).logp, unified_policy("int8").score(batch).logp)


def test_a_bf16_trainer_codes_what_its_engine_codes():
    policy = unified_policy("int8", compute_dtype="bfloat16")
    engine = LocalEngine(policy.model, quant="int8", compute_dtype=torch.bfloat16)
    view = engine.weights.layers[0].views["q_proj"].weight
    layer = policy.model.model.layers[0].self_attn.q_proj
    coded = layer.coded_weight(layer.weight)
    assert torch.equal(view.codes, coded.codes.float())
    assert torch.equal(view.scale, coded.scale)


# What others see.


def test_codes_follow_every_change_of_the_weights():
    layer = unified(nn.Linear(8, 4), "int8")
    x = torch.randn(3, 8)

    def is_fresh():
        return torch.equal(layer(x), linear(x, quantize(layer.weight.detach(), "int8"), layer.bias))

    assert is_fresh()
    first = layer.coded_weight(layer.weight)
    assert layer.coded_weight(layer.weight) is first  # made once
    with torch.no_grad():
        layer.weight.mul_(torch.tensor(1.7))
        layer.weight[0] += 1
    assert is_fresh()
    layer.load_state_dict({"weight": torch.randn(4, 8), "bias": torch.randn(4)})
    assert is_fresh()
    layer.weight = nn.Parameter(torch.randn(4, 8))
    assert is_fresh()


def test_fused_adamw_marks_its_parameters_as_changed():
    from qurl.config import OptimConfig
    from qurl.trainer.optimizer import build_optimizer

    parameter = nn.Linear(4, 4)
    optimizer = build_optimizer(parameter, OptimConfig(), lr=0.1)
    for group in optimizer.param_groups:
        group |= {"fused": True, "foreach": False}
    parameter(torch.randn(2, 4)).sum().backward()
    versions = [p._version for p in parameter.parameters()]
    optimizer.step()
    changed = (p._version for p in parameter.parameters())
    assert all(new > old for new, old in zip(changed, versions, strict=True))


def test_an_update_is_seen_by_the_next_forward():
    config = build_config({"optim": {"lr": 1e-2}, "quant": {"unified": True}})
    policy = unified_policy("int8")
    learner, batch = build_learner(config, policy), random_batch(policy)
    before = policy.score(batch).logp.detach()
    learner.update(batch, 0)
    after = policy.score(batch).logp.detach()
    assert (after - before).abs().max() > 0.01
    again = unified_policy("int8", copy.deepcopy(policy.model)).score(batch).logp
    assert torch.equal(after, again.detach())


def test_the_same_names_weights_and_files(tmp_path):
    policy, plain = unified_policy("fp8"), tiny_policy()
    assert [n for n, _ in projections(policy.model)] == [n for n, _ in projections(plain.model)]
    policy.tokenizer = plain.tokenizer
    policy.save(tmp_path / "unified")
    plain.save(tmp_path / "plain")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "unified").iterdir())
    for name in names:
        files = (tmp_path / folder / name for folder in ("unified", "plain"))
        assert len({file.read_bytes() for file in files}) == 1
    quant = QuantConfig(format="fp8", unified=True)
    loaded = load_policy(tmp_path / "unified", ModelConfig(), CPU, quant)
    batch = random_batch(plain)
    assert torch.equal(loaded.score(batch).logp, policy.score(batch).logp)


def test_the_tracker_sees_the_updates():
    policy, tracker = unified_policy("int8"), UpdateTracker("int8", rows=8)
    tracker.measure(policy.model)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    assert 0 < tracker.measure(policy.model)["uaq/code_flip_frac"] < 1


def test_the_tracker_watches_quantized_layers_only():
    model, tracker = make_model("llama", num_hidden_layers=3), UpdateTracker("int8", 8, None, 1)
    tracker.measure(model)
    assert {name.split(".")[2] for name in tracker.state_dict()} == {"1"}


@pytest.mark.parametrize("engine", ["local", "hf"])
def test_an_unquantized_engine_evaluates_in_full_precision(engine):
    policy, plain, ids = unified_policy("int4"), tiny_policy(), list(range(5, 30))
    built = build_engine(engine, policy.model, quant="none")
    expected = score_with(plain.model, ids)
    torch.testing.assert_close(built.score(ids), expected, rtol=0, atol=1e-4)
    quantized = score_with(policy.model, ids, "int4")
    assert (quantized - expected).abs().mean() > 0.1
    problem = Problem("a", tuple(range(5, 12)), "")
    sampled = built.generate([problem], SamplingParams(max_tokens=6, seed=3))[0].completions[0]
    assert len(sampled.logprobs) == 6
    score = score_with(plain.model, [*problem.prompt_ids, *sampled.token_ids])[6:]
    torch.testing.assert_close(torch.tensor(sampled.logprobs), score, rtol=0, atol=1e-4)


def test_full_precision_lasts_for_a_while_only():
    policy = unified_policy("int8")
    batch = random_batch(policy)
    coded = policy.score(batch).logp
    with full_precision(policy.model):
        plain = policy.score(batch).logp
    assert torch.equal(plain, tiny_policy().score(batch).logp)
    assert not torch.equal(plain, coded)
    assert torch.equal(policy.score(batch).logp, coded)


def test_the_critic_computes_in_full_precision():
    tree = {"algo": {"name": "ppo", "advantage": "gae"}}
    critics = [
        build_learner(build_config(tree), policy).critic
        for policy in (unified_policy("int4"), tiny_policy())
    ]
    policy = tiny_policy()
    layout = policy.layout(random_batch(policy))
    for critic in critics:
        nn.init.ones_(critic.head.weight)  # type: ignore[union-attr]
    assert torch.equal(critics[0](layout), critics[1](layout))  # type: ignore[misc]


def test_gradient_checkpointing_changes_nothing():
    gradients = []
    for checkpointing in (False, True):
        policy = unified_policy("int8", tiny_llama(), "all", gradient_checkpointing=checkpointing)
        policy.score(random_batch(tiny_policy())).logp.sum().backward()
        gradients.append([p.grad for p in policy.model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def test_a_model_that_is_quantized_in_part_is_refused():
    with pytest.raises(ModelError, match="has no layer named like q_proj"):
        unify_(nn.Sequential(nn.Linear(2, 2)), Config().quant, torch.float32)
