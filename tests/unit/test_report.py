"""The page of a run: what it says, what it leaves out, and that hostile text stays text."""

import base64
import hashlib
import io
import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

import qurl.run.report.reader as reader_module
import qurl.run.report.samples as samples_module
from qurl.cli import main
from qurl.config import Config
from qurl.config.schema import TaskConfig
from qurl.errors import DataError
from qurl.run.directory import Run
from qurl.run.intervals import paired_difference, unpaired_difference
from qurl.run.report import open_runs, write_report
from qurl.run.report.charts import CHARTS, is_charted
from qurl.run.report.compare import compare, find_differences
from qurl.run.report.page import to_script
from qurl.run.report.reader import RunReader, Tail
from qurl.run.report.samples import mark_tokens, parse_sample, printable
from qurl.run.report.verdict import Facts, judge

EVENTS = "events.jsonl"


def open_run(folder, steps=4, **keys):
    return Run.open(Config(steps=steps, run_dir=str(folder), **keys), output=io.StringIO())


def accuracy(precision, value):
    name = f"eval/{precision}/accuracy"
    return {name: value, f"{name}_low": value - 0.1, f"{name}_high": value + 0.1}


def row(step, **more):
    return {
        "reward/mean": 0.125 * (step + 1),
        "rollout_corr/kl": 1.4e-3,
        "rollout_corr/k3_kl": 1.5e-3,
        "rollout_corr/rollout_is_eff_sample_size": 0.99,
        "response_length/clip_ratio": 0.0,
        "perf/rollout_tokens_per_s": 1000.0 * (step + 1),
        "timing_s/rollout": 2.0,
        "timing_s/update": 1.0,
        "timing_s/step": 4.0,
    } | more


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\ud800\u202e\x00"


def sample(**more):
    return {
        "problem": "p-1",
        "prompt": "1+1=",
        "completion": "2",
        "answer": "2",
        "reward": 1.0,
        "finish": "stop",
        "has_prox": True,
        "token_ids": [5, 2],
        "tokens": ["2", "<eos>"],
        "logp_behav": [-1.0, -0.5],
        "logp_prox": [-0.75, -0.5],
        "logp": [-0.75, -0.5],
        "advantages": [1.0, 1.0],
        "shrink": [1.0, 1.0],
        "mask": [1.0, 1.0],
    } | more


@pytest.fixture
def run(tmp_path):
    """Three of four steps, an evaluation before and after, and a torn last line."""
    run = open_run(tmp_path / "my-run")
    run.event("start", "on CPU", machine={"device": "CPU (8 cores)", "commit": "abc"})
    run.log(-1, accuracy("full", 0.25) | accuracy("int8", 0.25) | {"timing_s/eval": 0.5})
    run.evaluation(0, "full", [True, False, False, False])
    for step in (0, 1, 2):
        run.log(step, row(step, **(accuracy("full", 0.75) if step == 2 else {})))
        run.sample(step, sample(reward=float(step)))
    run.evaluation(3, "full", [True, True, True, False])
    run.event("alarm", "step 2: KL rose", step=2)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    return run


