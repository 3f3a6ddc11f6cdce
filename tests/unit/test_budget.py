"""The budget of a recipe, counted by hand for the model made from scratch."""

from pathlib import Path

import pytest
import torch
from models import tiny_llama
from transformers import AutoModelForCausalLM, Qwen2Config

import qurl.run.budget
import qurl.run.validate
from qurl.config import build_config, load_config
from qurl.errors import ConfigError
from qurl.quant import quantize
from qurl.run.budget import (
    describe_budget,
    engine_rows,
    larger_microbatch,
    machine_memory,
    memory_rows,
    peak_memory,
)
from qurl.run.shape import measure, measure_model
from qurl.run.shares import follower_rows
from qurl.tasks.tokenizer import build_tokenizer

RECIPES = Path(__file__).parents[2] / "recipes"
# Width, MLP, layers, heads, key heads, vocabulary, and whether head and embedding are one.
QWEN_05B = (896, 4864, 24, 14, 2, 151936, True)
QWEN_15B = (1536, 8960, 28, 12, 2, 151936, True)
R1_15B = (1536, 8960, 28, 12, 2, 151936, False)
QWEN_7B = (3584, 18944, 28, 28, 4, 152064, False)
QWEN_32B = (5120, 27648, 64, 40, 8, 152064, False)


def measure_qwen(width, mlp, layers, heads, kv_heads, vocabulary, is_tied):
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=is_tied,
    )
    with torch.device("meta"):
        return measure(AutoModelForCausalLM.from_config(config))


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(qurl.run.budget, "pick_device", lambda _: torch.device("cuda"))


def recipe(**sections):
    return build_config(
        {
            "steps": 7,
            "device": "cpu",
            "model": {"scratch": {"hidden_size": 32, "layers": 2, "heads": 4}, "logits_chunk": 10},
            "task": {"max_prompt_tokens": 20},
            "batch": {"problems": 3, "minibatches": 4, "epochs": 2},
            "sampling": {"max_tokens": 12, "group_size": 5},
        }
        | sections
    )


def test_the_scratch_model_by_hand():
    """V = 100, H = 32, two layers. A layer: q, k, v, o of H^2 and gate, up, down of 4 H^2.

    projections  2 * 16 * 32^2           = 32768
    embeddings   2 * 100 * 32            =  6400
    norms        2 * 2 * 32 + 32         =   160
    cache        K and V, 2 layers of 32 =   128 numbers a token
    """
    size = measure_model(recipe())
    assert len(build_tokenizer()) == size.vocabulary == 100
    assert size.num_quantized == 32_768
    assert size.num_parameters == 32_768 + 6_400 + 160
    assert size.kv_numbers_per_token == 128


def test_a_saved_model_is_measured_without_its_weights(tmp_path):
    """Width 32, MLP 64, 4 heads of 8 and 2 of them for K and V: a layer has 3 * 1024 + 6 * 1024."""
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    size = measure_model(recipe(model={"path": str(tmp_path)}))
    assert size.num_quantized == 2 * 9 * 1024
    assert size.kv_numbers_per_token == 2 * 2 * 2 * 8


def test_memory_on_a_cpu_by_hand():
    """The engine shares all but the projections, whose codes it keeps as FP32 numbers.

    Four mini-batches of 15 sequences: at most 4 sequences of 32 tokens in a micro-batch. A token
    has in each of 2 layers: 2 (32 + 32 + 32) + 3 * 128 = 576 numbers in compute precision, and
    2 * 32 + 4 = 68 in FP32.
    """
    config = recipe()
    assert memory_rows(config, measure_model(config)) == {
        "policy, FP32": 4 * 39_328,
        "engine weights": 4 * 32_768,
        "AdamW": 8 * 39_328,
        "KV cache": 4 * 128 * 32 * 15,
        "gradients": 4 * 39_328,
        "activations": 4 * 32 * 2 * 4 * (576 + 68),
        "logits and head": (4 + 4) * 10 * 100 + 4 * 3_200,
    }


