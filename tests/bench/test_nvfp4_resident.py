"""The candidate for NVFP4 products compiles for Hopper, and its walks cover a product."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.nvfp4_resident import BLOCK, SHAPES, Walk, programs_of_part, share_of_time, walks

ROOT = Path(__file__).parents[2]
NUM_SMS, SHARED_BYTES = 132, 227 * 2**10  # of an H200


def test_the_first_walk_of_each_product_compiles_without_spilling():
    """In a process of its own, because these tests run under Triton's interpreter."""
    command = [sys.executable, "-m", "benchmarks.nvfp4_resident", "--compile", "--most", "1"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    lines = subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=ROOT)
    found = re.findall(r"^(\w+) .*: ([\d.]+) per weight, .*'STACK': '(\d+)'", lines.stdout, re.M)
    assert [role for role, *_ in found] == list(SHAPES), lines.stdout
    for role, per_weight, stack in found:
        assert 1 < float(per_weight) < 5, role
        assert stack == "0", role


@pytest.mark.parametrize("role", SHAPES)
def test_walks_fit_a_multiprocessor_and_cover_all_channels(role):
    N, K = SHAPES[role]
    for walk in walks(N, K, NUM_SMS, is_gated=role == "gate_up"):
        assert walk.programs * walk.shared_bytes(K) <= SHARED_BYTES
        assert walk.warps[0] * walk.steps(K) * walk.splits * BLOCK >= K
        tiles = -(-N // (walk.rows * walk.warps[1]))
        assert programs_of_part(walk, tiles, NUM_SMS) <= tiles
        assert share_of_time(walk, N, K, NUM_SMS) >= 0.99


def test_the_share_of_the_busiest_multiprocessor():
    """64 tiles of 32 channels on 10 multiprocessors: 20 programs of 4 rounds each at most.

    So the busiest has 2 programs x 4 tiles x 32 channels = 256 channels; an equal share is 204.8.
    """
    walk = Walk(warps=(4, 2), rows=16, splits=1, programs=2, ahead=2)
    assert share_of_time(walk, 2048, 4 * BLOCK, 10) == pytest.approx(256 / 204.8)
