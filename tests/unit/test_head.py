"""`qurl.trainer.head` against the plain formula, and its kernels against FP64.

On a CPU Triton's interpreter runs the kernels. Shapes: N tokens, H hidden, V vocabulary.
"""

import math

import pytest
import torch
from models import SHAPE, tiny_llama
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

import qurl.trainer.head
from qurl.trainer.head import PlainHead, Scoring, apply_head, plain_head

kernels = pytest.importorskip("qurl.trainer.kernels.token_scores")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN, INF = float("nan"), float("inf")


def random_tensors(n=7, hidden=5, vocabulary=11, *, dtype=torch.float32, seed=0):
    """States, weight, bias (all of which want gradients) and targets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, hidden), (vocabulary, hidden), (vocabulary,))
    inputs = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    targets = torch.randint(0, vocabulary, (n,), generator=generator)
    return [x.to(DEVICE).requires_grad_() for x in inputs], targets.to(DEVICE)


def scores(states, weight, bias, targets, logit_scale=1.3, **changes):
    options = {
        "temperature": 0.7,
        "chunk": 3,
        "compute_dtype": states.dtype,
        "needs_entropy_grad": True,
    }
    head = PlainHead(weight, bias, logit_scale)
    return head.score(states, targets, Scoring(**(options | changes)))


def plain_scores(states, weight, bias, targets, temperature=0.7, logit_scale=1.3):
    logits = states @ weight.T
    if bias is not None:
        logits = logits + bias
    log_p = (logits * logit_scale / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy


def weigh(logp, entropy):
    """A scalar whose gradient is another for every row."""
    weights = torch.linspace(-1, 2, len(logp), dtype=logp.dtype, device=logp.device)
    return (weights * logp + (0.5 - weights.square()) * entropy).sum()


def check_gradient(found, expected):
    """Elements may be small because large ones cancel, so the largest is the measure."""
    found, expected = found.detach().double(), expected.detach().double()
    size = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, atol=1e-5 * size, rtol=0)


# The function


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("needs_entropy_grad", "keeps_gradients"), [(True, True), (False, False), (False, True)]
)
def test_gradients_are_those_of_finite_differences(needs_entropy_grad, keeps_gradients, has_bias):
    (states, weight, bias), targets = random_tensors(dtype=torch.float64)
    options = {"needs_entropy_grad": needs_entropy_grad, "keeps_gradients": keeps_gradients}

    def function(*inputs):
        states, weight, bias = inputs if has_bias else (*inputs, None)
        result = scores(states, weight, bias, targets, **options)
        return result if needs_entropy_grad else result[0]

    inputs = (states, weight, bias) if has_bias else (states, weight)
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 7])
def test_scores_and_gradients_are_those_of_the_formula(num_tokens):
    """Chunks of 3: none, a part of one, exactly one, and one more token."""
    inputs, targets = random_tensors(num_tokens)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = scores(*inputs, targets), plain_scores(*exact, targets)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-5)
    weigh(*found).backward()
    weigh(*expected).backward()
    for ours, theirs in zip(inputs, exact, strict=True):
        check_gradient(ours.grad, theirs.grad)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 7])
def test_kept_gradients_are_those_of_logits_computed_again(num_tokens):
    """Rounded once more, to BF16, where the weights of tokens meet the states."""
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        results = []
        for is_kept in (False, True):
            inputs, targets = random_tensors(num_tokens)
            options = {"compute_dtype": dtype, "needs_entropy_grad": False}
            logp, entropy = scores(*inputs, targets, keeps_gradients=is_kept, **options)
            weigh(logp, entropy).backward()
            results.append((logp, entropy, [x.grad for x in inputs]))
        again, kept = results
        assert torch.equal(again[0], kept[0])
        assert torch.equal(again[1], kept[1])
        for expected, found in zip(again[2], kept[2], strict=True):
            assert found.dtype == expected.dtype
            size = float(expected.abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(found, expected, atol=bound * size, rtol=0)


def test_a_likely_token_has_an_exact_gradient_where_it_is_kept():
    """1 - p is 3e-4 here: p itself would be 1 in BF16."""
    states, target = torch.ones(1, 1, device=DEVICE), torch.tensor([1], device=DEVICE)
    weight = torch.tensor([[0.0], [8.0]], device=DEVICE, requires_grad=True)
    options = {"compute_dtype": torch.bfloat16, "needs_entropy_grad": False}
    logp, _ = scores(
        states, weight, None, target, 1.0, temperature=1.0, keeps_gradients=True, **options
    )
    logp.sum().backward()
    slope = 1 / (1 + math.exp(8))
    assert weight.grad.flatten().tolist() == pytest.approx([-slope, slope], rel=2**-8)


def test_a_token_worked_by_hand():
    """x = (0, ln 3) and z = 2 x / 2, so p = (1/4, 3/4) and the entropy is ln 4 - 3/4 ln 3."""
    states = torch.ones(1, 1, device=DEVICE)
    weight = torch.tensor([[1.0], [3.0]], device=DEVICE).log()
    target = torch.tensor([1], device=DEVICE)
    logp, entropy = scores(states, weight, None, target, temperature=2.0, logit_scale=2.0)
    assert logp.item() == pytest.approx(-0.2876821)
    assert entropy.item() == pytest.approx(0.5623351)


def test_factors_are_rounded_to_the_compute_dtype_and_sums_are_not():
    inputs, targets = random_tensors()
    states, weight, bias = inputs
    found = scores(*inputs, targets, compute_dtype=torch.bfloat16)
    x, w, b = states.detach(), weight.detach(), bias.detach()
    x, w, b = x.bfloat16().double(), w.bfloat16().double(), b.double()
    logits = (x @ w.T + b).requires_grad_()
    identity = torch.eye(len(weight), dtype=torch.float64, device=DEVICE)
    expected = plain_scores(logits, identity, None, targets)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-5)

    weigh(*found).backward()
    weigh(*expected).backward()
    dz = logits.grad.float().bfloat16().double()
    for ours, theirs in ((states, dz @ w), (weight, dz.T @ x), (bias, dz.sum(0))):
        assert ours.grad.dtype == torch.float32
        check_gradient(ours.grad, theirs)


def test_gradients_have_the_dtypes_of_what_they_are_of():
    (states, weight, bias), targets = random_tensors()
    states = states.detach().bfloat16().requires_grad_()
    logp, _ = scores(states, weight, bias, targets)
    assert logp.dtype == torch.float32
    logp.sum().backward()
    assert states.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32


def test_results_do_not_depend_on_autocast():
    inputs, targets = random_tensors()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        within = scores(*inputs, targets)
        gradients_within = torch.autograd.grad(weigh(*within), inputs)
    outside = scores(*inputs, targets)
    gradients_outside = torch.autograd.grad(weigh(*outside), inputs)
    for a, b in zip((*within, *gradients_within), (*outside, *gradients_outside), strict=True):
        assert torch.equal(a, b)


def test_a_head_that_is_the_embedding_gets_both_gradients():
    ids, targets = torch.arange(6, device=DEVICE), torch.arange(1, 7, device=DEVICE)
    gradients = []
    for function in (scores, plain_scores):
        torch.manual_seed(0)
        embedding = nn.Embedding(8, 4).to(DEVICE)
        states = embedding(ids).tanh()
        weigh(*function(states, embedding.weight, None, targets)).backward()
        gradients.append(embedding.weight.grad)
    check_gradient(*gradients)


def test_entropies_without_a_gradient():
    inputs, targets = random_tensors()
    logp, entropy = scores(*inputs, targets, needs_entropy_grad=False)
    assert logp.requires_grad
    assert not entropy.requires_grad


def test_only_the_entropies_may_be_used():
    inputs, targets = random_tensors()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found = torch.autograd.grad(scores(*inputs, targets)[1].sum(), inputs)
    expected = torch.autograd.grad(plain_scores(*exact, targets)[1].sum(), exact)
    for ours, theirs in zip(found, expected, strict=True):
        check_gradient(ours, theirs)


# What it costs


def test_nothing_is_kept_but_inputs_and_a_number_per_token():
    (states, weight, bias), targets = random_tensors(50, 6, 40)
    kept = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        scores(states, weight, bias, targets)
    expected = [(50, 6), (40, 6), (40,), (50,), (50,), (50,)]
    assert sorted(tuple(x.shape) for x in kept) == sorted(expected)
    assert {states.data_ptr(), weight.data_ptr()} <= {x.data_ptr() for x in kept}


def test_gradients_of_logits_are_kept_on_request():
    (states, weight, bias), targets = random_tensors(50, 6, 40)
    options = {"keeps_gradients": True, "needs_entropy_grad": False}
    kept = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        logp, _ = scores(states, weight, bias, targets, **options)
        with torch.no_grad():
            scores(states, weight, bias, targets, **options)
    assert [tuple(x.shape) for x in kept].count((50, 40)) == 1
    with FlopCounterMode(display=False) as counter:
        logp.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 50 * 6 * 40  # no logits


class LargestTensor(TorchDispatchMode):
    """How many numbers the largest tensor has that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_logits_exist_for_a_chunk_at_a_time():
    inputs, targets = random_tensors(50, 6, 40)
    with LargestTensor() as largest:
        weigh(*scores(*inputs, targets, chunk=9)).backward()
    assert largest.numel == 9 * 40