@pytest.mark.parametrize(("format", "narrow"), [("none", 2), ("int8", 1), ("fp8-block", 1)])
def test_memory_on_a_gpu_by_hand(on_gpu, format, narrow):
    config = recipe(quant={"format": format})
    rows = memory_rows(config, measure_model(config))
    assert rows["engine weights"] == narrow * 32_768 + 2 * 3_200
    assert rows["KV cache"] == 2 * 128 * 32 * 15
    assert rows["BF16 copies"] == 2 * (32_768 + 3_200)
    assert rows["activations"] == 4 * 32 * 2 * (2 * 576 + 4 * 68)


def test_checkpointing_keeps_a_residual_per_layer_and_two_layers(on_gpu):
    scratch = {"hidden_size": 32, "layers": 3, "heads": 4}
    config = recipe(model={"scratch": scratch, "gradient_checkpointing": True})
    rows = memory_rows(config, measure_model(config))
    assert rows["activations"] == 4 * 32 * (4 * 32 * 3 + 2 * (2 * 576 + 4 * 68))


def test_a_micro_batch_holds_the_longest_sequence():
    """32 tokens at once, though only 20 are asked for; 40 if they fit."""
    per_token = 2 * 4 * (576 + 68)
    for asked, tokens in ((20, 32), (40, 40)):
        config = recipe(batch={"problems": 3, "minibatches": 4, "microbatch_tokens": asked})
        rows = memory_rows(config, measure_model(config))
        assert rows["activations"] == tokens * per_token


def test_moments_in_8_bits():
    """Gate, up and down have 4096 numbers each, q, k, v, o, embedding and head fewer."""
    config = recipe(optim={"moments": "8bit"})
    num_coded = 2 * 3 * 4_096
    assert memory_rows(config, measure_model(config))["AdamW"] == (
        8 * (39_328 - num_coded) + 2 * num_coded + 4 * num_coded / 256
    )


def test_moments_in_fp16():
    config = recipe(optim={"name": "hadam", "moments": "fp16"})
    assert memory_rows(config, measure_model(config))["AdamW"] == 4 * 39_328


def test_masters_in_bf16(on_gpu):
    """Projections take 2 + 2 bytes and need no copies; the embedding and the head stay FP32."""
    plain, config = recipe(), recipe(optim={"masters": "bf16"})
    before, rows = (memory_rows(c, measure_model(c)) for c in (plain, config))
    assert rows["policy, BF16 + rest"] == 4 * 32_768
    assert rows["policy, FP32"] == 4 * (39_328 - 32_768)
    assert before["BF16 copies"] - rows["BF16 copies"] == 2 * 32_768
    assert sum(before.values()) - sum(rows.values()) == 2 * 32_768


def test_reference_and_critic_cost_memory():
    """The critic's gradients and activations come and go in turn with the policy's."""
    config = recipe(algo={"name": "ppo", "advantage": "gae", "kl_coef": 0.1})
    rows = memory_rows(config, measure_model(config))
    assert rows["reference"] == rows["critic"] == 4 * 39_328
    assert rows["AdamW"] == 2 * 8 * 39_328
    assert rows["gradients"] == 4 * 39_328


def test_adapters_by_hand(on_gpu):
    """A layer has q, k, v, o of 32 x 32 and an MLP of 128: N + K = 4 * 64 + 3 * 160 = 736.

    Frozen weights are BF16, and the engine shares all but the projections. There is neither a
    reference nor a gradient of the head.
    """
    scratch = {"hidden_size": 32, "layers": 2, "heads": 4}
    model = {"scratch": scratch, "logits_chunk": 10, "lora_rank": 8}
    config = recipe(model=model, algo={"kl_coef": 0.1}, eval={"every": 1})
    rows = memory_rows(config, measure_model(config))
    adapters = 8 * 2 * 736
    assert rows == {
        "policy, frozen": 2 * 39_328,
        "adapters, FP32": 4 * adapters,
        "engine weights": 32_768,
        "engine of evaluations": 2 * 32_768,
        "CUDA": 2**30,
        "AdamW": 8 * adapters,
        "KV cache": 2 * 128 * 32 * 15,
        "gradients": 4 * adapters,
        "merged weights": 2 * 32_768,
        "activations": 4 * 32 * 2 * (2 * 576 + 4 * 68),
        "logits and head": (4 + 2) * 10 * 100,
    }


