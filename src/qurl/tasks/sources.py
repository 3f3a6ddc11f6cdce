"""Where the data of the recipes comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class HubFile:
    """Files of a data set on the hub that become one JSONL file."""

    repo: str
    pattern: str
    columns: Mapping[str, str]  # our name of each column that is kept: theirs


_SAME = {"problem": "problem", "answer": "answer"}
_GSM8K = {"question": "question", "answer": "answer"}
SOURCES: Mapping[str, Mapping[str, HubFile]] = {
    "gsm8k": {
        "gsm8k_train.jsonl": HubFile("openai/gsm8k", "main/train-*.parquet", _GSM8K),
        "gsm8k_test.jsonl": HubFile("openai/gsm8k", "main/test-*.parquet", _GSM8K),
    },
    "dapo-math": {
        "dapo_math_17k.jsonl": HubFile(
            "open-r1/DAPO-Math-17k-Processed",
            "all/train-*.parquet",
            {"problem": "prompt", "answer": "solution"},
        ),
    },
    "deepscaler": {
        "deepscaler.jsonl": HubFile(
            "agentica-org/DeepScaleR-Preview-Dataset", "deepscaler*.json", _SAME
        ),
    },
    "aime24": {"aime24.jsonl": HubFile("HuggingFaceH4/aime_2024", "data/train-*.parquet", _SAME)},
    "math500": {"math500.jsonl": HubFile("HuggingFaceH4/MATH-500", "test.jsonl", _SAME)},
}
"""{name: {file: where its rows come from}}"""


def hint(file: str) -> str:
    """How to get a file that is not there, if `qurl data` writes it."""
    name = next((name for name, files in SOURCES.items() if file in files), "")
    return f" (`qurl data {name}` writes it)" if name else ""
