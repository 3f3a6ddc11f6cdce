import json
import os
from pathlib import Path

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

# Read when a kernel is defined, so it must be set before anything imports Triton (torch does not).
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def _quiet_single_thread() -> None:
    """Tiny tensors: more threads are slower. Progress bars would mix with what tests capture."""
    torch.set_num_threads(1)
    disable_progress_bar()


@pytest.fixture(scope="session")
def vectors():
    """Loads a file of worked numbers from tests/vectors."""

    def load(name: str) -> dict:
        return json.loads((Path(__file__).parent / "vectors" / name).read_text())

    return load
