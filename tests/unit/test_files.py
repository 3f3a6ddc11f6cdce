"""Reading data files: the usual columns, and errors that name the row."""

import gzip
import json
import os
import sys
from decimal import Decimal

import pytest

from qurl.errors import ConfigError, DataError, MissingExtra, ModelError
from qurl.tasks import load_task
from qurl.tasks.columns import INSTRUCTION
from qurl.tasks.tokenizer import build_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+3?"},
]


def write(path, rows):
    text = "\n".join(json.dumps(r, default=str) for r in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
def test_every_format_gives_the_same_problems(tmp_path, suffix):
    rows = [{"question": f"What is {i}+1?", "answer": str(i + 1)} for i in range(3)]
    task = load_task(write(tmp_path / f"sums{suffix}", rows))
    assert (task.name, task.reward, len(task)) == ("sums", "math", 3)
    assert [p.id for p in task] == ["sums-1", "sums-2", "sums-3"]
    assert [p.answer for p in task] == ["1", "2", "3"]
    assert task[0].extra["prompt"] == f"What is 0+1?\n{INSTRUCTION}"
    assert task[0].prompt_ids == ()


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "q", "answer": "2 * 600 = <<2*600=1200>>1200\n#### 1,200"}, "1200"),
        ({"question": "q", "answer": "so\n#### (1, 2)"}, "(1, 2)"),
        ({"problem": "q", "answer": 2.5e-05}, "0.000025"),
        ({"problem": "q", "answer": " \\frac{3}{4} ", "solution": "long"}, "\\frac{3}{4}"),
        ({"problem": "q", "answer": "", "solution": "so \\boxed{\\mbox{four}}."}, "\\mbox{four}"),
        ({"problem": "q", "solution": "first \\boxed{1}, then \\boxed{2}"}, "2"),
        ({"problem": "q", "answer": 142.0}, "142"),
        ({"problem": "q", "answer": 2.5}, "2.5"),
        ({"problem": "q", "answer": -(10**400)}, f"-1{'0' * 400}"),
        ({"prompt": "q", "ground_truth": 7}, "7"),
        ({"prompt": "q", "target": "8"}, "8"),
        ({"prompt": MESSAGES, "reward_model": {"style": "rule", "ground_truth": "5"}}, "5"),
    ],
)
def test_the_truth_of_the_usual_columns(tmp_path, row, answer):
    [problem] = load_task(write(tmp_path / "one.jsonl", [row]))
    assert problem.answer == answer
    assert {k: v for k, v in problem.extra.items() if k != "prompt"} == {
        k: v for k, v in row.items() if k != "prompt"
    }


def test_a_list_of_answers_is_a_choice(tmp_path):
    [problem] = load_task(
        write(tmp_path / "one.jsonl", [{"problem": "q", "answer": ["6630.65\n", "6630"]}])
    )
    assert problem.answer == "6630.65"
    assert problem.extra["accepted_answers"] == ["6630"]


def test_verl_parquet_is_read_as_it_is(tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": MESSAGES,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train", "index": 17},
    }
    [problem] = load_task(write(tmp_path / "train.parquet", [row]))
    assert problem.id == "openai/gsm8k/17"
    assert problem.answer == "5"
    assert problem.extra["prompt"] == "Be brief.\n\nWhat is 2+3?"
    assert problem.extra["extra_info"] == {"split": "train", "index": 17}


def test_ids_of_rows_are_kept_and_repeated_ones_are_told_apart(tmp_path):
    rows = [{"id": i, "question": "q", "answer": "1"} for i in (4, 4, None)]
    task = load_task(write(tmp_path / "x.jsonl", rows))
    assert [p.id for p in task] == ["4", "4#2", "x-3"]
    rows = [{"prompt": "q", "answer": "1", "id": id} for id in ("4#3", "4", "4")]
    task = load_task(write(tmp_path / "x.jsonl", rows))
    assert [p.id for p in task] == ["4#3", "4", "4#3#3"]
    rows = [{"prompt": "q", "answer": "1", "id": f"amc@{i}"} for i in range(3)]
    assert len({p.name for p in load_task(write(tmp_path / "x.jsonl", rows))}) == 3


