"""Memory that comes and goes behind one address, with a driver that only takes notes."""

import sys
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from qurl.errors import EngineError
from qurl.rollout.local.arena import Arena, VirtualMemory

CPU = torch.device("cpu")
UNIT = 2 * 2**20
ADDRESS = 0x7F0000000000
HANDLE = 77
FREE = 5 * 2**30


class Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeDriver:
    """As much of `cuda.bindings.driver` as is used; `errors` has those that a function gives."""

    CUresult = Result
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationGranularity_flags = SimpleNamespace(
        CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended"
    )
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    VALUES = {  # noqa: RUF012
        "cuMemGetAllocationGranularity": (UNIT,),
        "cuMemAddressReserve": (ADDRESS,),
        "cuMemCreate": (HANDLE,),
        "cuMemGetInfo": (FREE, 2 * FREE),
    }

    def __init__(self, **errors):
        self.calls = []
        self.errors = {name: list(results) for name, results in errors.items()}

    @staticmethod
    def CUmemAllocationProp():
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    @staticmethod
    def CUmemAccessDesc():
        return SimpleNamespace(location=None, flags=None)

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            results = self.errors.get(name)
            error = results.pop(0) if results else Result.CUDA_SUCCESS
            values = self.VALUES.get(name, ())
            return (error, *(values if error is Result.CUDA_SUCCESS else (None,) * len(values)))

        return call

    def take(self):
        """Calls since the last time."""
        calls, self.calls = self.calls, []
        return calls

    def names(self):
        return [name for name, *_ in self.take()]


def make(num_bytes=UNIT, **errors):
    driver = FakeDriver(**errors)
    return driver, VirtualMemory(num_bytes, 3, driver)


def test_addresses_are_reserved_in_whole_units():
    driver, memory = make(2 * UNIT + 1)
    (granularity, properties, option), reservation = driver.take()
    assert (granularity, option) == ("cuMemGetAllocationGranularity", "recommended")
    assert (properties.type, properties.location.type, properties.location.id) == (
        "pinned",
        "device",
        3,
    )
    assert reservation == ("cuMemAddressReserve", 3 * UNIT, 0, 0, 0)
    assert (memory.num_bytes, memory.is_mapped) == (3 * UNIT, False)
    interface = memory.__cuda_array_interface__
    assert (interface["data"], interface["shape"]) == ((ADDRESS, False), (3 * UNIT,))
    assert make(2 * UNIT)[1].num_bytes == 2 * UNIT


def test_memory_comes_and_goes_at_one_address():
    driver, memory = make()
    driver.take()
    for _ in range(2):
        memory.map()
        assert memory.is_mapped
        create, mapping, release, (access, address, size, descriptions, count) = driver.take()
        assert create[:2] == ("cuMemCreate", UNIT)
        assert mapping == ("cuMemMap", ADDRESS, UNIT, 0, HANDLE, 0)
        assert release == ("cuMemRelease", HANDLE)
        assert (access, address, size, count) == ("cuMemSetAccess", ADDRESS, UNIT, 1)
        assert descriptions[0].flags == "read and write"
        assert (descriptions[0].location.type, descriptions[0].location.id) == ("device", 3)
        memory.unmap()
        assert not memory.is_mapped
        assert driver.take() == [("cuMemUnmap", ADDRESS, UNIT)]
    del memory
    assert driver.take() == [("cuMemAddressFree", ADDRESS, UNIT)]


def test_nothing_is_lost_when_nobody_unmaps():
    driver, memory = make()
    memory.map()
    driver.take()
    del memory
    assert driver.names() == ["cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"]


def test_memory_that_others_do_not_use_is_taken(monkeypatch):
    reclaimed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reclaimed.append(1))
    driver, memory = make(cuMemCreate=[Result.CUDA_ERROR_OUT_OF_MEMORY])
    memory.map()
    assert reclaimed == [1]
    assert driver.names()[2:] == [
        *("cuMemCreate", "cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess")
    ]


def test_too_little_memory_names_the_numbers_and_the_keys():
    oom = Result.CUDA_ERROR_OUT_OF_MEMORY
    driver, memory = make(3 * 2**30, cuMemCreate=[oom, oom])
    driver.take()
    message = (
        rf"needs {3 * 2**30} bytes, and {FREE} are free.*"
        r"rollout.kv_tokens, rollout.max_batch or rollout.kv_memory_frac"
    )
    with pytest.raises(EngineError, match=message):
        memory.map()
    assert not memory.is_mapped
    assert driver.names() == ["cuMemCreate", "cuMemCreate", "cuMemGetInfo"]
    memory.map()
    assert memory.is_mapped


