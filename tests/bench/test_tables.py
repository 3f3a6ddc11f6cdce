"""`benchmarks/tables.py`: what it makes of measurements, and that the pages are up to date."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks import tables
from benchmarks.measured import replace_between, student_interval

ROOT = Path(__file__).parents[2]


def rollout(tokens_per_s, *, model="7B", workload="A", quant="none", kv="none", **more):
    settings = {"engine": "local", "model": model, "workload": workload, "quant": quant, "kv": kv}
    versions = {"torch": "2.11.0", "triton": "3.6.0"}
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {
            "device": "NVIDIA H200",
            "cuda": "13.0",
            "versions": versions,
            "commit": more.pop("commit", "c0ffee"),
        },
        "settings": {**settings, "repeats": 2, **more.pop("settings", {})},
        "figures": {"tokens_per_s": tokens_per_s, "limit_share": 0.625, "logprob_gap": 0.0351},
        **more,
    }


@pytest.fixture
def read(tmp_path):
    def read(*rollouts, rows=(), gaps=()):
        attention = {"device": "X", "date": "D", "versions": {"torch": "T", "triton": "R"}}
        files = {
            "rollout": {"results": {str(i): entries for i, entries in enumerate(rollouts)}},
            "sync": {"results": {}},
            "attention": {**attention, "rows": list(rows)},
            "mismatch": {"model": "M", "rows": list(gaps)},
        }
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tables.Measured.read(tmp_path)

    return read


@pytest.mark.parametrize("name", tables.PAGES)
def test_pages_show_what_was_measured(name):
    page = (ROOT / name).read_text(encoding="utf-8")
    section = tables.PAGES[name](tables.Measured.read())
    whole = replace_between(page, tables.BEGIN, tables.END, section)
    assert page == whole, "run `make tables`"


def test_a_page_keeps_what_is_around_its_section():
    page = "before\n<begin>\n\nold\n\n<end>\nafter\n"
    assert replace_between(page, "<begin>", "<end>", "new") == page.replace("old", "new")


@pytest.mark.parametrize("page", ["no markers", "<begin><end>" * 2])
def test_a_page_has_one_section(page):
    with pytest.raises(AssertionError, match="a page has <begin> and <end> once"):
        replace_between(page, "<begin>", "<end>", "new")


def test_an_interval_over_seeds_by_hand():
    """Mean 2, deviation 1 over three values: 2 -+ 4.30 / sqrt(3)."""
    assert student_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.4826, 2 + 2.4826), abs=1e-4)
    assert student_interval([5.0] * 40) == (5.0, 5.0)


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [(0.625, "%", "62 %"), (0.0, ".2f", "0.00"), (1.2549, ".2f", "1.25"), (None, "%", "?")],
)
def test_numbers(value, form, shown):
    assert tables.show(value, form, "?") == shown


def test_the_newest_entry_counts(read):
    measured = read([rollout(10_000), rollout(20_000)])
    assert measured.rollouts["7B", "A", "none", "none"].tokens_per_s == 20_000


def test_other_machines_are_left_out(read):
    other = rollout(1)
    other["machine"] = {**other["machine"], "device": "CPU (x86_64, 2 cores)"}
    measured = read([rollout(20_000), other])
    assert measured.rollouts["7B", "A", "none", "none"].tokens_per_s == 20_000


def test_other_engines_and_workloads_are_left_out(read):
    others = [{"engine": "vllm"}, {"workload": "4x2:16+8"}, {"model": "0.5B"}]
    measured = read(*([rollout(1, settings=settings)] for settings in others))
    assert measured.rollouts == {}


def test_a_row_of_rollouts(read):
    """vLLM: 26.3 thousand tokens/s of the 42.9 thousand that the bytes allow."""
    fast = rollout(30_000, quant="int8", profile={"busy_ms": 6.499})
    measured = read([rollout(20_000)], [fast])
    row = tables.rollout_row(measured, ("7B", "A", "int8", "none"))
    ours = ["30.0", "62 %", "1.50", "6.50", "0.035"]
    assert row == ["7B, A (256 x 512 + 1024)", "INT8", *ours, "26.3", "61 %", "", "1.14"]


def test_a_factor_between_two_commits_is_marked(read):
    measured = read([rollout(20_000)], [rollout(30_000, quant="int8", commit="c0ffee+")])
    assert measured.factor_text(("7B", "A", "int8", "none")) == "1.50†"
    assert measured.factor_text(("7B", "A", "none", "none")) == "1.00"
    assert measured.factor_text(("7B", "A", "fp8", "none")) == ""


def test_what_was_not_measured_says_so(read):
    row = tables.rollout_row(read(), ("7B", "Cp", "int8", "none"))
    assert row[2:] == ["not measured", "", "", "", "", "not measured", "", "", ""]
    assert row[0] == "7B, C' (64 x 512 + 4096)"
    assert "not measured" in tables.sync_table(read())


def test_every_workload_has_a_row_for_every_format(read):
    lines = tables.rollout_table(read()).splitlines()
    assert len(lines) == 2 + len(tables.WORKLOADS) * len(tables.FORMATS)
    assert {line.count("|") for line in lines} == {12}


def test_the_anchors_have_rows():
    keys = {(*place, *format) for place in tables.WORKLOADS for format in tables.FORMATS}
    assert tables.VLLM.keys() <= keys


@pytest.mark.parametrize(("is_ceiling", "missed"), [(False, "a 1.0"), (True, "c 3.0")])
def test_a_missed_goal_is_bold(is_ceiling, missed):
    reached = {"a": 1.0, "b": 2.0, "c": 3.0, "d": None}
    cell = tables.goal_cell(2.0, reached, ".1f", is_ceiling=is_ceiling)
    shown = "a 1.0; b 2.0; c 3.0".replace(missed, f"**{missed}**")
    word = "at most" if is_ceiling else "at least"
    assert cell == f"{word} 2.0: {shown}; not measured: d"


def test_gaps_of_a_real_model(read):
    gap = {"format": "int8", "kv": "fp8", "tokens": 30552, "mean_gap": 0.04237, "gap_99": 0.5264}
    measured = read(gaps=[{**gap, "k3": 0.00702}])
    assert tables.mismatch_table(measured).splitlines()[-1] == (
        "| INT8 | FP8 | 30552 | 0.0424 | 0.53 | 7.0e-03 |"
    )


def test_attention_shows_the_tiling_of_the_engine(read):
    shape = {"heads": 28, "kv_heads": 4, "head_dim": 128, "batch": 64, "context": 1024}
    chosen = vars(tables.choose_tiling(128, tables.CACHES["bf16"]))
    other = {**chosen, "block": 2 * chosen["block"]}
    rows = [
        {"cache": "bf16", **shape, "tiling": tiling, "us": us, "gb_s": gb_s}
        for tiling, us, gb_s in ((other, 1.0, 9999.0), (chosen, 39.2, 3427.0))
    ]
    lines = tables.attention_table(read(rows=rows)).splitlines()
    assert lines[2:] == ["| 28 / 4 (7B) | 64 x 1024 | 3.43 | not measured | 39 | not measured |"]


def test_the_short_table_has_only_workloads_that_were_measured(read):
    measured = read([rollout(20_000)], [rollout(30_000, quant="int8")])
    text = tables.render_speed(measured)
    assert "| 7B, A (256 x 512 + 1024) | 20.0 (22.3) | 30.0 (26.3) | not measured (25.1) |" in text
    assert "1.5B" not in text
