"""The page in a real browser: it loads, updates, filters, and can be read by everyone."""

import io
import math
import re
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import qurl.run.watch as watch_module
from qurl.config import Config
from qurl.run.directory import Run
from qurl.run.report import write_report
from qurl.run.watch import WatchServer

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "report.png"
HOSTILE = "</script><img src=x onerror=alert(1)><b>bold</b>\u202e"


def metrics(step, num_steps=60):
    done = step / num_steps
    return {
        "reward/mean": 0.2 + 0.7 * done + 0.02 * math.sin(step),
        "response_length/mean": 40 + 20 * done,
        "response_length/max": 100.0,
        "response_length/clip_ratio": 0.01,
        "actor/entropy": 1.5 - done,
        "actor/grad_norm": 1 + 0.3 * math.cos(step),
        "actor/pg_loss": 0.01 * math.sin(step),
        "actor/lr": 1e-5 * (1 - done),
        "actor/pg_clipfrac": 0.02,
        "acr/rescued_frac": 0.001,
        "rollout_corr/k3_kl": 1e-5 * 10 ** (2 * done),
        "rollout_corr/rollout_is_eff_sample_size": 0.999 - 0.01 * done,
        "perf/rollout_tokens_per_s": 20_000.0,
        "timing_s/rollout": 2.0,
        "timing_s/update": 3.0,
        "timing_s/sync": 0.2,
        "timing_s/step": 5.5,
    }


def accuracy(value):
    name = "eval/full/accuracy"
    return {name: value, f"{name}_low": value - 0.05, f"{name}_high": value + 0.05}


def sample(step, index=0):
    """Even indices are right; index 3 is truncated, and has the largest mismatch, a factor of 5."""
    tokens = ["The", " sum", " is", " ", str(step), "\n", HOSTILE if index == 1 else "."]
    n, gap = len(tokens), math.log(5) if index == 3 else 0.05
    return {
        "problem": f"p-{step}-{index}",
        "prompt": f"What is {step}+{index}? {HOSTILE}",
        "completion": "".join(tokens),
        "answer": str(step + index),
        "reward": float(index % 2 == 0),
        "finish": "length" if index == 3 else "stop",
        "has_prox": True,
        "token_ids": list(range(n)),
        "tokens": tokens,
        "logp_behav": [-2.0] * n,
        "logp_prox": [-2.0] * 4 + [-2.0 + gap] + [-2.0] * 2,
        "logp": [-2.0] * 4 + [-2.0 + gap + math.log(1.3)] + [-2.0] * 2,
        "advantages": [1.0] * n,
        "shrink": [1.0] * 4 + [min(1.0, 2 / math.exp(gap))] + [1.0] * 2,
        "mask": [1.0] * n,
    }


def make_run(folder, num_steps=50, seed=0):
    run = Run.open(Config(steps=60, run_dir=str(folder), seed=seed), output=io.StringIO())
    machine = {"device": "CPU", "python": "3.11", "versions": {"torch": "2.11"}, "commit": "abc123"}
    run.event("start", "on CPU", machine=machine)
    run.log(-1, accuracy(0.2) | {"timing_s/eval": 1.0})
    run.evaluation(0, "full", [True] * 20 + [False] * 80)
    for step in range(num_steps):
        run.log(step, metrics(step) | (accuracy(0.6) if step == 29 else {}))
        for index in range(4):
            run.sample(step, sample(step, index))
    run.evaluation(30, "full", [True] * 60 + [False] * 40)
    run.event("warning", "step 10: 2 graders were killed", step=10)
    return run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "demo-run")


@pytest.fixture
def report(run):
    return write_report(run.path).as_uri()


@contextmanager
def serving(monkeypatch, *paths):
    monkeypatch.setattr(watch_module, "POLL_SECONDS", 0.05)
    with WatchServer(paths) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.is_closing.set()
            server.shutdown()
            thread.join()