def test_a_base_in_codes_by_hand(on_gpu):
    """Codes take 0.625 bytes a weight, once for the trainer and once for the engine, which has the
    adapters in BF16. Nothing is merged; gate and up of a layer are decoded, and put side by side.
    """
    scratch = {"hidden_size": 32, "layers": 2, "heads": 4}
    model = {"scratch": scratch, "logits_chunk": 10, "lora_rank": 8, "base": "nvfp4"}
    config = recipe(model=model, quant={"format": "nvfp4"}, eval={"every": 1})
    rows = memory_rows(config, measure_model(config))
    adapters = 8 * 2 * 736
    assert rows["policy, frozen"] == 0.625 * 32_768 + 2 * 6_560
    assert rows["engine weights"] == 0.625 * 32_768 + 2 * adapters
    assert rows["adapters, FP32"] == 4 * adapters
    assert rows["decoded weights"] == 2 * 2 * (2 * 128 * 32)
    assert not rows.keys() & {"merged weights", "engine of evaluations"}


def test_nvfp4_weights_of_a_7b_model():
    """Its projections in 5 bits and a number per row; nothing is allocated."""
    width, mlp, layers, _, kv_heads, *_ = QWEN_7B
    shapes = [(width, width), (2 * 128 * kv_heads, width), (width, width), (2 * mlp, width)]
    shapes += [(width, mlp)]
    numbers = [torch.empty(shape, device="meta") for shape in shapes]
    total = layers * sum(quantize(weight, "nvfp4").num_bytes for weight in numbers)
    rows = sum(shape[0] for shape in shapes)
    assert total == layers * (sum(n.numel() for n in numbers) * 5 / 8 + 4 * rows)
    assert 3.6e9 < total < 4.6e9


@pytest.mark.parametrize(("base", "fits"), [("nvfp4", True), ("full", False)])
def test_lora_of_a_32b_model_on_one_card_of_141_gb(on_gpu, base, fits):
    """The recipe's batch; with a BF16 base its copies for training and sampling do not fit."""
    flags = ["--model.base", base, "--quant.format", "nvfp4" if base == "nvfp4" else "int8"]
    config = load_config(RECIPES / "qerl-gsm8k-nvfp4.toml", flags)
    rows = memory_rows(config, measure_qwen(*QWEN_32B), 141e9)
    assert (peak_memory(config, rows) < 141e9) == fits


def test_the_cache_is_as_large_as_asked_for_or_needed():
    """Dynamic sampling asks for 2 x 15 sequences at once; at most max_batch of them together."""
    dynamic = {"dynamic_sampling": True, "gen_multiple": 2}
    for sections, tokens in (
        ({"rollout": {"max_batch": 4}}, 32 * 4),
        ({"rollout": {"kv_tokens": 1000}}, 1000),
        ({"algo": dynamic}, 32 * 30),
        ({"algo": dynamic, "rollout": {"max_batch": 16}}, 32 * 16),
    ):
        config = recipe(**sections)
        assert memory_rows(config, measure_model(config))["KV cache"] == 4 * 128 * tokens


def test_the_cache_takes_its_share_of_a_card(on_gpu):
    """80 % of what is free before the first update or, if it is given back, after it."""
    for is_released in (False, True):
        config = recipe(rollout={"release_kv": is_released, "kv_memory_frac": 0.8})
        size = measure_model(config)
        wanted = memory_rows(config, size)["KV cache"]
        held = 2**30 + 4 * 39_328 + 32_768 + 2 * 3_200 + 8 * 39_328 * is_released
        rows = memory_rows(config, size, held + 50_000)
        assert rows["KV cache"] == pytest.approx(40_000)
        assert wanted > 40_000
        update = sum(rows[n] for n in ("gradients", "BF16 copies", "activations"))
        update += rows["logits and head"]
        cached = max(update, 40_000) if is_released else update + 40_000
        held += 8 * 39_328 * (not is_released)
        assert peak_memory(config, rows) == pytest.approx(held + cached)


