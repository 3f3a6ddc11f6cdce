"""Advice: the forecast against what was measured, the choice, and what a user sees of it."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks import forecast as check
from qurl.bench import probe
from qurl.bench import scenario as scenarios
from qurl.bench.advise import Row, advise, choose
from qurl.bench.arms import Arm
from qurl.bench.forecast import (
    DECODE_RATES,
    ROLLOUT_ERROR,
    STEP_ERROR,
    StepSeconds,
    Work,
    decode_terms,
    gain_range,
    rollout_seconds,
    step_seconds,
)
from qurl.bench.limits import Speed, speed_of
from qurl.bench.scenario import BASE, Hardware, Scenario, check_family, find_shape
from qurl.bench.shapes import SHAPES, qwen2_shape
from qurl.cli import main
from qurl.config import build_config, check_combinations
from qurl.errors import ConfigError
from qurl.run.cards import CARDS, find_card
from qurl.run.shape import measure
from qurl.tasks.tokenizer import build_tokenizer

SMALL = qwen2_shape("small", 8, 2, 2, 1, 16, 100, is_tied=True)
ROUND = Speed(bandwidth=1e3, flops_wide=1e4, flops_narrow=2e4)
MEASURED = check.read_rollouts()


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch):
    """These tests plan; one that measures says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def recipe(**sections):
    return build_config(
        {
            "model": {"path": "nowhere"},
            "task": {"max_prompt_tokens": 512},
            "batch": {"problems": 32},
            "sampling": {"max_tokens": 1024},
            "algo": {"kl_coef": 0.0},
            "rollout": {"release_kv": True},
        }
        | sections
    )


def test_the_terms_of_a_decode_step_by_hand():
    """Products of a layer: qkv 16 x 8, o 8 x 8, gate_up 32 x 8, down 8 x 16: 576, so W has 1152.

    head         100 * 8 = 800 numbers of 2 bytes, 8-bit body: 1152 + 1600 = 2752 bytes, 2.752 s
    compute      2 * 3 * (1152 / 2e4 + 800 / 1e4) = 0.8256 s
    keys         3 sequences x 10 tokens x 2 layers x 2 x 4 numbers = 480 bytes in FP8
    activations  2 layers x (2 * 8 + 16 + 8) x 2 bytes = 160 bytes a token
    """
    terms = decode_terms(SMALL, Arm.of("int8+kv"), ROUND, 3, 10)
    assert terms == pytest.approx((2.752 + 0.8256, 0.48, 2, 2, 3 * 0.160, 3 * 2 * 1))
    terms = decode_terms(SMALL, Arm.of("none"), ROUND, 3, 10)
    assert terms == pytest.approx((3.904 + 6 * 0.1952, 0.96, 2, 0, 0, 0))


def test_a_rollout_lasts_as_long_as_its_longest_completion():
    rates = (0, 0, 1, 0, 0, 0)  # only the two layers count: seconds are twice the decode steps
    work = Work(sequences=8, prompt_tokens=5, new_tokens=10, together=8)
    seconds = [
        rollout_seconds(SMALL, Arm.of("none"), ROUND, w, rates)
        for w in (work, replace(work, longest=30), replace(work, together=2))
    ]
    assert seconds == [20, 60, 80]


def test_a_step_by_hand():
    """Per sequence of 6 + 4 tokens, with FLOPs 23040, 2816 x ... as `Products` counts them."""
    work = Work(3, 6, 4, 3, num_updates=2, num_passes=2, num_forwards=1.5, num_networks=2)
    linears = 1.09 * 2 * 10 * 1152 / 1e4
    others = (1.09 * 2 * 4 * 800 + 2.15 * 2 * 16 * 10 * 11) / 1e4
    traffic = 10 * 160 / 1e3
    forward = linears + others + 8.6 * traffic
    update = 3 * (linears + others) + 30.0 * traffic
    optimizer = 2 * SMALL.num_parameters * 36 / 1e3
    found = step_seconds(SMALL, Arm.of("int8"), ROUND, work)
    assert found.forwards == pytest.approx(3 * 1.5 * forward)
    assert found.update == pytest.approx(2 * (3 * 2 * update + optimizer))
    rest = 0.25 + 2e-6 * 3 * 4
    assert found.total == pytest.approx(found.rollout + found.forwards + found.update + rest)
    unified = step_seconds(SMALL, Arm.of("fp8-unified-dgrad"), ROUND, work)
    assert found.forwards - unified.forwards == pytest.approx(3 * 1.5 * 0.66 * linears / 2)
    assert found.update - unified.update == pytest.approx(2 * 3 * 2 * 0.70 * linears)


