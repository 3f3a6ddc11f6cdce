import warnings

import pytest
import torch

from qurl.rollout.local.architecture import Architecture
from qurl.rollout.local.cache import (
    MEMORY_CPU,
    SCRATCH_PAGE,
    CacheMemory,
    CacheOptions,
    KVCache,
    PagePool,
)
from qurl.rollout.local.decoder import table_width
from qurl.rollout.local.kv_range import KVRange
from qurl.rollout.local.ops import LayerCache
from qurl.rollout.local.reference import KEYS, attend_pages, write_pages_

CPU = torch.device("cpu")

ARCH = Architecture(
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, norm_eps=1e-6, windows=(None, None)
)


def make_memory(page_size: int = 4, **options) -> CacheMemory:
    return CacheMemory(ARCH, torch.float32, CPU, CacheOptions(page_size, **options))


def make_cache(num_pages: int, page_size: int, **options) -> KVCache:
    return make_memory(page_size, **options).acquire(num_pages)


def random_cache(num_pages: int, page_size: int) -> KVCache:
    torch.manual_seed(0)
    cache = make_cache(num_pages, page_size)
    cache.data.copy_(torch.randn(cache.data.shape))
    return cache


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


def test_a_cache_starts_at_zero_with_a_scratch_page():
    data = make_cache(num_pages=3, page_size=4).data
    assert data.shape == (2, 2, 4, 4, 2, 8)
    assert not data.any()


def test_copies_go_through_all_layers_and_leave_the_source():
    cache = random_cache(num_pages=4, page_size=4)
    before = cache.data.clone()
    cache.copy_([(1, 3), (2, 4)])
    assert torch.equal(cache.data[:, :, 3], before[:, :, 1])
    assert torch.equal(cache.data[:, :, 4], before[:, :, 2])
    assert torch.equal(cache.data[:, :, :3], before[:, :, :3])
    cache.copy_([])


@pytest.mark.parametrize("is_fp8", [False, True])
def test_saved_pages_come_back_to_other_pages(is_fp8):
    cache = make_cache(num_pages=6, page_size=4, is_fp8=is_fp8)
    cache.data.copy_(torch.randn(cache.data.shape))
    before = cache.data.float().clone()
    saved = cache.save([5, 2])
    cache.data.zero_()
    cache.restore_(saved, [1, 6])
    assert torch.equal(cache.data[:, :, [1, 6]].float(), before[:, :, [5, 2]])
    assert not cache.data[:, :, [0, 2, 3, 4, 5]].float().any()


