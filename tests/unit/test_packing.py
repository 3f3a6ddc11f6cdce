"""Packed sequences: the same numbers as each sequence alone, and nothing from its neighbours."""

import copy
import json

import pytest
import torch
from models import CPU, SHAPE, random_batch, tiny_llama, tiny_policy
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import qurl.ops.attention
import qurl.trainer.packing
from qurl.config import ModelConfig
from qurl.errors import ModelError
from qurl.ops.attention import attend_flash
from qurl.rollout.hf import HFEngine
from qurl.trainer.critic import Critic
from qurl.trainer.packing import ATTENTION, BatchLayout, Packed, attend, try_attention
from qurl.trainer.policy import Policy, _pack_forwards_
from qurl.types import Batch, Problem, SamplingParams

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "mistral, window 3": (MistralForCausalLM, MistralConfig, {"sliding_window": 3}),
    "gemma3, every other layer windowed": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
        | {"sliding_window": 4},
    ),
}


def make_model(family):
    model_class, config_class, options = FAMILIES[family]
    torch.manual_seed(0)
    return model_class(config_class(**(SHAPE | options))).eval()


def gpt2():
    shape = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=2)).eval()


def padded(policy):
    """The same policy, which takes its sequences padded."""
    other = copy.deepcopy(policy)
    other.is_packed = False
    return other


