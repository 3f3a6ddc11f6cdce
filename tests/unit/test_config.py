"""Recipes: precedence, every refusal and every warning, and the recipes that ship."""

import ast
import dataclasses
import tomllib
from pathlib import Path

import pytest

from qurl.config import PRESETS, Config, build_config, load_config, schema, systems, to_json
from qurl.config.flags import _read, apply_flags
from qurl.config.rules import find_mistakes, find_warnings, prox_readers
from qurl.config.systems import SystemsConfig
from qurl.errors import ConfigError
from qurl.objectives import ADVANTAGES, OBJECTIVES, Advantage, Objective
from qurl.run.directory import flatten

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return write


def refusal(tree):
    with pytest.raises(ConfigError) as error:
        build_config(tree, "r.toml")
    return str(error.value)


def test_the_defaults_are_a_recipe():
    assert build_config({}) == Config()
    assert find_mistakes(Config()) == []
    assert not list(find_warnings(Config()))
    assert build_config(dataclasses.asdict(Config())) == Config()


def test_every_key_has_a_docstring():
    """They feed `--help` and the docs; a section is described by its class."""
    trees = [ast.parse(Path(module.__file__).read_text()) for module in (schema, systems)]
    classes = [n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef)]
    sections = [n for n in classes if n.name.endswith("Config")]
    num_systems = len(dataclasses.fields(SystemsConfig))
    assert len(sections) == len(dataclasses.fields(Config)) - 5 + 3 + num_systems
    for section in sections:
        assert ast.get_docstring(section), section.name
        for field, after in zip(section.body, [*section.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and "Config" not in ast.unparse(field.annotation):
                has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert has_text, f"{section.name}: {ast.unparse(field)}"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_says_and_nothing_else(name):
    config = load_config(None, ["--algo.name", name])
    assert config.algo.name == name
    changed = {
        key: value
        for key, value in flatten(dataclasses.asdict(config)).items()
        if value != flatten(dataclasses.asdict(Config()))[key] and key != "algo.name"
    }
    stated = flatten(PRESETS[name])
    assert changed.items() <= stated.items()
    found = flatten(dataclasses.asdict(config))
    assert {key: found[key] for key in stated} == stated


def test_presets_by_hand():
    assert load_config(None, ["--algo.name", "dapo"]).algo.clip_high == 0.28
    assert load_config(None, ["--algo.name", "dapo"]).optim.warmup_steps == 10
    assert load_config(None, ["--algo.name=ppo"]).algo.advantage == "gae"
    twice = load_config(None, ["--algo.name", "grpo", "--algo.name", "dapo"])
    assert (twice.algo.name, twice.algo.clip_high) == ("dapo", 0.28)
    assert load_config(None, []).algo.kl_coef == 1e-3, "the default algorithm is grpo"


def test_a_recipe_beats_its_preset(recipe):
    path = recipe('algo.name = "dapo"\nalgo.clip_high = 0.3\noptim.warmup_steps = 0')
    config = load_config(path)
    assert (config.algo.clip_high, config.optim.warmup_steps) == (0.3, 0)
    assert config.algo.dynamic_sampling


def test_a_recipe_beats_the_preset_that_a_flag_asks_for(recipe):
    path = recipe('algo.name = "grpo"\nalgo.clip_high = 0.3')
    config = load_config(path, ["--algo.name", "dapo"])
    assert config.algo.name == "dapo"
    assert config.algo.clip_high == 0.3
    assert config.algo.overlong_frac == 0.2, "from the new preset"
    assert config.algo.kl_coef == 0.0, "nothing is left of the old preset"


def test_a_flag_beats_all(recipe):
    path = recipe('algo.name = "dapo"\nalgo.clip_high = 0.3\nsteps = 5')
    flags = ["--algo.clip-high", "0.4", "--algo.dynamic_sampling=false", "--steps", "6"]
    config = load_config(path, flags)
    assert (config.algo.clip_high, config.algo.dynamic_sampling, config.steps) == (0.4, False, 6)
    default = load_config(path, ["--algo.clip-high", "0.2"])
    assert default.algo.clip_high == 0.2, "a flag may say the default"


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--algo.cap", "none"], "algo.cap", None),
        (["--algo.cap=none"], "algo.cap", None),
        (["--algo.cap", "None"], "algo.cap", None),
        (["--critic.clip", "none"], "critic.clip", None),
        (["--quant.format", "none"], "quant.format", "none"),
        (["--task.instruction", "none"], "task.instruction", "none"),
        (["--task.instruction", "true"], "task.instruction", "true"),
        (["--algo.whiten", "true"], "algo.whiten", True),
        (["--algo.whiten"], "algo.whiten", True),
        (["--task.skip-long-prompts", "--steps", "3"], "task.skip_long_prompts", True),
        (["--algo.whiten", "False"], "algo.whiten", False),
        (["--algo.whiten", "True"], "algo.whiten", True),
        (["--task.skip-long-prompts=true"], "task.skip_long_prompts", True),
        (["--run-dir", "x"], "run_dir", "x"),
        (["--run_dir", "x"], "run_dir", "x"),
        (["--optim.betas", "0.8", "0.9"], "optim.betas", (0.8, 0.9)),
        (["--sampling.stop", "a", "b"], "sampling.stop", ("a", "b")),
        (["--task.name=x.jsonl", "--task.eval-sets", "a", "b"], "task.eval_sets", (("a", "b"),)),
        (["--model.scratch.layers", "3"], "model.scratch.layers", 3),
    ],
)
def test_flags_say_things_as_recipes_do(flags, key, value):
    assert flatten(dataclasses.asdict(load_config(None, flags)))[key] == value


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("algo", "cap"),
        ("algo", "dual_clip"),
        ("experimental", "acr_max_bound"),
        ("critic", "clip"),
        ("correction", "veto"),
    ],
)
def test_none_in_optional_keys(recipe, section, key):
    config = load_config(recipe(f'{section}.{key} = "none"'))
    assert getattr(getattr(config, section), key) is None


