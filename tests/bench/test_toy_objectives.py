"""`benchmarks/toy_objectives.py`: its table and plot, from runs and from the committed JSON."""

import json

import pytest

from benchmarks import toy_objectives as toy


def run(arm, seed, *accuracies, failure=""):
    curves = {name: [[step, 0.5] for step in range(len(accuracies))] for name in toy.KEPT}
    for name in ("eval/full/accuracy", "eval/quantized/accuracy"):
        curves[name] = [[step, a] for step, a in enumerate(accuracies)]
    return {"arm": arm, "seed": seed, "failure": failure, "curves": curves}


def result(*runs):
    return {
        **{"date": "2026-01-02", "recipe": "r.toml", "steps": 4, "lr": 3e-4, "epochs": 2},
        **{"versions": {"torch": "2"}, "machine": "M", "runs": list(runs)},
    }


def test_evaluations_are_keyed_by_the_number_of_updates(tmp_path):
    rows = [{"step": -1, "eval/full/accuracy": 0.1}, {"step": 0, "eval/full/accuracy": 0.2}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = toy.pick(toy.read_rows(path, "int8"), "eval/quantized/accuracy")
    assert found == [[0, 0.1], [1, 0.2]]


def test_accuracy_is_a_mean_of_the_last_evaluations_over_seeds():
    found = result(run("int8 tis", 0, 0.1, 0.5, 0.6, 0.7), run("int8 tis", 1, 0.1, 0.7, 0.8, 0.9))
    assert "| int8 tis | 0.700 [0.600, 0.800] |" in toy.make_table(found)


def test_a_run_that_failed_at_once_is_counted_and_not_averaged():
    found = result(run("int4 acr", 0, 0.5), run("int4 acr", 1, failure="out of luck"))
    assert toy.make_table(found).splitlines()[-1].startswith("| int4 acr | 0.500 [0.500, 0.500] |")
    assert toy.make_table(found).rstrip().endswith("| 1 |")
    assert "| int4 acr |  |  |" in toy.make_table(result(run("int4 acr", 0, failure="so")))


def test_acr_is_compared_with_tis_seed_by_seed():
    """Differences 1, 2 and 3 points: 2 -+ 4.30 / sqrt(3)."""
    pairs = [(run("int8 acr", s, 0.5 + 0.01 * (s + 1)), run("int8 tis", s, 0.5)) for s in range(3)]
    text = toy.compare_acr(result(*(r for pair in pairs for r in pair)), "int8")
    assert text.endswith("mean +2.0 (95 % -0.5 to +4.5), by seed +1.0, +2.0, +3.0.")
    assert toy.compare_acr(result(*pairs[0], *pairs[1]), "int8") == ""


def test_table_and_plot_show_what_was_measured():
    path = toy.RESULTS / "toy_objectives.json"
    found = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text() == toy.make_table(found)
    digest = toy.plot("toy_objectives", found).digest
    assert digest in path.with_suffix(".svg").read_text(), "run it with --draw-only"


@pytest.mark.parametrize("arm", toy.ARMS)
def test_every_arm_is_a_valid_recipe(arm):
    from qurl.config import load_config

    format, objective = toy.ARMS[arm]
    flags = ["--quant.format", format, "--algo.objective", objective]
    assert load_config(toy.DEMO, flags).algo.objective == objective
