"""AQN's schedule against the vectors, and its noise in the engine."""

import json
import re
from pathlib import Path

import pytest
import torch
from models import tiny_llama

from qurl.config import build_config
from qurl.config.rules import find_mistakes, find_warnings
from qurl.rollout import build_engine
from qurl.rollout.canary import score_with
from qurl.rollout.noise import noise_sigma

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "systems.json").read_text())
AQN = VECTORS["qerl_aqn"]
IDS = list(range(5, 40))


def test_sigma_follows_the_vectors():
    names = ("total_steps", "sigma_start", "sigma_end", "num_stages")
    settings = [AQN[name] for name in names]
    for sample in AQN["samples"]:
        found = noise_sigma(sample["step"], *settings)
        assert found == pytest.approx(sample["sigma"], rel=1e-9), sample["step"]
    width = AQN["total_steps"] // AQN["num_stages"]
    stages = [noise_sigma(width * (i + 1), *settings) for i in range(AQN["num_stages"] - 1)]
    assert stages == pytest.approx(AQN["trend"], rel=1e-9)


def norms(engine):
    return [layer.norms[k] for layer in engine.weights.layers for k in sorted(layer.norms)]


def noisy_engine(model, quant="nvfp4"):
    return build_engine("local", model, quant=quant, has_noise=True)


def test_noise_is_added_to_a_clean_copy_and_the_trainer_does_not_see_it():
    model = tiny_llama()
    engine, own = noisy_engine(model), score_with(model, IDS)
    clean = [norm.clone() for norm in norms(engine)]
    scores = engine.score(IDS)
    for version in range(100):
        engine.sync(model, version=version)
        for _ in range(2):  # twice is as good as once
            engine.add_noise_(0.01, seed=version)
    noise = torch.stack([a - b for a, b in zip(norms(engine), clean, strict=True)])
    assert 0.008 < float(noise.std()) < 0.012, "a random walk would have 0.1"
    assert len(torch.unique(noise)) == noise.numel()
    assert not torch.equal(engine.score(IDS), scores)
    assert torch.equal(score_with(model, IDS), own)
    assert all((p == 1).all() for n, p in model.named_parameters() if "norm" in n)
    assert (engine.weights.norm == 1).all(), "the last norm feeds no projection"
    engine.sync(model, version=100)
    assert torch.equal(engine.score(IDS), scores)


def test_noise_depends_on_its_seed_alone():
    model = tiny_llama()
    one, other = noisy_engine(model), noisy_engine(model)
    one.add_noise_(0.1, seed=1)
    one.add_noise_(0.05, seed=7)
    other.add_noise_(0.05, seed=7)
    assert all(map(torch.equal, norms(one), norms(other)))
    other.add_noise_(0.05, seed=8)
    assert not any(map(torch.equal, norms(one), norms(other)))


def test_the_addresses_of_norms_stay():
    model = tiny_llama()
    engine = noisy_engine(model, "int8")
    before = engine.weights.addresses()
    engine.add_noise_(0.05, seed=7)
    engine.sync(model, version=1)
    assert engine.weights.addresses() == before


@pytest.mark.parametrize(
    ("quant", "other", "mistake"),
    [
        ({"noise": "aqn"}, {"rollout": {"engine": "hf"}}, r"noise = 'aqn' needs .* 'local'"),
        ({"noise": "aqn", "unified": True}, {}, r"makes trainer and actor one function"),
        (
            {"noise": "aqn"},
            {"systems": {"aqn": {"start": 1e-3, "end": 1e-2}}},
            r"systems.aqn.start = 0.001 must not lie below systems.aqn.end = 0.01",
        ),
        ({"scales": "frozen", "format": "fp8"}, {}, r"'frozen' is for .* 'int8', not 'fp8'"),
        ({"scales": "frozen"}, {"rollout": {"engine": "hf"}}, r"'frozen' needs .* 'local'"),
        ({"scales": "frozen", "unified": True}, {}, r"'frozen' is not built for quant.unified"),
    ],
)
def test_refusals(quant, other, mistake):
    found = find_mistakes(build_config({"quant": quant, **other}))
    assert any(re.search(mistake, text) for text in found), found


def test_stages_that_a_short_run_skips_are_named():
    config = build_config({"quant": {"noise": "aqn"}, "steps": 5})
    assert [w for w in find_warnings(config) if "systems.aqn.stages = 10 is more than" in w]
