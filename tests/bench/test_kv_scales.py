"""Scales of an FP8 cache from a batch, and what they round away."""

import torch

from benchmarks.kv_scales import Recorder, largest, of_batch
from qurl.types import KVScales


def test_the_percentile_of_a_batch():
    """The 999th of 1 ... 1000 in any order, and the largest."""
    rows = torch.arange(1, 1001).float()[torch.randperm(1000)][None]
    assert largest(rows, 0.999) == 999
    assert largest(rows, 1.0) == 1000


def test_scales_by_head_and_by_layer():
    """Keys of two heads reach 4.48 and 8.96, centered on 0 and 4.48; values 2.24 and 4.48."""
    k = torch.tensor([[[1.0, -4.48]], [[8.96, 1.0]]])  # [H_kv, N, D]
    v = torch.tensor([[[2.24, 0.0]], [[0.0, -4.48]]])
    centers = KVScales(torch.ones(1, 2, 2), torch.tensor([[[0.0, 0.0], [4.48, 0.0]]]))
    found = of_batch([(k, v)], 1.0, centers)
    expected = torch.tensor([[[4.48, 4.48], [2.24, 4.48]]]) * 1.05 / 448
    torch.testing.assert_close(found.scale, expected)
    found = of_batch([(k, v)], 1.0, by_head=False)
    expected = torch.tensor([[[8.96, 8.96], [4.48, 4.48]]]) * 1.05 / 448
    torch.testing.assert_close(found.scale, expected)
    assert found.center.count_nonzero() == 0


def test_a_recorder_keeps_what_it_sees_and_then_counts_what_is_beyond_the_codes():
    recorder, x = Recorder(), torch.tensor([[[[1.0, 449.0]]]])  # [1, H_kv, N, D]
    assert recorder(x, x)[0] is x
    assert len(recorder.seen) == 1
    recorder._scales = torch.ones(2, 1), torch.tensor([[2.0, 2.0]])
    k, v = recorder(x, x)
    assert (k.tolist(), v.tolist()) == ([[[[-1.0, 448.0]]]], [[[[1.0, 448.0]]]])
    assert (recorder.num_beyond, recorder.num_rounded) == (1, 4), "447 less the center is inside"