@pytest.mark.parametrize(
    ("failing", "calls"),
    [
        ("cuMemCreate", ["cuMemCreate"]),
        ("cuMemMap", ["cuMemCreate", "cuMemMap", "cuMemRelease"]),
        (
            "cuMemSetAccess",
            ["cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemUnmap"],
        ),
    ],
)
def test_a_failure_leaves_no_memory_behind(failing, calls):
    driver, memory = make(**{failing: [Result.CUDA_ERROR_INVALID_VALUE]})
    driver.take()
    with pytest.raises(EngineError, match=rf"{failing} gave CUDA_ERROR_INVALID_VALUE"):
        memory.map()
    assert not memory.is_mapped
    assert driver.names() == calls


def test_a_failed_reservation_has_nothing_to_free():
    driver = FakeDriver(cuMemAddressReserve=[Result.CUDA_ERROR_INVALID_VALUE])
    with pytest.raises(EngineError, match="cuMemAddressReserve gave"):
        VirtualMemory(UNIT, 0, driver)
    assert driver.names() == ["cuMemGetAllocationGranularity", "cuMemAddressReserve"]


# --- the arena on a CPU -----------------------------------------------------------------------


def test_tensors_share_the_arena_and_start_at_zero():
    arena = Arena(64, CPU)
    assert not arena.is_mapped
    arena.map()
    numbers = arena.tensor((2, 8), torch.float32)
    assert torch.equal(numbers, torch.zeros(2, 8))
    numbers[0, 1] = 1.0
    assert arena.tensor((64,), torch.uint8)[4:8].tolist() == [0, 0, 0x80, 0x3F]
    codes = arena.tensor((4, 4), torch.float8_e4m3fn)
    assert codes.data_ptr() == numbers.data_ptr()
    with pytest.raises(AssertionError, match="66 bytes wanted of 64"):
        arena.tensor((33,), torch.bfloat16)


def test_a_cpu_frees_the_memory_and_the_address_with_it():
    arena = Arena(1024, CPU)
    arena.map()
    arena.tensor((1024,), torch.uint8).fill_(255)
    arena.unmap()
    assert not arena.is_mapped
    with pytest.raises(AssertionError):
        arena.tensor((1,), torch.uint8)
    arena.map()
    assert not arena.tensor((1024,), torch.uint8).any()


def test_a_cpu_without_enough_memory():
    with pytest.raises(EngineError, match=rf"needs {2**62} bytes.*rollout.max_batch"):
        Arena(2**62, CPU).map()


# --- and on a GPU -----------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def is_near(num_bytes: int, expected: int) -> bool:
    """Within an eighth of the arena: CUDA loads kernels meanwhile, and others use the GPU too."""
    return abs(num_bytes - expected) < 2**27


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_keeps_the_address_and_gives_the_memory_back():
    pytest.importorskip("cuda.bindings")
    device = torch.device("cuda", torch.cuda.current_device())
    arena = Arena(2**30, device)
    assert arena.keeps_address
    before, _ = torch.cuda.mem_get_info()
    arena.map()
    assert is_near(before - torch.cuda.mem_get_info()[0], 2**30)
    numbers = arena.tensor((2**28,), torch.float32)
    assert numbers.device == device
    assert not numbers.any()
    numbers += 1
    address = numbers.data_ptr()
    arena.unmap()
    assert is_near(before - torch.cuda.mem_get_info()[0], 0)
    arena.map()
    assert arena.tensor((2**28,), torch.float32).data_ptr() == address
    assert not numbers.any()
    arena.unmap()
    assert is_near(before - torch.cuda.mem_get_info()[0], 0)


@pytest.mark.gpu
@needs_gpu
def test_a_cuda_graph_survives_unmapping():
    pytest.importorskip("cuda.bindings")
    arena = Arena(2**26, torch.device("cuda", torch.cuda.current_device()))
    arena.map()
    numbers = arena.tensor((2**24,), torch.float32)
    numbers += 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers += 1
    arena.unmap()
    arena.map()
    for _ in range(3):
        graph.replay()
    assert (numbers == 3).all()


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_without_the_bindings_gets_its_memory_from_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    arena = Arena(2**20, torch.device("cuda", torch.cuda.current_device()))
    assert not arena.keeps_address
    for _ in range(2):
        arena.map()
        numbers = arena.tensor((4,), torch.float32)
        assert not numbers.any()
        numbers += 1
        arena.unmap()


@pytest.mark.gpu
@needs_gpu
def test_more_than_the_gpu_has():
    pytest.importorskip("cuda.bindings")
    _, total = torch.cuda.mem_get_info()
    arena = Arena(2 * total, torch.device("cuda", torch.cuda.current_device()))
    with pytest.raises(EngineError, match=r"are free.*rollout.kv_memory_frac"):
        arena.map()
    assert not arena.is_mapped
