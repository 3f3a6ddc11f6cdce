"""Update visibility against worked examples and the numbers of the theory."""

import math

import pytest
import torch
from torch import nn

from qurl.errors import ModelError
from qurl.quant.formats import FORMATS, get_format, quantize
from qurl.quant.linear import frozen_scales
from qurl.quant.tracking import UpdateTracker, update_ratios, update_sums, watched_rows

CODED = [name for name, format in FORMATS.items() if not format.is_weight_only]

METRICS = ("update_norm", "quant_error", "code_flip_frac", "update_cosine", "update_proj")


class Layers(nn.Module):
    """A model that has just the given projections."""

    def __init__(self, **weights):
        super().__init__()
        for name, weight in weights.items():
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            layer.weight = nn.Parameter(weight.clone())
            setattr(self, name, layer)

    @torch.no_grad()
    def set(self, **weights):
        for name, weight in weights.items():
            getattr(self, name).weight.copy_(weight)


def _row(*values):
    return torch.tensor([values], dtype=torch.float64)


def _normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_by_hand():
    # max|x| = 127 keeps the step at 1: codes (127, 0, 11) become (127, 1, 11).
    # dtheta = (0, 0.2, 0.1), dQ = (0, 1, 0), Q - theta = (0, 0.4, 0.3).
    model = Layers(q_proj=_row(127, 0.4, 10.6))
    tracker = UpdateTracker("int8", rows=4)
    assert tracker.measure(model) == {}
    model.set(q_proj=_row(127, 0.6, 10.7))
    expected = {
        "update_norm": 0.05 / (127**2 + 0.4**2 + 10.6**2),
        "quant_error": 0.25 / (127**2 + 0.6**2 + 10.7**2),
        "code_flip_frac": 1 / 3,
        "update_cosine": 0.2 / math.sqrt(0.05),
        "update_proj": 4.0,
    }
    measured = tracker.measure(model)
    assert measured == pytest.approx(
        {f"uaq/{name}{group}": x for name, x in expected.items() for group in ("", "/attn_in")}
    )


def test_each_call_compares_with_the_call_before():
    model = Layers(o_proj=_row(127, 0.0, 0.0))
    tracker = UpdateTracker("int8", rows=1)
    flips = []
    for value in (0.0, 1.0, 1.2, 3.0):
        model.set(o_proj=_row(127, value, 0.0))
        flips.append(tracker.measure(model).get("uaq/code_flip_frac"))
    assert flips == [None, 1 / 3, 0.0, 1 / 3]


def test_groups_and_their_total():
    # Per weight (one row, two values): ||dtheta||^2 over ||theta||^2, where the total is the
    # ratio of the sums and not the mean of the ratios.
    before = {
        "q_proj": _row(3, 4),
        "k_proj": _row(0, 5),
        "v_proj": _row(5, 0),
        "o_proj": _row(1, 0),
        "gate_proj": _row(2, 0),
        "up_proj": _row(0, 4),
        "down_proj": _row(10, 0),
    }
    model = Layers(**before, lm_head=_row(1, 1))
    tracker = UpdateTracker("none", rows=8)
    tracker.measure(model)
    model.set(
        q_proj=_row(3, 5),  # 1 / 25
        k_proj=_row(2, 5),  # 4 / 25
        o_proj=_row(1, 1),  # 1 / 1
        up_proj=_row(0, 2),  # 4 / 16
        lm_head=_row(9, 9),
    )
    measured = tracker.measure(model)
    assert {k: v for k, v in measured.items() if "update_norm" in k} == pytest.approx(
        {
            "uaq/update_norm/attn_in": 5 / 75,
            "uaq/update_norm/attn_out": 1.0,
            "uaq/update_norm/mlp_in": 4 / 20,
            "uaq/update_norm/mlp_out": 0.0,
            "uaq/update_norm": 10 / (75 + 1 + 20 + 100),
        }
    )
    assert measured["uaq/quant_error"] == 0.0
    assert measured["uaq/update_proj"] == 1.0
    assert measured["uaq/code_flip_frac"] == 4 / 14


@pytest.mark.parametrize("format", ["none", *FORMATS])
def test_what_the_trainers_dtype_hides(format):
    """From numbers on BF16's grid: by a quarter of a step at most, then by eight to sixteen."""
    start = _normal(256, 128, seed=0).bfloat16().float()
    model = nn.ModuleDict({"q_proj": nn.Linear(128, 256, bias=False)})
    model["q_proj"].weight.data = start.clone()
    tracker = UpdateTracker(format, rows=256, dtype=torch.bfloat16)
    tracker.measure(model)
    signs = _normal(256, 128, seed=1).sign()
    model["q_proj"].weight.data = start * (1 + 2**-10 * signs)
    hidden = tracker.measure(model)
    assert hidden["uaq/update_norm"] == pytest.approx(2**-20, rel=1e-3)
    assert hidden["uaq/code_flip_frac"] == 0.0
    assert hidden["uaq/update_proj"] == 0.0
    assert (hidden["uaq/quant_error"] > 2**-19) == (format != "none")
    model["q_proj"].weight.data = start * (1 + 2**-4 * signs)
    seen = tracker.measure(model)
    assert seen["uaq/code_flip_frac"] > 0.05
    assert 0.5 < seen["uaq/update_proj"] < 1.5


