"""`benchmarks/vllm_engine.py` with the engines that need no vLLM."""

import json

from benchmarks import vllm_engine
from benchmarks.vllm_engine import VllmBench


def test_every_version_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine, "ENGINES", ("local", "hf"))
    monkeypatch.setattr(vllm_engine, "engine_options", lambda *_: {})
    sizes = {"problems": 2, "group_size": 2, "prompt_tokens": 5, "new_tokens": 6, "scored": 3}
    vllm_engine.run(
        VllmBench("tiny", quant="int8", turn=tmp_path / "turn", out=tmp_path / "out.json", **sizes)
    )
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results.keys() == {"local tiny int8", "hf tiny int8"}
    for [entry] in results.values():
        assert [row["version"] for row in entry["versions"]] == [0, 1, 2, 3]
        assert all(0 < row["gap_mean"] < 0.1 for row in entry["versions"])
    local, hf = ([row["gap_mean"] for row in entry["versions"]] for [entry] in results.values())
    assert all(abs(a - b) < 1e-3 for a, b in zip(local, hf, strict=True))
