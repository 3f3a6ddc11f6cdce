import pytest
import torch

from qurl.rollout.local.cache import SCRATCH_PAGE, PagePool, allocate_kv, copy_pages_
from qurl.rollout.local.decoder import KEYS, attend_pages, table_width, write_pages_
from qurl.rollout.local.weights import Architecture

ARCH = Architecture(
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, norm_eps=1e-6, windows=(None, None)
)


def make_kv(num_pages: int, page_size: int):
    return allocate_kv(ARCH, num_pages, page_size, torch.float32, torch.device("cpu"))


def test_pages_are_handed_out_once_and_never_the_scratch_page():
    pool = PagePool(5, page_size=4)
    pages = pool.allocate(2) + pool.allocate(3)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert SCRATCH_PAGE not in pages
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.allocate(1)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for(tokens, pages):
    assert PagePool(1, page_size=4).pages_for(tokens) == pages


def test_a_shared_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(3, page_size=4)
    pages = pool.allocate(2)
    shared = pool.share(pages[:1])
    assert shared == pages[:1]
    pool.release(pages)
    assert pool.num_free == 2
    pool.release(shared)
    assert pool.num_free == 3


def test_misuse_is_caught():
    pool = PagePool(2, page_size=4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(pages)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(pages)


def test_kv_starts_at_zero_with_a_scratch_page():
    kv = make_kv(num_pages=3, page_size=4)
    assert kv.shape == (2, 2, 4, 4, 2, 8)
    assert not kv.any()


def test_copy_pages_copies_all_layers_and_leaves_the_source():
    kv = make_kv(num_pages=4, page_size=4)
    kv.copy_(torch.randn(kv.shape))
    before = kv.clone()
    copy_pages_(kv, [(1, 3), (2, 4)])
    assert torch.equal(kv[:, :, 3], before[:, :, 1])
    assert torch.equal(kv[:, :, 4], before[:, :, 2])
    assert torch.equal(kv[:, :, :3], before[:, :, :3])
    copy_pages_(kv, [])


def test_writes_land_in_page_and_offset():
    kv = make_kv(num_pages=3, page_size=4)[0]
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    write_pages_(kv, k, v, torch.tensor([2 * 4 + 1, 3 * 4]))
    assert torch.equal(kv[0, 2, 1], k[0])
    assert torch.equal(kv[0, 3, 0], k[1])
    assert torch.equal(kv[1, 2, 1], v[0])
    assert kv[0].count_nonzero() == k.numel()


@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_pages_equals_attention_over_the_sequence(window):
    """Two sequences of 6 and 9 tokens whose pages lie in disorder; foreign keys are masked."""
    torch.manual_seed(0)
    kv = torch.randn(2, 9, 4, 2, 8)
    table = torch.tensor([[7, 2, 0, 0], [3, 8, 1, 0]])
    positions = torch.tensor([5, 8])
    q = torch.randn(2, 4, 8)
    out = attend_pages(q, kv, table, positions, window).view(2, 4, 8)
    for b, position in enumerate(positions.tolist()):
        first = 0 if window is None else position - window + 1
        keys, values = (x[table[b]].flatten(0, 1)[first : position + 1] for x in kv)
        for head in range(4):
            scores = keys[:, head // 2] @ q[b, head] / 8**0.5
            expected = scores.softmax(0) @ values[:, head // 2]
            torch.testing.assert_close(out[b, head], expected)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 24, 64])
def test_table_width_gives_a_whole_number_of_vectors(page_size):
    for num_pages in (1, 2, 7):
        width = table_width(num_pages, page_size)
        assert width >= num_pages
        assert width * page_size % KEYS == 0