@pytest.mark.parametrize("format", ["none", *FORMATS])
def test_no_update_measures_zero(format):
    model = Layers(q_proj=_normal(5, 32), down_proj=torch.zeros(3, 32))
    tracker = UpdateTracker(format, rows=128)
    tracker.measure(model)
    measured = tracker.measure(model)
    assert measured.keys() == {f"uaq/{n}{g}" for n in METRICS for g in ("", "/attn_in", "/mlp_out")}
    assert all(value == 0 for name, value in measured.items() if "quant_error" not in name)
    assert (measured["uaq/quant_error"] > 0) == (format != "none")
    assert measured["uaq/quant_error/mlp_out"] == 0


def test_a_scale_that_moves_is_seen_without_a_flip():
    # Doubling a row doubles its scale: the codes stay, and the actor follows exactly.
    model = Layers(up_proj=_normal(4, 16).double())
    tracker = UpdateTracker("int8", rows=4)
    tracker.measure(model)
    model.set(up_proj=2 * model.up_proj.weight)
    measured = tracker.measure(model)
    assert measured["uaq/code_flip_frac"] == 0
    assert measured["uaq/update_norm"] == pytest.approx(1.0)
    assert measured["uaq/update_cosine"] == pytest.approx(1.0, abs=1e-3)


def test_a_zero_that_changes_sign_is_no_flip():
    model = Layers(q_proj=_row(448, 1e-5))
    tracker = UpdateTracker("fp8", rows=1)
    tracker.measure(model)
    model.set(q_proj=_row(448, -1e-5))
    assert tracker.measure(model)["uaq/code_flip_frac"] == 0


@pytest.mark.parametrize(
    ("num_rows", "wanted", "format", "expected"),
    [
        (3, 128, "int8", [0, 1, 2]),
        (8, 4, "int8", [0, 2, 4, 6]),
        (10, 3, "none", [0, 3, 6]),
        (300, 1, "fp8-block", [*range(128)]),
        (300, 200, "fp8-block", [*range(256)]),
        (640, 256, "fp8-block", [*range(128), *range(256, 384)]),
        (300, 300, "fp8-block", [*range(300)]),
    ],
)
def test_watched_rows(num_rows, wanted, format, expected):
    format = None if format == "none" else get_format(format)
    assert watched_rows(num_rows, wanted, format).tolist() == expected


@pytest.mark.parametrize("format", CODED)
def test_watched_rows_have_the_codes_of_the_whole_weight(format):
    weight = _normal(600, 200) * torch.linspace(1, 9, 600)[:, None]
    rows = watched_rows(600, 300, get_format(format))
    assert torch.equal(
        quantize(weight[rows], format).codes.float(), quantize(weight, format).codes[rows].float()
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_rows", [256, 200])  # the second leaves a tile of 128 unfilled
def test_layers_are_measured_together_as_they_are_alone(format, num_rows):
    layers = [nn.Module() for _ in range(3)]
    for i, layer in enumerate(layers):
        layer.q_proj = nn.Linear(160, num_rows, bias=False)
        layer.q_proj.weight.data = _normal(num_rows, 160, seed=i) * 10**i
    model, tracker = nn.ModuleList(layers), UpdateTracker(format, rows=num_rows)
    tracker.measure(model)
    before = [layer.q_proj.weight.detach().clone() for layer in layers]
    for layer in layers:
        layer.q_proj.weight.data *= 1 + 0.1 * _normal(num_rows, 160, seed=9)
    alone = sum(
        update_sums(old, layer.q_proj.weight.detach(), get_format(format))
        for old, layer in zip(before, layers, strict=True)
    )
    expected = {f"uaq/{k}": v for k, v in update_ratios(alone.tolist()).items()}
    assert expected["uaq/code_flip_frac"] > 0
    measured = tracker.measure(model)
    assert {k: measured[k] for k in expected} == pytest.approx(expected, rel=1e-12)


def test_only_the_watched_rows_count():
    model = Layers(q_proj=_normal(8, 4))
    tracker = UpdateTracker("int8", rows=4)
    tracker.measure(model)
    changed = model.q_proj.weight.detach().clone()
    changed[1::2] += 1
    model.set(q_proj=changed)
    assert tracker.measure(model)["uaq/update_norm"] == 0


def test_a_resumed_tracker_measures_the_same_bits(tmp_path):
    model = Layers(q_proj=_normal(64, 32), up_proj=_normal(96, 32, seed=1))
    tracker = UpdateTracker("fp8", rows=16)
    tracker.measure(model)
    torch.save(tracker.state_dict(), tmp_path / "tracker.pt")
    resumed = UpdateTracker("fp8", rows=16)
    resumed.load_state_dict(torch.load(tmp_path / "tracker.pt", weights_only=True))
    model.set(q_proj=model.q_proj.weight + 1e-3 * _normal(64, 32, seed=2))
    assert resumed.measure(model) == tracker.measure(model)
    assert resumed.state_dict().keys() == {"q_proj", "up_proj"}


def test_the_state_is_a_copy_of_the_weights():
    model = Layers(q_proj=_normal(4, 8))
    tracker = UpdateTracker("int8", rows=4)
    tracker.measure(model)
    before = tracker.state_dict()["q_proj"].clone()
    model.set(q_proj=torch.zeros(4, 8))
    assert torch.equal(tracker.state_dict()["q_proj"], before)


def test_bf16_weights_are_measured():
    model = Layers(q_proj=_normal(4, 64).bfloat16())
    tracker = UpdateTracker("int8", rows=4)
    tracker.measure(model)
    model.set(q_proj=model.q_proj.weight * 2)
    assert tracker.measure(model)["uaq/update_norm"] == 1.0


def test_a_changed_setting_is_refused():
    model = Layers(q_proj=_normal(300, 8))
    tracker = UpdateTracker("int8", rows=128)
    tracker.measure(model)
    other = UpdateTracker("int8", rows=64)
    other.load_state_dict(tracker.state_dict())
    with pytest.raises(ModelError, match=r"q_proj: \(128, 8\) was watched .* \(64, 8\) is now"):
        other.measure(model)
    with pytest.raises(ModelError, match=r"k_proj: None was watched .* \(128, 8\) is now"):
        tracker.measure(Layers(k_proj=_normal(128, 8)))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="format 'int5' is not one of"):
        UpdateTracker("int5", rows=8)
    with pytest.raises(ModelError, match=r"has no nn.Linear named like q_proj"):
        UpdateTracker("int8", rows=8).measure(nn.Linear(2, 2))