class Page(HTMLParser):
    """Scripts, styles, attributes and the embedded data of a page, as a browser splits it."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.scripts, self.styles, self._within, self.data = [], [], [], "", None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._within = (tag, dict(attributes).get("id"))

    def handle_endtag(self, tag):
        self._within = ""

    def handle_data(self, text):
        if self._within == ("script", "data"):
            self.data = json.loads(text)
        elif self._within and self._within[0] in ("script", "style"):
            (self.scripts if self._within[0] == "script" else self.styles).append(text)

    @property
    def policy(self):
        metas = [a for tag, a in self.tags if tag == "meta"]
        return next(a["content"] for a in metas if "http-equiv" in a)


# The page as a file


def test_report_holds_the_run(run):
    path = write_report(run.path)
    assert path == run.path / "report.html"
    data = Page(path).data
    (shown,) = data["runs"]
    assert (shown["name"], data["live"], data["comparison"]) == ("my-run", False, None)
    columns = shown["columns"]
    assert columns["step"] == [-1, 0, 1, 2]
    assert columns["reward/mean"] == [None, 0.125, 0.25, 0.375]
    assert columns["eval/full/accuracy_low"] == [0.15, None, None, 0.65]
    assert columns["seconds"] == [0.5, 4.5, 8.5, 12.5]  # the untrained model took 0.5
    assert shown["seconds"] == {"eval": 0.5, "other": 3.0, "rollout": 6.0, "update": 3.0}
    assert shown["machines"] == [{"device": "CPU (8 cores)", "commit": "abc"}]
    assert [event["kind"] for event in shown["events"]] == ["start", "alarm"]
    assert shown["events"][1]["step"] == 2
    assert [s["step"] for s in shown["samples"]] == [0, 1, 2]
    assert shown["config"]["quant.format"] == "int8"


def test_report_needs_no_network(run):
    page = Page(write_report(run.path))
    assert not any(
        name in ("src", "href") and not value.startswith("#")
        for _, attributes in page.tags
        for name, value in attributes.items()
    )
    assert {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object"} == set()
    assert not re.search(r"@import|url\(", "".join(page.styles))
    assert "default-src 'none'" in page.policy
    assert "connect-src 'none'" in page.policy


def test_only_our_own_scripts_may_run(run):
    page = Page(write_report(run.path))
    for kind, texts in (("script-src", page.scripts), ("style-src", page.styles)):
        allowed = re.search(rf"{kind} ([^;]*)", page.policy)[1].split()
        digests = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts]
        assert allowed == [f"'sha256-{digest}'" for digest in digests]
        assert texts


def test_hostile_text_stays_text(run):
    run.sample(3, sample(prompt=HOSTILE.replace("\ud800", ""), tokens=[HOSTILE[:20], "b"]))
    with (run.path / EVENTS).open("a") as file:  # a lone surrogate, as JSON may spell it
        record = {"time": "t", "kind": "<b>", "message": HOSTILE, "more": [HOSTILE]}
        file.write(json.dumps(record) + "\n")
    path = write_report(run.path)
    text = path.read_text()
    assert "alert(1)</script>" not in text
    assert "<img" not in text
    page = Page(path)
    assert len(page.scripts) == 5
    event, last = page.data["runs"][0]["events"][-1], page.data["runs"][0]["samples"][-1]
    clean = HOSTILE[:-3] + "⟨U+D800⟩⟨U+202E⟩⟨U+0000⟩"
    assert (event["kind"], event["message"]) == ("<b>", clean)
    assert last["prompt"] == clean.replace("⟨U+D800⟩", "")
    assert last["tokens"][0] == HOSTILE[:20]


def test_json_cannot_end_its_element():
    text = to_script({"a": "</script><!--\u2028é"})
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text) == {"a": "</script><!--\u2028é"}


def test_report_is_the_same_twice(run):
    assert write_report(run.path).read_bytes() == write_report(run.path).read_bytes()


def test_a_run_without_steps_has_a_report(tmp_path):
    shown = Page(write_report(open_run(tmp_path / "new").path)).data["runs"][0]
    assert (shown["columns"], shown["samples"]) == ({}, [])
    assert shown["verdict"]["title"] == "Nothing to judge yet"


def test_a_place_that_cannot_be_written(run, tmp_path, capsys):
    place = tmp_path / "nowhere" / "page.html"
    assert main(["report", str(run.path), "--out", str(place)]) == 2
    assert capsys.readouterr().err == (
        f"DataError: cannot write {place}: No such file or directory; choose another file with "
        "--out FILE.html\n"
    )


def test_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(DataError, match=r"is not a run directory: it has no config\.json"):
        write_report(tmp_path)


def test_assets_are_in_the_package_with_their_licence():
    assets = Path(reader_module.__file__).parent / "assets"
    assert "MIT" in (assets / "uPlot.LICENSE").read_text()
    assert "uPlot" in (assets / "uPlot.iife.min.js").read_text()


# Reading


def test_what_is_new_is_read_and_a_rewind_starts_anew(run):
    reader = RunReader(run.path)
    assert reader.read()["reset"]
    assert reader.read() is None
    run.rewind(3)  # cuts the torn line off, and replaces the files
    again = reader.read()
    assert (again["reset"], again["columns"]["step"]) == (True, [-1, 0, 1, 2])
    run.log(3, row(3))
    new = reader.read()
    assert (new["reset"], new["columns"]["step"]) == (False, [3])
    assert new["columns"]["seconds"] == [16.5]
    assert new["verdict"]["done"] == 4
    run.rewind(1)
    again = reader.read()
    assert (again["reset"], again["columns"]["step"]) == (True, [-1, 0])
    assert len(again["samples"]) == 1
    assert again["seconds"]["rollout"] == 2.0


def test_a_line_is_read_when_it_is_complete(tmp_path):
    path = tmp_path / "x.jsonl"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes(b'{"a": 1}\n{"a"')
    assert tail.lines() == [b'{"a": 1}']
    with path.open("ab") as file:
        file.write(b": 2}\n" + b"x" * 100_000 + b"\n")
    assert [len(line) for line in tail.lines()] == [8, 100_000]
    assert not tail.is_replaced
    path.unlink()
    assert tail.is_replaced


def test_a_broken_line_is_named(run):
    (run.path / EVENTS).write_text("{]\n")
    with pytest.raises(DataError, match=r"events\.jsonl has a line that is not valid JSON"):
        RunReader(run.path).read()


def test_numbers_that_are_not_finite_are_gaps(tmp_path):
    run = open_run(tmp_path / "run")
    run.log(0, row(0, **{"actor/entropy": math.nan}))
    run.log(1, row(1, **{"actor/entropy": 0.5}))
    shown = RunReader(run.path).read()
    assert shown["columns"]["actor/entropy"] == [None, 0.5]
    broken = next(c for c in shown["verdict"]["checks"] if "finite" in c["question"])
    assert (broken["level"], "actor/entropy" in broken["answer"]) == ("bad", True)


def test_a_long_run_is_thinned_and_keeps_evaluations(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_ROWS", 10)
    run = open_run(tmp_path / "run", steps=30)
    for step in range(30):
        run.log(step, row(step, **(accuracy("full", 0.5) if step == 7 else {})))
    shown = RunReader(run.path).read()
    assert shown["stride"] == 3
    assert shown["columns"]["step"] == [0, 3, 6, 7, 9, 12, 15, 18, 21, 24, 27, 29]
    assert shown["columns"]["seconds"][-1] == 120.0
    assert shown["seconds"]["rollout"] == 60.0, "all steps count"


def test_of_many_events_alarms_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_EVENTS", 3)
    run = open_run(tmp_path / "run")
    kinds = ["checkpoint", "alarm", "fallback", "warning", "alarm", "checkpoint"]
    for step, kind in enumerate(kinds):
        run.event(kind, "...", step=step)
    update = RunReader(run.path).read()
    assert [(event["kind"], event["step"]) for event in update["events"]] == [
        ("alarm", 1),
        ("warning", 3),
        ("alarm", 4),
    ]
    assert update["num_events"] == 6


def test_many_samples_are_spread_evenly(tmp_path, monkeypatch):
    run = open_run(tmp_path / "run", steps=100)
    for step in range(100):
        run.sample(step, sample(prompt="x" * 1000))
    monkeypatch.setattr(samples_module, "MAX_BYTES", 15_000)
    shown = RunReader(run.path).read()
    steps = [s["step"] for s in shown["samples"]]
    assert (steps[0], steps[-1], shown["num_samples"]) == (0, 99, 100)
    assert 5 <= len(steps) <= 15
    assert max(b - a for a, b in pairwise(steps)) <= 100 / len(steps) * 1.5 + 1


def test_every_chart_names_metrics_that_the_code_logs():
    source = "".join(
        p.read_text()
        for p in Path(reader_module.__file__).parents[2].rglob("*.py")
        if "report" not in p.parts
    )
    for chart in CHARTS:
        for name in chart.metrics:
            known = "uaq/" in name or "*" in name or f'"{name}' in source
            assert known or f"{{name}}/{name.split('/')[1]}" in source, name
    assert is_charted("eval/int8/accuracy_low")
    assert is_charted("eval/int8/gsm8k/accuracy_high")
    assert not is_charted("eval/int8/pass@4")


# Tokens


def config_of(**keys):
    names = {"algo.objective": "acr", "algo.clip_low": 0.2, "algo.clip_high": 0.2, "algo.cap": 2.0}
    return names | {name.replace("__", "."): value for name, value in keys.items()}


def ratios(*values):
    return [math.log(value) for value in values]


def test_marks_by_hand():
    """R = 1.3, 1.3, 1.3, 2.5, 0.7, 0.7, 1, 1.3; the bound of acr is 1.2 / r = 2.4 at r = 1/2."""
    record = {
        "logp": ratios(1.3, 1.3, 1.3, 2.5, 0.7, 0.7, 1.0, 1.3),
        "logp_prox": [0.0] * 8,
        "logp_behav": [0.0] * 8,
        "advantages": [1, 1, -1, 1, 1, -1, 1, 1],
        "shrink": [1, 0.5, 1, 0.5, 1, 1, 0.5, 1],
        "mask": [1, 1, 1, 1, 1, 1, 1, 0],
    }
    assert "".join(mark_tokens(record, config_of())) == "cr c ctx"
    # tis has no wider bound: the second is clipped; a limit of 1.25 clips it too.
    assert "".join(mark_tokens(record, config_of(algo__objective="tis"))) == "cc c ctx"
    narrow = config_of(experimental__acr_max_bound=1.25)
    assert "".join(mark_tokens(record, narrow)) == "cc c ctx"
    # Against the sampler, whose log-probs are higher by log 1.3, the first three have R = 1.
    behav = record | {"logp_behav": ratios(*[1.3] * 8)}
    assert "".join(mark_tokens(behav, config_of(algo__objective="ppo_behav")))[:3] == " t "


def test_marks_of_an_older_run_know_truncation_only():
    record = {"logp_behav": ratios(0.1, 0.1), "logp_prox": ratios(0.19, 0.21)}
    assert "".join(mark_tokens(record, config_of())) == " t"
    assert "".join(mark_tokens(record, config_of(algo__cap=None))) == "  "


def parse(**more):
    return parse_sample(json.dumps(sample(**more)).encode(), config_of(), "samples.jsonl")


def test_sample_by_token():
    found = parse()
    assert found["tokens"] == ["2", "<eos>"]
    assert found["gaps"] == [0.25, 0.0]
    assert found["behav"] == [-1.0, -0.5]
    assert (found["answer"], found["reward"], found["length"]) == ("2", 1.0, 2)


def test_a_sample_without_prox_has_no_gaps():
    assert parse(has_prox=False)["gaps"] == []
    line = json.dumps(sample()).encode()
    assert parse_sample(line, config_of(correction__mode="bypass"), "")["gaps"] == []


def test_a_long_completion_loses_its_middle():
    n = 2300
    columns = {name: [-0.5] * n for name in ("logp_behav", "logp_prox", "logp")}
    rest = {name: [1.0] * n for name in ("advantages", "shrink", "mask")}
    found = parse(tokens=[str(i) for i in range(n)], token_ids=[1] * n, **columns, **rest)
    assert (found["length"], found["left_out"], len(found["tokens"])) == (n, 300, 2000)
    assert (found["tokens"][1499], found["tokens"][1500]) == ("1499", "1800")
    assert len(found["marks"]) == len(found["gaps"]) == 2000


def test_a_sample_without_texts_shows_ids():
    assert parse(tokens=[])["tokens"] == ["[5]", "[2]"]


def test_a_sample_that_is_none():
    with pytest.raises(DataError, match=r"samples\.jsonl holds a line that is no sample"):
        parse_sample(b'{"tokens": 3}', config_of(), "samples.jsonl")


def test_log_probs_that_are_not_finite_are_shown():
    found = parse(logp_prox=["nan", -0.5], advantages=["inf", 1.0])
    assert found["gaps"] == [-49.0, 0.0]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("metrics.jsonl", '{"x": 1}'),
        ("metrics.jsonl", '{"step": 1, "x": []}'),
        ("metrics.jsonl", "3"),
        ("evals.jsonl", "{}"),
    ],
)
def test_records_that_no_run_writes(run, file, line):
    (run.path / file).write_text(line + "\n")
    with pytest.raises(DataError, match=r"my-run"):
        write_report(run.path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tab\tand\nline", "tab\tand\nline"),
        ("a\u202eb\u2066c", "a⟨U+202E⟩b⟨U+2066⟩c"),
        ("\x1b[31m\r", "⟨U+001B⟩[31m⟨U+000D⟩"),
        ("\ud83d!", "⟨U+D83D⟩!"),
        ("héllo 😀 שלום", "héllo 😀 שלום"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown


# Verdict


def judged(rows=(), events=(), evals=(), **config):
    facts = Facts({"steps": 100, "sampling.max_tokens": 8} | config)
    rows = [{"step": i} | r for i, r in enumerate(rows)]
    facts.add(rows, [dict(e) for e in events], evals)
    verdict = judge(facts)
    return verdict, {c["question"]: (c["level"], c["answer"]) for c in verdict["checks"]}


def outcomes(precision, step, digits):
    return {"precision": precision, "step": step, "outcomes": digits}


def test_a_good_run_is_healthy():
    rows = [row(i, **{"reward/mean": 0.1 + 0.05 * i}) for i in range(15)]
    evals = [outcomes("full", 0, "0" * 50 + "1" * 50), outcomes("full", 15, "1" * 100)]
    verdict, checks = judged(rows, evals=evals)
    assert (verdict["level"], verdict["title"], verdict["done"]) == ("good", "Healthy", 15)
    assert checks["Does the reward rise?"] == (
        "good",
        "It rose: 0.150 → 0.750 (means of 3 steps).",  # 0.1, 0.15, 0.2 and 0.7, 0.75, 0.8
    )
    # g = 51 / 102, l = 1 / 102: 0.4902 -+ 1.96 sqrt((0.5098 - 0.2403) / 102) = 0.389 to 0.591
    level, answer = checks["Does it answer new problems better?"]
    assert level == "good"
    assert "50.0% → 100.0% after 15 steps: +50.0 points (95%: +38.9 to +59.1)" in answer
    # 15 steps of 2 + 1 of 4 seconds
    assert checks["Where does the time go?"] == (
        "info",
        "Rollouts 50%, updates 25%, other 25%. If rollouts took no time, the run would be 2.00x "
        "as fast.",
    )


def test_rewards_that_never_differ_are_bad():
    verdict, checks = judged([row(i, **{"reward/mean": 0.0}) for i in range(4)])
    level, answer = checks["Does the reward rise?"]
    assert (verdict["level"], level) == ("bad", "bad")
    assert "All 4 steps have a mean reward of 0" in answer


@pytest.mark.parametrize(
    ("metric", "value", "question", "level"),
    [
        ("response_length/clip_ratio", 0.95, "Do completions end by themselves?", "bad"),
        ("response_length/clip_ratio", 0.4, "Do completions end by themselves?", "watch"),
        ("rollout_corr/rollout_is_eff_sample_size", 0.3, "Is the sampler still the policy?", "bad"),
        (
            "rollout_corr/rollout_is_eff_sample_size",
            0.7,
            "Is the sampler still the policy?",
            "watch",
        ),
    ],
)
def test_faults_are_seen(metric, value, question, level):
    _, checks = judged([row(i, **{metric: value}) for i in range(6)])
    assert checks[question][0] == level


def test_a_falling_reward_and_accuracy_are_seen():
    rows = [row(i, **{"reward/mean": 0.9 - 0.05 * i}) for i in range(15)]
    evals = [outcomes("full", 0, "1" * 80 + "0" * 20), outcomes("full", 15, "1" * 40 + "0" * 60)]
    verdict, checks = judged(rows, evals=evals)
    assert checks["Does the reward rise?"][0] == "watch"
    assert checks["Does it answer new problems better?"][0] == "bad"
    assert verdict["title"] == "Needs attention"


def test_evaluations_of_other_problems_are_not_compared():
    evals = [outcomes("full", 0, "01"), outcomes("full", 3, "011")]
    _, checks = judged([row(0)], evals=evals)
    assert checks["Does it answer new problems better?"] == (
        "info",
        "66.7% after 3 steps; the first evaluation had 2 problems, this one 3.",
    )


def test_times_that_are_not_finite_are_left_out():
    broken = {"timing_s/rollout": -math.inf, "timing_s/step": math.inf}
    _, checks = judged([row(0), row(1, **broken)])
    # rollout 2, update 1 and 1, the rest of the first step 1
    assert checks["Where does the time go?"][1].startswith("Rollouts 40%, updates 40%, other 20%.")


def test_a_cost_of_quantization_is_seen():
    evals = [outcomes("full", 5, "1" * 90 + "0" * 10), outcomes("int8", 5, "1" * 60 + "0" * 40)]
    _, checks = judged([row(0)], evals=evals)
    level, answer = checks["Does quantization cost accuracy?"]
    assert level == "watch"
    assert "int8 answers 60.0%, full precision 90.0%: -30.0 points" in answer


@pytest.mark.parametrize(
    ("kinds", "level", "answer"),
    [
        (["alarm", "warning", "warning", "checkpoint"], "bad", "1 alarm, 2 warnings."),
        (["fallback"], "watch", "1 fallback."),
        (["checkpoint", "resume", "new-kind"], "good", "No alarms"),
    ],
)
def test_events_by_severity(kinds, level, answer):
    _, checks = judged([row(0)], [{"kind": kind} for kind in kinds])
    found = checks["Did anything go wrong?"]
    assert found[0] == level
    assert found[1].startswith(answer)


def test_alarms_are_named():
    events = [{"kind": "alarm", "name": name} for name in ("truncated", "no_signal", "truncated")]
    _, checks = judged([row(0)], events)
    answer = checks["Did anything go wrong?"][1]
    assert answer == "3 alarms. See the events below: truncated, no_signal."


# Intervals and comparison


def test_paired_difference_by_hand():
    """4 gained and 1 lost of 10: g = 5/12, l = 2/12; (7/12 - 1/16) / 12 = 0.2083^2."""
    a, b = [True] + [False] * 9, [False] + [True] * 4 + [False] * 5
    value, low, high = paired_difference(a, b)
    assert value == pytest.approx(0.3)
    assert (low, high) == pytest.approx((0.25 - 1.96 * 0.208333, 0.25 + 1.96 * 0.208333), abs=1e-5)
    assert not paired_difference(a, b).is_clear


def test_unpaired_difference_by_hand():
    """Wilson's interval of 5 of 10 is 0.5 -+ 0.2634; of the difference, 0.2634 sqrt(2)."""
    half = [True] * 5 + [False] * 5
    value, low, high = unpaired_difference(half, half)
    assert value == 0
    assert (low, high) == pytest.approx((-0.3725, 0.3725), abs=1e-4)