def test_instructions(tmp_path):
    path = write(
        tmp_path / "x.jsonl",
        [
            {"question": "a?", "answer": "1"},
            {"prompt": "b?", "answer": "1"},
            {"prompt": MESSAGES, "answer": "5"},
        ],
    )
    assert [p.extra["prompt"] for p in load_task(path)] == [
        f"a?\n{INSTRUCTION}",
        "b?",
        "Be brief.\n\nWhat is 2+3?",
    ]
    assert [p.extra["prompt"] for p in load_task(path, instruction="Now.")] == [
        "a?\nNow.",
        "b?\nNow.",
        "Be brief.\n\nWhat is 2+3?\nNow.",
    ]
    assert load_task(path, instruction="")[0].extra["prompt"] == "a?"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "label": 3}', r"bad\.jsonl line 3: no answer.*found: question, label"),
        ('{"text": "q", "answer": "3"}', r"line 3: no question; one of prompt, question, problem"),
        ('{"question": " ", "answer": "3"}', r"line 3: 'question' is empty"),
        ('{"prompt": [], "answer": "3"}', r"line 3: 'prompt' is empty"),
        (
            '{"question": ["a"], "answer": "3"}',
            r"line 3: 'question' is \['a'\]; .*'role' and 'content'",
        ),
        (
            '{"prompt": [{"role": "user"}, {"content": "x"}], "answer": "3"}',
            r"'prompt' is \[.*'role' and 'content'",
        ),
        ('{"question": 5, "answer": "3"}', r"line 3: 'question' is 5; it must be text"),
        ('{"question": "q", "answer": {"a": 1}}', r"line 3: 'answer' is {'a': 1}; it must be text"),
        ('{"question": "q", "answer": -Infinity}', r"line 3: 'answer' is -inf"),
        ('{"question": "q"', r"line 3: is not valid JSON"),
        ("[1, 2]", r"line 3: is a list, not an object"),
        ('{"question": "q", "answer": "1", "qurl_reward": []}', "'qurl_reward' is a name of QuRL"),
        ('{"question": "q", "answer": "1", "reward": ["math"]}', "'reward' is .*math.*, not one"),
        ('{"question": "q", "answer": "1", "accepted_answers": [{}]}', "'accepted_answers' is {};"),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        load_task(path)


def test_blank_answers_are_left_out_loudly(tmp_path):
    rows = [{"question": "q", "answer": a} for a in ("1", "", None, float("nan"), "2")]
    task = load_task(write(tmp_path / "x.jsonl", rows))
    assert [p.answer for p in task] == ["1", "2"]
    [note] = task.notes
    assert note.startswith("3 of 5 rows")
    assert note.endswith("x.jsonl line 2")


def test_a_reward_of_the_user_needs_no_answer(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"prompt": "write a poem"}])
    task = load_task(path, reward="poems:judge")
    assert task[0].answer == ""
    [note] = task.notes
    assert note.endswith("x.jsonl has an answer (columns: prompt): the reward gets '' as the truth")
    with pytest.raises(DataError, match="no answer"):
        load_task(path)


