import importlib
import sys

import pytest

importlib.import_module("verl")
IS_LOADED = "qurl.integrations.verl" in sys.modules
"""Before a test imports it."""


@pytest.fixture(scope="session")
def is_loaded_by_verl():
    return IS_LOADED
