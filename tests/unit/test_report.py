import io
import re
import sys
from xml.etree import ElementTree

import pytest

from qurl.config import Config
from qurl.errors import DataError, MissingExtra
from qurl.run.directory import Run
from qurl.run.report import build_headlines, write_report
from qurl.run.report.charts import build_charts, read_curve
from qurl.run.report.figures import _moving_average


def open_run(tmp_path, steps=4):
    config = Config(steps=steps, run_dir=str(tmp_path / "my-run"))
    return Run.open(config, output=io.StringIO())


def accuracy(precision, value):
    name = f"eval/{precision}/accuracy"
    return {name: value, f"{name}_low": value - 0.1, f"{name}_high": value + 0.1}


@pytest.fixture
def run(tmp_path):
    """Three steps, an evaluation before and after, a NaN and a torn last line."""
    run = open_run(tmp_path)
    run.log(-1, accuracy("full", 0.25) | accuracy("int8", 0.21875) | {"timing_s/eval": 0.5})
    for step in (0, 1, 2):
        run.log(
            step,
            {
                "reward/mean": 0.125 * (step + 1),
                "rollout_corr/kl": 1.4e-3,
                "rollout_corr/k3_kl": 1.5e-3,
                "rollout_corr/rollout_is_max": 10.0**step,
                "actor/entropy": float("nan"),
                "uaq/quant_error": 0.0,
                "perf/rollout_tokens_per_s": 1000.0 * (step + 1),
                "timing_s/rollout": 2.0,
                "timing_s/update": 1.0,
            }
            | (accuracy("full", 0.4375) | {"timing_s/eval": 0.5} if step == 2 else {}),
        )
    run.sample(3, {"prompt": "Is 1 < 2 & <b>?", "completion": "<script>x()</script>", "reward": 1})
    run.event("alarm", "KL <em>rose</em>")
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    return run


def titles(page):
    return re.findall(r"<figcaption><b>(.*?)</b>", page)


def test_report_shows_the_numbers(run):
    path = write_report(run.path)
    assert path == run.path / "report.html"
    page = path.read_text()
    for text in (
        "my-run",
        "3 of 4",
        "0.125 → 0.375",
        "25.0% → 43.8%",
        "step 0 → 2",
        "after 0 → 3 steps, 95%: 33.8% to 53.8%",
        "21.9%",
        "2,000",  # median of 1000, 2000, 3000
        "1.50e-03",
        "1 alarm",
        "quant.format",
        "scratch on arithmetic",
    ):
        assert text in page


def test_curves_only_where_there_is_data(run):
    page = write_report(run.path).read_text()
    assert titles(page) == [
        "Reward",
        "Held-out accuracy",
        "Mismatch: KL",
        "Mismatch: largest ratio",
        "Time per step",
    ]
    svgs = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(svgs) == 5
    for svg in svgs:
        ElementTree.fromstring(svg)
    assert "int8" in svgs[1]
    assert "int8" not in svgs[0]


def test_text_of_the_run_is_escaped(run):
    page = write_report(run.path).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;x()&lt;/script&gt;" in page
    assert "Is 1 &lt; 2 &amp; &lt;b&gt;?" in page
    assert "KL &lt;em&gt;rose&lt;/em&gt;" in page


def test_report_needs_no_network(run):
    page = write_report(run.path).read_text()
    addresses = set(re.findall(r"https?://[^\"' <]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names only
    assert not re.search(r"<(link|img|script|iframe)\b|@import|url\(http", page)


def test_ids_of_the_figures_do_not_clash(run):
    page = write_report(run.path).read_text()
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 0
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


def test_figures_take_the_colour_of_the_page(run):
    page = write_report(run.path).read_text()
    assert "currentColor" in page
    assert not re.search(r"(stroke|fill): #(000000|010203)", page)


def test_report_is_the_same_twice(run):
    assert write_report(run.path).read_bytes() == write_report(run.path).read_bytes()


def test_a_run_without_steps_has_a_report(tmp_path):
    page = write_report(open_run(tmp_path).path).read_text()
    assert "0 of 4" in page
    assert "No step has been logged yet" in page
    assert "<svg" not in page


def test_a_long_run_shows_first_and_last_samples(tmp_path):
    run = open_run(tmp_path)
    for step in range(40):
        run.sample(step, {"prompt": "p", "completion": f"answer-{step}.", "reward": 0.0})
    page = write_report(run.path).read_text()
    shown = [int(n) for n in re.findall(r"answer-(\d+)\.", page)]
    assert shown == [*range(4), *range(28, 40)]


def test_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(DataError, match=r"is not a run directory: it has no config\.json"):
        write_report(tmp_path)


def test_matplotlib_is_an_extra(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "qurl.run.report.figures")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"qurl-rl\[report\]"):
        write_report(run.path)


def test_read_curve_leaves_out_what_is_not_finite():
    metrics = [{"step": 1, "x": 1.0}, {"step": 2, "x": "nan"}, {"step": 3}, {"step": 4, "x": -2}]
    curve = read_curve(metrics, "x", "label")
    assert curve is not None
    assert (curve.steps, curve.values) == ([1, 4], [1.0, -2.0])
    assert read_curve(metrics, "y", "label") is None
    positive = read_curve(metrics, "x", "label", "log")
    assert positive is not None
    assert positive.steps == [1]


def test_evaluations_are_drawn_at_the_number_of_updates():
    rows = [{"step": -1, **accuracy("full", 0.5)}, {"step": 1, "x": 1, **accuracy("full", 0.7)}]
    curve = read_curve(rows, "eval/full/accuracy", "full")
    assert curve is not None
    assert (curve.steps, curve.values) == ([0, 2], [0.5, 0.7])
    assert curve.low == pytest.approx([0.4, 0.6])
    trained = read_curve(rows, "x", "x")
    assert trained is not None
    assert trained.steps == [1]


def test_time_chart_has_a_curve_for_each_part():
    metrics = [
        {"step": 1, "timing_s/eval": 5.0, "timing_s/rollout": 2.0},
        {"step": 2, "timing_s/rollout": 3.0},
        {"step": 3, "other": 1.0},
    ]
    (chart,) = build_charts(metrics)
    assert [(c.label, c.steps, c.values) for c in chart.curves] == [
        ("eval", [1], [5.0]),
        ("rollout", [1, 2], [2.0, 3.0]),
    ]


def test_headline_of_a_single_evaluation():
    metrics = [{"step": -1, **accuracy("full", 0.5)}]
    headlines = build_headlines(5, metrics, [])
    assert [h.value for h in headlines] == ["0 of 5", "50.0%"]


def test_moving_average_is_centred_and_exact_at_the_ends():
    # width 3: (1 + 2) / 2, (1 + 2 + 6) / 3, (2 + 6 + 4) / 3, (6 + 4) / 2
    assert list(_moving_average([1, 2, 6, 4], 3)) == pytest.approx([1.5, 3, 4, 5])
