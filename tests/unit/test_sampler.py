"""Shapes: B rows, V vocabulary."""

import math

import pytest
import torch

from qurl.rollout.sampler import RowParams, filter_logits, request_key, sample, uniform
from qurl.types import SamplingParams


def draw(logits, random, **params):
    rows = RowParams.stack([SamplingParams(**params)], logits.device)
    return sample(logits, torch.as_tensor(random, dtype=torch.float64), rows)


def splitmix64(state: int) -> int:
    """Steele, Lea and Flood's output function on unsigned Python integers."""
    mask = (1 << 64) - 1
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def test_uniform_is_splitmix64():
    """The reference stream of seed 1234567 starts with 6457827717110365317."""
    assert splitmix64(1234567 + 0x9E3779B97F4A7C15) == 6457827717110365317
    for key in (0, 1234567, -1, -(2**63), 2**63 - 1):
        for position in (0, 1, 4095):
            state = (key + (position + 1) * 0x9E3779B97F4A7C15) % (1 << 64)
            expected = (splitmix64(state) >> 11) / 2**53
            assert uniform(torch.tensor([key]), torch.tensor([position])).item() == expected


def test_uniform_fills_the_interval_evenly():
    """10 bins of 20000 draws: chi-square with 9 degrees of freedom, 33.7 has p = 1e-4."""
    u = uniform(torch.arange(200).repeat_interleave(100), torch.arange(100).repeat(200))
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 10, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 33.7


def test_request_keys_are_stable_and_distinct():
    assert request_key(0, "gsm8k/1", 0) == request_key(0, "gsm8k/1", 0)
    keys = {
        request_key(s, p, i) for s in (0, 1, 11) for p in ("1", "11", "1:1") for i in (0, 1, 11)
    }
    assert len(keys) == 27
    assert all(-(2**63) <= k < 2**63 for k in keys)


def test_key_value_never_changes():
    """Runs must be reproducible by later versions."""
    assert request_key(0, "a", 0) == -7239001488113675310
    assert uniform(torch.tensor([0]), torch.tensor([0])).item() == pytest.approx(
        0.8833108082136426, abs=1e-15
    )


def test_inverse_cdf_by_hand():
    """p = (0.5, 0, 0.25, 0.25): the cdf is 0.5, 0.5, 0.75, 1, and token 1 is never drawn."""
    p = torch.tensor([0.5, 0.0, 0.25, 0.25]).log()
    random = [0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2.0**-53]
    tokens, logprobs = draw(p.expand(6, 4), random)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(logprobs, p[tokens])


def test_zero_skips_impossible_tokens():
    """p = (0, 0.25, 0.75): u = 0 is the lower end of token 1's interval."""
    tokens, _ = draw(torch.tensor([[0.0, 0.25, 0.75]]).log(), [0.0])
    assert tokens.item() == 1


def test_the_largest_uniform_never_reaches_an_impossible_tail():
    logits = torch.full((1, 1000), -math.inf)
    logits[0, :3] = torch.tensor([0.1, 0.2, 0.3])
    assert draw(logits, [1 - 2.0**-53])[0].item() == 2
    assert draw(logits, [1.0])[0].item() == 2


def test_temperature_scales_before_the_softmax():
    """logits (0, log 9) at temperature 2 are (0, log 3): probabilities 1/4 and 3/4."""
    logits = torch.tensor([[0.0, math.log(9)]]).expand(2, 2)
    tokens, logprobs = draw(logits, [0.24, 0.26], temperature=2.0)
    assert tokens.tolist() == [0, 1]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.25, 0.75]))


def test_greedy_takes_the_argmax_with_its_unscaled_logprob():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    tokens, logprobs = draw(logits, [0.99], temperature=0, top_p=0.1, top_k=1)
    assert tokens.item() == 1
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 1])


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, [0.1, 0.4, 0.3, 0.2]),
        (1.0, -1, [0.1, 0.4, 0.3, 0.2]),
        (1.0, 2, [0, 4 / 7, 3 / 7, 0]),
        (0.69, 0, [0, 4 / 7, 3 / 7, 0]),  # the token that crosses 0.69 is kept
        (0.71, 0, [0, 4 / 9, 3 / 9, 2 / 9]),
        (0.01, 0, [0, 1, 0, 0]),  # never empty
        (0.5, 2, [0, 1, 0, 0]),  # of the two kept by top-k, 4/7 already has the mass
        (1.0, 9, [0.1, 0.4, 0.3, 0.2]),
    ],
)
def test_filters_by_hand(top_p, top_k, kept):
    """p = (0.1, 0.4, 0.3, 0.2), sorted 0.4, 0.3, 0.2, 0.1."""
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).double().log()
    filtered = filter_logits(logits, torch.tensor([top_p]).double(), torch.tensor([top_k]))
    torch.testing.assert_close(filtered.softmax(-1), torch.tensor([kept]).double())


def test_top_k_keeps_k_of_equal_tokens():
    filtered = filter_logits(torch.zeros(1, 5), torch.tensor([1.0]), torch.tensor([2]))
    assert filtered.isfinite().tolist() == [[True, True, False, False, False]]


def test_rows_have_their_own_parameters():
    params = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=1),
        SamplingParams(temperature=0.5),
        SamplingParams(top_p=0.3),
    ]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    random = torch.full((4,), 0.77, dtype=torch.float64)
    tokens, logprobs = sample(logits, random, RowParams.stack(params, "cpu"))
    for row, p in enumerate(params):
        alone = draw(logits[row : row + 1], [0.77], **vars(p))
        assert alone[0].item() == tokens[row]
        assert alone[1].item() == logprobs[row]
    assert logprobs[1] == 0


def test_a_row_does_not_depend_on_the_others():
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1))
    random = uniform(torch.arange(64), torch.zeros(64, dtype=torch.int64))
    tokens, logprobs = draw(logits, random, temperature=0.9)
    for rows in (slice(0, 8), slice(40, 64), slice(5, 6)):
        some, some_logprobs = draw(logits[rows], random[rows], temperature=0.9)
        assert torch.equal(some, tokens[rows])
        assert torch.equal(some_logprobs, logprobs[rows])


def test_frequencies_follow_the_distribution():
    """Chi-square of 20000 draws over 20 tokens: 19 degrees of freedom, 50 has p = 1.3e-4."""
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(2))
    random = uniform(torch.full((20000,), 99), torch.arange(20000))
    tokens, _ = draw(logits.expand(20000, 20), random)
    expected = 20000 * logits[0].softmax(-1)
    counts = torch.bincount(tokens, minlength=20)
    assert ((counts - expected) ** 2 / expected).sum() < 50
