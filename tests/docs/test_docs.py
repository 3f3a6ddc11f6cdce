"""What the pages say is so: names, files, commands, keys, metrics, links and examples."""

import dataclasses
import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from models import as_flags, from_a_start
from packaging.requirements import Requirement
from torch.distributed import run as torchrun

from qurl.cli import COMMANDS
from qurl.config import Config, build_config, check_combinations, load_config, read_recipe
from qurl.correction import mismatch_metrics, weight_metrics
from qurl.errors import RewardError
from qurl.losses import tis
from qurl.objectives import OBJECTIVES, with_facts
from qurl.quant.tracking import GROUPS, update_ratios
from qurl.rewards import GradingPool
from qurl.run.cards import find_card
from qurl.run.choices import Choices
from qurl.run.directory import flatten, read_jsonl
from qurl.tasks import load_task
from qurl.train import train

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
MODULES = sorted((ROOT / "src" / "qurl").rglob("*.py"))
FOLDERS = ("src", "tests", "docs", "examples", "recipes", "benchmarks", "deploy")
SOURCE = "\n".join(path.read_text() for path in MODULES)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def prose(page):
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def code_spans(page):
    return re.findall(r"`([^`\n]+)`", prose(page))


def code_blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def shell_lines(page):
    """Commands of the bash blocks, comments cut off, continued lines joined."""
    text = "\n".join(code_blocks(page, "bash")).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in text.splitlines() if line.strip()]


