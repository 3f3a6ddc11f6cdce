"""hAdam, compound scaling and BF16 masters: by hand, against AdamW, and in a learner."""

import copy
import math

import numpy as np
import pytest
import torch
from models import build_learner, random_batch, tiny_llama, tiny_policy
from torch import nn

from qurl.config import OptimConfig, build_config
from qurl.config.rules import find_mistakes
from qurl.errors import ConfigError
from qurl.rollout import build_engine
from qurl.trainer.hadam import FIRST_SCALE, HAdam, hypot
from qurl.trainer.masters import REST, join, narrow_masters_, split, widen
from qurl.trainer.optimizer import apply_gradients, build_optimizer, optimizer_metrics

GROUP = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8}


def test_hadam_vector(vectors):
    """50 steps from 0.5 at a rate of 0.01 with normal gradients, in FP64."""
    case = vectors("systems.json")["hadam"]
    weight = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
    options = {"lr": 0.01, "betas": (0.9, 0.999), "moments": torch.float64}
    optimizer = HAdam([{"params": [weight]}], **options)
    for gradient in np.random.default_rng(case["seed"]).normal(size=case["steps"]):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        assert optimizer.step()
    assert weight.item() == pytest.approx(case["w_hadam"], rel=1e-12)
    assert weight.item() == pytest.approx(case["w_adam"], rel=1e-12)


def test_hadam_is_adamw_at_any_scale():
    """With decay and clipped gradients; a large eps, so that it must follow the scale."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100, generator=generator, dtype=torch.float64)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group = GROUP | {"eps": 1e-2}
    reference = torch.optim.AdamW([theirs], betas=(0.9, 0.999), **group)
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "moments": torch.float64}
    optimizer = HAdam([{"params": [ours], **group}], **options)
    optimizer._rescale(512.0)
    for _ in range(30):
        gradient = torch.randn(100, generator=generator, dtype=torch.float64)
        ours.grad, theirs.grad = gradient, 0.25 * gradient
        optimizer.step(clip=0.25)
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_hypot_neither_under_nor_overflows():
    a = torch.tensor([3e-6, 3e4, 0.0, 5.0, 6e-8], dtype=torch.float16)
    b = torch.tensor([4e-6, 4e4, 0.0, 0.0, 6e-8], dtype=torch.float16)
    expected = torch.hypot(a.double(), b.double())
    assert a.square().tolist()[:2] == [0.0, math.inf], "squares would"
    torch.testing.assert_close(hypot(a, b).double(), expected, rtol=2e-2, atol=6e-8)


def test_tiny_gradients_in_fp16_are_not_divided_by_eps():
    """g = 1e-5: its square is 0 in FP16, its h = sqrt(1e-3) 1e-5 = 3.2e-7 is not."""
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "moments": torch.float16}
    optimizer = HAdam([{"params": [weight], "eps": 1e-8}], **options)
    assert (torch.tensor(1e-5, dtype=torch.float16) ** 2).item() == 0
    for _ in range(3):
        weight.grad = torch.full_like(weight, 1e-5)
        assert optimizer.step()
    assert weight.tolist() == pytest.approx([-0.03] * 4, rel=0.05)


def test_the_scale_as_a_state_machine(monkeypatch):
    """An overflow skips the update and halves S, m and h; good steps double them, if they fit."""
    monkeypatch.setattr("qurl.trainer.hadam.GROW_AFTER", 3)
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "moments": torch.float16}
    optimizer = HAdam([{"params": [weight]}, {"params": []}], **options)

    def step(*gradient):
        """Of a loss times S, as an FP16 trainer computes it."""
        weight.grad = torch.tensor(gradient, dtype=torch.float16)
        return optimizer.step(clip=1 / optimizer.scale)

    assert step(100.0, 10.0)
    m, before = optimizer.state[weight]["m"].clone(), weight.detach().clone()
    assert not step(math.inf, 1.0)
    assert not step(math.nan, 1.0)
    assert torch.equal(weight, before)
    assert optimizer.scale == FIRST_SCALE / 4
    assert torch.equal(optimizer.state[weight]["m"], m / 4)
    for _ in range(3):
        assert step(25.0, 2.5)
    assert optimizer.scale == FIRST_SCALE / 2
    assert [group["good_steps"] for group in optimizer.param_groups] == [0, 0]
    optimizer.state[weight]["m"][0] = 4e4
    for _ in range(3):
        assert step(4e4, 0.0)
    assert optimizer.scale == FIRST_SCALE / 2, "m would not have fitted"


def test_fp32_gradients_lose_no_step_to_an_overflow():
    """They are scaled by the optimizer, so it takes a smaller scale at once: 200 S > 65504."""
    weight = nn.Parameter(torch.zeros(2))
    config = OptimConfig(name="hadam", moments="fp16")
    optimizer = build_optimizer(nn.ParameterList([weight]), config, lr=1.0)
    weight.grad = torch.tensor([200.0, 0.02])
    apply_gradients(optimizer, lr=0.1, grad_clip=1000.0)
    assert optimizer_metrics(optimizer) == {"optim/scale": FIRST_SCALE / 64}
    assert weight.tolist() == pytest.approx([-0.1, -0.1], rel=1e-3)
    state = optimizer.state[weight]
    assert sum(x.nbytes for x in state.values() if isinstance(x, torch.Tensor)) == 2 * 4


def test_masters_are_split_and_joined_to_the_bit():
    """And the upper half is the nearest BF16 number; a tie is rounded away from zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10_000, generator=generator) * torch.logspace(-38, 10, 10_000)
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, 1 + 2**-8, -(1 + 2**-8)])])
    weight, rest = split(x)
    assert torch.equal(join(weight, rest).view(torch.int32), x.view(torch.int32))
    is_tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weight[~is_tie], x.bfloat16()[~is_tie])
    assert weight[-2:].tolist() == [1 + 2**-7, -(1 + 2**-7)]
    assert weight.nbytes + rest.nbytes == x.nbytes


