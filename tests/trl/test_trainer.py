"""What QurlGRPOTrainer samples, learns, logs, saves and refuses."""

import json
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from qurl.errors import ConfigError, DataError, EngineError, ModelError, QurlError
from qurl.integrations.trl import QurlGRPOTrainer, QurlOptions, sample
from qurl.integrations.trl_options import ABSENT, ALLOWED, LEAST
from qurl.quant.formats import FORMATS
from qurl.rollout import build_engine
from qurl.tasks.tokenizer import build_tokenizer
from qurl.types import Completion, Rollout, SamplingParams
from tests.models import tiny_llama
from tests.trl.toy import CHAT, config, share_below_half, trainer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trl.md").read_text()
NAMED_OTHERWISE = (
    "use_transformers_continuous_batching",
    "entropy_coef",
    "use_adaptive_entropy",
    "tools",
    "environment_factory",
)
METRICS = "".join((ROOT / "docs" / name).read_text() for name in ("metrics.md", "algorithm.md"))


def rows(made):
    return [row for row in made.state.log_history if "loss" in row]


def test_it_learns_from_int8_rollouts_with_acr(tmp_path):
    """Twelve updates, two per generation."""
    made = trainer(
        tmp_path,
        max_steps=12,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        num_generations=8,
        learning_rate=0.01,
    )
    made.train()
    rewards = [row["reward"] for row in rows(made)]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.15
    assert all(0 < row["rollout_corr/k3_kl"] < 0.01 for row in rows(made))
    assert max(row["actor/pg_clipfrac"] for row in rows(made)) > 0.01


@pytest.mark.parametrize("quant", ["none", *FORMATS])
def test_every_format(tmp_path, quant):
    made = trainer(tmp_path, options=QurlOptions(quant=quant), max_steps=2)
    made.train()
    (row,) = rows(made)
    assert (row["rollout_corr/k3_kl"] < 1e-9) == (quant == "none")
    assert row["rollout_corr/k3_kl"] < (0.3 if quant in ("int4", "nvfp4") else 0.05)


def test_trained_in_bf16(tmp_path):
    """Codes are those of the rounded weights."""
    made = trainer(tmp_path, options=QurlOptions(quant="none"), bf16=True, max_steps=2)
    assert made.engine.weights.compute_dtype == torch.bfloat16
    made.train()
    (row,) = rows(made)
    assert 1e-9 < row["rollout_corr/k3_kl"] < 0.01


