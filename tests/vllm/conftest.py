"""vLLM engines are slow to start: tests share one for each model and format.

A test gets it synchronised with its own weights, as a run gets it step by step.
"""

import os
import sys
from pathlib import Path

import pytest

# Where vLLM compiles its sampler, tiny models would wait half a minute for it.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 2**25}


def can_multiply_int8() -> bool:
    """Without VNNI, oneDNN's INT8 product saturates on a CPU."""
    flags = Path("/proc/cpuinfo").read_text()
    return any(flag in flags for flag in ("avx512_vnni", "avx_vnni", "amx_int8"))


class Engines:
    """Shared engines, by the shape of the model and the options."""

    def __init__(self) -> None:
        self._engines: dict = {}

    def build(self, kind, model, quant="none", tokenizer=None, **options):
        """As `build_engine`, but an engine that is there already is synchronised as version 0."""
        from qurl.errors import EngineError
        from qurl.rollout import build_engine

        assert kind == "vllm"
        key = (quant, type(model).__name__, model.config.to_json_string(), str(options))
        if key not in self._engines:
            options = {"max_batch": 64, "options": OPTIONS} | options
            try:
                self._engines[key] = build_engine(kind, model, quant=quant, **options)
            except EngineError as error:
                if "scaled_fp8_quant" not in str(error):
                    raise
                pytest.skip("this build of vLLM has no FP8 kernel for a CPU")
        engine = self._engines[key]
        engine.tokenizer = tokenizer
        engine.sync(model, version=0)
        return engine

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


@pytest.fixture(scope="session")
def engines():
    shared = Engines()
    yield shared
    shared.close()