def narrowed(moments="fp32", name="adamw", masters="bf16"):
    """A tiny model with an optimizer whose masters are split, or not."""
    model = tiny_llama(hidden_size=64)
    config = OptimConfig(name=name, moments=moments, masters=masters, weight_decay=0.1)
    optimizer = build_optimizer(model, config, lr=1e-6)
    if masters == "bf16":
        narrow_masters_(model, optimizer)
    return model, optimizer


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.5
    apply_gradients(optimizer, lr=1e-6, grad_clip=1e9)


def masters_of(model, optimizer):
    named = model.named_parameters()
    return {name: widen(p.detach(), optimizer.state[p]).clone() for name, p in named}


def test_only_projections_are_narrow():
    """And lie next to each other if they read the same input."""
    model, optimizer = narrowed()
    narrow = {n.split(".")[-2] for n, p in model.named_parameters() if p.dtype == torch.bfloat16}
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert narrow == set(projections)
    start = dict(tiny_llama(hidden_size=64).named_parameters())
    for name, master in masters_of(model, optimizer).items():
        assert torch.equal(master, start[name]), name
    for layer in model.model.layers:
        q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
        assert k.data_ptr() == q.data_ptr() + q.nbytes


@pytest.mark.parametrize(("name", "moments"), [("adamw", "8bit"), ("hadam", "fp16")])
def test_narrow_masters_train_as_fp32_ones_to_the_bit(name, moments):
    """At a rate of 1e-6, where BF16 alone keeps nothing of an update."""
    (narrow, ours), (wide, theirs) = (narrowed(moments, name, masters=m) for m in ("bf16", "fp32"))
    start = masters_of(narrow, ours)
    for seed in range(20):
        step(narrow, ours, seed)
        step(wide, theirs, seed)
    found, expected = masters_of(narrow, ours), masters_of(wide, theirs)
    for key, master in found.items():
        assert torch.equal(master, expected[key]), key
        assert 5e-6 < float((master - start[key]).abs().max()) < 3e-5, key
    q, before = narrow.model.layers[0].self_attn.q_proj.weight, narrowed()[0].model.layers[0]
    assert float((q == before.self_attn.q_proj.weight).float().mean()) > 0.9, "hardly one shows yet"
    assert ours.state[q][REST].dtype == torch.int16


def test_a_bf16_compensation_would_lose_half_of_small_updates():
    """Why the rest is an integer: 40 updates of 1e-6 on a weight of 0.2, by Kahan in BF16."""
    total = 0.2 * torch.ones(1000).bfloat16()
    compensation = torch.linspace(-4e-4, 4e-4, 1000).bfloat16()
    start = total.float() - compensation.float()
    for _ in range(40):
        y = 1e-6 - compensation.float()
        new = (total.float() + y).bfloat16()
        compensation = ((new.float() - total.float()) - y).bfloat16()
        total = new
    moved = (total.float() - compensation.float() - start).double()
    assert float((moved - 4e-5).norm() / (4e-5 * 1000**0.5)) > 0.4