def test_mixed_precision_of_accelerates_launcher(tmp_path, monkeypatch):
    """`accelerate launch --mixed_precision` counts where GRPOConfig has neither bf16 nor fp16."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert trainer(tmp_path).engine.weights.compute_dtype == torch.bfloat16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match=r"torch.float16 \(mixed_precision = 'fp16'\), but"):
        trainer(tmp_path)


def test_a_model_in_fp16_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trained in torch.float16 .* load the model in float32"):
        trainer(tmp_path, given={"model": tiny_llama().half()})


def test_dropout_is_off(tmp_path):
    given = {"model": tiny_llama(attention_dropout=0.5)}
    made = trainer(tmp_path, given=given, max_steps=2, logging_steps=1)
    made.train()
    first, _ = rows(made)
    assert first["actor/ppo_kl"] == 0
    assert first["rollout_corr/k3_kl"] < 0.01


def test_engine_options(tmp_path):
    """One layer at either end is neither quantized nor tracked."""
    options = QurlOptions(engine={"max_batch": 3, "full_layers": 1})
    made = trainer(tmp_path, options=options, given={"model": tiny_llama(num_hidden_layers=3)})
    assert made.engine.max_batch == 3
    assert [layer.format is None for layer in made.engine.weights.layers] == [True, False, True]
    made.train()
    assert not any("layers.0." in name for name in made._tracker.state_dict())


class Spy(QurlGRPOTrainer):
    def _roll_out(self, prompts, trainer):
        self.asked = []
        generate = self.engine.generate
        self.engine.generate = lambda problems, params: (
            self.asked.append((len(problems), params)) or generate(problems, params)
        )
        try:
            return super()._roll_out(prompts, trainer)
        finally:
            del self.engine.generate


def test_a_group_is_one_problem(tmp_path):
    """24 rows in groups of four: six prompts are prefilled, not 24."""
    made = trainer(tmp_path, Spy, max_steps=2, temperature=0.7)
    made.train()
    ((num_problems, params),) = made.asked
    assert (num_problems, params.group_size) == (6, 4)
    assert (params.max_tokens, params.temperature) == (8, 0.7)
    made.evaluate(Dataset.from_dict({"prompt": ["1+1=", "2+2="]}))
    assert made.asked[0][1].seed != params.seed


class Echo:
    """Completes a prompt with its first token and the number of the completion."""

    def generate(self, problems, params):
        return [Rollout(p, self.answers(p, params.group_size), 0, 1.0) for p in problems]

    def answers(self, problem, size):
        ids = [(problem.prompt_ids[0], number) for number in range(size)]
        return [Completion(pair, (0.0, 0.0), "", "stop") for pair in ids]


def test_runs_of_different_lengths_keep_their_order():
    prompts = [[7], [7], [5, 1], [7], [5, 1], [5, 1]]
    found = sample(Echo(), prompts, SamplingParams(), ["a", "a", "b", "a", "b", "b"])
    assert [c.token_ids for c in found] == [(7, 0), (7, 1), (5, 0), (7, 0), (5, 0), (5, 1)]


def test_log_probs_are_the_engines(tmp_path):
    made = trainer(tmp_path)
    found = made._roll_out(["1+2=", "1+2="], made)
    engine = build_engine("local", made.model, quant="int8")
    for prompt, completion, logprobs in zip(*(found.values()), strict=True):
        scores = engine.score([*prompt, *completion])[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(logprobs), scores, rtol=0, atol=1e-4)
    again = made._roll_out(["1+2=", "1+2="], made)
    assert again["completion_ids"] != found["completion_ids"]


def test_conversations(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT
    prompts = [[{"role": "user", "content": f"{i}+1="}] for i in range(6)]
    given = {"processing_class": tokenizer, "train_dataset": Dataset.from_dict({"prompt": prompts})}
    made = trainer(tmp_path, given=given, max_steps=2)
    found = made._roll_out(prompts[:1], made)
    assert tokenizer.decode(found["prompt_ids"][0]) == "0+1="
    made.train()
    assert rows(made)[0]["rollout_corr/k3_kl"] < 0.01


def test_a_streaming_dataset(tmp_path):
    data = IterableDataset.from_generator(lambda: ({"prompt": f"{i}+1="} for i in range(24)))
    made = trainer(tmp_path, Spy, given={"train_dataset": data}, max_steps=2)
    made.train()
    ((num_problems, params),) = made.asked
    assert (num_problems, params.group_size) == (6, 4)


def test_metrics_have_our_names(tmp_path):
    made = trainer(tmp_path, options=QurlOptions(cap=1.02))
    made.train()
    first, second = rows(made)
    expected = "rollout_corr/kl rollout_corr/k3_kl rollout_corr/chi2_token acr/rescued_frac"
    expected += " rollout_corr/rollout_is_max rollout_corr/rollout_is_eff_sample_size acr/max_upper"
    expected += " acr/shrink_mean rollout_corr/truncated_frac actor/pg_clipfrac actor/ppo_kl"
    expected += " training/rollout_probs_diff_mean actor/entropy sync/canary_gap sync/seconds"
    expected += " perf/rollout_tokens_per_s timing_s/rollout"
    assert set(expected.split()) <= first.keys()
    assert {"uaq/update_norm", "uaq/quant_error", "uaq/code_flip_frac"} <= second.keys()
    for name in second:
        if "/" in name and not re.match("completions|rewards", name):
            family = name.removesuffix(f"/{name.split('/')[-1]}") if name.count("/") > 1 else name
            assert family in METRICS or family.split("/")[1] in METRICS, name
    assert second["perf/rollout_tokens"] <= 24 * 8


def test_an_update_is_measured_once(tmp_path):
    """Two generations per update: the second has no update before it."""
    settings = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 3}
    made = trainer(tmp_path, options=QurlOptions(objective="ppo_behav"), **settings)
    measured, measure = [], made._tracker.measure
    made._tracker.measure = lambda model: measured.append(measure(model)) or measured[-1]
    made.train()
    assert measured[0] == {}
    assert [found["uaq/update_norm"] > 0 for found in measured[1:]] == [True, True]


def test_maxima_are_maxima(tmp_path):
    """A row covers four micro-batches: its maximum is that of all of them."""
    seen = []

    class Kept(QurlGRPOTrainer):
        def _compute_loss(self, model, inputs):
            gap = inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]
            seen.append(gap[inputs["completion_mask"].bool()])
            return super()._compute_loss(model, inputs)

    made = trainer(tmp_path, Kept, max_steps=2)
    made.train()
    (row,) = rows(made)
    gaps = torch.cat(seen)
    assert len(seen) == 4
    assert row["rollout_corr/rollout_is_max"] == pytest.approx(gaps.max().exp().item(), rel=1e-5)
    assert row["rollout_corr/rollout_is_min"] == pytest.approx(gaps.min().exp().item(), rel=1e-5)
    assert row["rollout_corr/kl"] == pytest.approx(-gaps.mean().item(), abs=1e-6)


def test_evaluation(tmp_path):
    data = Dataset.from_dict({"prompt": ["1+1=", "2+2="]})
    changes = {"per_device_eval_batch_size": 8, "eval_strategy": "steps", "eval_steps": 2}
    made = trainer(tmp_path, given={"eval_dataset": data}, max_steps=2, **changes)
    made.train()
    found = next(row for row in made.state.log_history if "eval_reward" in row)
    assert found["eval_rollout_corr/k3_kl"] < 0.01
    assert found["eval_perf/rollout_tokens"] <= 8 * 8
    assert "eval_rollout_corr/k3_kl" not in rows(made)[0]
    assert made.evaluate()["eval_actor/entropy"] > 1


def logits(model):
    with torch.no_grad():
        return model(torch.arange(4, 40)[None]).logits


def test_uaq_is_undone_when_the_model_is_saved(tmp_path):
    made = trainer(
        tmp_path / "run",
        options=QurlOptions(update_scale=1.5),
        save_strategy="steps",
        save_steps=2,
    )
    plain = tiny_llama()
    scaled, norm = (m.model.layers[0].input_layernorm.weight for m in (made.model, plain))
    assert torch.equal(scaled, 1.5 * norm)
    torch.testing.assert_close(logits(made.model), logits(plain), rtol=1e-4, atol=1e-4)
    made.train()
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.save_model(str(tmp_path / "saved"))
    assert all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())
    assert made.model.config.qurl_uaq["scale"] == 1.5

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not hasattr(saved.config, "qurl_uaq")
    torch.testing.assert_close(logits(saved), logits(made.model), rtol=1e-4, atol=1e-4)
    name = "model.layers.0.input_layernorm.weight"
    torch.testing.assert_close(saved.state_dict()[name], before[name] / 1.5)

    folder = tmp_path / "run" / "checkpoint-4"
    assert json.loads((folder / "config.json").read_text())["qurl_uaq"]["scale"] == 1.5
    assert torch.equal(load_file(folder / "model.safetensors")[name], before[name])


def test_resuming_with_uaq(tmp_path):
    options, saving = QurlOptions(update_scale=1.5), {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, options=options, **saving).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.raises(ConfigError, match=r"'scale': 1.5\}, and this trainer None"):
        trainer(tmp_path).train(resume_from_checkpoint=checkpoint)
    made = trainer(tmp_path, options=options)
    made.train(resume_from_checkpoint=checkpoint)
    assert made.state.global_step == 4
    # A model with UAQ is folded back before it is scaled anew.
    with pytest.warns(UserWarning, match="carried UAQ with s = 1.5"):
        folded = trainer(tmp_path, given={"model": checkpoint})
    assert not hasattr(folded.model.config, "qurl_uaq")


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2, "save_steps": 4}])
def test_a_resumed_run_continues_as_an_unbroken_one(tmp_path, changes):
    """Evaluations sample too, and earlier ones are not repeated."""
    data = Dataset.from_dict({"prompt": ["1+1="]})
    settings = {
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
    }
    settings |= changes
    unbroken = trainer(tmp_path, given={"eval_dataset": data}, **settings)
    unbroken.train()
    resumed = trainer(tmp_path, given={"eval_dataset": data}, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{settings['save_steps']}"))
    for ours, theirs in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_uaq_with_a_reference_that_follows(tmp_path):
    """TRL averages the weights of reference and policy. Of one policy, that is the same policy."""
    tiny_llama().save_pretrained(tmp_path / "model")
    made = trainer(
        tmp_path,
        options=QurlOptions(update_scale=1.5),
        given={"model": str(tmp_path / "model")},
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        learning_rate=1e-9,
    )
    made.train()
    assert [row["actor/ref_kl"] < 1e-9 for row in rows(made)] == [True, True]


def test_uaq_needs_fp32(tmp_path):
    given = {"model": tiny_llama().bfloat16()}
    with pytest.raises(ModelError, match="load the model in float32"):
        trainer(tmp_path, options=QurlOptions(update_scale=1.5), given=given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel = True must be False"),
        ({"importance_sampling_level": "sequence"}, "'sequence' must be 'token'"),
        ({"use_vllm": True}, "use_vllm = True must be False"),
        ({"use_transformers_continuous_batching": True}, "continuous_batching = True"),
        ({"loss_type": "cispo"}, "loss_type = 'cispo' must be 'dapo' or 'bnpo' or"),
        ({"loss_type": "luspo"}, "'luspo'"),
        ({"top_p": 0.9}, "top_p = 0.9 must be 1.0"),
        ({"top_k": 20}, "top_k = 20"),
        ({"min_p": 0.1}, "min_p = 0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold = 0.5 must be None"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile"),
        ({"entropy_coef": 0.01}, "entropy_coef"),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex = '"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha = 5.0 must be None"),
        ({"bf16_full_eval": True}, "bf16_full_eval = True must be False, because evaluate"),
        ({"fp16_full_eval": True}, "fp16_full_eval = True must be False"),
        ({"temperature": 0.0}, "temperature = 0.0 must be at least 1e-06"),
        ({"max_completion_length": None}, "max_completion_length = None must be at least 1"),
        ({"delta": 1.1}, r"delta = 1.1 must exceed 1 \+ epsilon_high = 1.2"),
        ({"use_vllm": True, "top_p": 0.5}, "use_vllm = True .*; top_p = 0.5"),
    ],
)
def test_refused_settings(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": [len]}, "tools is given, but completions are single turns"),
        ({"rollout_func": print}, "rollout_func is given"),
        ({"peft_config": object()}, "peft_config is given"),
        ({"train_dataset": Dataset.from_dict({"prompt": ["a"], "image": [0]})}, "column 'image'"),
    ],
)
def test_refused_arguments(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, given=given)


def test_arguments_by_position_are_looked_at(tmp_path):
    with pytest.raises(ConfigError, match="use_vllm"):
        QurlGRPOTrainer(tiny_llama(), share_below_half, config(tmp_path, use_vllm=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "ppo"}, "objective = 'ppo' is not one of ppo_prox, ppo_behav"),
        ({"objective": len}, "has no facts"),
        ({"cap": 0.5}, "cap = 0.5 must be at least 1"),
        ({"update_scale": 1.0}, "update_scale = 1.0 must exceed 1"),
        ({"quant": "int3"}, "^quant = 'int3' is not one of none, int8"),
        ({"engine": {"max_batches": 3}}, r"engine\['max_batches'\] is not one of kv, full_layers"),
        ({"engine": {"quant": "fp8"}}, r"engine\['quant'\] is not one of kv"),
        ({"engine": {"dtype": "bfloat16"}}, r"engine\['dtype'\] = 'bfloat16' must be"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        QurlOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": "int3", "max_batch": 0}, r"^engine\['kv'\] = 'int3' .*; engine\['max_batch'\] = 0"),
        ({"full_layers": 1}, r"^engine\['full_layers'\] = 1 leaves none .* or set quant = 'none'"),
    ],
)
def test_the_engines_refusals_name_options_of_the_trainer(tmp_path, options, message):
    with pytest.raises(QurlError, match=message):
        trainer(tmp_path, options=QurlOptions(engine=options))


def test_uaq_names_the_option_of_the_trainer(tmp_path):
    given = {"model": GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2))}
    with pytest.raises(ModelError, match=r"know .* 'gpt2'.* Set update_scale = None, or add"):
        trainer(tmp_path, options=QurlOptions(update_scale=1.5), given=given)


def test_a_cache_that_is_too_small_names_options_of_the_trainer(tmp_path):
    made = trainer(tmp_path, options=QurlOptions(engine={"kv_tokens": 4}))
    wanted = r"raise engine\['kv_tokens'\] or engine\['kv_memory_frac'\], or lower max_completion_l"
    with pytest.raises(EngineError, match=wanted):
        made.train()


def chat(*contents):
    """Arguments of a trainer on conversations of one message each."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT
    prompts = [[{"role": "user", "content": content}] for content in contents]
    return {"processing_class": tokenizer, "train_dataset": Dataset.from_dict({"prompt": prompts})}