def resolve(name):
    """The object behind `qurl.module.name` or `qurl.module.Class.method`."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{name} is no module")


def table(page, first_column):
    """Cells of the table whose head starts with `first_column`, without head and rule."""
    lines = page.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


# Names on the pages


@each_page
def test_files_exist(page):
    named = [span for span in code_spans(page) if span.split("/")[0] in FOLDERS and "/" in span]
    for name in named:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        if test:
            assert f"\ndef {test}(" in (ROOT / path).read_text(), name


@each_page
def test_names_exist(page):
    for span in code_spans(page):
        if match := re.fullmatch(r"(qurl(?:\.\w+)+)", span):
            resolve(match[1])


@each_page
def test_recipe_keys_exist(page):
    keys = flatten(dataclasses.asdict(Config()))
    sections = {key.split(".")[0] for key in keys if "." in key}
    for span in code_spans(page):
        match = re.match(r"(\w+)\.\w+(\.\w+)?(?!\S*[(/])", span)
        if match and match[1] in sections and not span.endswith(".py"):
            assert match[0] in keys, f"{span}: no such key"


@each_page
def test_metrics_exist(page):
    prefixes = (
        r"rollout_corr|training|actor|critic|acr|uaq|sync|perf|reward|sampling|response_length"
        r"|correction"
    )
    for span in code_spans(page):
        if re.fullmatch(rf"(?:{prefixes})/\w+(?:/\w+)?", span):
            assert is_metric(span), f"{span}: no such metric"


def is_metric(name):
    kind, metric, *group = name.split("/")
    if f'"{name}"' in SOURCE or f'"{name}_sum"' in SOURCE:
        return True
    is_ratio = kind == "uaq" and metric in update_ratios([0.0] * 8)
    return is_ratio and set(group) <= set(GROUPS.values())


def test_a_wrong_name_would_be_found():
    assert not is_metric("rollout_corr/no_such_metric")
    assert not is_metric("uaq/update_norm/no_such_group")
    with pytest.raises(AttributeError):
        resolve("qurl.losses.no_such_function")


def test_all_mismatch_metrics_are_explained():
    logp, mask = torch.zeros(2, 3), torch.ones(2, 3)
    logged = mismatch_metrics(logp, logp, mask, cap=2.0) | weight_metrics(mask, mask, mask)
    assert logged.keys() <= set(code_spans(ROOT / "docs" / "algorithm.md"))


TINY = {
    **{"steps": 2, "device": "cpu", "threads": 1, "task.difficulty": 2},
    **{"model.scratch.hidden_size": 32, "model.scratch.warm_start_steps": 30},
    **{"batch.problems": 4, "batch.minibatches": 2},
    **{"sampling.max_tokens": 4, "sampling.group_size": 4},
}
RUNS = {
    "ppo": {"algo.kl_coef": 0.01, "quant.update_scale": 1.5},
    "dapo": {
        **{"algo.max_gen_rounds": 40, "eval.every": 1, "eval.problems": 4, "eval.samples": 2},
        **{"sampling.select": "greso", "sampling.budget": "e3", "batch.subselect": "pods"},
    },
    "grpo": {
        **{"correction.mode": "auto", "quant.format": "none", "sampling.replay": "recent"},
        **{"sampling.select": "dots", "systems.dots.references": 2, "sampling.thermostat": "e3"},
        **{"batch.subselect": "shuffle-r1"},
        **{"rollout.drafts": "histospec", "sampling.keep_responses": True},
    },
    "vapo": {"critic.pretrain_steps": 1, "rollout.ahead": 1},
}


@pytest.mark.parametrize("name", RUNS)
def test_all_metrics_of_a_run_are_explained(name, tmp_path):
    keys = {**from_a_start(TINY), "algo.name": name, **RUNS[name], "run_dir": tmp_path}
    run = train(load_config(None, as_flags(keys)))
    logged = {key for row in read_jsonl(run / "metrics.jsonl") for key in row} - {"step"}
    pages = [ROOT / "docs" / page for page in ("metrics.md", "algorithm.md")]
    explained = {span for page in pages for span in code_spans(page)}
    assert {general_name(key) for key in logged} <= explained


def general_name(metric):
    """As the pages have it: eval/int8/pass@2_low -> eval/full/pass@K."""
    metric = re.sub(r"@\d+(_low|_high)?", "@K", metric)
    kind, *parts = metric.split("/")
    if kind == "uaq":
        return f"uaq/{parts[0]}"
    return f"eval/full/{parts[1]}" if kind == "eval" else metric


def test_equation_table():
    rows = table(ROOT / "docs" / "algorithm.md", "equation")
    for _, _, file, names in rows:
        module = resolve(file.strip("`").removeprefix("src/").removesuffix(".py").replace("/", "."))
        for name in re.findall(r"`([^`]+)`", names):
            assert name.strip('"') in OBJECTIVES if name[0] == '"' else hasattr(module, name), name
    numbers = {int(n) for equation, *_ in rows for n in re.findall(r"\((\d+)\)", equation)}
    assert numbers == {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14}


@pytest.mark.parametrize("page", ["README.md", "docs/algorithm.md"])
def test_objective_tables(page):
    heads = {"README.md": "`algo.objective`", "docs/algorithm.md": "`objective`"}
    rows = {cells[0].strip("`"): cells[1] for cells in table(ROOT / page, heads[page])}
    assert rows == {
        "ppo_prox": "(1)",
        "ppo_behav": "(3)",
        "decoupled": "(4)",
        "tis": "(5)",
        "acr": "(9)",
    }
    assert rows.keys() == OBJECTIVES.keys()


def test_structure_lists_every_folder_and_top_module_once():
    package = ROOT / "src" / "qurl"
    cells = [row[0] for row in table(ROOT / "docs" / "structure.md", "where in `src/qurl/`")]
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    folders = [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    modules = [path.name for path in package.glob("*.py") if not path.name.startswith("__")]
    assert sorted(listed) == sorted(folders + modules)
    assert len(modules) + 2 <= 16, "few files at the top"


def test_layers_hold():
    """The contracts of pyproject.toml; structure.md draws them."""
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    drawn = (ROOT / "docs" / "structure.md").read_text()
    for layer in layers["contracts"][0]["layers"]:
        names = layer.replace(" : __main__", "").replace(" : ", ", ")
        assert f"\n{names}\n" in drawn, names


# Links and paths


@each_page
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]


def test_no_absolute_paths():
    folders = "|".join(("home", "root", "tmp", "usr", "mnt", "work", "opt"))
    absolute = re.compile(rf"(?<![\w.~<*])/(?:{folders})/")
    files = [*PAGES, *RECIPES, *MODULES, ROOT / "Makefile", ROOT / "pyproject.toml"]
    files += [*(ROOT / "examples").glob("*.py"), *(ROOT / "docs").glob("*.py")]
    for path in files:
        assert not absolute.search(path.read_text()), path


# Commands


def test_make_help_lists_the_commands():
    printed = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    listed = {line.split()[0] for line in printed.splitlines()}
    assert listed >= {"install", "demo", "test", "lint", "docs", "bench"}


@each_page
def test_make_targets_exist(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [s.split()[1] for s in code_spans(page) + shell_lines(page) if s.startswith("make ")]
    assert set(named) <= set(targets)


@each_page
def test_shell_commands_parse(page, tmp_path, monkeypatch):
    for module in (
        "my_reward",
        "my_module",
        "my_sandbox",
    ):  # modules that the pages ask the reader to write
        (tmp_path / f"{module}.py").touch()
    monkeypatch.chdir(tmp_path)
    for line in shell_lines(page):
        program, command, *rest = shlex.split(line)
        if program != "qurl":
            continue
        assert command in COMMANDS, line
        words = [word for word in rest if word != "--dry-run"]
        if command in ("train", "validate") and not any(word.isupper() for word in words):
            has_recipe = not words[0].startswith("-")
            is_file = words[0].endswith(".toml")
            recipe = (ROOT / words[0] if is_file else words[0]) if has_recipe else None
            assert isinstance(load_config(recipe, words[has_recipe:]), Config)


def qurl_commands(text):
    """The words after `qurl train`, with variables of the shell replaced."""
    text = re.sub(r'"\$@"', "", text.replace("\\\n", " "))
    text = re.sub(r'"\$\(\(.*?\)\)"', "16", text)
    return [shlex.split(m[1], comments=True) for m in re.finditer(r"\bqurl train (?!\[)(.+)", text)]


@pytest.mark.parametrize("file", ["deploy/qurl.sbatch", "deploy/rayjob.yaml", "docs/nodes.md"])
def test_commands_for_machines_have_real_flags(file):
    """Their recipes are the reader's, so the flags are read over the defaults."""
    commands = qurl_commands((ROOT / file).read_text().replace("`", " "))
    assert commands
    for words in commands:
        flags = words[next(i for i, word in enumerate(words) if word.startswith("--")) :]
        gpu = flags.index("--gpu") if "--gpu" in flags else None
        if gpu is not None:
            find_card(flags[gpu + 1].split(")")[0])
            flags = flags[:gpu]
        flags = [word for word in flags if word != "--dry-run"]
        assert load_config(None, flags).parallel.trainers in (1, 8, 16)