@pytest.mark.parametrize(("chunk", "measured"), [(1024, 53.5), (4096, 55.1)])
def test_what_was_measured_on_an_h200(on_gpu, chunk, measured):
    """1.5B, no engine, micro-batches of 13,520 tokens; estimates may be a tenth too high."""
    config = recipe(
        batch={"problems": 64, "minibatches": 1, "microbatch_tokens": 13_520},
        sampling={"max_tokens": 1024, "group_size": 4},
        model={"logits_chunk": chunk},
    )
    rows = memory_rows(config, measure_qwen(*QWEN_15B))
    names = ("policy, FP32", "AdamW", "gradients", "BF16 copies", "activations", "logits and head")
    estimate = sum(rows[name] for name in names) / 2**30
    assert measured <= estimate <= 1.1 * measured


def test_kept_logits_take_two_bytes_for_each_token_of_a_micro_batch(on_gpu):
    batch = {"problems": 64, "minibatches": 1, "microbatch_tokens": 13_520}
    sampling = {"max_tokens": 1024, "group_size": 4}
    rows = [
        memory_rows(
            recipe(
                batch=batch,
                sampling=sampling,
                model={"logits_chunk": 4096, "keep_logits": is_kept},
                algo={"entropy_coef": coefficient},
            ),
            measure_qwen(*QWEN_15B),
        )["logits and head"]
        for is_kept, coefficient in ((False, 0.0), (True, 0.0), (True, 0.1))
    ]
    assert rows[1] - rows[0] == 2 * (13_520 - 4096) * 151_936
    assert rows[2] == rows[0]


SMALLER = ["--optim.moments", "8bit", "--rollout.release_kv", "true"]
SMALLER += ["--batch.microbatch_tokens", "4096"]


@pytest.mark.parametrize(
    ("pattern", "shape", "card", "flags"),
    [
        ("gsm8k-ppo-*", QWEN_05B, 40e9, []),
        ("gsm8k-ppo-*", QWEN_05B, 24e9, SMALLER),
        ("deepscaler-*", R1_15B, 80e9, []),
        ("dapo-math-*", QWEN_7B, 141e9, []),
        ("gsm8k-grpo-lora", QWEN_15B, 24e9, []),
        ("gsm8k-grpo-lora", QWEN_7B, 80e9, []),
        ("qerl-gsm8k-nvfp4", QWEN_7B, 24e9, []),
        ("qerl-gsm8k-nvfp4", QWEN_32B, 80e9, []),
    ],
)
def test_recipes_fit_the_cards_that_they_name(on_gpu, pattern, shape, card, flags):
    paths = sorted(RECIPES.glob(f"{pattern}.toml"))
    assert paths
    for path in paths:
        assert f"GPU of {card / 1e9:.0f} GB" in path.read_text().replace("one of", "GPU of")
        config = load_config(path, flags)
        peak = peak_memory(config, memory_rows(config, measure_qwen(*shape), card))
        assert peak < 0.95 * card, path.name


@pytest.mark.parametrize(
    ("shape", "card", "asked", "expected"),
    [
        (QWEN_05B, 141e9, 8192, 65536),  # 0.5e9 x 32768 is below 2e13, twice that is not
        (QWEN_05B, 80e9, 8192, 32768),
        (QWEN_05B, 40e9, 8192, None),  # no more fits
        (QWEN_15B, 141e9, 16384, None),  # 1.5e9 x 16384 keeps the GPU busy
        (QWEN_05B, 141e9, 65536, None),
    ],
)
def test_a_larger_micro_batch_is_named_if_it_fits(on_gpu, shape, card, asked, expected):
    path = RECIPES / "gsm8k-ppo-int8.toml"
    config = load_config(path, ["--batch.microbatch_tokens", str(asked)])
    tokens = larger_microbatch(config, measure_qwen(*shape), card)
    assert tokens == expected
    if tokens:
        larger = load_config(path, ["--batch.microbatch_tokens", str(tokens)])
        assert peak_memory(larger, memory_rows(larger, measure_qwen(*shape), card)) < 0.9 * card