@pytest.mark.parametrize(
    ("name", "moments"), [("adamw", "fp32"), ("adamw", "8bit"), ("hadam", "fp16")]
)
def test_states_are_loaded_to_the_bit(name, moments):
    (model, first), (twin, second) = narrowed(moments, name), narrowed(moments, name)
    for seed in range(3):
        step(model, first, seed)
    first.param_groups[0].update(good_steps=7) if name == "hadam" else None
    twin.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for seed in (3, 4):
        step(model, first, seed)
        step(twin, second, seed)
    if name == "hadam":
        assert second.param_groups[0]["good_steps"] == 9
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
        states = first.state[a], second.state[b]
        assert {k: getattr(v, "dtype", v) for k, v in states[0].items()} == {
            k: getattr(v, "dtype", v) for k, v in states[1].items()
        }


def learner_of(masters, compute_dtype="bfloat16", moments="fp32"):
    optim = {"masters": masters, "moments": moments, "lr": 1e-3}
    config = build_config({"optim": optim, "batch": {"minibatches": 1, "epochs": 2}})
    return build_learner(config, tiny_policy(compute_dtype=compute_dtype))


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_a_learner_does_the_same_with_narrow_masters(moments):
    """But for ties, which are one in 2^16 weights."""
    found = {}
    for masters in ("fp32", "bf16"):
        learner = learner_of(masters, moments=moments)
        batch = random_batch(learner.policy)
        learner.narrow_masters_()
        trained, metrics = learner.update(batch, 0)
        found[masters] = (
            metrics,
            trained.logp,
            masters_of(learner.policy.model, learner.optimizer),
        )
    (metrics, logp, wide), (narrow_metrics, narrow_logp, narrow) = found.values()
    assert narrow_metrics == pytest.approx(metrics, rel=1e-2, abs=1e-3)
    torch.testing.assert_close(narrow_logp, logp, rtol=0, atol=0.02)
    start = dict(tiny_policy().model.named_parameters())
    for name, master in narrow.items():
        gap, moved = (master - wide[name]).norm(), (wide[name] - start[name].detach()).norm()
        assert float(gap) < 0.15 * float(moved), name


@pytest.mark.parametrize("engine", ["local", "hf"])
@pytest.mark.parametrize("quant", ["none", "int8"])
def test_engines_copy_narrow_masters(engine, quant):
    """And sample the codes, or the numbers, of FP32 masters that round to the same."""
    model, optimizer = narrowed()
    wide = tiny_llama(hidden_size=64)
    with torch.no_grad():
        for p, own in zip(model.parameters(), wide.parameters(), strict=True):
            own.copy_(p)
    built = [
        build_engine(engine, m, quant=quant, compute_dtype=torch.bfloat16) for m in (model, wide)
    ]
    ids = list(range(5, 25))
    found, expected = (e.score(ids) for e in built)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1 if engine == "hf" else 1e-4)
    step(model, optimizer, 0)
    assert built[0].sync(model, version=1).canary_gap < 1.0


def test_a_trainer_in_fp32_refuses_narrow_masters():
    with pytest.raises(ConfigError, match=r"computes in torch.float32 and would see rounded"):
        learner_of("bf16", "float32").narrow_masters_()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optim": {"moments": "fp16"}}, "FP16 cannot hold squares of gradients; use 'hadam'"),
        ({"optim": {"name": "hadam", "moments": "8bit"}}, "8-bit codes are made for adamw"),
        ({"model": {"lora_rank": 8}}, "does not go with model.lora_rank = 8: adapters are small"),
        ({"model": {"compile": True}}, "does not go with model.compile = true"),
        (
            {"model": {"compute_dtype": "float32"}},
            "the trainer would see rounded weights; use 'fp32'",
        ),
        ({"experimental": {"dither": True}}, "does not go with experimental.dither = true"),
        (
            {"parallel": {"trainers": 2}},
            "optim.masters = 'bf16' is not built for the shards of parallel.trainers",
        ),
        (
            {"parallel": {"trainers": 2}, "optim": {"name": "hadam"}},
            "optim.name = 'hadam' is not built for the shards of parallel.trainers = 2",
        ),
    ],
)
def test_refused_combinations(sections, message):
    sections = sections if "optim" in sections else sections | {"optim": {"masters": "bf16"}}
    (mistake,) = find_mistakes(build_config(sections))
    assert message in mistake
