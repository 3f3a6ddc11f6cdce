"""Recipes by name, and their data from a hub that is a folder here."""

import json
import tomllib
from pathlib import Path

import huggingface_hub
import pyarrow
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from pyarrow import parquet

from qurl.cli import main
from qurl.config import load_config, read_recipe
from qurl.config import shipped as shipped_module
from qurl.config.shipped import read_head, shipped_recipes
from qurl.errors import ConfigError, DataError
from qurl.tasks import load_task
from qurl.tasks.hub import write_data
from qurl.tasks.sources import SOURCES

ROOT = Path(__file__).parents[2]
NAME = "gsm8k-ppo-int8"


def test_a_recipe_is_found_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(NAME, ["--steps", "3"])
    assert (config.steps, config.run_dir, config.quant.format) == (3, f"runs/{NAME}", "int8")


def test_a_file_and_a_run_of_that_name_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(NAME).write_text("steps = 7")
    assert read_recipe(NAME) == {"steps": 7}
    Path(NAME).unlink()
    Path(NAME).mkdir()
    assert read_recipe(NAME)["steps"] == 435, "a folder that is no run is no recipe either"
    run = {"steps": 9, "run_dir": "x", "algo": {"name": "grpo"}}
    (Path(NAME) / "config.json").write_text(json.dumps(run))
    assert read_recipe(NAME)["steps"] == 9


def test_a_name_that_is_not_there_gets_similar_ones():
    with pytest.raises(ConfigError, match=r"did you mean gsm8k-ppo-int8 or .*`qurl recipes` lists"):
        load_config("gsm8k-ppo-int")
    with pytest.raises(ConfigError, match=r"no run at zzz\.toml; `qurl recipes` lists"):
        load_config("zzz.toml")


def test_the_wheel_holds_the_recipes(tmp_path, monkeypatch):
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["force-include"] == {"recipes": "qurl/recipes"}
    installed = tmp_path / "qurl" / "recipes"
    installed.mkdir(parents=True)
    (installed / "mine.toml").write_text("steps = 4")
    monkeypatch.setattr(shipped_module, "__file__", str(tmp_path / "qurl/config/shipped.py"))
    assert shipped_recipes() == {"mine": installed / "mine.toml"}
    assert read_recipe("mine") == {"steps": 4}


def test_the_command_lists_and_prints_them(capsys):
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    for name in shipped_recipes():
        assert f"\n{name}\n" in f"\n{printed}"
    assert "data: `qurl data gsm8k` writes both files" in printed
    assert main(["recipes", NAME]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / f"{NAME}.toml").read_text()
    assert main(["recipes", "gsm8k"]) == 2
    assert "there is no recipe named 'gsm8k'" in capsys.readouterr().err


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_says_where_its_data_comes_from(name):
    """What `qurl data` writes for it is what it reads."""
    task, words = load_config(name).task, read_head(shipped_recipes()[name])["data"].split("`")
    commands = [word.split()[2] for word in words if word.startswith("qurl data")]
    files = {f"data/{file}" for command in commands for file in SOURCES[command]}
    assert files == {path for path in (task.path, task.eval_path) if path}
    assert commands or "generated" in words[0]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder in place of the hub; `calls` lists what was asked for."""
    monkeypatch.chdir(tmp_path)
    hub = tmp_path / "hub"
    hub.mkdir()

    def download(repo, *, repo_type, allow_patterns):
        assert repo_type == "dataset"
        assert all(
            p in [f.pattern for s in SOURCES.values() for f in s.values()] for p in allow_patterns
        )
        if not (hub / repo).exists():
            raise LocalEntryNotFoundError("Got: ConnectError: no such host\nCheck your connection.")
        return str(hub / repo)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return hub


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_data_comes_from_the_hub(hub, capsys):
    folder = hub / "openai" / "gsm8k" / "main"
    rows = [{"question": f"{i}+1?", "answer": f"Add.\n#### {i + 1}", "more": 0} for i in range(3)]
    write_parquet(folder / "train-00000-of-00002.parquet", rows[:2])
    write_parquet(folder / "train-00001-of-00002.parquet", rows[2:])
    write_parquet(folder / "test-00000-of-00001.parquet", rows[:1])
    assert main(["data", "gsm8k"]) == 0
    assert "data/gsm8k_train.jsonl: 3 rows of openai/gsm8k" in capsys.readouterr().out
    lines = Path("data/gsm8k_train.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"question": r["question"], "answer": r["answer"]} for r in rows
    ]
    assert [p.answer for p in load_task("gsm8k", path="data/gsm8k_test.jsonl")] == ["1"]
    Path("data/gsm8k_test.jsonl").write_text("mine")
    assert main(["data", "gsm8k"]) == 0
    assert "data/gsm8k_test.jsonl is there already" in capsys.readouterr().out
    assert Path("data/gsm8k_test.jsonl").read_text() == "mine"


def test_columns_are_renamed(hub):
    rows = [{"prompt": "1+1?", "solution": "2", "data_source": "x"}]
    write_parquet(hub / "open-r1/DAPO-Math-17k-Processed/all/train-0.parquet", rows)
    list(write_data("dapo-math", Path("here")))
    assert json.loads(Path("here/dapo_math_17k.jsonl").read_text()) == {
        "problem": "1+1?",
        "answer": "2",
    }


def test_no_network_and_changed_data_are_errors_that_say_what_to_do(hub, capsys):
    assert main(["data", "aime24"]) == 2
    error = capsys.readouterr().err
    assert "HuggingFaceH4/aime_2024 from the hub: Got: ConnectError: no such host. Without" in error
    assert "write data/aime24.jsonl yourself: JSON lines with 'problem' and 'answer'" in error
    source = hub / "HuggingFaceH4" / "aime_2024"
    write_parquet(source / "other.parquet", [{"x": 1}])
    with pytest.raises(DataError, match=r"has no file data/train-\*\.parquet any more"):
        list(write_data("aime24", Path("data")))
    write_parquet(source / "data/train-0.parquet", [{"problem": "x", "result": "2"}])
    with pytest.raises(DataError, match=r"row 1: there is no column 'answer' \(found: problem"):
        list(write_data("aime24", Path("data")))
    assert not Path("data").exists()
    assert main(["data", "mnist"]) == 2
    assert "'mnist' is not one of the data sets gsm8k, dapo-math" in capsys.readouterr().err


def test_a_missing_data_file_names_the_command():
    with pytest.raises(DataError, match=r"not exist .*`qurl data gsm8k` writes it.; set task.path"):
        load_task("gsm8k", path="data/gsm8k_train.jsonl")