TOO_LONG = "Tell me: " + "1+" * 40


def test_a_prompt_that_is_too_long_is_refused_before_training(tmp_path):
    """The model has 64 positions, and eight are for the completion."""
    found = r"'train_dataset\[1100\]: Tell me: 1\+[1+]*\.\.\.': a prompt of 89 tokens and "
    found += "max_completion_length = 8 make 97, beyond the model's max_position_embeddings = 64; "
    with pytest.raises(EngineError, match=f"{found}lower max_completion_length$"):
        trainer(tmp_path, given=chat(*["1+1="] * 1100, TOO_LONG, TOO_LONG))
    trainer(tmp_path, given=chat("1" * 56))
    with pytest.raises(EngineError, match=r"a prompt of 57 tokens and .* make 65"):
        trainer(tmp_path, given=chat("1" * 57))


def test_a_prompt_that_is_empty_is_refused_before_training(tmp_path):
    with pytest.raises(DataError, match=r"'train_dataset\[1\]: ' has an empty prompt"):
        trainer(tmp_path, given=chat("1+1=", "", "2+2="))
    held_out = {"easy": Dataset.from_dict({"prompt": ["1+1=", ""]})}
    with pytest.raises(DataError, match=r"\"eval_dataset\['easy'\]\[1\]: \" has an empty prompt"):
        trainer(tmp_path, given={"eval_dataset": held_out})


