"""Log-probs and entropies of the policy against a dense forward, and what a policy refuses."""

import copy
import json
import shutil
from functools import partialmethod

import pytest
import torch
from models import CPU, SHAPE, random_batch, tiny_llama, tiny_policy
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from qurl.config import ModelConfig
from qurl.errors import ModelError
from qurl.trainer.critic import Critic
from qurl.trainer.policy import Policy, load_policy
from qurl.types import Batch


def dense_scores(model, batch):
    """The same from the model's own logits, in float64."""
    logits = model.double()(input_ids=batch.token_ids, use_cache=False).logits[:, :-1]
    logps = (logits / batch.temperature).log_softmax(-1)
    chosen = logps.gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    keep = batch.mask[:, 1:]
    first = torch.zeros(len(batch), 1, dtype=torch.float64)
    return torch.cat([first, chosen * keep], 1), torch.cat([first, entropy * keep], 1)


class RowsOfLogits(TorchDispatchMode):
    """How many rows the results have whose last size is the vocabulary."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.counts = vocabulary, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[1:] == (self.vocabulary,):
            self.counts.add(len(result))
        return result


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 3, 10_000])
def test_scores_equal_a_dense_forward(chunk, temperature):
    policy = tiny_policy(logits_chunk=chunk)
    batch = random_batch(policy, temperature=temperature)
    scores = policy.score(batch)
    logp, entropy = dense_scores(copy.deepcopy(policy.model), batch)
    torch.testing.assert_close(scores.logp.double(), logp, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy.double(), entropy, atol=2e-5, rtol=1e-5)
    assert (scores.logp[batch.mask == 0] == 0).all()
    assert scores.logp[batch.mask == 1].max() < 0


@pytest.mark.parametrize("chunk", [1, 3, 10_000])
def test_gradients_equal_the_dense_ones(chunk):
    policy = tiny_policy(logits_chunk=chunk)
    batch = random_batch(policy, temperature=0.8)
    weights = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    scores = policy.score(batch, needs_entropy_grad=True)
    (scores.logp * weights + 0.3 * scores.entropy).sum().backward()
    dense = copy.deepcopy(policy.model)
    dense.zero_grad()
    logp, entropy = dense_scores(dense, batch)
    (logp * weights + 0.3 * entropy).sum().backward()
    for name, gradient in gradients(policy.model).items():
        expected = dense.get_parameter(name).grad
        torch.testing.assert_close(gradient.double(), expected, atol=2e-4, rtol=1e-3, msg=name)


def test_entropy_has_a_gradient_only_where_it_is_asked_for():
    policy = tiny_policy()
    batch = random_batch(policy)
    assert not policy.score(batch).entropy.requires_grad
    assert policy.score(batch, needs_entropy_grad=True).entropy.requires_grad


def test_padding_changes_nothing():
    policy = tiny_policy()
    batch = random_batch(policy)
    wide = batch.map(
        lambda x: torch.cat([x, torch.zeros(len(x), 5, dtype=x.dtype)], 1) if x.dim() == 2 else x
    )
    garbage = torch.arange(wide.mask.shape[1]) >= wide.lengths[:, None]
    wide = wide.replace(token_ids=torch.where(garbage, 42, wide.token_ids))
    scores, padded = policy.score(batch), policy.score(wide)
    width = batch.mask.shape[1]
    torch.testing.assert_close(padded.logp[:, :width], scores.logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(padded.entropy[:, :width], scores.entropy, atol=1e-5, rtol=0)
    assert (padded.logp[:, width:] == 0).all()


def test_a_token_is_scored_by_what_comes_before_it():
    policy = tiny_policy()
    batch = random_batch(policy)
    changed = batch.token_ids.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 99
    before, after = policy.score(batch), policy.score(batch.replace(token_ids=changed))
    torch.testing.assert_close(before.logp[:, :6], after.logp[:, :6])
    scored = batch.mask[:, 6].bool()
    assert (before.logp[:, 6] != after.logp[:, 6])[scored].all()


@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain head", "softcap"])
def test_all_logits_are_never_held(softcap):
    """Forward and backward with chunks of 4: no [B, T, V], neither made nor saved."""
    policy = tiny_policy(logits_chunk=4)
    policy.model.config.final_logit_softcapping = softcap
    batch = random_batch(policy, rows=8)
    vocabulary = policy.model.config.vocab_size
    saved, rows = [], RowsOfLogits(vocabulary)
    with (
        rows,
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        scores = policy.score(batch)
        scores.logp.sum().backward()
    assert saved
    assert not [x.shape for x in saved if x.dim() > 1 and x.shape[-1] == vocabulary]
    the_weight = policy.model.config.hidden_size  # transposed
    assert rows.counts == {4, batch.num_tokens % 4, the_weight} - {0}


def test_no_forward_keeps_casts_of_all_weights():
    """Autocast's cache would, to the end of a forward: a copy of the model in BF16."""
    policy, cached = tiny_policy(compute_dtype="bfloat16"), []
    layer = policy.model.model.layers[1]
    layer.register_forward_hook(lambda *_: cached.append(torch.is_autocast_cache_enabled()))
    policy.score(random_batch(policy))
    assert set(cached) == {False}