def test_the_slurm_script_is_sound():
    script = ROOT / "deploy" / "qurl.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    help = torchrun.get_args_parser().format_help().replace("_", "-")
    launched = script.read_text().split("torchrun")[-1].split("-m qurl")[0]
    for flag in re.findall(r"--[a-z-]+", launched):
        assert flag in help, flag


def test_the_ray_job_and_the_image_agree():
    job = yaml.safe_load((ROOT / "deploy" / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    for pod in pods:
        mounts = {mount["name"] for c in pod["containers"] for mount in c["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
        assert all(
            c["resources"]["limits"] == c["resources"]["requests"] for c in pod["containers"]
        )
    flags = shlex.split(job["spec"]["entrypoint"])[3:]
    parallel, pod = load_config(None, flags).parallel, pods[1]["containers"][0]
    replicas = {cluster["workerGroupSpecs"][0][key] for key in ("replicas", "minReplicas")}
    gpus = int(pod["resources"]["limits"]["nvidia.com/gpu"])
    assert {parallel.trainers + parallel.engines} == {gpus * (1 + count) for count in replicas}
    assert "num-gpus" not in cluster["headGroupSpec"]["rayStartParams"], "Ray places trainers there"
    image = (ROOT / "Dockerfile").read_text()
    assert f"ARG RAY=ray[default]=={cluster['rayVersion']}\n" in image
    base = re.search(r"^FROM (\S+)$", image, re.MULTILINE)[1]
    assert base.startswith(f"pytorch/pytorch:{pins('gpu-py312.txt')['torch']}-cuda13.")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.search(r"^ARG EXTRAS=(\S+)$", image, re.MULTILINE)[1].split(",")
    assert set(named) <= extras["optional-dependencies"].keys()
    copied = re.findall(r"^COPY (.+) \S+$", image, re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())


def test_the_tables_of_forecasts_are_what_the_code_says():
    writer = runpy.run_path(str(ROOT / "docs" / "write_scale_tables.py"))
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert page == writer["rewrite"](page), "run `make docs`"


def test_readme_quick_start_is_there():
    lines = shell_lines(ROOT / "README.md")
    assert {"make demo", "make test"} <= set(lines)
    assert any(line.startswith("qurl train recipes/arithmetic-cpu.toml") for line in lines)


def test_readme_data_and_reward(tmp_path):
    [line] = code_blocks(ROOT / "README.md", "json")
    (tmp_path / "train.jsonl").write_text(line)
    task = load_task("file", path=tmp_path / "train.jsonl")
    assert task[0].answer == json.loads(line)["answer"] == "48"
    [code] = code_blocks(ROOT / "README.md", "python")
    names = {}
    exec(code, names)
    assert names["score"]("that makes 48", "48", {}) == 1.0
    assert names["score"]("that makes 47", "48", {}) == 0.0


def test_tasks_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [recipe], [code] = (code_blocks(ROOT / "docs" / "tasks.md", k) for k in ("toml", "python"))
    (tmp_path / "my_reward.py").touch()
    (tmp_path / "recipe.toml").write_text(recipe)
    task = load_config("recipe.toml").task
    assert task.training_files == {"data/gsm8k_train.jsonl": 3, "data/programs.jsonl": 1}
    assert task.held_out_files["aime24"] == "data/aime24.jsonl"
    (tmp_path / "my_sandbox.py").write_text(code)
    refusal = pytest.raises(RewardError, match="start a container")
    with GradingPool("my_sandbox:score", workers=1) as pool, refusal:
        pool.grade([("print(1)", "", {"tests": ["assert True"]})])


# Recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_parse_and_say_what_to_expect(path):
    config = load_config(path)
    assert config.run_dir == f"runs/{path.stem}"
    head = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for word in ("hardware", "time", "expect", "data"):
        assert re.search(rf"^# {word}   ? +\S", head, re.MULTILINE), word


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_set_only_keys_of_the_reference(path):
    listed = set(code_spans(ROOT / "docs" / "recipe.md"))
    assert flatten(read_recipe(path)).keys() <= listed


def load_reference_writer():
    return runpy.run_path(str(ROOT / "docs" / "write_recipe_reference.py"))


def test_recipe_reference_is_up_to_date():
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert page == load_reference_writer()["render"](), "run `make docs`"


def test_what_turns_a_system_on_is_a_recipe_that_is_accepted():
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    sentences = re.findall(r"Turn it on\s+with\s+(`.+?)\.\n", page, re.DOTALL)
    assert len(sentences) >= 7
    for sentence in sentences:
        tree = tomllib.loads("\n".join(re.findall(r"`(.+?)`", sentence)))
        check_combinations(build_config(tree, sentence), sentence)


def test_the_table_of_pairs_is_what_the_rules_say():
    writer = runpy.run_path(str(ROOT / "docs" / "write_systems_table.py"))
    page = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
    assert page == writer["rewrite"](page), "run `make docs`"
    verdicts = {pair: writer["judge"](*pair)[0] for pair in PAIRS}
    assert verdicts == PAIRS


PAIRS = {
    ("ACR", "one update a step"): "warned",
    ("ACR", "replay"): "works",
    ("no correction", "replay"): "refused",
    ("UAQ", "LoRA"): "refused",
    ("GRESO", "DOTS"): "one key",
    ("dynamic sampling", "GRESO"): "works",
    ("PPO", "PODS"): "refused",
    ("E3 budget", "BroRL"): "works",
    ("E3 budget", "Shuffle-R1"): "refused",
    ("HistoSpec", "FP8 cache"): "works",
    ("HistoSpec", "vLLM"): "refused",
}
"""Some of the pairs."""


def test_recipe_reference_is_complete():
    writer = load_reference_writer()
    for path, section in writer["walk_sections"]():
        keys = {
            field.name
            for field in dataclasses.fields(section)
            if not dataclasses.is_dataclass(getattr(section, field.name))
        }
        assert keys <= writer["field_docs"](type(section)).keys(), f"[{path}] lacks docstrings"
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    for key in flatten(dataclasses.asdict(Config())):
        assert f"\n| `{key}` |" in page


STABLE_KEYS = {
    "model": ("path",),
    "task": ("name", "path"),
    "batch": ("problems", "minibatches"),
    "sampling": ("max_tokens", "group_size", "temperature"),
    "algo": ("name", "objective", "cap", "clip_low", "clip_high"),
    "optim": ("lr",),
    "quant": ("format", "update_scale", "kv"),
    "rollout": ("engine",),
    "save": ("every",),
    "eval": ("every",),
}
"""Keys that scripts rely on, besides steps, seed and run_dir."""


def test_stable_recipe_keys():
    keys = ["steps", "seed", "run_dir"]
    keys += [f"{section}.{key}" for section, names in STABLE_KEYS.items() for key in names]
    flat = flatten(dataclasses.asdict(load_config(None)))
    words = as_flags({key: flat[key] for key in keys})
    assert flatten(dataclasses.asdict(load_config(None, words))) == flat


# Public names

PUBLIC = {
    "qurl.losses.policy_loss": (
        "logp, logp_prox, logp_behav, advantages, mask, *, objective='acr', clip_low=0.2, "
        "clip_high=0.2, cap=2.0, aggregation='token-mean', horizon=None"
    ),
    "qurl.losses.aggregate": "values, mask, aggregation='token-mean', *, horizon=None",
    "qurl.advantages.gae": "rewards, values, mask=None, gamma=1.0, lam=1.0",
    "qurl.advantages.group_advantages": "rewards, kind='grpo'",
    "qurl.quant.quantize": "weight, format",
    "qurl.quant.dequantize": "q",
    "qurl.quant.rescale_": "model, scale=1.5",
    "qurl.quant.unscale_": "model, scale=None",
    "qurl.rollout.build_engine": "kind, model, tokenizer=None, *, quant='none'",
    "qurl.rollout.Engine.sync": "self, source, *, version",
    "qurl.rollout.Engine.generate": "self, problems, params",
    "qurl.rollout.Engine.stream": "self, params",
    "qurl.rollout.Engine.score": "self, token_ids",
    "qurl.tasks.load_task": "name_or_path",
    "qurl.rewards.grade_math": "answer_text, truth",
    "qurl.train.train": "config",
}

RECORDS = {
    "qurl.types.Problem": ("id", "prompt_ids", "answer", "extra"),
    "qurl.types.SamplingParams": (
        *("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "group_size"),
    ),
    "qurl.types.Completion": ("token_ids", "logprobs", "text", "finish", "trained", "versions"),
    "qurl.types.Rollout": ("problem", "completions", "version", "temperature"),
    "qurl.types.Graded": ("rollout", "rewards", "details"),
    "qurl.types.SyncReport": ("version", "seconds", "bytes", "code_flip_frac", "verified"),
    "qurl.quant.Quantized": ("codes", "scale"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_signatures(name):
    """What is written here is there, in this order; what is more is by keyword and optional."""
    documented = inspect.signature(eval(f"lambda {PUBLIC[name]}: None")).parameters
    actual = dict(inspect.signature(resolve(name)).parameters)
    assert list(actual)[: len(documented)] == list(documented)
    for parameter in documented.values():
        found = actual.pop(parameter.name)
        assert (found.kind, found.default) == (parameter.kind, parameter.default), parameter.name
    assert all(
        p.kind is p.VAR_KEYWORD or (p.kind is p.KEYWORD_ONLY and p.default is not p.empty)
        for p in actual.values()
    )


@pytest.mark.parametrize("name", RECORDS)
def test_public_records(name):
    record = resolve(name)
    names = [field.name for field in dataclasses.fields(record)]
    assert tuple(names[: len(RECORDS[name])]) == RECORDS[name]
    assert record.__dataclass_params__.frozen


# Examples and the rest


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("custom_reward", ["'25'                 score  1.00", "'waste': 14.0"]),
        ("engine_in_your_script", ["step 8", "learned: True"]),
        ("episode_calculator", ["gets  8+8+4+4=\n", "8+8+4+4=3+8=11;\n"]),
        ("jitrl_text_game", ["proposal alone   first", "jitrl            first"]),
        ("quantized_policy_loss", ["-2.40 / 0.00    -2.60 / -2.60"]),
        ("sample_and_compare", ["0% of the codes changed", "the same tokens: True"]),
        ("select_unsolved", ["known: [22, 47, 50, 17]", "solved: [47, 50, 17, 2]"]),
        ("task_multiplication", ["draw-train-0     64*69=   4416"]),
    ],
)
def test_examples_run(name, expected, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    runpy.run_path(f"examples/{name}.py", run_name="__main__")
    printed = capsys.readouterr().out
    for text in expected:
        assert text in printed


def flags(tmp_path, **keys):
    """The flags of a run of one step with a tiny model; keyword `a__b` is the key a.b."""
    named = {key.replace("__", "."): value for key, value in keys.items()}
    merged = {**from_a_start(TINY), "steps": 1, "run_dir": tmp_path / "run", **named}
    return as_flags(merged)


NEED_A_HOST = ("trl_grpo",)
"""Run where their host is installed: make test-trl."""
TRAINED = (
    *("custom_advantage", "custom_engine", "custom_objective", "custom_sampling"),
    "custom_tracker",
)


@pytest.mark.parametrize("name", TRAINED)
def test_examples_train(name, monkeypatch, tmp_path):
    """Each hands an object to `train`."""
    monkeypatch.chdir(ROOT)
    importlib.import_module(f"examples.{name}").main(*flags(tmp_path, eval__every=0))
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 1


OWN_PARTS = {
    "examples.custom_objective:cispo": {"algo.objective": "cispo/clip_frac"},
    "examples.custom_advantage:batch_scaled": {"algo.advantage": "actor/pg_loss"},
    "examples.custom_engine:CountingEngine": {"rollout.engine": "perf/rollout_tokens"},
    "examples.episode_calculator:calculator": {"rollout.episode": "perf/rollout_tokens"},
    "examples.task_multiplication:draw": {"task.name": "reward/mean"},
    "examples.custom_reward:brief": {"task.reward": "reward/waste"},
    "examples.select_unsolved:unsolved": {"sampling.select": "reward/mean"},
}


@pytest.mark.parametrize("part", OWN_PARTS)
def test_a_recipe_names_a_part_of_ones_own(part, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    [(key, metric)] = OWN_PARTS[part].items()
    words = flags(tmp_path, **{key: part, "sampling.stop": "=", "eval.every": 0})
    rows = read_jsonl(train(load_config(None, words)) / "metrics.jsonl")
    assert metric in rows[0]


def test_every_example_is_run_here():
    here = {name for mark in test_examples_run.pytestmark for name, _ in mark.args[1]}
    assert here | set(TRAINED) | set(NEED_A_HOST) == {
        path.stem for path in (ROOT / "examples").glob("*.py")
    }


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*_*.py")), ids=lambda p: p.stem)
def test_examples_of_parts_are_short(path):
    is_part = path.stem.startswith(("custom", "episode", "select", "task"))
    assert not is_part or len(path.read_text().splitlines()) <= 40


def test_readme_credits_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [d for group in project["optional-dependencies"].values() for d in group]
    names = [re.match(r"[\w-]+", d)[0] for d in project["dependencies"] + extras]
    links = {"torch": "PyTorch", "wandb": "Weights & Biases", "tensorboard": "TensorBoard"}
    for name in set(names) - {project["name"]}:
        assert f"[{links.get(name, name)}](https://" in (ROOT / "README.md").read_text(), name


def test_versions_agree():
    from qurl import __version__

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == str(citation["version"]) == __version__
    assert citation["license"] == project["license"]
    assert f"\n## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert citation["references"][0]["url"].endswith("2602.13953")


def test_parts_given_as_objects_are_in_the_run_directory(monkeypatch, tmp_path):
    """So that a resumed run, by script or by command, goes on with the same parts."""
    monkeypatch.chdir(ROOT)
    importlib.import_module("examples.custom_objective").main(*flags(tmp_path, eval__every=0))
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["algo"]["objective"] == "examples.custom_objective:cispo"
    assert saved["algo"]["advantage"] == "grpo"
    assert saved["rollout"]["engine"] == "local"


def test_an_object_is_recorded_in_place_of_the_name_that_it_replaces(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(None, ["--algo.objective", "examples.custom_objective:cispo"])
    named, given = Choices.of(config), Choices.of(config, tis)
    assert named.record_in(config) == config
    own = with_facts(OBJECTIVES["tis"])(lambda tokens: tokens.ratio)
    assert given.record_in(config).algo.objective == "tis"
    recorded = Choices.of(config, own).record_in(config).algo.objective
    assert recorded.startswith("__main__:")


def test_a_task_without_problems_is_not_replaced_by_the_recipes(monkeypatch):
    monkeypatch.chdir(ROOT)
    empty = importlib.import_module("qurl.bench.step").LetterTask(None, 1, 0)
    monkeypatch.setattr(type(empty), "__len__", lambda self: 0)
    assert Choices.of(load_config(None, []), None, None, None, empty).task is empty


def pins(file):
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_tested_versions_are_those_that_the_package_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["dev"], *extras["data"], *extras["gguf"]]
    wanted = [Requirement(line) for line in asked if not line.startswith("qurl-rl")]
    for file in ("cpu-py311.txt", "gpu-py312.txt"):
        found = pins(file)
        known = [r for r in wanted if r.name in found]
        assert len(known) >= 3
        assert all(found[r.name] in r.specifier for r in known), file
    assert {r.name for r in wanted} <= pins("cpu-py311.txt").keys()


def test_versions_of_the_gpu_are_those_of_the_measurements():
    results = "".join(p.read_text() for p in (ROOT / "benchmarks" / "results").rglob("*.json"))
    for name, version in pins("gpu-py312.txt").items():
        assert f'"{name}": "{version}"' in results


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_commands_of_examples_can_be_copied(path):
    """As they stand in the file, each into a run directory of its own."""
    text = path.read_text()
    assert "\\\\\n" not in text
    commands = re.findall(r"^ +qurl train .*$", text.replace("\\\n", " "), re.MULTILINE)
    assert all("--run-dir" in command for command in commands)