def wait_for_steps(page, text):
    page.locator(".verdict .progress", has_text=text).wait_for()


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def test_a_newcomer_finds_the_three_answers(report, open_page):
    """Is it healthy, where does its time go, which tokens did the sampler get wrong?"""
    page = open_page(report)
    verdict = page.locator("#verdict")
    assert "Look closer" in verdict.inner_text()  # there is one warning
    assert "1 warning" in verdict.inner_text()
    assert "+40.0 points" in verdict.inner_text()
    assert re.search(r"update\s*54", page.locator("#time").inner_text())  # 150 of 276 seconds
    assert "new weights are quantized for the sampler" in page.locator("#time").inner_text()
    summary = page.locator("#samples .summary").inner_text()  # 50 of 1400 tokens are off by 5
    assert "within a factor of 5 on 99% of these 1400 tokens" in summary
    first = page.locator("#samples table tbody tr").first.inner_text()
    assert "\u00d75" in first
    assert "rescued" in first  # R = 1.3 is above 1.2 and below 1.2 / (2 / 5) = 3


def test_every_chart_is_drawn_and_described(report, open_page):
    page = open_page(report)
    names = page.locator("#charts figcaption b").all_inner_texts()
    assert {"Reward", "Held-out accuracy", "Mismatch KL", "Time per step (s)"} <= set(names)
    assert page.locator("#charts canvas").count() == len(names)
    label = page.locator("figure", has_text="Held-out accuracy").locator(".plot")
    assert "full: from 20% to 60%" in label.get_attribute("aria-label")
    painted = page.evaluate(
        """() => [...document.querySelectorAll('#charts canvas')].every((canvas) => {
          const { width, height } = canvas;
          const pixels = canvas.getContext('2d').getImageData(0, 0, width, height).data;
          return pixels.some((x) => x > 0);
        })"""
    )
    assert painted


def test_named_held_out_sets_have_a_chart(tmp_path, open_page):
    run = make_run(tmp_path / "run", num_steps=2)
    for step, right in ((2, 0.25), (3, 0.5)):
        sets = {"eval/full/gsm8k/accuracy": right, "eval/int8/math 500/accuracy": right / 2}
        run.log(step, metrics(step) | accuracy(0.4) | sets)
    page = open_page(write_report(run.path).as_uri())
    label = page.locator("figure", has_text="Held-out accuracy by set").locator(".plot")
    assert "full gsm8k: from 25% to 50%" in label.get_attribute("aria-label")
    assert "int8 math 500: from 12.5% to 25%" in label.get_attribute("aria-label")


def test_log_ticks_can_be_read(report, open_page):
    page = open_page(report)
    ticks = page.evaluate("logTicks(1e-5, 1e-3).map((x) => shown(x))")
    assert ticks == ["10⁻⁵", "3\u00d710⁻⁵", "10⁻⁴", "3\u00d710⁻⁴", "0.001"]
    assert page.evaluate("logTicks(0.8, 1.3)") == [0.8, 1, 1.2]
    assert page.evaluate("logTicks(1e-9, 10).length") <= 6


def test_shares_can_be_read_near_both_ends(report, open_page):
    page = open_page(report)
    shares = page.evaluate("[0, 0.0004, 0.27, 0.9996, 1].map(share)")
    assert shares == ["0%", "0.04%", "27%", "99.96%", "100%"]
    assert page.evaluate("rangeOf({ scale: 'share' }, 0, 0)") == [0, 0.1], "nothing below 0%"


def test_curves_over_wall_clock(report, open_page):
    page = open_page(report)
    plot = page.locator("figure", has_text="Reward").locator(".plot").first
    assert "step" in plot.inner_text()
    page.get_by_label("wall clock").check()
    assert "time" in plot.inner_text()
    page.get_by_label("smooth").uncheck()
    page.get_by_label("events", exact=True).uncheck()


def test_filters(report, open_page):
    page = open_page(report)
    count = page.locator(".filters output")
    assert count.inner_text() == "200 of 200 samples"
    page.get_by_label("from step").fill("10")
    page.get_by_label("to step").fill("19")
    assert count.inner_text() == "40 of 200 samples"
    page.locator("select[name=reward]").select_option("bad")
    assert count.inner_text() == "20 of 200 samples"
    page.locator("select[name=end]").select_option("length")
    assert count.inner_text() == "10 of 200 samples"
    page.locator("select[name=order]").select_option("old")
    assert "step 10" in page.locator(".list button").first.inner_text()
    page.get_by_label("from step").fill("99")
    assert "No sample passes" in page.locator(".detail").inner_text()


