"""Dithered masters: the same forward in BF16, and updates that it sees."""

import pytest
import torch
from models import random_batch, tiny_llama, tiny_policy
from torch import nn

from qurl.quant.tracking import UpdateTracker
from qurl.trainer.dither import dither_, place_in_cell


@pytest.mark.parametrize("start", ["on the grid", "between"])
def test_numbers_stay_in_their_cells_and_fill_them(start):
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(200_000, generator=draw) * 10 ** torch.randn(200_000, generator=draw)
    largest = torch.finfo(torch.bfloat16).max
    powers = torch.tensor([0.0, 1.0, -1.0, 2.0**-20, -(2.0**30), largest, -largest])
    weight = torch.cat([weight, powers.repeat(1000)])
    weight = weight.bfloat16().float() if start == "on the grid" else weight
    places = torch.rand(weight.shape, generator=draw)
    moved = place_in_cell(weight, places)
    assert torch.equal(moved.bfloat16(), weight.bfloat16())
    assert (moved[weight == 0] == 0).all()
    # Outwards, in units of the distance to the next number out there.
    middle = weight.bfloat16().float()
    is_plain = (middle != 0) & (middle.abs() < 1e38)
    step = 2.0**-7 * 2.0 ** middle.abs().log2().floor()
    shift = ((moved.abs() - middle.abs()) / step)[is_plain]
    assert shift.min() < -0.49
    assert shift.max() > 0.49
    assert abs(shift.mean()) < 0.01
    # Below a power of two the next number is half as far.
    at_one = (moved - 1)[weight == 1]
    assert -(2.0**-9) <= at_one.min() < -0.9 * 2.0**-9
    assert 0.9 * 2.0**-8 < at_one.max() <= 2.0**-8


def test_both_ends_of_a_cell_belong_to_it():
    weight = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    for place in (0.0, 1.0):
        moved = place_in_cell(weight, torch.full_like(weight, place))
        assert torch.equal(moved.bfloat16(), weight.bfloat16())


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_forward_before_training_is_the_same_to_the_bit(is_tied):
    model = tiny_llama(tie_word_embeddings=is_tied, attention_bias=True).bfloat16().float()
    policy = tiny_policy(model=model, compute_dtype="bfloat16")
    batch = random_batch(policy)
    before = policy.score(batch).logp.detach()
    masters = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    assert dither_(model, seed=0) == []
    assert torch.equal(policy.score(batch).logp, before)
    moved = {n for n, w in model.named_parameters() if not torch.equal(w, masters[n])}
    expected = {n for n in masters if "_proj" in n and masters[n].any()}
    assert moved == (expected if is_tied else expected | {"lm_head.weight"})


def test_what_is_no_linear_layer_is_named():
    model = tiny_llama()
    model.experts = nn.Parameter(torch.ones(2, 3, 4))
    assert dither_(model, seed=0) == ["experts"]
    assert (model.experts == 1).all()


def test_a_seed_names_the_places():
    models = [tiny_llama() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        dither_(model, seed)
    first, same, other = (m.model.layers[0].mlp.up_proj.weight for m in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_small_updates_are_seen_on_average():
    """By a twentieth of a step: nothing from the grid, all of it from random places."""
    for is_dithered in (False, True):
        model = tiny_llama(hidden_size=256, intermediate_size=512).bfloat16().float()
        if is_dithered:
            dither_(model, seed=0)
        tracker = UpdateTracker("none", 512, torch.bfloat16)
        tracker.measure(model)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 1 + 2.0**-12 * torch.randn(weight.shape, generator=draw).sign()
        seen = tracker.measure(model)["uaq/update_proj"]
        assert seen == pytest.approx(float(is_dithered), abs=0.05)