def test_no_micro_batch_is_larger_than_a_mini_batch(on_gpu):
    """3 x 5 sequences in 4 mini-batches: 4 of 32 tokens each."""
    config = recipe(batch={"problems": 3, "minibatches": 4, "microbatch_tokens": 32})
    assert larger_microbatch(config, measure_model(config), 141e9) == 128
    config = recipe(batch={"problems": 3, "minibatches": 4, "microbatch_tokens": 128})
    assert larger_microbatch(config, measure_model(config), 141e9) is None


def test_the_text_holds_the_token_budget():
    """3 problems x 5 = 15 sequences of 12 tokens; 4 mini-batches x 2 epochs in each of 7 steps."""
    lines = [" ".join(line.split()) for line in describe_budget(recipe()).splitlines()]
    assert "sequences per step 15 (3 problems x 5)" in lines
    assert "sampled per step at most 180" in lines
    assert "age of rollouts 0 steps (rollout.ahead)" in lines
    assert "updates per step 8" in lines
    assert "updates in the run 56" in lines
    config = recipe(batch={"problems": 3000, "minibatches": 4})
    total = sum(memory_rows(config, measure_model(config)).values()) / 2**30
    assert f"at the peak {total:.3f}, estimated" in " ".join(describe_budget(config).split())


def test_the_text_compares_with_the_card(on_gpu, monkeypatch):
    class Card:
        name, total_memory = "A small GPU", 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card)
    text = describe_budget(recipe(rollout={"release_kv": True}))
    assert "of 1.0 (A small GPU), estimated" in text
    assert 'too much: optim.moments = "8bit" or model.gradient_checkpointing = true or' in text
    assert "release_kv" not in text
    Card.total_memory = 2**31
    assert "saves memory" not in describe_budget(recipe())
    config = recipe(rollout={"kv_tokens": 160})  # a cache that does not adapt to the card
    peak = peak_memory(config, memory_rows(config, measure_model(config), is_cuda=True))
    Card.total_memory = int(peak / 0.95)
    text = describe_budget(config)
    assert "tight, since runs take up to 15 % more: rollout.release_kv = true or" in text
    Card.total_memory = int(peak / 0.85)
    assert "saves memory" not in describe_budget(config)


def test_a_model_that_is_not_there_is_said_to_be_unknown(tmp_path):
    text = describe_budget(recipe(model={"path": str(tmp_path / "nowhere")}))
    assert f"unknown: model.path = '{tmp_path / 'nowhere'}' does not exist" in text
    assert "updates in the run" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ConfigError, match="device = 'cuda', but torch sees no GPU"):
        describe_budget(recipe(device="cuda"))


def test_one_of_four_trainers_by_hand(on_gpu):
    """39,328 parameters in two layers of 16,384 and 6,560 others, of which the head has 3,200.

    A mini-batch of 2 problems x 16 is dealt to 4 ranks: 2 rows of 32 tokens in a micro-batch. An
    unfused layer keeps 576 + 4 * 32 + 2 * 128 numbers of a token in BF16 and 68 + 64 in FP32. Each
    rank samples one problem at most, with an engine that has an FP32 embedding and norms, a BF16
    head and codes.
    """
    config = recipe(
        parallel={"trainers": 4},
        algo={"name": "ppo", "advantage": "gae", "kl_coef": 0.1},
        batch={"problems": 2, "minibatches": 4},
        sampling={"max_tokens": 12, "group_size": 16},
        quant={"format": "int8"},
    )
    rows = memory_rows(config, measure_model(config))
    assert rows == {
        "policy, FP32": 39_328,
        "reference": 39_328,
        "critic": 39_328,
        "engine weights": 32_768 + (4 + 2) * 3_200 + 4 * 160,
        "CUDA": 2**30,
        "AdamW": 2 * 2 * 39_328,
        "KV cache": 2 * 128 * 32 * 16,
        "gradients": 39_328,
        "BF16 copies": 2 * (32_768 + 3_200),
        "activations": 2 * 32 * 2 * (2 * (576 + 384) + 4 * (68 + 64)),
        "logits and head": (4 + 2) * 10 * 100 + 4 * 3_200,
        "gathered weights": 4 * (3 * 16_384 + 6_560),
        "gathered gradients": 4 * (2 * (16_384 + 6_560) - 3_200),
    }
    assert follower_rows(config, rows) == rows, "every rank samples"