@pytest.mark.parametrize(
    ("frozen", "num_products"), [((), 3), ((1,), 2), ((0,), 2), ((0, 1), 1), ((0, 1, 2), None)]
)
def test_what_wants_no_gradient_costs_nothing(frozen, num_products):
    """The backward pass makes the logits again, and a product for states and weight each."""
    inputs, targets = random_tensors(7, 5, 11)
    for i in frozen:
        inputs[i].requires_grad_(False)
    logp, _ = scores(*inputs, targets)
    assert logp.requires_grad == (num_products is not None)
    if num_products is None:
        return
    with FlopCounterMode(display=False) as counter:
        logp.sum().backward()
    assert counter.get_total_flops() == num_products * 2 * 7 * 5 * 11
    assert [x.grad is None for x in inputs] == [i in frozen for i in range(3)]


# The kernels


def score(logits, targets, factor=1.0, **options):
    return kernels.score_rows(logits, targets, factor, **options)


def exact_scores(logits, targets, factor=1.0):
    """log p, log Z and entropy in FP64."""
    z = logits.double() * factor
    logp = z.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    return logp, z.logsumexp(-1), torch.special.entr(z.softmax(-1)).sum(-1)


def random_logits(n, vocabulary, *, spread=3.0, offset=0.0):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = offset + spread * torch.randn(n, vocabulary, generator=generator)
    return logits.to(DEVICE), torch.randint(0, vocabulary, (n,), generator=generator).to(DEVICE)