def _one_step(format, lr, scale=1.0):
    """A random-sign Adam step on a Gaussian weight [512, 1536] of deviation 0.02."""
    weight = 0.02 * _normal(512, 1536).double() / scale
    model = Layers(q_proj=weight)
    tracker = UpdateTracker(format, rows=512)
    tracker.measure(model)
    model.set(q_proj=weight + lr * _normal(512, 1536, seed=1).sign())
    measured = tracker.measure(model)
    return {name: measured[f"uaq/{name}"] for name in METRICS}


@pytest.mark.parametrize(
    ("format", "lr", "flips", "cosine"),
    [
        ("int8", 1e-6, 0.0019, 0.043),
        ("int8", 1e-5, 0.018, 0.133),
        ("fp8", 1e-6, 0.0040, 0.027),
        ("fp8", 1e-5, 0.029, 0.084),
    ],
)
def test_the_quantized_actor_follows_on_average(format, lr, flips, cosine):
    measured = _one_step(format, lr)
    assert measured["code_flip_frac"] == pytest.approx(flips, rel=0.1)
    assert measured["update_cosine"] == pytest.approx(cosine, rel=0.15)
    assert measured["update_proj"] == pytest.approx(1.0, abs=0.15)
    assert measured["update_norm"] == pytest.approx((lr / 0.02) ** 2, rel=0.01)


def test_uaq_makes_updates_more_visible(vectors):
    expected = vectors("systems.json")["uaq"]
    plain, scaled = _one_step("int8", 1e-5), _one_step("int8", 1e-5, scale=expected["s"])
    assert plain["code_flip_frac"] == pytest.approx(expected["flip_fraction"], rel=0.03)
    assert scaled["code_flip_frac"] == pytest.approx(expected["flip_fraction_uaq"], rel=0.03)
    ratio = scaled["code_flip_frac"] / plain["code_flip_frac"]
    assert ratio == pytest.approx(expected["flip_ratio"], rel=0.03)
    assert scaled["update_cosine"] / plain["update_cosine"] == pytest.approx(1.5**0.5, rel=0.05)
    # The squared norms of Eq. (13) grow by s^2, and Eq. (14) stays.
    assert scaled["update_norm"] / plain["update_norm"] == pytest.approx(2.25, rel=1e-6)
    assert scaled["quant_error"] == pytest.approx(plain["quant_error"], rel=1e-3)


def test_frozen_scales_are_those_of_the_actor():
    """The row grows beyond its first scale, so its largest code is cut and its error seen."""
    model = Layers(q_proj=_row(127, 10))
    tracker = UpdateTracker("int8", rows=4, scales=frozen_scales(model, "int8", torch.float32))
    tracker.measure(model)
    model.set(q_proj=_row(254, 20))
    measured = tracker.measure(model)
    assert measured["uaq/code_flip_frac"] == 1 / 2
    assert measured["uaq/quant_error"] == pytest.approx(127**2 / (254**2 + 20**2))