def test_a_replica_holds_what_one_trainer_does(on_gpu):
    """But for the tokens: its share of a mini-batch, and of the completions."""
    settings = {"batch": {"problems": 4, "minibatches": 1}, "quant": {"format": "int8"}}
    config = recipe(parallel={"trainers": 4, "shard": False}, **settings)
    alone = recipe(**settings)
    rows, whole = (memory_rows(c, measure_model(c)) for c in (config, alone))
    by_tokens = ("KV cache", "activations", "logits and head")
    for name, number in whole.items():
        assert rows[name] <= number if name in by_tokens else rows[name] == number, name
    assert rows["activations"] < whole["activations"]
    assert rows.keys() == whole.keys()


def test_the_first_trainer_may_sample_alone(on_gpu):
    """It caches all 3 problems x 5, where each of two would cache 2 problems x 5."""
    alone = recipe(parallel={"trainers": 2, "colocate": False}, eval={"every": 1})
    together = recipe(parallel={"trainers": 2}, eval={"every": 1})
    rows, shared = (memory_rows(c, measure_model(c)) for c in (alone, together))
    own = {"engine weights", "engine of evaluations", "KV cache"}
    assert rows.keys() - follower_rows(alone, rows).keys() == own
    assert rows["engine of evaluations"] == 2 * 32_768 + (4 + 2) * 3_200 + 4 * 160
    assert (rows["KV cache"], shared["KV cache"]) == (2 * 128 * 32 * 15, 2 * 128 * 32 * 10)


@pytest.mark.parametrize("trainers", [1, 4])
def test_an_engine_on_a_card_of_its_own_by_hand(on_gpu, trainers):
    """Three engines have one problem x 5 each. The tiny model arrives in one chunk."""
    parallel = {"trainers": trainers, "engines": 3}
    config = recipe(parallel=parallel, quant={"format": "int8"})
    size, weights = measure_model(config), 32_768 + (4 + 2) * 3_200 + 4 * 160
    assert engine_rows(config, size) == {
        "engine weights": weights,
        "weights in transit": weights,
        "CUDA": 2**30,
        "KV cache": 2 * 128 * 32 * 5,
    }
    rows = memory_rows(config, size)
    assert not rows.keys() & {"engine weights", "engine of evaluations", "KV cache"}
    small = engine_rows(config, size, 2**30 + 2 * weights + 10_000)
    assert small["KV cache"] == pytest.approx(8_000), "80 % of what is free"


def test_a_tied_head_is_a_buffer_of_the_engine(on_gpu):
    """Qwen of 1.5B: one matrix of 151,936 x 1536 as embedding in FP32 and as head in BF16."""
    config = recipe(parallel={"engines": 1}, quant={"format": "int8"})
    size = measure_qwen(*QWEN_15B)
    matrix, others = 151_936 * 1536, size.num_parameters - size.num_quantized
    rows = engine_rows(config, size)
    assert rows["engine weights"] == size.num_quantized + 6 * matrix + 4 * (others - matrix)
    assert rows["weights in transit"] == 2**30 + 2 * matrix