def test_the_rates_are_those_that_fit_the_measurements():
    """New measurements change them: `python -m benchmarks.forecast` prints rates and errors."""
    assert check.fit(MEASURED) == pytest.approx(np.array(DECODE_RATES), rel=0.01)


def test_the_errors_that_are_shown_are_those_of_the_measurements():
    """The docstring's numbers, of shapes that the fit has not seen."""
    seconds, gains = (np.abs(errors) for errors in check.rollout_errors(MEASURED))
    assert len(seconds) >= 48
    assert len(gains) >= 34
    assert math.sqrt((seconds**2).mean()) < 0.051
    assert seconds.max() < 0.155
    assert math.sqrt((gains**2).mean()) < 0.035
    assert 0.9 * ROLLOUT_ERROR < np.quantile(gains, 0.9) < ROLLOUT_ERROR
    assert gains.max() < 0.095
    steps = np.abs(list(check.step_errors().values()))
    assert 0.9 * STEP_ERROR < steps.max() < STEP_ERROR


def test_training_is_forecast_for_shapes_that_set_no_rate():
    errors = {name: abs(error) for name, error in check.train_errors().items()}

    def largest(model, *ends):
        return max(
            e for name, e in errors.items() if name.startswith(model) and name.endswith(ends)
        )

    assert errors["3B none update"] < 0.03
    assert errors.pop("1.5B fp8-unified-all 16640 update") < 0.075
    assert largest("1.5B", "update", "prox") < 0.04
    assert largest("1.5B", "step") < 0.05
    assert largest("1.5B", "training") < 0.065
    assert largest("3B", "step") < 0.035
    assert largest("7B", "step") < 0.07, "BF16 with micro-batches of 4160 tokens"
    assert largest("0.5B", "step") < 0.05
    assert largest("0.5B", "training") < 0.065
    assert largest("0.5B none 8192", "update", "prox") < 0.025, "sets the time of launches"
    assert largest("0.5B none 16384", "update") < 0.31, "-26 %"
    assert largest("0.5B none 32768", "update") < 0.13, "-12 %"


def test_the_prox_forward_is_skipped_where_it_was_in_measured_steps():
    """With correction.mode = "auto", BF16 steps were faster than steps with INT8 rollouts."""
    config = recipe(correction={"mode": "auto"}, algo={"kl_coef": 0.0, "objective": "ppo_prox"})
    found = {arm: scenario(config).work(Arm.of(arm)).num_forwards for arm in ("none", "int8")}
    assert found == {"none": 0, "int8": 0.75}
    assert scenario(config).work(Arm.of("int8-unified-dgrad")).num_forwards == 0
    assert scenario(config).work(Arm.of("none+kv")).num_forwards == 0.75, "gaps of an FP8 cache"
    steps = check.read_bench_steps()
    arms = ("int8-unified-dgrad", "none", "int8+kv")
    of_arm = {
        arm: pair
        for (model, arm, batch, _), pair in steps.items()
        if model == "1.5B" and batch == "256x16+1024"
    }
    measured, computed = zip(*(of_arm[arm] for arm in arms), strict=True)
    for fastest, base, slowest in (measured, computed):
        assert fastest.total < base.total < slowest.total