def test_gradient_checkpointing_gives_the_same_gradients():
    model = tiny_llama(attention_dropout=0.3)
    plain = tiny_policy(model=copy.deepcopy(model))
    frugal = tiny_policy(model=model, gradient_checkpointing=True)
    assert frugal.model.is_gradient_checkpointing
    batch = random_batch(plain)
    for policy in (plain, frugal):
        policy.score(batch).logp.sum().backward()
    expected = gradients(plain.model)
    for name, gradient in gradients(frugal.model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-5, msg=name)


NEEDS_GPP = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor calls g++ for a CPU")


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, NEEDS_GPP])]
)
def test_compiled_layers_compute_the_same(tmp_path, monkeypatch, backend):
    """`aot_eager` traces forward and backward as Inductor does, without its half minute of g++."""
    from torch._dynamo.utils import counters  # slow to import

    torch.compiler.reset()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    model = tiny_llama()
    plain = tiny_policy(model=copy.deepcopy(model))
    compiled = tiny_policy(model=model, compile=True)
    critics = [Critic(policy) for policy in (plain, compiled)]
    counters.clear()
    counts = []
    for rows in (2, 3, 5):
        batch = random_batch(plain, rows=rows)
        for policy, critic in zip((plain, compiled), critics, strict=True):
            policy.model.zero_grad()
            (policy.score(batch).logp.sum() + critic(policy.layout(batch)).sum()).backward()
        expected = gradients(plain.model)
        for name, gradient in gradients(compiled.model).items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)
        counts.append(counters["stats"]["unique_graphs"])
    assert counts[0] > 0
    assert len(set(counts)) == 1, "compiled once for all sizes"
    for layer in (*compiled.model.model.layers, *critics[1].backbone.layers):
        assert layer._compiled_call_impl is not None
    compiled.save(tmp_path)
    loaded = load_policy(tmp_path, ModelConfig(), CPU)
    torch.testing.assert_close(loaded.score(batch).logp, plain.score(batch).logp)


def with_dropout(kind):
    """Half of everything dropped: by F.dropout (Llama, OPT) or by nn.Dropout (GPT-2)."""
    if kind == "llama":
        return tiny_llama(attention_dropout=0.5)
    if kind == "opt":
        shape = {"vocab_size": 99, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48}
        shape |= {"num_hidden_layers": 2, "num_attention_heads": 4}
        return OPTForCausalLM(OPTConfig(**shape, dropout=0.5, attention_dropout=0.5))
    shape = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1}
    rates = {"embd_pdrop": 0.5, "resid_pdrop": 0.5, "attn_pdrop": 0.5}
    return GPT2LMHeadModel(GPT2Config(**shape, **rates, eos_token_id=2))


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2"])
def test_dropout_is_off_even_in_training_mode(kind):
    model = with_dropout(kind)
    policy = tiny_policy(model=model)
    batch = random_batch(policy)
    policy.model.train()
    first, second = policy.score(batch), policy.score(batch)
    assert torch.equal(first.logp, second.logp)
    assert torch.equal(first.logp, batch.logp_prox)