def test_sample_shows_the_true_answer_and_its_tokens(report, open_page):
    page = open_page(report)
    page.locator("select[name=order]").select_option("new")
    page.locator(".list button").nth(3).click()
    detail = page.locator(".detail")
    assert "p-49-3" in detail.inner_text()
    assert re.search(r"true answer\s*52", detail.inner_text())
    assert "truncated at sampling.max_tokens" in detail.inner_text()
    token = detail.locator(".tokens .active")
    assert (token.inner_text(), token.get_attribute("class")) == ("49", "m-r active")
    assert "ratio \u00d75" in detail.locator(".inspect").inner_text()
    assert "Rescued" in detail.locator(".inspect").inner_text()


def test_hostile_text_stays_text(report, open_page):
    page = open_page(report)
    assert page.locator("img").count() == 0
    page.locator("select[name=order]").select_option("new")
    page.locator(".list button").nth(1).click()
    assert "<b>bold</b>⟨U+202E⟩" in page.locator(".tokens").inner_text()


def test_keyboard(report, open_page):
    page = open_page(report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "verdict"
    plot = page.locator("figure", has_text="Reward").locator(".plot").first
    plot.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    spoken = page.locator("figure", has_text="Reward").first.locator("[aria-live]")
    assert re.match(r"step 1: reward 0\.\d+", spoken.inner_text())
    tokens = page.locator(".tokens")
    tokens.focus()
    page.keyboard.press("Home")
    assert page.locator(".tokens .active").inner_text() == "The"
    page.keyboard.press("ArrowRight")
    assert page.locator(".tokens .active").inner_text().strip() == "sum"
    assert "sampler 13.5" in page.locator(".inspect").inner_text()  # exp(-2)


def test_everything_has_a_name(report, open_page):
    """Controls have labels, sections have headings, images have descriptions."""
    page = open_page(report)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('input, select, button, [role=img], section')]
          .filter((e) => !e.closest('label') && !e.ariaLabel && !e.innerText?.trim()
                         && !e.getAttribute('aria-labelledby'))
          .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    assert page.locator("h1").count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"


def test_phone(report, open_page):
    page = open_page(report, width=390, height=800)
    assert overflow(page) == 0
    page.locator("#samples .list button").first.click()
    assert overflow(page) == 0
    assert page.locator("#charts .plot").first.bounding_box()["width"] <= 390


def test_dark(report, open_page):
    light, dark = (open_page(report, color_scheme=scheme) for scheme in ("light", "dark"))
    brightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert min(light.evaluate(brightness)) > 230
    assert max(dark.evaluate(brightness)) < 40
    for page in (light, dark):
        assert page.evaluate(CONTRAST) >= 4.5
    dark.emulate_media(color_scheme="light")  # redraws
    assert min(dark.evaluate(brightness)) > 230


CONTRAST = """() => {
  const light = ([r, g, b]) => [r, g, b].map((x) => x / 255)
    .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const parse = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const card = light(parse(getComputedStyle(document.querySelector('.checks li')).backgroundColor));
  const texts = ['.checks span:not(.icon)', '.checks b', 'figcaption span', '#time .soft'];
  return Math.min(...texts.map((selector) => {
    const text = light(parse(getComputedStyle(document.querySelector(selector)).color));
    return (Math.max(text, card) + 0.05) / (Math.min(text, card) + 0.05);
  }));
}"""