def by_hand():
    """Rows `a a a a`, `b b` and `c c c` of the module's own drawing; responses a3, b1, c1, c2."""
    mask = torch.tensor([[0, 0, 0, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).float()
    return Batch(
        token_ids=torch.tensor([[10, 11, 12, 13], [20, 21, 0, 0], [30, 31, 32, 0]]),
        lengths=torch.tensor([4, 2, 3]),
        mask=mask,
        logp_behav=torch.zeros_like(mask),
        rewards=torch.zeros(3),
        accuracies=torch.zeros(3),
        group=torch.zeros(3, dtype=torch.int64),
        problem_ids=["a", "b", "c"],
        temperature=1.0,
    )


def test_packed_by_hand():
    batch = by_hand()
    packed = Packed.of(batch.token_ids, [4, 2, 3])
    assert packed.token_ids.tolist() == [10, 11, 12, 13, 20, 21, 30, 31, 32]
    assert packed.options["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2]]
    for side in "qk":
        bounds = packed.options[f"cu_seq_lens_{side}"]
        assert bounds.tolist() == [0, 4, 6, 9]
        assert bounds.dtype == torch.int32
        assert packed.options[f"max_length_{side}"] == 4
    assert packed.places.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10]


@pytest.mark.parametrize("is_packed", [True, False])
def test_layout_by_hand(is_packed):
    batch = by_hand()
    layout = BatchLayout.of(batch, is_packed=is_packed)
    assert layout.token_ids.shape == ((1, 9) if is_packed else (3, 4))
    assert len(layout.scored) == 4
    assert layout.targets.tolist() == [13, 21, 31, 32]
    assert layout.before(layout.token_ids).tolist() == [12, 20, 30, 31]
    found = layout.spread(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert found.tolist() == [[0, 0, 0, 1], [0, 2, 0, 0], [0, 3, 4, 0]]


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_first_token_is_never_scored(is_packed):
    """Before it there is nothing, or in the packed row another sequence."""
    batch = by_hand()
    everything = batch.replace(mask=torch.ones_like(batch.mask))
    layout = BatchLayout.of(everything, is_packed=is_packed)
    assert not {10, 20, 30} & set(layout.targets.tolist())
    assert (everything.mask == 1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_sequence_is_scored_as_if_it_were_alone(family):
    model = make_model(family)
    alone = copy.deepcopy(model).double()
    policy = tiny_policy(model=model)
    assert policy.is_packed
    assert policy.notes == ()
    batch = random_batch(policy, rows=8)
    scores = policy.score(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.token_ids[row : row + 1, :length]
        logps = alone(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        expected = logps.gather(-1, ids[0, 1:, None]).squeeze(-1) * batch.mask[row, 1:length]
        torch.testing.assert_close(
            scores.logp[row, 1:length].double(), expected, atol=2e-5, rtol=1e-5
        )
        entropy = -(logps.exp() * logps).sum(-1) * batch.mask[row, 1:length]
        torch.testing.assert_close(
            scores.entropy[row, 1:length].double(), entropy, atol=2e-5, rtol=1e-5
        )


@pytest.mark.parametrize("is_frugal", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_padded_sequences(family, is_frugal):
    """Checkpointed layers are computed again in the backward pass, and need the bounds there."""
    policy = tiny_policy(model=make_model(family), gradient_checkpointing=is_frugal)
    assert policy.is_packed
    batch = random_batch(policy)
    weights = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    other = padded(policy)
    for one in (policy, other):
        (one.score(batch).logp * weights).mean().backward()
    for name, parameter in policy.model.named_parameters():
        expected = other.model.get_parameter(name).grad
        assert expected.abs().max() > 1e-4, name
        torch.testing.assert_close(parameter.grad, expected, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_leaks_between_neighbours(family):
    """Another sequence in the middle of the row: all others keep their bits."""
    policy = tiny_policy(model=make_model(family))
    batch = random_batch(policy)
    critic = Critic(policy)
    nn.init.ones_(critic.head.weight)
    tokens = batch.token_ids.clone()
    tokens[2] = (tokens[2] + 1) % 99
    changed = batch.replace(token_ids=tokens)
    others = [row for row in range(len(batch)) if row != 2]
    with torch.no_grad():
        before, after = policy.score(batch), policy.score(changed)
        values, new_values = (critic(policy.layout(b)) for b in (batch, changed))
    assert torch.equal(before.logp[others], after.logp[others])
    assert torch.equal(before.entropy[others], after.entropy[others])
    assert torch.equal(values[others], new_values[others])
    scored = batch.mask[2].bool()
    assert (before.logp[2] != after.logp[2])[scored].all()
    assert (values[2] != new_values[2])[scored].all()


def test_no_gradient_leaks_either():
    """Rows of different tokens: only those of the row that is trained move."""
    policy = tiny_policy()
    batch = by_hand()
    policy.score(batch).logp[2].sum().backward()
    moved = policy.model.get_input_embeddings().weight.grad.abs().sum(-1) > 0
    assert moved.nonzero().flatten().tolist() == [30, 31]


@pytest.mark.parametrize("family", ["llama", "mistral, window 3"])
def test_values_equal_those_of_padded_sequences(family):
    policy = tiny_policy(model=make_model(family))
    batch = random_batch(policy)
    critic = Critic(policy)
    assert policy.is_packed
    nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    other = copy.deepcopy(critic)
    packed, padded = (BatchLayout.of(batch, is_packed=p) for p in (True, False))
    critic(packed).square().sum().backward()
    other(padded).square().sum().backward()
    torch.testing.assert_close(critic(packed), other(padded), atol=1e-5, rtol=1e-5)
    for name, parameter in critic.named_parameters():
        expected = other.get_parameter(name).grad
        scale = expected.abs().max().item()
        torch.testing.assert_close(parameter.grad, expected, atol=1e-5 * scale, rtol=1e-4, msg=name)


def test_learned_positions_begin_anew_in_each_sequence():
    policy = tiny_policy(model=gpt2())
    assert policy.is_packed
    batch = random_batch(policy)
    torch.testing.assert_close(policy.score(batch).logp, padded(policy).score(batch).logp)


def test_transformers_builds_no_mask(monkeypatch):
    """Nor does it look for packing in the positions, for which it would have to wait."""
    policy = tiny_policy(model=make_model("mistral, window 3"))
    batch = random_batch(policy)

    def fail(*_, **__):
        pytest.fail("a mask was built, or packing looked for")

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, ATTENTION, fail)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", fail)
    policy.score(batch)


def attention_by_hand(q, k, v, bounds, window, scale):
    """One query at a time, over the keys that it may see."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        for i in range(start, end):
            first = start if window is None else max(start, i - window + 1)
            for h in range(q.shape[1]):
                keys, values = k[first : i + 1, h // group], v[first : i + 1, h // group]
                out[i, h] = (keys @ q[i, h] * scale).softmax(-1) @ values
    return out


def random_heads(dtype=torch.float64, device="cpu", lengths=(5, 1, 7), size=8):
    draw = torch.Generator().manual_seed(0)
    total = sum(lengths)
    q, k, v = (
        torch.randn(total, heads, size, generator=draw, dtype=torch.float64).to(device, dtype)
        for heads in (4, 2, 2)
    )
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    return q, k, v, bounds


class Attention(nn.Module):
    is_causal = True


def call(q, k, v, bounds, **options):
    """`attend` as a model calls it."""
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    longest = int(bounds.diff().max())
    keywords = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    keywords |= {"max_length_q": longest, "max_length_k": longest}
    out, weights = attend(Attention(), query, key, value, None, **keywords, **options)
    assert weights is None
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 6, 7, 100])
def test_attention_by_hand(window):
    heads = random_heads()
    found = call(*heads, scaling=0.3, sliding_window=window)
    assert found.shape == (1, 13, 4, 8)
    torch.testing.assert_close(found[0], attention_by_hand(*heads, window, 0.3))


@pytest.mark.parametrize("window", [None, 1, 3])
def test_flash_attention_is_told_the_same(monkeypatch, window):
    """What flash attention would compute from the arguments that it is given."""

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=True):
        assert enable_gqa
        assert torch.equal(cu_q, cu_k)
        assert max_q == max_k == 7
        left, right = window_size
        assert right == 0
        return attention_by_hand(q, k, v, cu_q, None if left == -1 else left + 1, scale)

    monkeypatch.setattr(qurl.ops.attention.varlen, "varlen_attn", flash)
    heads = random_heads()
    found = attend_flash(*heads, 7, window, 0.3)
    torch.testing.assert_close(found, attention_by_hand(*heads, window, 0.3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 1, 30])
def test_flash_attention_and_its_gradients(window):
    heads = random_heads(torch.bfloat16, "cuda", lengths=(50, 1, 77, 128), size=64)
    exact = [x.double() for x in heads[:3]]
    results = []
    for q, k, v in (heads[:3], exact):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = call(*leaves, heads[3], scaling=0.125, sliding_window=window)
        out.double().sin().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for found, expected in zip(*results, strict=True):
        assert found.dtype == torch.bfloat16
        # A window of one key leaves nothing to choose: queries and keys have no gradient but
        # rounding, which is measured by the gradient of the values.
        size = max(expected.norm(), 1e-3 * results[1][3].norm())
        assert (found.double() - expected).norm() < 0.01 * size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_on_a_gpu_in_bfloat16(family):
    policy = Policy(make_model(family), None, ModelConfig(), torch.device("cuda"))
    assert policy.is_packed, policy.notes
    assert policy.compute_dtype == torch.bfloat16
    cpu = tiny_policy(model=make_model(family))
    batch = random_batch(cpu)
    gap = policy.score(batch.to("cuda")).logp.cpu() - cpu.score(batch).logp
    assert gap.abs().mean() < 0.05


def test_autocast_reaches_the_attention(monkeypatch):
    """Rotated queries are FP32 and values BF16 where the masters are FP32."""
    q, k, v, bounds = random_heads()
    real, seen = qurl.trainer.packing._attend_padded, []

    def recorded(q, k, v, *others):
        seen.extend(x.dtype for x in (q, k, v))
        return real(q, k, v, *others)

    monkeypatch.setattr(qurl.trainer.packing, "_attend_padded", recorded)
    with torch.autocast("cpu", torch.bfloat16):
        found = call(q.float(), k.float(), v.bfloat16(), bounds, scaling=0.3)
    assert {found.dtype, *seen} == {torch.bfloat16}
    expected = attention_by_hand(q, k, v, bounds, None, 0.3)
    torch.testing.assert_close(found[0].double(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "attention to later tokens"),
    ],
)
def test_attention_refuses_what_it_does_not_compute(options, asked):
    with pytest.raises(ModelError, match=f"Attention asks for {asked}"):
        call(*random_heads(), **options)


def falcon():
    shape = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(**shape, alibi=True)).eval()


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8)).eval()


@pytest.mark.parametrize("make", [falcon, gemma2], ids=["ALiBi", "softcap"])
def test_a_model_that_cannot_be_packed_is_padded_and_says_so(make):
    torch.manual_seed(0)
    model = make()
    own = model.config._attn_implementation
    policy = tiny_policy(model=copy.deepcopy(model))
    assert not policy.is_packed
    [note] = policy.notes
    name = type(model).__name__
    assert note.startswith(f"sequences are padded for training: {name} cannot be given packed ones")
    assert policy.model.config._attn_implementation == own
    batch = random_batch(policy)
    logps = model(input_ids=batch.token_ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    expected = logps.gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1) * batch.mask[:, 1:]
    torch.testing.assert_close(policy.score(batch).logp[:, 1:], expected, atol=1e-4, rtol=1e-4)


def test_attention_is_tried_where_the_model_will_be_trained():
    """Weights to be shared among ranks are in main memory at first. Meta stands for a GPU, which
    cannot attend in this way."""
    model = tiny_llama()
    try_attention(model, CPU, torch.float32)
    assert _pack_forwards_(model, torch.float32, CPU) is None
    obstacle = _pack_forwards_(model, torch.float32, torch.device("meta"))
    assert "LlamaForCausalLM cannot be given packed ones (RuntimeError" in obstacle


def test_a_leak_is_noticed(monkeypatch):
    """Attention that ignores the bounds and lets the second sequence see the first."""

    def leaky(module, query, key, value, mask, cu_seq_lens_q=None, max_length_q=None, **options):
        if cu_seq_lens_q is not None:
            cu_seq_lens_q = cu_seq_lens_q[[0, -1]]
            max_length_q, mask = query.shape[2], None
        return attend(
            module,
            query,
            key,
            value,
            mask,
            cu_seq_lens_q=cu_seq_lens_q,
            max_length_q=max_length_q,
            **options,
        )

    monkeypatch.setitem(
        AttentionInterface._global_mapping, ATTENTION, attend
    )  # put back at the end
    monkeypatch.setattr(qurl.trainer.packing, "attend", leaky)
    policy = tiny_policy()
    assert not policy.is_packed
    assert "its states differ by" in policy.notes[0]
    assert policy.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "mistral, window 3"])
def test_forwards_without_bounds_are_those_of_transformers(family):
    """With a padding mask and with a cache, to the bit."""
    model = make_model(family)
    plain = copy.deepcopy(model)
    packed = tiny_policy(model=model).model
    assert packed.config._attn_implementation == ATTENTION
    ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    with torch.no_grad():
        for extra in ({}, {"attention_mask": mask}):
            expected = plain(input_ids=ids, **extra).logits
            assert torch.equal(packed(input_ids=ids, **extra).logits, expected)
        assert torch.equal(packed.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_the_hf_engine_samples_as_from_the_plain_model(quant):
    model = tiny_llama()
    plain = copy.deepcopy(model)
    policy = tiny_policy(model=model)
    params = SamplingParams(max_tokens=6, group_size=3, seed=1)
    problems = [Problem(id="a", prompt_ids=(5, 6, 7, 8))]
    results = [
        HFEngine(one, policy.tokenizer, quant=quant).generate(problems, params)
        for one in (plain, policy.model)
    ]
    assert results[0] == results[1]


def test_a_saved_policy_is_an_ordinary_model(tmp_path):
    policy = tiny_policy()
    policy.save(tmp_path)
    assert "qurl" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config._attn_implementation == "sdpa"
    batch = random_batch(policy)
    loaded = Policy(model, policy.tokenizer, ModelConfig(), CPU)
    assert torch.equal(loaded.score(batch).logp, policy.score(batch).logp)


def test_a_copy_of_a_policy_is_packed_too():
    policy = tiny_policy()
    batch = random_batch(policy)
    for other in (copy.deepcopy(policy), tiny_policy(model=copy.deepcopy(policy.model))):
        assert other.is_packed
        assert torch.equal(other.score(batch).logp, policy.score(batch).logp)


def test_a_window_that_is_only_in_the_mask_is_not_packed():
    """Seven tokens, as many as the check has, would not show it."""
    kinds = ["sliding_attention", "full_attention"]
    window = {"use_sliding_window": True, "sliding_window": 20, "layer_types": kinds}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    config = Qwen2MoeConfig(**SHAPE, **window, **experts, shared_expert_intermediate_size=16)
    policy = tiny_policy(model=Qwen2MoeForCausalLM(config).eval())
    assert not policy.is_packed
    assert "sliding window is in its mask alone" in policy.notes[0]
