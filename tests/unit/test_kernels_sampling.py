"""`sample_rows` against `qurl.rollout.sampler`. On a CPU Triton's interpreter runs the kernels.

Shapes: B rows, V vocabulary.
"""

import math

import pytest
import torch
import triton
import triton.language as tl

from qurl.rollout.local.kernels.sampling import load_uniform, sample_rows
from qurl.rollout.sampler import RowParams, sample, uniform

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


@triton.jit
def uniform_kernel(keys, counters, out):
    row = tl.program_id(0)
    tl.store(out + row, load_uniform(keys, counters, row))


def random_rows(batch, vocabulary, *, seed=0, spread=3.0):
    """Logits, keys and counters."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(batch, vocabulary, generator=generator)
    keys = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
    counters = torch.randint(0, 5000, (batch,), generator=generator)
    return logits.to(DEVICE), keys.to(DEVICE), counters.to(DEVICE)


def one(temperature):
    return torch.tensor([temperature], device=DEVICE)


def reference(logits, temperature, keys, counters):
    everything = torch.ones(1, device=DEVICE)
    params = RowParams(temperature, everything.double(), 0 * everything.long(), has_filter=False)
    return sample(logits.float(), uniform(keys, counters), params)


def draw(logits, temperature, keys, counters, **options):
    return sample_rows(logits, temperature, keys, counters, **options)


def check_tokens(tokens, expected, logits, temperature, keys, counters):
    """Equal, but where u hits a step of the cumulative probability to within its rounding.

    Of V steps some V * 1e-6 are as near to a random u as FP32 exponentials are exact.
    """
    for row in (tokens != expected).nonzero().flatten().tolist():
        scaled = logits[row].double() / temperature
        cdf = scaled.softmax(-1).cumsum(-1)
        u = uniform(keys[row : row + 1], counters[row : row + 1])
        low, high = sorted((int(tokens[row]), int(expected[row])))
        assert (cdf[low:high] - u).abs().max() < 1e-5
    assert (tokens != expected).sum() <= 1 + 1e-6 * logits.numel()


def test_random_numbers_are_those_of_every_engine():
    """All 53 bits, for keys and counters at their limits too."""
    _, keys, counters = random_rows(8, 1)
    keys[:4] = torch.tensor([0, -1, -(2**63), 2**63 - 1])
    counters[:3] = torch.tensor([0, 2**40, -1])
    out = torch.zeros(8, dtype=torch.float64, device=DEVICE)
    uniform_kernel[(8,)](keys, counters, out)
    assert torch.equal(out, uniform(keys, counters))


@pytest.mark.parametrize(
    ("batch", "vocabulary", "temperature", "block"),
    [
        (4096 if HAS_GPU else 20, 1000, 1.0, 128),
        (4096 if HAS_GPU else 12, 1003, 0.6, 256),  # the last block has 235 tokens
        (4096 if HAS_GPU else 8, 17, 1.3, 4096),
        (3, 1, 1.0, 4096),
        (1, 4097, 1.0, 4096),  # the last block has one token
    ],
)
def test_draws_what_the_reference_draws(batch, vocabulary, temperature, block):
    rows = random_rows(batch, vocabulary)
    t = one(temperature)
    tokens, logprobs = draw(rows[0], t, *rows[1:], block=block)
    expected, expected_logprobs = reference(rows[0], t, *rows[1:])
    check_tokens(tokens, expected, rows[0], t, *rows[1:])
    own = (rows[0] / t).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs, own, rtol=0, atol=1e-5)
    assert ((logprobs - expected_logprobs).abs() < 1e-5).sum() >= (tokens == expected).sum()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary(dtype):
    logits, keys, counters = random_rows(257, 151936)
    logits, t = logits.to(dtype), one(1.0)
    tokens, logprobs = draw(logits, t, keys, counters)
    expected, _ = reference(logits, t, keys, counters)
    check_tokens(tokens, expected, logits, t, keys, counters)
    own = logits.double().log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs.double(), own, rtol=0, atol=1e-5)


def test_frequencies_follow_the_distribution():
    """Chi-square over 6 tokens in two blocks: 5 degrees of freedom, 26 has p = 1e-4."""
    count = 20000 if HAS_GPU else 100
    p = torch.tensor([0.1, 0.25, 0.15, 0.3, 0.05, 0.15], device=DEVICE)
    keys = torch.full((count,), 7, device=DEVICE)
    counters = torch.arange(count, device=DEVICE)
    tokens, _ = draw(p.log().expand(count, 6).contiguous(), one(1.0), keys, counters, block=4)
    counts = torch.bincount(tokens, minlength=6)
    assert ((counts - count * p) ** 2 / (count * p)).sum() < 26


def test_bfloat16_logits():
    logits, keys, counters = random_rows(4, 300)
    t = one(0.8)
    tokens, logprobs = draw(logits.bfloat16(), t, keys, counters)
    same, same_logprobs = draw(logits.bfloat16().float(), t, keys, counters)
    assert torch.equal(tokens, same)
    assert torch.equal(logprobs, same_logprobs)


def test_greedy_takes_the_first_of_the_largest():
    """The largest are 700 and 900, which lie in other blocks; then 3 and 4 of the same block."""
    logits, keys, counters = random_rows(2, 1000, spread=0.5)
    logits[0, [700, 900]] = 9.0
    logits[1, [3, 4]] = 9.0
    tokens, logprobs = draw(logits, one(0.0), keys, counters, block=64)
    assert tokens.tolist() == [700, 3]
    expected = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_impossible_tokens_are_never_drawn():
    """Three tokens are possible, the first block and the end of the last one are not."""
    logits, keys, counters = random_rows(2000 if HAS_GPU else 30, 160)
    possible = torch.tensor([64, 70, 129], device=DEVICE)
    masked = torch.full_like(logits, -math.inf)
    masked[:, possible] = logits[:, possible]
    tokens, logprobs = draw(masked, one(1.0), keys, counters, block=32)
    assert torch.isin(tokens, possible).all()
    assert set(tokens.tolist()) == set(possible.tolist())
    expected = masked.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_the_only_token_is_certain():
    logits, keys, counters = random_rows(5, 100)
    logits[:] = -math.inf
    logits[:, 77] = -1e4
    tokens, logprobs = draw(logits, one(1.0), keys, counters, block=32)
    assert tokens.tolist() == [77] * 5
    assert logprobs.tolist() == [0.0] * 5


def test_a_probable_token_has_an_accurate_logprob():
    """p = 1 / (1 + e^-15), log p = -3.06e-7, to a step of the FP32 numbers above 1."""
    logits = torch.tensor([[0.0, -15.0]], device=DEVICE)
    key = torch.ones(1, dtype=torch.int64, device=DEVICE)
    _, logprobs = draw(logits, one(0.0), key, key)
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-15)), abs=2.0**-23)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_senseless_logits_have_no_logprob(value, temperature):
    """One NaN or +inf, or nothing but -inf. The rows beside it do not notice."""
    logits, keys, counters = random_rows(3, 100)
    t = one(temperature)
    sound, sound_logprobs = draw(logits, t, keys, counters, block=32)
    logits[1, slice(None) if value == -math.inf else 50] = value
    tokens, logprobs = draw(logits, t, keys, counters, block=32)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert 0 <= tokens[1] < 100
    assert torch.equal(tokens[::2], sound[::2])
    assert torch.equal(logprobs[::2], sound_logprobs[::2])


def test_a_row_does_not_depend_on_the_others():
    logits, keys, counters = random_rows(6, 500)
    t = one(0.9)
    tokens, logprobs = draw(logits, t, keys, counters, block=128)
    for rows in (slice(0, 1), slice(3, 6)):
        some = draw(logits[rows].contiguous(), t, keys[rows], counters[rows], block=128)
        assert torch.equal(some[0], tokens[rows])
        assert torch.equal(some[1], logprobs[rows])