def test_adapters_take_what_the_measured_steps_took():
    """A 7B update without weight gradients; 1.5B waits for its host if micro-batches are small."""

    def forecast(shape, tokens, has_lora):
        work = Work(128, 16, 1024, 128, has_lora=has_lora, microbatch_tokens=tokens)
        return step_seconds(SHAPES[shape], Arm.of("int8"), check.H200, work)

    plain, adapted = (forecast("7B", 4160, has_lora) for has_lora in (False, True))
    assert adapted.forwards == plain.forwards
    assert 0.8 * plain.update < adapted.update < 0.83 * plain.update  # and AdamW has little to do
    # 32 micro-batches of 28 layers: 32 * 28 * 6.9 ms = 6.2 s, and 24 * 28 * 2.1 ms = 1.4 s
    small, large = (forecast("1.5B", tokens, True) for tokens in (4160, 16640))
    assert (small.forwards, small.update) == pytest.approx((1.41, 6.2), rel=0.02)
    assert large.update < forecast("1.5B", 16640, False).update
    # A sequence is not split, however small a micro-batch.
    assert forecast("1.5B", 100, True) == forecast("1.5B", 1040, True)
    notes = advise(recipe(model={"path": "nowhere", "lora_rank": 32}), shape="1.5B").notes
    assert any("training with adapters is forecast from two steps" in note for note in notes)


def test_the_range_covers_nine_of_ten_measured_gains():
    covered = []
    for rollout, base in check.pair_up(MEASURED):
        computed = [
            StepSeconds(rollout_seconds(r.shape, r.arm, check.H200, r.work), 0.0, 0.0, rest=0.0)
            for r in (base, rollout)
        ]
        low, gain, high = gain_range(*computed)
        assert low < gain < high
        covered.append(low <= base.seconds / rollout.seconds <= high)
    assert sum(covered) >= 0.9 * len(covered)


def test_measured_rollouts_add_no_error_of_their_own():
    base, arm = StepSeconds(8, 1, 0.75), StepSeconds(4, 1, 0.75)
    low, gain, high = gain_range(base, arm)
    assert gain == pytest.approx(10 / 6)
    assert high / gain == pytest.approx(gain / low)
    assert math.log(high / gain) == pytest.approx(math.hypot(0.8 * ROLLOUT_ERROR, STEP_ERROR))
    high = gain_range(base, arm, is_measured=True)[2]
    assert math.log(high / gain) == pytest.approx(STEP_ERROR)


@pytest.mark.parametrize("problems", [8, 32])
def test_the_answer_for_a_small_model_is_no(problems):
    """INT8 rollouts of 0.5B were measured at 1.01 (256 sequences) and 0.92 (64)."""
    advice = advise(recipe(batch={"problems": problems}), shape="0.5B")
    assert advice.answer == "no"
    assert advice.recommended == {"quant.format": "none", "correction.mode": "auto"}
    assert advice.verdict[0].startswith("No: the best format, int8")
    assert advice.verdict[1].endswith('Also set correction.mode = "auto".')


def test_the_answer_for_long_completions_of_a_larger_model_is_yes():
    """Few sequences, the longest of 8k tokens: rollouts are most of the step."""
    config = recipe(
        model={"path": "nowhere", "gradient_checkpointing": True},
        batch={"problems": 8},
        sampling={"max_tokens": 8192},
        optim={"moments": "8bit"},
    )
    advice = advise(config, shape="7B", tokens=3000)
    assert advice.answer == "yes"
    assert advice.recommended["quant.format"] == "int8"
    assert advice.recommended["quant.kv"] == "fp8"
    assert advice.recommended["algo.objective"] == "acr"
    rows = {row.arm: row for row in advice.rows}
    assert 1.1 < rows["int8+kv"].gain[1] < rows["none"].rollout_s / rows["int8+kv"].rollout_s


def row(arm, gain, fits=True, step=10.0):
    return Row(arm, 6.0, 4.0, step, (gain * 0.94, gain, gain * 1.06), 20.0, fits, None)


@pytest.mark.parametrize(
    ("gains", "answer", "arm"),
    [
        ({"int8": 1.02, "int8+kv": 1.02}, "no", None),
        ({"int8": 1.05, "int8+kv": 1.06}, "perhaps", "int8"),
        ({"int8": 1.20, "fp8": 1.21}, "yes", "int8"),
        ({"int8": 1.05, "int8+kv": 1.20}, "yes", "int8+kv"),
        ({"int8": 1.05, "fp8": 1.20, "fp8+kv": 1.21}, "yes", "fp8"),
    ],
)
def test_choices(gains, answer, arm):
    rows = [row(BASE, 1.0), *(row(name, gain) for name, gain in gains.items())]
    found, recommended, lines = choose(rows)
    assert found == answer
    assert lines[0].lower().startswith(answer)
    if arm is not None:
        expected = {"format": "none", "kv": "none", **Arm.of(arm).quant}
        assert recommended["quant.format"] == expected["format"]
        assert recommended.get("quant.kv", "none") == expected["kv"]


