import json
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(autouse=True, scope="session")
def _single_thread() -> None:
    """Tiny tensors: more threads are slower."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def vectors():
    """Loads a file of worked numbers: ours in tests/vectors."""

    def load(name: str) -> dict:
        return json.loads((Path(__file__).parent / "vectors" / name).read_text())

    return load