def test_long_prompts_are_an_error_or_skipped(tmp_path):
    questions = ["a" * 30, "b" * 50, "c" * 31, "d"]
    path = write(tmp_path / "x.jsonl", [{"question": q, "answer": "1"} for q in questions])
    options = {"tokenizer": build_tokenizer(), "max_prompt_tokens": 30, "instruction": ""}
    with pytest.raises(
        DataError, match=r"line 2: the prompt has 50 tokens.*max_prompt_tokens = 30"
    ):
        load_task(path, **options)
    task = load_task(path, **options, skip_long_prompts=True)
    assert [p.extra["prompt"][0] for p in task] == ["a", "d"]
    [note] = task.notes
    assert note.startswith("2 of 4 rows")
    assert "task.max_prompt_tokens = 30" in note
    with pytest.raises(DataError, match="is left: 4 of 4 rows"):
        load_task(path, **{**options, "max_prompt_tokens": 0}, skip_long_prompts=True)


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("no/such.jsonl", "", r"no/such\.jsonl does not exist"),
        ("file", "no/such.csv", r"no/such\.csv does not exist"),
        ("gsm8k", "", r"'question' and 'answer' .*#### 72"),
        ("math", "", r"'problem' and 'answer'"),
        ("file", "", r"needs task\.path"),
    ],
)
def test_a_missing_file_says_what_to_do(name, path, message):
    with pytest.raises(DataError, match=message):
        load_task(name, path=path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.csv",
            b"a,b\n",
            "not one of .jsonl, .*; `datasets` and pandas can write a CSV",
        ),
        ("x.txt", b"a,b\n", r"not one of .jsonl, .jsonl.gz, .json, .parquet$"),
        ("x.jsonl", b"\n", "it is empty"),
        ("x.jsonl", b'{"question": "\xff"}', "cannot be read: .*; save the file as UTF-8"),
        ("x.jsonl.gz", b"not gzip", "cannot be read"),
        ("x.json", b'{"question": "q"}', "must hold a list"),
        ("x.json", b"{", "not valid JSON"),
    ],
)
def test_a_broken_file(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_task("file", path=path)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_the_line_that_is_not_utf8_is_named(tmp_path, suffix):
    content = b'{"question": "q", "answer": "1"}\n' * 2000 + '{"question": "café?"'.encode("latin1")
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    reason = "line 2001: cannot be read: .* can't decode byte 0xe9 in position 17: .* as UTF-8"
    with pytest.raises(DataError, match=reason):
        load_task(path)


def test_a_broken_parquet_file(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"cannot be read: .*not a parquet file"):
        load_task(path)


def test_decimal_columns_are_numbers(tmp_path):
    amounts = [Decimal("42.50"), Decimal("7.00"), Decimal("-123456789012345678901234567890.25")]
    rows = [{"question": f"{amount}?", "answer": amount} for amount in amounts]
    task = load_task(write(tmp_path / "x.parquet", rows))
    expected = ["42.5", "7", "-123456789012345678901234567890.25"]
    assert [problem.answer for problem in task] == expected


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("date32[day]", 2**30),
        ("timestamp[us]", 2**62),
        ("timestamp[ns]", 2**60 + 1),
        ("duration[s]", 2**62),
    ],
)
def test_a_column_that_python_cannot_hold_is_named(tmp_path, kind, number):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    when = pyarrow.array([1000, number], kind)
    table = pyarrow.table({"question": ["a?", "b?"], "answer": ["1", "2"], "when": when})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError) as caught:
        load_task(tmp_path / "x.parquet")
    assert f"the column 'when' of type {kind} (" in str(caught.value)
    assert "); remove it or write it as text" in str(caught.value)


def test_a_parquet_file_of_types_that_are_not_known(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def refuse(path):
        raise NotImplementedError("Integers with less than 8 bits not implemented")

    monkeypatch.setattr(parquet, "read_table", refuse)
    path = write(tmp_path / "x.parquet", [{"question": "q", "answer": "1"}])
    with pytest.raises(DataError, match=r"x.parquet: cannot be read: .*less than 8 bits not impl"):
        load_task(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "x.parquet"
    path.write_bytes(b"")
    with pytest.raises(MissingExtra, match=r"qurl-rl\[data\]"):
        load_task(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, suffix):
    row = {"question": "6*7?", "answer": "42"}
    path = write(tmp_path / f"d{suffix}", [row])
    content = gzip.decompress(path.read_bytes()) if suffix.endswith("gz") else path.read_bytes()
    content = b"\xef\xbb\xbf" + content
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert load_task(path)[0].answer == "42"


def test_files_with_byte_order_marks_may_be_joined(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"question": "6*7?", "answer": "42"}])
    path.write_bytes((b"\xef\xbb\xbf" + path.read_bytes() + b"\n") * 2)
    assert [problem.answer for problem in load_task(path)] == ["42", "42"]


NUMBER = (
    "cannot be read: ValueError: Exceeds the limit (4300 digits) for integer string conversion: "
    "value has 5000 digits; write such a number as text"
)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ('{"prompt": "a", "x": ' + "[" * 200 + "]" * 200 + "}", "is nested too deeply; rows have"),
        (
            '{"prompt": "a\\ud800", "answer": "1"}',
            "'a\\ud800' is not valid text (a lone surrogate)",
        ),
        ('{"prompt": "a", "answer": "1", "x": [{"\\udc00": 1}]}', "'\\udc00' is not valid text"),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "cannot be read: ValueError: Exceeds"),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", NUMBER),
    ],
)
def test_what_json_allows_and_no_tokenizer_takes(tmp_path, line, reason):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        load_task(path)
    assert f"{path} line 2: {reason}" in str(caught.value)