@pytest.mark.parametrize(
    ("quant", "others"),
    [
        ({"format": "fp8", "unified": True, "backward": "dgrad"}, {"unified", "backward"}),
        ({"format": "int8", "kv": "fp8", "full_layers": 2}, {"kv", "full_layers"}),
        ({"format": "int8", "scales": "frozen"}, {"scales"}),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_recommended_keys_are_a_recipe_that_is_accepted(quant, others, device):
    config = recipe(batch={"problems": 8}, quant=quant, device=device)
    check_combinations(config, "recipe")
    advice = advise(config, shape="0.5B")
    assert advice.answer == "no"
    is_planned = device != "cpu"  # on a CPU no step is computed, so nothing but the format is said
    assert advice.recommended.pop("correction.mode", None) == ("auto" if is_planned else None)
    assert set(advice.recommended) == {f"quant.{key}" for key in {"format", *others}}
    assert all(f"quant.{key} = " in advice.verdict[1].split("Also set")[1] for key in others)
    keys = {key.removeprefix("quant."): value for key, value in advice.recommended.items()}
    mode = replace(config.correction, mode="auto" if is_planned else "decoupled")
    quant = replace(config.quant, **keys)
    check_combinations(replace(config, quant=quant, correction=mode), "recommended")


@pytest.mark.parametrize(
    "sections",
    [
        {"correction": {"mode": "auto"}},
        {"correction": {"veto": 1e-4}},
        {"batch": {"problems": 8, "minibatches": 1}},
        {"algo": {"kl_coef": 0.0, "advantage": "mine:advantage"}},
        {"rollout": {"ahead": 1}},
    ],
    ids=["set already", "reads all prox", "no prox forward", "unknown", "a step off"],
)
def test_auto_is_named_only_where_it_would_save_a_forward(sections):
    advice = advise(recipe(**sections), shape="0.5B")
    assert "correction.mode" not in advice.recommended


def test_bf16_steps_are_planned_without_the_prox_forward_that_they_could_skip():
    by_mode = {
        mode: {row.arm: row for row in advise(config, shape="1.5B", tokens=660).rows}
        for mode in ("auto", "decoupled")
        for config in [recipe(correction={"mode": mode})]
    }
    assert by_mode["auto"] == by_mode["decoupled"]
    rows = by_mode["decoupled"]
    assert rows["none"].train_s < rows["int8"].train_s


def test_a_base_that_goes_with_one_format_leaves_no_choice():
    sections = {"model": {"path": "nowhere", "lora_rank": 32, "base": "nvfp4"}}
    with pytest.raises(ConfigError, match=r"quant\.format = 'nvfp4' only.*--model.base full"):
        advise(recipe(**sections, quant={"format": "nvfp4"}), shape="7B")


def test_training_in_8_bits_is_named_where_it_would_gain():
    rows = [row(BASE, 1.0), row("int8", 1.0), row("int8-unified-dgrad", 1.25, step=8.0)]
    assert "int8-unified-dgrad would add 1.25x, and is unproven" in choose(rows)[2][1]
    rows[2] = row("int8-unified-dgrad", 0.9, step=11.0)
    assert choose(rows)[2][1].endswith("Train in BF16.")


def test_memory_can_decide():
    rows = [row(BASE, 1.0, fits=False), row("int8", 1.0)]
    assert choose(rows)[0] == "yes"
    assert "BF16 rollouts do not" in choose(rows)[2][0]
    rows = [row(BASE, 1.0, fits=False), row("int8", 1.0, fits=False)]
    answer, recommended, lines = choose(rows, ["model.lora_rank"])
    assert (answer, recommended) == ("no", {})
    assert lines[1] == "model.lora_rank saves memory."


def scenario(config, card="H200", gpus=1, shape="1.5B", tokens=1024):
    found = CARDS[card]
    hardware = Hardware(found.name, found.memory, speed_of(found), found.has_fp8, found, gpus)
    return Scenario(config, hardware, find_shape(config, shape), 512, tokens)


def test_work_of_recipes():
    """Prox leaves out the first of four mini-batches; PPO scores values and trains two networks."""
    work = scenario(recipe()).work(Arm.of("none"))
    assert (work.sequences, work.together, work.num_forwards) == (256, 256, 0.75)
    assert (work.num_updates, work.num_networks, work.longest) == (4, 1, 1024)
    ppo = recipe(algo={"name": "ppo", "advantage": "gae"}, batch={"problems": 32, "epochs": 2})
    work = scenario(ppo, tokens=300).work(Arm.of("none"))
    assert (work.num_forwards, work.num_networks, work.num_passes) == (1.75, 2, 2)
    assert (work.new_tokens, work.longest, work.num_updates) == (300, 1024, 8)


def test_a_small_card_decodes_fewer_sequences_at_once_and_an_fp8_cache_more():
    config = recipe(batch={"problems": 512}, rollout={"max_batch": 4096})
    together = [scenario(config).work(Arm.of(arm)).together for arm in ("int8", "int8+kv")]
    assert 256 < together[0] < 4096
    assert together[1] == pytest.approx(min(4096, 2 * together[0]), rel=0.01)


def test_hardware_that_is_not_here():
    advice = advise(recipe(), gpu="rtx 3090", gpus=2, shape="0.5B")
    assert {row.arm for row in advice.rows} == {"none", "int8", "int8-unified-dgrad"}, "no FP8"
    assert "on 2 x RTX 3090 (computed)" in advice.setting
    assert sum(note.startswith("extrapolated:") for note in advice.notes) == 2
    advice = advise(recipe(), shape="0.5B")
    assert "there is no GPU here, so one is assumed" in advice.notes[0]
    assert not any(note.startswith("extrapolated:") for note in advice.notes)


def test_a_model_that_leaves_no_memory_for_a_cache_gets_an_answer():
    advice = advise(recipe(), gpu="rtx 3090", shape="7B")
    assert advice.answer == "no"
    assert not any(row.fits for row in advice.rows)


def test_cards():
    assert find_card("h100").memory == 80e9
    assert find_card("RTX4090").capability == (8, 9)
    with pytest.raises(ConfigError, match="--gpu 'H1000' is not one of H200, H100"):
        find_card("H1000")
    assert speed_of(CARDS["H200"]) == check.H200


def test_shapes_of_models():
    """Qwen3's heads are not hidden / heads; GPT-2 is no Llama."""
    with torch.device("meta"):
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 500}
        model = Qwen3ForCausalLM(
            Qwen3Config(**sizes, num_key_value_heads=2, intermediate_size=96, num_hidden_layers=3)
        )
        gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4))
    shape = measure(model)
    check_family(shape)
    assert (shape.head_dim, shape.num_kv_heads, shape.num_layers) == (32, 2, 3)
    assert not shape.is_tied
    assert shape.num_quantized == 3 * sum(n * k for n, k in shape.products.values())
    with pytest.raises(ConfigError, match="knows dense models of the Llama family"):
        check_family(measure(gpt2))


