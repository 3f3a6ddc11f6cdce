"""Shares of tokens on which sampler and trainer differ, by hand."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.gap_tails import measure

ROW = {"has_prox": True, "mask": [1, 1, 1, 0], "logp_behav": [-1.0] * 4}


def write(run, *rows):
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_both_directions_count_and_tokens_that_are_not_trained_do_not(tmp_path):
    """Of rho = 1.1, 1.3 and 1 / 1.3 two are beyond 1.2; the last token and row have no say."""
    prox = [-1.0 + math.log(rho) for rho in (1.1, 1.3, 1 / 1.3, 9.0)]
    row = ROW | {"logp_prox": prox}
    run = write(tmp_path, row, row | {"has_prox": False})
    assert measure(run) == {"tokens": 3, "tail": 0.667}


def test_a_run_without_a_prox_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no sample has a prox"):
        measure(write(tmp_path, ROW | {"has_prox": False, "logp_prox": ROW["logp_behav"]}))
