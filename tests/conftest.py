import gc
import json
import os
import sys
from pathlib import Path

# Read when numpy is imported. Triton's interpreter multiplies tiles too small for threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

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


@pytest.fixture(autouse=True, scope="session")
def _keep_libraries_from_the_garbage_collector():
    """Every run collects garbage before its first step (`settled_heap`): a fifth of a second, most
    of it spent on imported modules. Runs unfreeze all when they end, so that must do nothing."""
    gc.collect()
    gc.freeze()
    unfreeze, gc.unfreeze = gc.unfreeze, lambda: None
    yield
    gc.unfreeze = unfreeze


@pytest.fixture(autouse=True)
def _own_import_path():
    """Runs put the working directory on the path, where the next test's modules should not be."""
    before = sys.path.copy()
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def vectors():
    """Loads a file of worked numbers from tests/vectors."""

    def load(name: str) -> dict:
        return json.loads((Path(__file__).parent / "vectors" / name).read_text())

    return load