def test_all_mistakes_of_the_values_at_once():
    message = refusal(
        {
            "stepz": 3,
            "steps": "many",
            "quant": {"format": "int3"},
            "algo": {"cap": 0.5, "gamma": 2, "clip": 1},
            "model": {"scratch": {"depth": 3}},
            "optim": "fast",
        }
    )
    assert message.startswith("8 mistakes in r.toml:")
    for line in (
        "stepz = 3 is not a key; the top level has steps, seed, run_dir",
        "steps = 'many': must be a valid integer",
        "quant.format = 'int3' is not one of 'none', 'int8', 'fp8', 'fp8-block', 'nvfp4', 'int6'",
        "algo.cap = 0.5: must be greater than or equal to 1",
        "algo.gamma = 2: must be less than or equal to 1",
        "algo.clip = 1 is not a key; [algo] has name, objective, cap",
        "model.scratch.depth = 3 is not a key; [model.scratch] has hidden_size, layers",
        "optim = 'fast' must be a table, like [optim]",
    ):
        assert f"- {line}" in message


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"steps": 0}, "steps = 0: must be greater than or equal to 1"),
        ({"steps": 1.5}, "steps = 1.5: must be a valid integer"),
        ({"optim": {"lr": 0}}, "optim.lr = 0: must be greater than 0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr = nan: must be"),
        ({"optim": {"lr": float("inf")}}, "optim.lr = inf: must be a finite number"),
        ({"sampling": {"temperature": 1e-9}}, "sampling.temperature = 1e-09: must be greater than"),
        ({"optim": {"betas": [0.9, 2]}}, "optim.betas.1 = 2: must be less than 1"),
        ({"eval": {"top_p": 0}}, "eval.top_p = 0: must be greater than 0"),
        ({"sampling": {"stop": "x"}}, "sampling.stop = 'x': must be a valid list"),
        ({"optim": {"betas": [0.9]}}, "optim.betas.1 = [0.9]: Field required"),
        ({"optim": {"lr": True}}, "optim.lr = True: must be a valid number"),
        ({"optim": {"grad_clip": "2"}}, "optim.grad_clip = '2': must be a valid number"),
        ({"steps": True}, "steps = True: must be a valid integer"),
        ({"model": {"compile": "no"}}, "model.compile = 'no': must be a valid boolean"),
        ({"run_dir": ""}, "run_dir = '': String should have at least 1 character"),
        ({"correction": {"veto": 1}}, "correction.veto = 1: must be less than 1"),
        ({"algo": {"whiten": "maybe"}}, "algo.whiten = 'maybe': must be a valid boolean"),
        ({"quant": {"update_scale": 0.5}}, "quant.update_scale = 0.5: must be greater than or"),
        ({"quant": {"update_scale": 1e308}}, "quant.update_scale = 1e+308: must be less than or"),
        (
            {"experimental": {"norm_fed_lr_scale": 5e-324}},
            "experimental.norm_fed_lr_scale = 5e-324: must be greater than or",
        ),
        ({"task": {"path": 3}}, "task.path = 3: must be a valid string"),
        (
            {"task": {"mix": {"a": 1, "b": 0.0}}},
            "task.mix.'b' = 0.0: must be greater than or equal",
        ),
        ({"task": {"mix": {"a": 1e308}}}, "task.mix.'a' = 1e+308: must be less than or equal to"),
        ({"optim": {"lr": 1e308}}, "optim.lr = 1e+308: must be less than or equal to 1000"),
        ({"algo": {"cap": 1e308}}, "algo.cap = 1e+308: must be less than or equal to"),
        ({"algo": {"clip_high": 1e308}}, "algo.clip_high = 1e+308: must be less than or equal to"),
        ({"task": {"eval_sets": {"a": 3}}}, "task.eval_sets.'a' = 3: must be a valid string"),
        ({"task": {"mix": ["a"]}}, "task.mix.0 = 'a': must be a valid list"),
    ],
)
def test_one_mistake_names_key_value_and_what_is_allowed(tree, message):
    text = refusal(tree)
    assert text.startswith(message)
    assert text.endswith("(r.toml)")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"task": {"name": "nosuch"}}, "task.name = 'nosuch' is not one of arithmetic, countdown,"),
        ({"task": {"reward": "f1"}}, "task.reward = 'f1' is not one of auto, math, exact, count"),
        (
            {"algo": {"objective": "acrr"}},
            "algo.objective = 'acrr' is not one of ppo_prox, ppo_behav, decoupled, tis, acr, nor "
            "module:name",
        ),
        ({"algo": {"advantage": "gea"}}, "algo.advantage = 'gea' is not one of gae, grpo, dr_grpo"),
        (
            {"rollout": {"engine": "sglang"}},
            "rollout.engine = 'sglang' is not one of local, hf, vllm, nor",
        ),
        ({"rollout": {"episode": "x"}}, "rollout.episode = 'x' is not empty, nor module:name"),
        ({"sampling": {"select": "x"}}, "sampling.select = 'x' is not one of shuffle, greso"),
        ({"algo": {"objective": "no_such:f"}}, "algo.objective = 'no_such:f': there is no module"),
        ({"task": {"name": "my.py:f"}}, "'my.py' is not the name of a module"),
        ({"sampling": {"group_size": 1}}, "algo.advantage = 'grpo' compares completions"),
        (
            {"sampling": {"group_size": 1}, "algo": {"advantage": "rloo"}},
            "algo.advantage = 'rloo' compares completions",
        ),
        (
            {
                "sampling": {"group_size": 1},
                "algo": {"advantage": "reinforce_pp", "dynamic_sampling": True},
            },
            "sampling.group_size = 1: algo.dynamic_sampling needs at least 2",
        ),
        ({"algo": {"name": "ppo", "advantage": "grpo"}}, "algo.name = 'ppo' means 'gae'"),
        ({"algo": {"kl_in_reward": True}}, "kl_in_reward = true needs algo.advantage = 'gae'"),
        ({"correction": {"mode": "bypass"}}, "'bypass' needs algo.objective = 'ppo_behav'"),
        (
            {"experimental": {"weighted_kl": True}, "algo": {"objective": "ppo_prox"}},
            "experimental.weighted_kl = true: 'ppo_prox' has no importance weight",
        ),
        (
            {"correction": {"kind": "icepop"}, "algo": {"objective": "decoupled"}},
            "correction.kind = 'icepop' needs algo.objective = 'tis' or 'acr', not 'decoupled'",
        ),
        (
            {"correction": {"mode": "auto", "reject": ["token_k3:1"], "veto": 1e-4}},
            "correction.mode = 'auto' does not go with correction.reject, correction.veto: they",
        ),
        (
            {
                "correction": {"mode": "auto", "batch_normalize": True},
                "algo": {"name": "ppo", "advantage": "gae", "kl_in_reward": True},
            },
            "'auto' does not go with correction.batch_normalize, algo.kl_in_reward: they read",
        ),
        (
            {"rollout": {"ahead": 1}, "correction": {"mode": "auto"}, "quant": {"unified": True}},
            "'auto' takes behav for prox, and rollout.ahead = 1 makes behav an update older than",
        ),
        ({"correction": {"icepop_low": 6}}, "icepop_low = 6.0 must lie below correction.icepop_h"),
        ({"correction": {"icepop_low": 2}}, "icepop_high = 5.0 must have 1 between them"),
        (
            {"correction": {"icepop_high": 0.8}},
            "correction.icepop_low = 0.5 and correction.icepop_high = 0.8 must have 1 between them",
        ),
        (
            {"save": {"every": 5, "keep": 0}},
            "save.every = 5 asks for checkpoints, save.keep = 0 for none",
        ),
        (
            {"batch": {"problems": 2, "minibatches": 17}},
            "batch.minibatches = 17 is more than the 16 sequences of a step",
        ),
        ({"task": {"name": "file"}}, "task.name = 'file' needs task.path"),
        ({"task": {"path": "mine.jsonl"}}, "task.name = 'arithmetic' draws its problems"),
        ({"task": {"name": "gym:x", "eval_path": "y"}}, "task.eval_path = 'y', but task.name"),
        (
            {"task": {"name": "gsm8k", "path": "x"}, "eval": {"every": 3}},
            "eval.every = 3: set task.eval_path, because a file has no held-out problems",
        ),
        ({"task": {"mix": {"x.jsonl": 2}}}, "task.mix = {'x.jsonl': 2.0}, but task.name = 'arith"),
        (
            {"task": {"name": "file", "path": "x.jsonl", "mix": {"y.jsonl": 1}}},
            "task.path = 'x.jsonl' and task.mix exclude each other; keep one",
        ),
        (
            {"task": {"name": "file", "eval_path": "x.jsonl", "eval_sets": {"y": "y.jsonl"}}},
            "task.eval_path = 'x.jsonl' and task.eval_sets exclude each other; keep one",
        ),
        (
            {"task": {"name": "x.jsonl", "path": "y.jsonl"}},
            "task.name = 'x.jsonl' and task.path = 'y.jsonl' both name a file; keep one",
        ),
        ({"task": {"name": "file", "mix": {"": 1}}}, "task.mix has an empty name; give each file"),
        ({"task": {"name": "file", "eval_sets": {"a": ""}}}, "task.eval_sets has an empty name"),
        (
            {"task": {"name": "file", "eval_sets": {"a/b": "y.jsonl"}}},
            "task.eval_sets.'a/b': a name has letters",
        ),
        (
            {"task": {"name": "file", "path": "x", "rewards": [["a", "math"], ["a", "code"]]}},
            "task.rewards names 'a' twice",
        ),
        (
            {"task": {"name": "file", "path": "x", "rewards": {"a": "maths"}}},
            "task.rewards.a = 'maths' is not one of math, exact, countdown, code, nor module:name",
        ),
        (
            {"task": {"name": "file", "mix": {"x": 1}}, "sampling": {"select": "json:loads"}},
            "sampling.select = 'json:loads' chooses the problems itself",
        ),
        (
            {"model": {"scratch": {"hidden_size": 36}}},
            "model.scratch.hidden_size = 36 must be a multiple of 2 x model.scratch.heads = 8",
        ),
        (
            {"quant": {"unified": True, "format": "none"}},
            "quant.unified = true needs quant.format = 'int8'",
        ),
        (
            {"quant": {"unified": True}, "model": {"compile": True}},
            "quant.unified = true cannot be compiled; set model.compile = false",
        ),
        ({"quant": {"backward": "all"}}, "quant.backward = 'all' needs quant.unified = true"),
        (
            {"quant": {"format": "none", "full_layers": 1}},
            "quant.full_layers = 1 needs a quant.format other than 'none'",
        ),
        (
            {"quant": {"full_layers": 1}, "rollout": {"engine": "qurl.rollout:HFEngine"}},
            "quant.full_layers = 1 needs rollout.engine = 'local' or 'hf'",
        ),
        ({"correction": {"reject": ["token_k9:1"]}}, "'token_k9:1' does not start with one of"),
        ({"correction": {"reject": ["token_k1:1"]}}, "'token_k1:1' needs a band"),
        ({"correction": {"reject": ["seq_sum_k2:1_2"]}}, "'seq_sum_k2:1_2' needs one upper bound"),
        ({"correction": {"reject": ["seq_max_k1:2_1"]}}, "'seq_max_k1:2_1' needs 0 < low < high"),
        ({"correction": {"reject": ["seq_max_k1:2_5"]}}, "'seq_max_k1:2_5' needs a band with 1 in"),
        ({"correction": {"reject": ["token_k3:x"]}}, "'token_k3:x' needs one upper bound"),
        ({"correction": {"reject": ["token_k3:-1"]}}, "'token_k3:-1' needs a bound above 0"),
        ({"correction": {"reject": ["token_k3:nan"]}}, "'token_k3:nan' needs a bound above 0"),
        ({"correction": {"reject": ["token_k1:1_inf"]}}, "'token_k1:1_inf' needs 0 < low < high"),
    ],
)
def test_combinations_that_cannot_work(tree, message):
    (mistake,) = find_mistakes(build_config(tree))
    assert message in mistake