def evaluated(folder, digits, seed=0, **keys):
    run = open_run(folder, steps=4, seed=seed, **keys)
    run.log(0, row(0))
    run.evaluation(0, "full", [False] * len(digits))
    run.evaluation(4, "full", [digit == "1" for digit in digits])
    return run.path


def test_several_runs_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = evaluated(tmp_path / "a", "1" * 40 + "0" * 60)
    better = evaluated(tmp_path / "b", "1" * 70 + "0" * 30)
    same = evaluated(tmp_path / "c", "1" * 40 + "0" * 60, seed=1)
    path = write_report(first, better, same)
    assert path == Path("comparison.html")
    comparison = Page(path).data["comparison"]
    assert comparison["differences"] == {"seed": ["0", "0", "1"]}
    one, two = comparison["verdicts"]
    assert one["level"] == "good"
    assert one["text"].startswith("b is better than a (full, step 4): 40.0% → 70.0%, +30.0 points")
    assert "100 held-out problems, the same problems" in one["text"]
    assert two["level"] == "info"
    assert "c cannot be told apart from a" in two["text"]
    assert "different problems" in two["text"], "generated from another seed"
    assert [numbers["steps"] for numbers in comparison["numbers"]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("sets", "seed", "are_same"), [(("a", "a"), 1, True), (("a", "b"), 0, False)]
)
def test_runs_on_named_sets_have_the_problems_of_their_files(tmp_path, sets, seed, are_same):
    paths = [
        evaluated(
            tmp_path / str(i), "1100", i * seed, task=TaskConfig(eval_sets=((name, "x.jsonl"),))
        )
        for i, name in enumerate(sets)
    ]
    runs = open_runs(paths)
    for run in runs:
        run.read()
    [verdict] = compare(runs)["verdicts"]
    assert ("the same problems" in verdict["text"]) == are_same