HEADS = {
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 2.0, "head_dim": 8}),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 4.0}),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_scale_or_cap_their_logits(name):
    model_class, config_class, options = HEADS[name]
    torch.manual_seed(0)
    policy = tiny_policy(model=model_class(config_class(**SHAPE, **options)).eval(), logits_chunk=3)
    batch = random_batch(policy, temperature=0.7)
    logp, entropy = dense_scores(copy.deepcopy(policy.model), batch)
    scores = policy.score(batch)
    torch.testing.assert_close(scores.logp.double(), logp, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.entropy.double(), entropy, atol=1e-4, rtol=1e-4)


def test_an_unknown_head_is_refused():
    class Doubling(type(tiny_llama())):
        def forward(self, **inputs):
            output = super().forward(**inputs)
            output.logits = 2 * output.logits
            return output

    with pytest.raises(ModelError, match="Doubling computes its logits in a way that is not known"):
        tiny_policy(model=Doubling(tiny_llama().config))


@pytest.mark.parametrize("is_tied", [False, True])
def test_save_and_load_give_the_same_bits(tmp_path, is_tied):
    policy = tiny_policy(model=tiny_llama(tie_word_embeddings=is_tied))
    policy.save(tmp_path)
    loaded = load_policy(tmp_path, ModelConfig(), CPU)
    assert isinstance(loaded, Policy)
    assert_close(loaded.model.state_dict(), policy.model.state_dict(), rtol=0, atol=0)
    assert loaded.tokenizer.encode("12+3=") == policy.tokenizer.encode("12+3=")
    batch = random_batch(policy)
    assert torch.equal(loaded.score(batch).logp, policy.score(batch).logp)


def test_weights_are_float32_whatever_the_folder_holds(tmp_path):
    policy = tiny_policy()
    policy.model.bfloat16()
    policy.save(tmp_path)
    loaded = load_policy(tmp_path, ModelConfig(), CPU)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def broken_folder(path, kind):
    if kind == "missing":
        return
    tiny_policy().save(path)
    if kind == "no weights":
        (path / "model.safetensors").unlink()
    elif kind == "torn weights":
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    elif kind == "no tokenizer":
        for file in path.glob("tokenizer*"):
            file.unlink()
    elif kind == "unknown type":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"model_type": "abacus"}))
    elif kind == "incomplete":
        tiny_llama().model.save_pretrained(path)


@pytest.mark.parametrize(
    "kind",
    ["no weights", "torn weights", "no tokenizer", "unknown type", "incomplete"],
)
def test_a_folder_that_cannot_be_loaded_is_named(tmp_path, kind):
    path = tmp_path / "model"
    broken_folder(path, kind)
    with pytest.raises(ModelError) as error:
        load_policy(path, ModelConfig(), CPU)
    message = str(error.value)
    assert message.startswith(f"model.path = {str(path)!r} ")
    if kind.startswith("no "):
        assert f"has {kind}: " in message
    elif kind == "torn weights":
        assert "model.safetensors cannot be read: " in message
        assert message.endswith("use an undamaged copy")
    else:
        assert "cannot be loaded as a causal LM; give a folder with config.json, weights" in message


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "a/b/c"])
def test_a_folder_that_is_not_there_is_not_looked_for_elsewhere(path):
    with pytest.raises(ModelError, match=r"model\.path = .* does not exist \(seen from"):
        load_policy(path, ModelConfig(), CPU)


def test_sampling_defaults_that_cannot_be_written_do_not_stop_a_save(tmp_path):
    """transformers reads a temperature without do_sample, and refuses to write it."""
    tiny_policy().save(tmp_path / "model")
    settings = tmp_path / "model" / "generation_config.json"
    settings.write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}))
    policy = load_policy(tmp_path / "model", ModelConfig(), CPU)
    policy.save(tmp_path / "again")
    assert policy.model.generation_config.eos_token_id == 2


def test_freezing_leaves_nothing_to_train():
    policy = tiny_policy().freeze_()
    assert not any(p.requires_grad for p in policy.model.parameters())
    assert not policy.score(random_batch(policy)).logp.requires_grad


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)],
)
def test_compute_dtype(name, dtype):
    policy = tiny_policy(compute_dtype=name)
    assert policy.compute_dtype == dtype
    batch: Batch = random_batch(policy)
    exact = tiny_policy().score(batch).logp
    gap = (policy.score(batch).logp - exact).abs().max()
    assert (gap > 0) == (dtype == torch.bfloat16)
    assert gap < 0.5
    assert next(policy.model.parameters()).dtype == torch.float32