def test_a_streamed_prompt_that_is_too_long_is_shown(tmp_path):
    data = IterableDataset.from_generator(lambda: ({"prompt": TOO_LONG} for _ in range(24)))
    made = trainer(tmp_path, given={"train_dataset": data})
    with pytest.raises(EngineError, match=r"'0: Tell me: 1\+[1+]*\.\.\.': a prompt of 89 tok"):
        made.train()


def test_a_warning_if_the_ratio_is_always_one(tmp_path):
    once = {"steps_per_generation": 2}
    with pytest.warns(UserWarning, match="R = pi / pi_prox is always 1"):
        made = trainer(tmp_path, **once, max_steps=2)
    made.train()
    (row,) = rows(made)
    assert row["actor/pg_clipfrac"] == 0
    assert row["actor/ppo_kl"] == 0
    assert row["rollout_corr/k3_kl"] > 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*always 1.*")
        trainer(tmp_path, options=QurlOptions(objective="ppo_behav"), **once)
        trainer(tmp_path, num_iterations=2, **once)
        trainer(tmp_path)


def test_the_example_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"))["trainer"]
    rewards = [row["reward"] for row in rows(made)]
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.8


def test_the_page(tmp_path):
    """The code of docs/trl.md, on a CPU and with a tiny model in the place of Qwen."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    tiny_llama().save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tmp_path / "model"))
    here = (
        f'GRPOConfig("{tmp_path}", use_cpu=True, bf16=False, max_completion_length=8, max_steps=2'
    )
    code = code.replace('GRPOConfig("runs/trl"', here)
    names = {}
    exec(code, names)
    assert names["trainer"].state.global_step == 2


def test_the_page_names_all_that_is_refused():
    for name in [*ALLOWED, *ABSENT, *LEAST]:
        is_named = f"`{name}`" in PAGE or f"`{name}=" in PAGE
        assert is_named or name in NAMED_OTHERWISE, name