def test_a_model_that_is_not_here():
    with pytest.raises(ConfigError, match=r"model.path = 'no/such/model' does not exist.*--shape"):
        advise(recipe(model={"path": "no/such/model"}))
    with pytest.raises(ConfigError, match="--shape '8B' is not one of tiny"):
        advise(recipe(), shape="8B")


def test_a_cpu_gains_nothing():
    advice = advise(recipe(device="cpu"))
    assert advice.answer == "no"
    assert "codes are multiplied as FP32" in advice.verdict[0]
    assert advise(recipe(device="cpu"), gpu="H200", shape="0.5B").rows, "a plan for a GPU"


def test_lengths_of_the_run_so_far(tmp_path):
    rows = [{"step": -1}, *({"step": n, "response_length/mean": 100.0 + n} for n in range(5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens, note = scenarios.find_tokens(recipe(run_dir=str(tmp_path)))
    assert tokens == 102
    assert note.startswith("completions are as long as in")
    tokens, note = scenarios.find_tokens(recipe(run_dir=str(tmp_path / "none")))
    assert tokens == 1024
    assert "--tokens N" in note


def test_measuring_a_step(monkeypatch):
    """On a CPU and with a tiny model, as a GPU does it: every arm has times of its own."""
    config = recipe(
        batch={"problems": 2, "microbatch_tokens": 64},
        sampling={"max_tokens": 24, "group_size": 2},
        device="cpu",
    )

    def count_tokens(call, device):
        """In place of a clock: differences of short times can be negative."""
        rollouts = call()
        return 1e-3 * sum(len(c.token_ids) for r in rollouts for c in r.completions), rollouts

    monkeypatch.setattr(probe, "time_call", count_tokens)
    monkeypatch.setattr(probe, "MORE_TOKENS", 12)
    monkeypatch.setattr(probe, "paused_gc", nullcontext)  # it collects garbage first, which is slow
    monkeypatch.setattr(probe, "free_memory", lambda: None)
    shape = measure(tiny_llama(max_position_embeddings=256))
    tiny = replace(scenario(config, tokens=16), shape=shape, prompt_tokens=8)
    arms = [Arm.of(name) for name in ("none", "int8", "int8-unified")]
    computed = {arm.name: tiny.forecast(arm) for arm in arms}
    measured = tiny.measure(arms, torch.device("cpu"))
    for arm in arms:
        found = measured[arm.name]
        assert all(s > 0 for s in (found.rollout, found.forwards, found.update))
        assert found.rollout == pytest.approx(1e-3 * 2 * 2 * 24, rel=1e-3), "the longest counts"
        assert found.rollout != computed[arm.name].rollout
    assert measured["int8"].update == measured["none"].update, "both train in BF16"
    assert measured["int8-unified"].rollout == measured["int8"].rollout


def test_the_mismatch_of_a_model_that_is_here(tmp_path):
    tiny_llama(max_position_embeddings=256).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    config = recipe(
        model={"path": str(tmp_path)},
        task={"name": "arithmetic"},
        sampling={"max_tokens": 16},
        batch={"problems": 4},
    )
    advice = advise(config)
    gaps = {row.arm: row.gap for row in advice.rows}
    assert gaps["none"] < 1e-4 < gaps["int8"] < gaps["fp8"]
    assert gaps["int8+kv"] is None, "an FP8 cache is not measured on a CPU"
    assert any("this model's own samples, measured on cpu" in note for note in advice.notes)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "r.toml"
    sizes = "[task]\nmax_prompt_tokens = 512\n[sampling]\nmax_tokens = 1024\n"
    path.write_text(f'[model]\npath = "nowhere"\n{sizes}')
    assert main(["advise", str(path), "--shape", "0.5B", "--batch.problems", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("0.49B parameters, 64 sequences of 512 + 1024 tokens, on H200")
    assert " ".join(lines[1].split()) == "arm rollout s train s step s gain range GiB gap"
    assert [line.split()[0] for line in lines[2:5]] == ["none", "int8", "int8+kv"]
    assert max(map(len, lines[:9])) <= 80
    assert lines[-2].startswith("No: ")
    assert main(["advise", str(path), "--shape", "0.5B", "--gpu", "L40S", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answer"] in ("yes", "perhaps", "no")
    assert len(found["rows"][1]["gain"]) == 3
    for flags in (["--gpus", "0"], ["--tokens", "many"]):
        assert main(["advise", str(path), *flags]) == 2
        assert "must be a whole number of at least 1" in capsys.readouterr().err


def test_a_dry_run_for_a_gpu_that_is_not_here(tmp_path, capsys):
    path = tmp_path / "r.toml"
    path.write_text('device = "cuda"\n[model.scratch]\nhidden_size = 32\n')
    assert main(["train", str(path), "--dry-run", "--gpu", "H100"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "memory (GiB) on H100 policy, FP32" in printed
    assert "BF16 copies" in printed, "rows of a GPU"
    assert "of 74.5 (H100), estimated batch.microbatch_tokens = 81920 fits too" in printed
    assert main(["train", str(path), "--gpu", "H100"]) == 2
    assert "it needs --dry-run" in capsys.readouterr().err
    assert main(["train", str(path), "--dry-run", "--gpu", "H1"]) == 2
    assert "--gpu 'H1' is not one of H200" in capsys.readouterr().err