def check_scores(logits, targets, factor=1.0, **options):
    found = score(logits, targets, factor, **options)
    for ours, theirs in zip(found, exact_scores(logits, targets, factor), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("factor", [1.0, 0.37, 1.9])
@pytest.mark.parametrize("vocabulary", [1, 17, 1000, 4096 + 3])
def test_scores_of_rows(vocabulary, factor):
    check_scores(*random_logits(3, vocabulary), factor)


@pytest.mark.parametrize("block", [64, 1024])
def test_scores_of_rows_in_many_blocks(block):
    check_scores(*random_logits(3, 4096 + 3), 0.7, block=block)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 30.0])
def test_scores_of_flat_and_of_peaked_rows(spread):
    check_scores(*random_logits(4, 1000, spread=spread, offset=-5.0), block=256)


def test_scores_of_huge_logits():
    """log Z is as large as they are, and what FP32 says of it as coarse."""
    logits, targets = random_logits(4, 1000, spread=3.0, offset=1e4)
    found = score(logits, targets, block=256)
    for ours, theirs in zip(found, exact_scores(logits, targets), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-7)
    logits[:, ::3] = -1e38
    check_scores(logits[:, ::3].contiguous(), targets // 3, block=64)


def test_a_row_does_not_depend_on_the_others():
    logits, targets = random_logits(5, 1000)
    together = score(logits, targets, block=256)
    alone = score(logits[3:4].clone(), targets[3:4].clone(), block=256)
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a[3:4], b)


def test_tokens_that_cannot_be_have_no_part():
    logits, _ = random_logits(2, 1000)
    logits[:, 64:] = -INF  # whole blocks and parts of one
    logits[:, :10] = -INF
    targets = torch.tensor([20, 5], device=DEVICE)
    logp, log_z, entropy = score(logits, targets, block=32)
    expected = exact_scores(logits[:, 10:64].contiguous(), torch.full_like(targets, 10))
    torch.testing.assert_close(logp[0].double(), expected[0][0], atol=1e-6, rtol=1e-6)
    assert logp[1] == -INF
    torch.testing.assert_close(log_z.double(), expected[1], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected[2], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 999, slice(None)])
def test_rows_without_a_distribution_have_nan_scores(bad, place):
    logits, targets = random_logits(3, 1000)
    logits[1, place] = bad
    check_that_only_row_1_is_nan(score(logits, targets, block=256))


def test_a_row_of_impossible_tokens_has_nan_scores():
    logits, targets = random_logits(3, 1000)
    logits[1] = -INF
    check_that_only_row_1_is_nan(score(logits, targets, block=256))


def check_that_only_row_1_is_nan(vectors):
    for vector in vectors:
        assert vector.isnan().tolist() == [False, True, False]


def test_a_target_outside_of_the_vocabulary_has_a_nan_score():
    logits, _ = random_logits(4, 17)
    targets = torch.tensor([0, -1, 17, 2**40], device=DEVICE)
    logp, log_z, entropy = score(logits, targets)
    assert logp.isnan().tolist() == [False, True, True, True]
    assert torch.stack([log_z, entropy]).isfinite().all()