def test_the_memory_of_a_machine_is_that_of_all_its_processes():
    config = recipe(parallel={"trainers": 4})
    rows = memory_rows(config, measure_model(config))
    step = sum(rows.values())
    assert peak_memory(config, rows) == step
    assert machine_memory(config, measure_model(config)) == 4 * step + 4 * 39_328
    alone = recipe(parallel={"trainers": 4, "colocate": False})
    rows = memory_rows(alone, measure_model(alone))
    ranks = peak_memory(alone, rows) + 3 * peak_memory(alone, follower_rows(alone, rows))
    assert machine_memory(alone, measure_model(alone)) == ranks + 4 * 39_328
    apart = recipe(parallel={"engines": 2})
    trainer, engine = (f(apart, measure_model(apart)) for f in (memory_rows, engine_rows))
    expected = peak_memory(apart, trainer) + 2 * sum(engine.values())
    assert machine_memory(apart, measure_model(apart)) == expected
    far = recipe(parallel={"trainers": 4, "colocate": False, "address": "head:6379"})
    driver = peak_memory(far, memory_rows(far, measure_model(far)))
    assert machine_memory(far, measure_model(far)) == driver + 4 * 39_328
    checkpointed = recipe(parallel={"trainers": 4}, model={"gradient_checkpointing": True})
    size = measure_qwen(*QWEN_7B)
    copies = [memory_rows(c, size, is_cuda=True)["BF16 copies"] for c in (config, checkpointed)]
    assert copies[0] == 28 * copies[1] > 2 * 7e9, "sharding does not divide what autograd keeps"


def test_the_text_of_several_trainers(on_gpu, monkeypatch):
    class Card:
        name, total_memory = "A small GPU", 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card)
    text = describe_budget(recipe(parallel={"trainers": 2}))
    assert "in main memory               0.000 for the driver to load models" in text
    assert "of each of 2 ranks" in text
    alone = describe_budget(recipe(parallel={"trainers": 2, "colocate": False}))
    assert "of rank 0, which samples; each other rank" in alone
    apart = describe_budget(recipe(parallel={"engines": 2}))
    assert "memory (GiB) of each of 2 engines" in apart
    assert "of 1.0, estimated, too much" in apart
    too_much = next(line for line in text.splitlines() if "too much" in line)
    assert "more GPUs (parallel.trainers)" in too_much
    assert "engines on other GPUs (parallel.engines)" in too_much
    assert 'optim.moments = "8bit"' in too_much
    assert "optim.masters" not in too_much, "several trainers refuse it"


def validate_memory(flags):
    recipe = qurl.run.validate.Recipe(load_config(None, flags))
    recipe.check_model()
    return recipe.check_memory()


def test_validate_counts_all_ranks_of_a_cpu(monkeypatch):
    flags = ["--device", "cpu", "--parallel.trainers", "3", "--model.scratch.hidden_size", "32"]
    config = load_config(None, flags)
    peak = machine_memory(config, measure_model(config))
    monkeypatch.setattr(qurl.run.validate, "total_memory", lambda _: peak - 1)
    with pytest.raises(ConfigError, match=r"too much for cpu; .*parallel\.trainers"):
        validate_memory(flags)
    monkeypatch.setattr(qurl.run.validate, "total_memory", lambda _: peak + 1)
    assert "GiB at the peak" in validate_memory(flags)


def test_validate_counts_what_the_driver_loads_into_main_memory(on_gpu, monkeypatch):
    """39,328 numbers of 4 bytes, on a machine of 100 kB with large GPUs."""
    flags = ["--parallel.trainers", "2", "--model.scratch.hidden_size", "32"]
    monkeypatch.setattr(qurl.run.validate, "pick_device", lambda _: torch.device("cuda"))
    sizes = {"cuda": 2**37, "cpu": 100_000}
    monkeypatch.setattr(qurl.run.validate, "total_memory", lambda device: sizes[device.type])
    with pytest.raises(ConfigError, match=r"loads FP32 models of .* into main memory"):
        validate_memory(flags)
    sizes["cpu"] = 2**37
    assert "of 128.0 GiB" in validate_memory(flags)


def test_validate_compares_the_fuller_card(on_gpu, monkeypatch):
    """The trainer needs 1.3 GiB; an engine whose cache is asked to hold 300M tokens, more."""
    flags = ["--parallel.engines", "1", "--model.scratch.hidden_size", "32"]
    monkeypatch.setattr(qurl.run.validate, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(qurl.run.validate, "total_memory", lambda device: 2**36)
    assert "about 1." in validate_memory(flags)
    flags += ["--rollout.kv_tokens", "300_000_000"]
    with pytest.raises(ConfigError, match="too much for cuda"):
        validate_memory(flags)