def test_several_runs(run, tmp_path, open_page):
    other = make_run(tmp_path / "other", num_steps=30, seed=1)
    path = write_report(run.path, other.path, out=tmp_path / "both.html")
    page = open_page(path.as_uri())
    text = page.locator("#comparison").inner_text()
    assert "other cannot be told apart from demo-run" in text
    assert re.search(r"seed\s+0\s+1", text)
    legend = page.locator("figure", has_text="Reward").first.locator(".u-legend").inner_text()
    assert "demo-run" in legend
    assert "other" in legend
    figure = page.locator("figure", has_text="Response length").first
    lines = figure.locator(".u-series:not([hidden]) .u-marker")
    styles = lines.evaluate_all("nodes => nodes.map((node) => node.style.borderStyle)")
    assert styles[1:] == ["solid", "dashed", "solid", "dashed"], "as the curves are drawn"
    page.locator("select[name=run]").select_option("1")
    assert page.locator(".filters output").inner_text() == "120 of 320 samples"


def test_an_empty_run(tmp_path, open_page):
    run = Run.open(Config(run_dir=str(tmp_path / "new")), output=io.StringIO())
    page = open_page(write_report(run.path).as_uri())
    assert "Nothing to judge yet" in page.locator("#verdict").inner_text()
    assert page.locator("canvas").count() == 0
    run.log(-1, accuracy(0.2) | {"timing_s/eval": 1.0, "timing_s/step": 1.5})
    page = open_page(write_report(run.path).as_uri())
    assert page.locator("canvas").count() == 1, "the accuracy of the untrained model"


def test_a_step_appears_as_it_is_logged(run, open_page, monkeypatch):
    with serving(monkeypatch, run.path) as server:
        page = open_page(server.url)
        wait_for_steps(page, "50 of 60 steps")
        assert page.locator("#live").inner_text().endswith("live")
        page.locator("select[name=order]").select_option("new")
        page.locator("select[name=reward]").select_option("bad")
        run.log(50, metrics(50))
        run.sample(50, sample(50, 1))
        run.event("alarm", "step 50: entropy collapsed", step=50)
        wait_for_steps(page, "51 of 60 steps")
        page.locator("#verdict", has_text="Needs attention").wait_for()
        assert "step 50: entropy collapsed" in page.locator("#events").inner_text()
        page.locator(".list button", has_text="step 50").wait_for()
        assert page.locator("select[name=reward]").input_value() == "bad", "filters stay"
        assert "51 of 60" in page.locator("#announce").inner_text()
        label = page.locator("figure", has_text="Reward").locator(".plot").first
        assert f"to {0.2 + 0.7 * 50 / 60 + 0.02 * math.sin(50):.3f}" in label.get_attribute(
            "aria-label"
        )
        page.close()


def test_a_restart_of_the_run_is_survived(run, open_page, monkeypatch):
    with serving(monkeypatch, run.path) as server:
        page = open_page(server.url)
        wait_for_steps(page, "50 of 60 steps")
        run.rewind(20)  # what a resumed run does
        wait_for_steps(page, "20 of 60 steps")
        page.get_by_text("80 of 80 samples").wait_for()
        run.log(20, metrics(20))
        wait_for_steps(page, "21 of 60 steps")
        page.close()


def test_a_restart_of_the_server_is_survived(run, open_page, monkeypatch):
    with serving(monkeypatch, run.path) as server:
        port = server.server_address[1]
        page = open_page(server.url)
        wait_for_steps(page, "50 of 60 steps")
    page.get_by_text("reconnecting").wait_for()
    run.log(50, metrics(50))
    original = WatchServer.__init__
    monkeypatch.setattr(
        WatchServer, "__init__", lambda self, paths: original(self, paths, port=port)
    )
    with serving(monkeypatch, run.path):
        wait_for_steps(page, "51 of 60 steps")
        page.close()


def test_picture_of_the_readme(run, open_page, pytestconfig, tmp_path):
    chosen = pytestconfig.getoption("--picture")
    page = open_page(
        write_report(chosen or run.path).as_uri(), height=1400, device_scale_factor=1.5
    )
    page.wait_for_timeout(300)
    target = FIGURE if chosen else tmp_path / "report.png"
    bottom = page.locator("figure").first.bounding_box()
    height = bottom["y"] + bottom["height"] + 24
    page.screenshot(path=target, clip={"x": 0, "y": 0, "width": 1280, "height": height})
    assert target.stat().st_size > 50_000, "a blank page is smaller"