def gradients(logits, targets, factor=0.7, *, dtype=torch.float32, block=256, has_entropy=True):
    """Of `weigh`, from the kernel; the logits are left alone."""
    _, log_z, entropy = (x.float() for x in exact_scores(logits, targets, factor))
    logp, other = (torch.zeros(len(logits), device=DEVICE, requires_grad=True) for _ in range(2))
    grads = torch.autograd.grad(weigh(logp, other), (logp, other))
    return kernels.logit_gradients(
        logits.clone(),
        targets,
        log_z,
        grads[0],
        *((entropy, grads[1]) if has_entropy else ()),
        factor=factor,
        dtype=dtype,
        block=block,
    )


def exact_gradients(logits, targets, factor=0.7, *, has_entropy=True):
    x = logits.double().requires_grad_()
    log_p = (x * factor).log_softmax(-1)
    logp = log_p.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.autograd.grad(weigh(logp, entropy if has_entropy else entropy.detach()), x)[0]


@pytest.mark.parametrize("has_entropy", [True, False])
@pytest.mark.parametrize("vocabulary", [1, 17, 1000, 4096 + 3])
def test_gradients_of_logits(vocabulary, has_entropy):
    logits, targets = random_logits(3, vocabulary)
    found = gradients(logits, targets, has_entropy=has_entropy)
    expected = exact_gradients(logits, targets, has_entropy=has_entropy)
    check_gradient(found, expected)


@pytest.mark.parametrize("has_entropy", [True, False])
def test_gradients_of_logits_are_rounded_once(has_entropy):
    logits, targets = random_logits(3, 1000)
    options = {"has_entropy": has_entropy}
    exact = gradients(logits, targets, **options)
    assert torch.equal(
        gradients(logits, targets, dtype=torch.bfloat16, **options), exact.bfloat16()
    )


def test_fp32_gradients_take_the_place_of_the_logits():
    logits, targets = random_logits(3, 1000)
    ones = torch.ones(3, device=DEVICE)
    out = kernels.logit_gradients(logits, targets, ones, ones, factor=1.0, dtype=torch.float32)
    assert out.data_ptr() == logits.data_ptr()


def test_gradients_of_tokens_that_cannot_be_are_zero():
    logits, targets = random_logits(3, 1000)
    logits[:, ::7] = -INF
    targets[:] = 1
    found = gradients(logits, targets)
    assert (found[:, ::7] == 0).all()
    possible = torch.ones(1000, dtype=torch.bool)
    possible[::7] = False
    expected = exact_gradients(logits[:, possible], torch.zeros_like(targets))
    check_gradient(found[:, possible], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_entropy", [True, False])
def test_a_nan_among_the_logits_reaches_every_gradient_of_its_row(has_entropy, dtype):
    logits, targets = random_logits(3, 1000)
    logits[1, 3] = NAN
    found = gradients(logits, targets, dtype=dtype, has_entropy=has_entropy)
    assert found.isnan().all(-1).tolist() == [False, True, False]
    assert found.isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("keeps_gradients", [True, False])
@pytest.mark.parametrize("needs_entropy_grad", [True, False])
def test_the_function_is_the_same_with_kernels_and_without(
    monkeypatch, needs_entropy_grad, keeps_gradients
):
    """A GPU always has them and a CPU never does, so neither tells on its own."""
    results = []
    for has_kernels in (True, False):
        monkeypatch.setattr(
            qurl.trainer.head, "_has_kernels", lambda logits, answer=has_kernels: answer
        )
        inputs, targets = random_tensors(5, 6, 300)
        options = {"needs_entropy_grad": needs_entropy_grad, "keeps_gradients": keeps_gradients}
        found = scores(*inputs, targets, **options)
        weigh(*found).backward()
        results.append([*found, *(x.grad for x in inputs)])
    for with_kernels, without in zip(*results, strict=True):
        check_gradient(with_kernels, without)


# Heads


@pytest.mark.parametrize(
    "make",
    [
        tiny_llama,
        lambda: tiny_llama(tie_word_embeddings=True),
        lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=5.0)),
        lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    ],
    ids=["llama", "tied", "granite", "cohere"],
)
def test_plain_heads_are_those_of_their_models(make):
    model = make()
    head = plain_head(model)
    assert head is not None
    assert head.weight is model.get_output_embeddings().weight
    states = torch.randn(3, model.config.hidden_size)
    logits = head.logit_scale * nn.functional.linear(states, head.weight, head.bias)
    torch.testing.assert_close(logits, apply_head(model, states))


def test_a_head_may_have_a_bias():
    model = tiny_llama()
    model.lm_head = nn.Linear(32, 7)
    weight, bias, logit_scale = plain_head(model)
    assert (weight, bias, logit_scale) == (model.lm_head.weight, model.lm_head.bias, 1.0)


def test_heads_that_are_more_are_not_plain():
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    assert plain_head(Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8))) is None
    model = tiny_llama()
    model.lm_head = Scaled(32, 7)
    assert plain_head(model) is None