def test_writes_land_in_page_and_offset():
    kv = make_cache(num_pages=3, page_size=4).data[0]
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    write_pages_(LayerCache(kv, None), k, v, torch.tensor([2 * 4 + 1, 3 * 4]))
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
    out = attend_pages(q, LayerCache(kv, None), table, positions, window).view(2, 4, 8)
    for b, position in enumerate(positions.tolist()):
        first = 0 if window is None else position - window + 1
        keys, values = (x[table[b]].flatten(0, 1)[first : position + 1] for x in kv)
        for head in range(4):
            scores = keys[:, head // 2] @ q[b, head] / 8**0.5
            expected = scores.softmax(0) @ values[:, head // 2]
            torch.testing.assert_close(out[b, head], expected)


def sample_of(k, v) -> KVRange:
    """Of keys and values [N, 2, 8] that turn with no position, in both layers."""
    sample = KVRange(
        torch.zeros(2, 2, 8), torch.zeros(2, 2, 2), torch.ones(1, 4), torch.zeros(1, 4)
    )
    for layer in range(2):
        sample.observe_(layer, k, v)
    return sample


def test_an_fp8_cache_reads_back_within_half_a_code():
    """E4M3 has three bits after the leading one: half a step is 1/16 of the value below it."""
    memory = make_memory(is_fp8=True)
    cache = memory.acquire(2)
    torch.manual_seed(0)
    common = 1000 * torch.randn(2, 8)
    k, v = torch.randn(4, 2, 8) + common, 100 * torch.randn(4, 2, 8)
    memory.set_range_(sample_of(k, v))
    kept = write_pages_(cache.layer(1), k, v, torch.arange(4, 8))
    assert cache.data.dtype == torch.float8_e4m3fn
    assert cache.scales is not None
    scales, center = cache.scales.scale[1], cache.scales.center[1]
    torch.testing.assert_close(center, k.mean(0))
    sources = (k - center, v)
    for stored, scale, source, read in zip(cache.data[1], scales, sources, kept, strict=True):
        values = stored[1].float() * scale[:, None]
        assert torch.equal(read, values)
        # The smallest codes have fewer bits: 2^-10 of the unit is half of their step.
        assert ((values - source).abs() <= source.abs() / 16 + scale[:, None] * 2**-10).all()
    assert scales[0].max() * 448 < 16 * 5, "the range is that of what tells keys apart"


def test_the_range_of_an_fp8_cache_has_a_margin_of_sixteen():
    """16 * 28 / 448 = 1, and the next power of two; a head that was always zero gets 1 as well."""
    memory = make_memory(is_fp8=True)
    amax = torch.zeros(2, 2, 2)
    amax[0, 1, 0], amax[1, 0, 1], amax[1, 1, 0], amax[1, 1, 1] = 28, 14, 29, 3.4
    memory.set_range_(KVRange(torch.zeros(2, 2, 8), amax, torch.ones(1, 4), torch.zeros(1, 4)))
    expected = torch.ones(2, 2, 2)
    expected[1, 0, 1], expected[1, 1, 0], expected[1, 1, 1] = 0.5, 2, 0.125
    assert torch.equal(memory.acquire(1).scales.scale, expected)


def test_the_share_of_saturated_codes():
    """Of two tokens in two layers 2 * 2 * 2 * 2 * 8 codes: one is 448, one -448, one is smaller."""
    memory = make_memory(is_fp8=True)
    cache = memory.acquire(2)
    data = cache.data.view(torch.uint8).flatten(2, 3).zero_()  # [layers, 2, slots, heads, D]
    data[0, 1, 5, 1, 3], data[1, 0, 9, 0, 0], data[1, 1, 9, 1, 7] = 0x7E, 0xFE, 0x7D
    data[:, :, 6] = 0x7E  # of another token
    assert cache.saturated_frac([5, 9]) == 2 / 128


# Memory. A page of 4 tokens is 2 * 2 layers * 4 * 2 heads * 8 * 4 bytes = 1024 bytes.


def test_pages_are_as_many_as_asked_for_or_needed():
    assert make_memory().page_bytes == 1024
    assert make_memory(is_fp8=True).page_bytes == 256
    assert make_memory(kv_tokens=30).choose_num_pages(1000, 1000) == 7
    # 9 tokens take 3 pages, and one more is for the prompt of a group that waits.
    assert make_memory().choose_num_pages(5, 9) == 5 * 4
    assert make_memory().choose_num_pages(10**6, 10**6) == MEMORY_CPU // 1024 - 1


def test_a_cpu_allocates_for_each_generation():
    memory = make_memory()
    memory.acquire(3).data.fill_(1)
    memory.release()
    assert not memory.is_mapped
    assert not memory.acquire(3).data.any()


class FakeGpu:
    """Memory of a GPU with an arena in it; torch keeps `cached` bytes that can be emptied."""

    def __init__(self, monkeypatch, total: int, keeps_address: bool = True) -> None:
        self.free, self.cached, self.log = total, 0, []
        self.keeps_address = keeps_address
        monkeypatch.setattr("qurl.rollout.local.cache.Arena", lambda n, _: FakeArena(self, n))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free, total))
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)

    def empty_cache(self) -> None:
        self.free, self.cached = self.free + self.cached, 0

    def memory(self, **options) -> CacheMemory:
        memory = make_memory(**options)
        memory.device = torch.device("cuda")
        return memory


class FakeArena:
    def __init__(self, gpu: FakeGpu, num_bytes: int) -> None:
        self.gpu, self.num_bytes = gpu, num_bytes
        self.keeps_address, self.is_mapped = gpu.keeps_address, False
        self.data = torch.zeros(num_bytes)

    def map(self) -> None:
        assert self.gpu.free >= self.num_bytes, "out of memory"
        self.gpu.free -= self.num_bytes
        self.is_mapped = True
        self.gpu.log.append("map")

    def unmap(self) -> None:
        self.gpu.free += self.num_bytes
        self.is_mapped = False
        self.gpu.log.append("unmap")

    def tensor(self, shape, dtype):
        assert self.is_mapped
        return self.data.view(torch.uint8)[: self.num_bytes].view(dtype).view(shape)