def test_runs_with_different_numbers_of_problems(tmp_path):
    runs = open_runs([evaluated(tmp_path / "a", "1100"), evaluated(tmp_path / "b", "110")])
    for run in runs:
        run.read()
    [verdict] = compare(runs)["verdicts"]
    assert "50.0% → 66.7%" in verdict["text"]
    assert "; 4 and 3 held-out problems, different problems)" in verdict["text"]


def test_untrained_models_are_not_compared(tmp_path):
    paths = [evaluated(tmp_path / "a", "10"), open_run(tmp_path / "b").path]
    runs = open_runs(paths)
    for run in runs:
        run.read()
    said = {
        "level": "info",
        "text": "a and b have no evaluation of trained weights at a common step.",
    }
    assert compare(runs)["verdicts"] == [said]
    assert compare(runs[:1]) is None


def test_runs_of_one_name_are_called_by_their_paths(tmp_path):
    paths = [open_run(tmp_path / x / "run").path for x in "ab"]
    assert [run.name for run in open_runs(paths)] == [str(path) for path in paths]


def test_differences_of_recipes():
    configs = [{"a": 1, "b": [1], "run_dir": "x"}, {"a": 1, "b": [2], "run_dir": "y", "c": None}]
    assert find_differences(configs) == {"b": ["[1]", "[2]"], "c": ["absent", "None"]}
    assert find_differences([{"a": "\u202ex"}, {"a": "y"}]) == {"a": ["⟨U+202E⟩x", "y"]}