@pytest.mark.parametrize(
    "columns",
    [{}, {"numbers": [1, 2]}, {"numbers": ["x"], "target": 3}, {"numbers": [1.5], "target": 3}],
)
def test_countdown_rows_need_whole_numbers(tmp_path, columns):
    path = write(tmp_path / "d.jsonl", [{"prompt": "a", "answer": "1", **columns}])
    with pytest.raises(DataError, match="line 1: the countdown reward needs a list of whole 'numb"):
        load_task(path, reward="countdown")


def test_a_file_replaced_by_another_of_the_same_length_has_another_fingerprint(tmp_path):
    rows = [{"prompt": "6*7=", "answer": "42"}]
    before = load_task(write(tmp_path / "d.jsonl", rows)).fingerprint
    assert load_task(write(tmp_path / "d.jsonl", rows)).fingerprint == before
    rows = [{"prompt": "6*8=", "answer": "48"}]
    assert load_task(write(tmp_path / "d.jsonl", rows)).fingerprint != before


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if enable_thinking is false %}<no think>{% endif %}"
)


def chat_task(path, rows, template=TEMPLATE, **options):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    options.setdefault("instruction", "")
    return load_task(write(path, rows), tokenizer=tokenizer, **options)


def test_chat_templates_get_arguments_and_a_system_message(tmp_path):
    rows = [{"prompt": "6*7="}, {"prompt": MESSAGES}]
    path, own = tmp_path / "d.jsonl", {"reward": "mine:reward"}
    plain = [p.extra["prompt"] for p in chat_task(path, rows, **own)]
    assert plain == ["[user]6*7=", "[system]Be brief.[user]What is 2+3?"]
    options = {"system": "Think.", "chat_template_kwargs": {"enable_thinking": False}}
    prompts = [p.extra["prompt"] for p in chat_task(path, rows, **options, **own)]
    assert prompts == [
        "[system]Think.[user]6*7=<no think>",
        "[system]Be brief.[user]What is 2+3?<no think>",
    ]


def test_arguments_that_a_chat_template_does_not_read(tmp_path):
    rows = [{"prompt": "6*7=", "answer": "42"}]
    with pytest.raises(
        ConfigError, match=r"kwargs.thinking_on: the model's chat template does not"
    ):
        chat_task(tmp_path / "d.jsonl", rows, chat_template_kwargs={"thinking_on": True})
    with pytest.raises(ConfigError, match="the model's chat template is missing"):
        chat_task(tmp_path / "d.jsonl", rows, None, chat_template_kwargs={"thinking": True})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[3].content }}", "UndefinedError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{# nothing #}", "makes an empty prompt"),
    ],
)
def test_a_chat_template_that_fails_names_the_row(tmp_path, template, reason):
    task = chat_task(tmp_path / "d.jsonl", [{"prompt": "6*7=", "answer": "42"}], template)
    with pytest.raises(ModelError) as caught:
        task[0]
    assert "d.jsonl line 1: the model's chat template " in str(caught.value)
    assert reason in str(caught.value)


def test_accepted_answers_may_have_a_column(tmp_path):
    row = {"question": "1/2?", "answer": "1/2", "accepted_answers": [0.5, "50 %", "1/2"]}
    [problem] = load_task(write(tmp_path / "x.jsonl", [row]), reward="exact")
    assert problem.answer == "1/2"
    assert problem.extra["accepted_answers"] == ["0.5", "50 %"]


def test_a_score_of_another_run_is_no_reward(tmp_path):
    row = {"question": "q", "answer": "1", "reward": 0.5}
    assert load_task(write(tmp_path / "x.jsonl", [row])).rewards == {"math"}


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(DataError, match=r"x.jsonl is not a regular file; set task.path to"):
        load_task("file", path=tmp_path / "x.jsonl")