def test_combinations_are_reported_at_once(recipe):
    path = recipe('algo.objective = "x"\ntask.name = "file"\ncorrection.reject = ["a", "b"]')
    with pytest.raises(ConfigError, match=r"4 mistakes in .*recipe\.toml"):
        load_config(path)


def test_combinations_that_look_wrong_and_are_not():
    for tree in (
        {"sampling": {"group_size": 1}, "algo": {"name": "ppo", "advantage": "gae"}},
        {"sampling": {"group_size": 1}, "algo": {"advantage": "reinforce_pp"}},
        {"correction": {"mode": "bypass"}, "algo": {"objective": "ppo_behav"}},
        {"correction": {"reject": ["seq_mean_k1:0.999_1.001", "token_k1:1_2", "token_k3:0.01"]}},
        {"correction": {"mode": "auto", "kind": "icepop", "level": "sequence"}},
        {"model": {"path": "some/model", "scratch": {"hidden_size": 36}}},
        {"batch": {"problems": 2, "minibatches": 16}},
    ):
        assert find_mistakes(build_config(tree)) == []


def test_parts_of_your_own(tmp_path, monkeypatch):
    """Rules that need facts wait until the part is loaded and they are given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise AssertionError('reading a recipe runs no code')")
    own = {"objective": "mine:o", "advantage": "mine:a"}
    tree = {
        "algo": {**own, "cap": 5.0, "lam": 0.9},
        "task": {"name": "mine:task", "path": "x.jsonl", "reward": "mine:reward"},
        "rollout": {"engine": "mine:engine", "episode": "mine:episode"},
        "sampling": {"select": "mine:select", "group_size": 1},
        "correction": {"kind": "icepop"},
        "quant": {"kv": "fp8"},
        "eval": {"every": 1},
    }
    config = build_config(tree)
    assert find_mistakes(config) == []
    assert not list(find_warnings(config))
    mistakes = find_mistakes(config, Objective(), Advantage(needs_group=True))
    assert [mistake.split(" = ")[0] for mistake in mistakes] == [
        "sampling.group_size",
        "correction.kind",
    ]
    warnings = find_warnings(config, Objective(), Advantage())
    assert [w.split()[0] for w in warnings] == ["algo.lam", "algo.cap", "algo.objective"]


def test_an_advantage_of_your_own_reads_prox_unless_it_says_no():
    config = build_config({"correction": {"mode": "auto"}, "algo": {"advantage": "mine:a"}})
    assert prox_readers(config, None) == []
    assert prox_readers(config, Advantage()) == ["algo.advantage = 'mine:a'"]
    (mistake,) = [m for m in find_mistakes(config, None, Advantage()) if "auto" in m]
    assert "does not go with algo.advantage = 'mine:a'" in mistake
    assert prox_readers(config, Advantage(needs_prox=False)) == []


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_a_recipe(name):
    assert find_mistakes(build_config({"algo": {"objective": name}})) == []


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_is_a_recipe(name):
    assert find_mistakes(build_config({"algo": {"advantage": name}})) == []


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"batch": {"minibatches": 1}}, "with one update per rollout batch"),
        ({"algo": {"cap": "none"}}, "ACR cannot act: algo.cap = none truncates nothing"),
        ({"quant": {"format": "none", "update_scale": 1.5}}, "UAQ without quantization"),
        ({"quant": {"update_scale": 1.5}, "optim": {"lr": 1e-5}}, "UAQ with optim.lr = 1e-05"),
        ({"algo": {"objective": "ppo_prox"}}, "'ppo_prox' does not correct the mismatch"),
        ({"algo": {"objective": "ppo_behav"}}, "'ppo_behav' does not correct the mismatch"),
        ({"correction": {"kind": "icepop"}}, "ACR cannot act: correction.kind = 'icepop'"),
        ({"correction": {"mode": "auto"}}, "'auto': a mismatch of quantized rollouts"),
        ({"correction": {"mode": "auto"}, "quant": {"format": "none", "kv": "fp8"}}, "'auto': a"),
        (
            {"steps": 3, "critic": {"pretrain_steps": 3}, "algo": {"advantage": "gae"}},
            "critic.pretrain_steps = 3 of steps = 3: the policy is never trained",
        ),
        (
            {"quant": {"unified": True}, "rollout": {"engine": "qurl.rollout:HFEngine"}},
            "quant.unified: rollout.engine = 'qurl.rollout:HFEngine' must quantize as qurl.quant",
        ),
        (
            {
                "rollout": {"ahead": 1},
                "algo": {"objective": "ppo_prox"},
                "quant": {"format": "none"},
            },
            "'ppo_prox' does not correct the age of rollouts that rollout.ahead = 1 samples",
        ),
        ({"steps": 9, "optim": {"warmup_steps": 10}}, "the learning rate never reaches optim.lr"),
    ],
)
def test_each_warning(tree, message):
    (warning,) = find_warnings(build_config(tree))
    assert message in warning


def test_choices_that_need_no_warning():
    for tree in (
        {"batch": {"minibatches": 1, "epochs": 2}},
        {"algo": {"cap": "none", "objective": "tis"}},
        {"quant": {"update_scale": 1.5}, "optim": {"lr": 9e-6}},
        {"algo": {"objective": "ppo_prox"}, "quant": {"format": "none"}},
        {"correction": {"mode": "auto"}, "quant": {"format": "none"}},
        {"algo": {"objective": "ppo_prox"}, "quant": {"unified": True}},
        {"rollout": {"ahead": 1}},
        {"rollout": {"ahead": 1}, "algo": {"objective": "ppo_behav"}, "quant": {"format": "none"}},
    ):
        assert not list(find_warnings(build_config(tree)))


def test_files_that_are_no_recipe(recipe, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no recipe and no run at .*nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"recipe\.toml is not valid TOML: .*line 2"):
        load_config(recipe("steps = 1\nseed 2\n"))
    with pytest.raises(ConfigError, match=r"Invalid value .*line 2.*; text needs quotes"):
        load_config(recipe("[quant]\nformat = int8\n"))
    recipe("").write_bytes(b"steps = 1 # \xff")
    with pytest.raises(ConfigError, match=r"recipe\.toml is not valid TOML: .* decode byte 0xff"):
        load_config(tmp_path / "recipe.toml")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        load_config(tmp_path)


def test_a_run_directory_is_a_recipe(tmp_path):
    flags = ["--algo.name", "dapo", "--algo.dual_clip", "none", "--algo.cap", "none"]
    flags += ["--sampling.stop", "###", "--optim.betas", "0.8", "0.95", "--run_dir", "elsewhere"]
    config = load_config(None, flags)
    (tmp_path / "config.json").write_text(to_json(config))
    config = dataclasses.replace(config, run_dir=str(tmp_path))  # where it is now
    assert load_config(tmp_path) == config
    assert load_config(str(tmp_path), ["--steps", "3"]) == dataclasses.replace(config, steps=3)
    assert load_config(tmp_path, ["--algo.name", "dapo"]) == config
    with pytest.raises(ConfigError, match="holds the resolved recipe of a run with 'dapo'"):
        load_config(tmp_path, ["--algo.name", "ppo"])
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    message = r"config\.json is not a run's config.*a model goes into model\.path of a recipe"
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path, ["--algo.name", "ppo"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_that_ship(path):
    config = load_config(path)
    assert not list(find_warnings(config))
    assert config.run_dir == f"runs/{path.stem}"


PAIRS = [p for p in RECIPES if p.stem.endswith("-int8")]


def test_there_are_pairs_of_recipes():
    assert len(PAIRS) >= 5


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.stem)
def test_int8_and_fp8_recipes_differ_in_the_format_only(path):
    other = path.with_name(path.name.replace("-int8", "-fp8"))
    ours, theirs = (flatten(tomllib.loads(p.read_text())) for p in (path, other))
    different = {key for key in ours | theirs if ours.get(key) != theirs.get(key)}
    allowed = {"quant.format", "run_dir"}
    if ours["model.path"].startswith("runs/"):  # it starts from its own earlier stage
        allowed.add("model.path")
        assert theirs["model.path"] == ours["model.path"].replace("-int8", "-fp8")
    assert different == allowed
    assert (ours["quant.format"], theirs["quant.format"]) == ("int8", "fp8")


def test_optional_keys_follow_from_the_types():
    tree = {"algo": {"cap": "none", "dual_clip": "none"}, "critic": {"clip": "none"}}
    config = build_config(tree | {"correction": {"veto": "none"}})
    assert (config.algo.cap, config.critic.clip, config.correction.veto) == (None, None, None)
    with pytest.raises(ConfigError, match=r"optim\.lr = 'none'"):
        build_config({"optim": {"lr": "none"}})


def recipe_file(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "r.toml"
    path.write_text(text, encoding=encoding)
    return path


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path):
    assert load_config(recipe_file(tmp_path, "steps = 7\n", "utf-8-sig")).steps == 7


def test_the_home_folder_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    keys = 'name = "file"\npath = "~/d.jsonl"\neval_path = "~/e.jsonl"\n'
    config = load_config(recipe_file(tmp_path, f'[model]\npath = "~/m"\n[task]\n{keys}'))
    paths = (config.model.path, config.task.path, config.task.eval_path)
    assert paths == ("/home/me/m", "/home/me/d.jsonl", "/home/me/e.jsonl")
    assert load_config(None, ["--model.path", "~/m"]).model.path == "/home/me/m"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seed = 18446744073709551616", "seed = 18446744073709551616 is too large; it must"),
        ("steps = 9223372036854775807", "steps = 9223372036854775807 is too large; it must be"),
        ("steps = 0x" + "f" * 9000, "steps = an integer of 36000 bits is too large"),
        ("[batch]\nproblems = 2000000", "batch.problems x sampling.group_size = 16000000 is too"),
        ('run_dir = "a\\u0000b"', "run_dir = 'a\\x00b' holds a NUL character"),
        ("steps = " + "[" * 5000, "is nested too deeply"),
        ("a" * 1000 + ' = "' + "x" * 10_000 + '"', "... (10002 characters) is not a key"),
        ('[sampling]\nstop = [""]', "sampling.stop holds an empty string"),
        ("[task]\ngrade_workers = 100000", "must be less than or equal to 256"),
    ],
)
def test_values_that_nothing_can_take(tmp_path, text, reason):
    with pytest.raises(ConfigError) as caught:
        load_config(recipe_file(tmp_path, text))
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 2500


def test_a_lone_surrogate_in_a_flag():
    with pytest.raises(ConfigError, match=r"run_dir = .* must be a valid string"):
        load_config(None, ["--run-dir", "a\udcff"])


def test_a_recipe_that_may_not_be_read(tmp_path, monkeypatch):
    path = recipe_file(tmp_path, "steps = 1")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(ConfigError, match=r"r.toml cannot be read: Permission denied"):
        load_config(path)


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"critic": {"lr": 1.0}}, "critic.lr"),
        ({"algo": {"lam": 0.9}}, "algo.lam = 0.9"),
        ({"algo": {"kl_coef": 0.0, "kl_estimator": "k1"}}, "algo.kl_estimator = 'k1'"),
        ({"algo": {"gen_multiple": 2}}, "algo.gen_multiple = 2"),
        ({"correction": {"icepop_low": 0.1}}, "correction.icepop_low = 0.1"),
        ({"algo": {"objective": "ppo_prox", "cap": 5.0}}, "algo.cap = 5.0"),
        ({"model": {"lora_alpha": 8}}, "model.lora_alpha = 8"),
        ({"model": {"path": "m", "scratch": {"layers": 3}}}, "model.scratch.layers"),
        ({"experimental": {"scale_o_proj": True}}, "experimental.scale_o_proj = True"),
        ({"task": {"name": "file", "path": "x", "difficulty": 5}}, "task.difficulty = 5"),
        ({"rollout": {"engine": "hf", "max_batch": 3}}, "rollout.max_batch = 3"),
        ({"eval": {"top_p": 0.5}}, "eval.top_p = 0.5"),
    ],
)
def test_keys_that_nothing_reads_are_named(tree, key):
    notes = [note for note in find_warnings(build_config(tree)) if " is not used: " in note]
    assert [note.split(" is not used")[0] for note in notes] == [key]


def test_no_key_of_the_defaults_or_of_a_preset_is_unused():
    for name in PRESETS:
        notes = list(find_warnings(load_config(None, ["--algo.name", name])))
        assert not [note for note in notes if "not used" in note]


def test_runs_on_a_file_are_saved_and_evaluated_now_and_then(tmp_path):
    path = recipe_file(tmp_path, '[task]\nname = "file"\npath = "d.jsonl"\n')
    config = load_config(path)
    assert (config.save.every, config.eval.every) == (20, 0)
    config = load_config(path, ["--task.eval-path", "e.jsonl"])
    assert (config.save.every, config.eval.every) == (20, 20)
    flags = ["--save.every", "0", "--eval.every", "5", "--task.eval-path", "e.jsonl"]
    config = load_config(path, flags)
    assert (config.save.every, config.eval.every) == (0, 5)
    assert load_config(path, ["--save.keep", "0"]).save.every == 0
    config = load_config(None, ["--task.name", "arithmetic"])
    assert (config.save.every, config.eval.every) == (0, 0)


@pytest.mark.parametrize(
    "flags",
    [
        ["--steps", "3", "--run-dir=runs/x", "--model.scratch.hidden-size", "64"],
        ["--quant.unified", "--algo.cap", "none", "--optim.betas", "0.9", "0.5"],
        ["--task.chat_template_kwargs", "a", "1", "--systems.pods.keep", "2"],
    ],
)
def test_flags_are_read_alike_with_or_without_all_other_keys(flags):
    config = Config()
    assert apply_flags(config, flags) == _read(config, flags) != config


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "three"], "steps"),
        (["--stepz", "3"], "--steps"),  # what was meant
        (["--steps", "3", "4"], "4"),
        (["--optim", "3"], "--optim"),
        (["--optim.lr.x", "3"], "--optim.lr"),
        (["--quant.format", "int5"], "int8"),
    ],
)
def test_mistakes_in_flags_are_told_once(flags, words, capsys):
    with pytest.raises(SystemExit):
        apply_flags(Config(), flags)
    told = capsys.readouterr()
    assert words in told.err + told.out
    assert told.err.count("--help") + told.out.count("--help") == 1