KIB = 1024
"""Bytes of a page."""


def test_a_gpus_cache_takes_a_share_of_what_is_free_and_stays(monkeypatch):
    gpu = FakeGpu(monkeypatch, 101 * KIB)
    memory = gpu.memory(memory_frac=0.5)
    assert memory.choose_num_pages(10, 9) == 40
    # Of 101 pages half are 50, and one is the scratch page.
    assert memory.choose_num_pages(20, 9) == 49
    data = memory.acquire(49).data
    memory.release()
    gpu.free = 0  # the trainer has taken the rest
    assert memory.choose_num_pages(20, 9) == memory.choose_num_pages(3, 9) == 49
    assert memory.acquire(49).data.data_ptr() == data.data_ptr()
    assert gpu.log == ["map"]


def test_a_gpus_cache_grows_only_where_it_gains(monkeypatch):
    gpu = FakeGpu(monkeypatch, 1000 * KIB)
    memory = gpu.memory(memory_frac=0.5)
    memory.acquire(memory.choose_num_pages(10, 9))
    assert memory.choose_num_pages(11, 9) == 40  # 44 would be a tenth more
    assert memory.choose_num_pages(12, 9) == 48
    memory.acquire(48)
    assert gpu.log == ["map", "unmap", "map"]
    # A request that the old cache cannot hold gets a new one, whatever the gain.
    assert memory.choose_num_pages(1, 4 * 49) == 50


def test_what_torch_keeps_for_later_counts_as_free(monkeypatch):
    gpu = FakeGpu(monkeypatch, 100 * KIB)
    gpu.free, gpu.cached = 10 * KIB, 90 * KIB
    assert gpu.memory(memory_frac=0.5).choose_num_pages(20, 9) == 49


def test_a_released_cache_comes_back_at_its_address(monkeypatch):
    gpu = FakeGpu(monkeypatch, 100 * KIB)
    memory = gpu.memory(memory_frac=0.5, is_released=True)
    address = memory.acquire(memory.choose_num_pages(20, 9)).data.data_ptr()
    memory.release()
    assert gpu.free == 100 * KIB
    gpu.free = 80 * KIB  # a new cache would be smaller, but the old one still fits
    assert memory.choose_num_pages(20, 9) == 49
    assert memory.acquire(49).data.data_ptr() == address
    memory.release()
    gpu.free = 60 * KIB  # 50 are more than three quarters
    assert memory.choose_num_pages(20, 9) == 29
    memory.acquire(29)
    assert gpu.free == 30 * KIB
    assert gpu.log == [*["map", "unmap"] * 2, "map"]


def test_memory_that_comes_back_elsewhere_is_released_with_a_warning(monkeypatch):
    gpu = FakeGpu(monkeypatch, 100 * KIB, keeps_address=False)
    memory = gpu.memory(is_released=True)
    memory.acquire(10)
    with pytest.warns(UserWarning, match=r"release_kv.*cuda-bindings"):
        memory.release()
    assert (memory.is_mapped, gpu.free) == (False, 100 * KIB)


def test_an_address_matters_only_where_memory_is_given_back(monkeypatch):
    memory = FakeGpu(monkeypatch, 100 * KIB, keeps_address=False).memory()
    with warnings.catch_warnings(action="error"):
        memory.acquire(10)
        memory.release()
    assert memory.is_mapped


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_small_cache_is_of_the_same_kind_and_apart(is_fp8):
    memory = make_memory(is_fp8=is_fp8)
    large = memory.acquire(3)
    small = memory.make_small(num_tokens=5)
    assert small.data.shape == (2, 2, 1 + 2, 4, 2, 8)
    assert small.data.dtype == large.data.dtype
    assert small.scales is large.scales
    assert not small.data.float().any()
    small.data.copy_(torch.ones(small.data.shape))
    assert not large.data.float().any()
    assert memory.num_pages == 3


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 24, 64])
def test_table_width_gives_a_whole_number_of_vectors(page_size):
    for num_pages in (1, 2, 7):
        width = table_width(num_pages, page_size)
        assert width >= num_pages
        assert width * page_size % KEYS == 0
