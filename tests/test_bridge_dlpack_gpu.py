"""The raw hand-over on CUDA: order and lifetime against work that is still queued.

The probes for lifetime are run on the plain DLPack calls too, where they must find wrong values: a
probe that finds none there proves nothing.
"""

import gc
import itertools
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gpu_work import TEN_MS, both_streams, stream_of

from sparse_decode import bridge
from sparse_decode.bridge import dlpack
from sparse_decode.bridge.dlpack import ImportCache, ZeroCopyError, to_jax, to_torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settled")]

ELEMENTS = 4 << 20
RUNS = 200

DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2"),
]

fill = jax.jit(lambda value: jnp.full((ELEMENTS,), value, jnp.float32))
mean = jax.jit(lambda x: (x[0] + x[ELEMENTS // 2] + x[-1]) / 3)


def same(array: jax.Array, tensor: torch.Tensor) -> None:
    assert tensor.is_cuda
    assert array.shape == tuple(tensor.shape)
    assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    kind = torch.complex64 if tensor.is_complex() else torch.float32
    expected = tensor.to(kind).cpu().numpy()
    np.testing.assert_array_equal(np.asarray(array).astype(expected.dtype), expected)


def sample(dtype: str, *shape: int) -> torch.Tensor:
    values = torch.arange(int(np.prod(shape)), device="cuda") % (2 if dtype == "bool" else 7)
    return values.view(shape).to(torch.float32).to(getattr(torch, dtype))


# Layout and dtype.


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_stays() -> None:
    tensor = torch.arange(64.0, device="cuda:1")
    array = to_jax(tensor)
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(0):  # work in JAX may leave the other one current
        doubled = 2 * array
    back = to_torch(doubled)
    assert torch.cuda.current_device() == 0
    assert back.device.index == 1
    assert torch.equal(back.cpu(), 2 * tensor.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_keep_address_and_values(dtype: str) -> None:
    tensor = sample(dtype, 4, 6)
    array = to_jax(tensor)
    same(array, tensor)
    same(array, to_torch(array))
    same(to_jax(tensor.T), tensor.T)
    computed = (
        jnp.asarray(tensor.to(torch.float32).cpu().numpy()).astype(dtype)
        if (not tensor.is_complex())
        else jnp.ones((4, 6), dtype)
    )
    same(computed, to_torch(computed))


def test_odd_strides_of_size_1_change_nothing() -> None:
    tensor = sample("float32", 64).as_strided((1, 64, 1), (777, 1, 99))
    array = to_jax(tensor)
    same(array, tensor)
    assert array.format.layout == jnp.zeros((1, 64, 1)).format.layout


def test_empty() -> None:
    array = to_jax(torch.empty(0, 192, dtype=torch.bfloat16, device="cuda"))
    assert (array.shape, array.dtype) == ((0, 192), jnp.bfloat16)
    assert array.devices() == {jax.devices("cuda")[0]}
    tensor = to_torch(array)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_cuda) == ((0, 192), torch.bfloat16, True)


def test_int64_as_words() -> None:
    tensor = torch.tensor([2**40 + 5, -1], device="cuda")
    with pytest.raises(ZeroCopyError, match="int64_as_int32=True"):
        to_jax(tensor)
    words = to_jax(tensor, int64_as_int32=True)
    assert words.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(words, tensor.cpu().numpy().view(np.int32))


@pytest.mark.parametrize("bytes_off", [4, 8, 16])
def test_misaligned(bytes_off: int) -> None:
    tensor = torch.zeros(64, device="cuda")[bytes_off // 4 :]
    with pytest.raises(ZeroCopyError, match=r"not a multiple of 32.*Pallas.*clone"):
        to_jax(tensor)


@pytest.mark.parametrize("bytes_off", [4, 8])
def test_misaligned_for_xla(bytes_off: int) -> None:
    tensor = torch.zeros(64, device="cuda")[bytes_off // 4 :]
    with pytest.raises(ZeroCopyError, match=r"not a multiple of 16.*XLA.*clone"):
        to_jax(tensor, for_kernels=False)


def test_16_bytes_are_enough_for_xla() -> None:
    tensor = torch.arange(64.0, device="cuda")[4:]
    same(to_jax(tensor, for_kernels=False), tensor)
    total = jax.jit(lambda x: x.sum())(to_jax(tensor, for_kernels=False))
    assert total == tensor.sum().item()


def test_layers_share_one_array_and_one_program() -> None:
    layer, stride = 2 * 16 * 384, 3 * 2 * 16 * 384 + 64
    storage = (torch.arange(5 * stride, device="cuda") % 97).half()
    take = jax.jit(lambda array, offset: jax.lax.dynamic_slice(array, (1, offset), (3, 384)))
    for number in range(3):
        view = storage.as_strided((5, 2, 16, 384), (stride, layer // 2, 384, 1), number * layer)
        with pytest.raises(ZeroCopyError, match="packed_to_jax"):
            to_jax(view)
        array, offset = bridge.packed_to_jax(view)
        assert (array.shape, offset) == ((5, stride), number * layer)
        assert array.unsafe_buffer_pointer() == storage.data_ptr()
        np.testing.assert_array_equal(take(array, offset), view[1:4, 0, 0].cpu().numpy())
    assert take._cache_size() == 1


# Order, without blocking the host.


@both_streams
def test_jax_reads_after_torch_has_written(kind: str) -> None:
    tensor = torch.zeros(ELEMENTS, device="cuda")
    wrong = 0
    for run in range(1, 21):
        with torch.cuda.stream(stream_of(kind)):
            torch.cuda._sleep(TEN_MS)
            tensor.fill_(run)
            result = mean(to_jax(tensor))
        wrong += float(result) != run
    assert wrong == 0


@both_streams
def test_torch_reads_after_jax_has_written(kind: str, jax_busy) -> None:
    last = jax.jit(lambda x, value: jnp.full((ELEMENTS,), value * x[0, 0]))
    wrong = 0
    for run in range(1, 21):
        array = last(jax_busy(), float(run))
        with torch.cuda.stream(stream_of(kind)):
            seen = to_torch(array).clone()
            wrong += not bool((seen == run).all())
    assert wrong == 0


@pytest.mark.serial
def test_the_host_does_not_wait(jax_busy) -> None:
    tensor = torch.zeros(ELEMENTS, device="cuda")
    mean(to_jax(tensor)).block_until_ready()
    to_torch(fill(1.0))
    cache = ImportCache()
    cache.borrow([tensor], [tensor])
    torch.cuda.synchronize()

    def last_busy() -> jax.Array:
        return [jax_busy() for _ in range(20)][-1]

    jax.block_until_ready(last_busy())
    for hand_over in (to_jax, lambda it: cache.borrow([it], [it])):
        torch.cuda._sleep(20 * TEN_MS)
        began = time.perf_counter()
        hand_over(tensor)
        took = time.perf_counter() - began
        assert not torch.cuda.current_stream().query()
        assert took < 0.05
        torch.cuda.synchronize()
    for hand_over in (to_torch, dlpack.settle):
        array = last_busy()
        began = time.perf_counter()
        hand_over(array)
        took = time.perf_counter() - began
        assert took < 0.05, f"{hand_over.__name__} took {took} s"
        assert not array.is_ready()
        array.block_until_ready()


# Lifetime.


def wrong_after_dropping_a_view(
    hand_over: Callable[[jax.Array], torch.Tensor], kind: str, runs: int
) -> tuple[int, int]:
    """Torch reads a view long after view and array were dropped. Returns wrong runs, reuses."""
    wrong = reused = 0
    stream = stream_of(kind)
    for run in range(1, runs + 1):
        array = fill(float(run)).block_until_ready()
        address = array.unsafe_buffer_pointer()
        view = hand_over(array)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(TEN_MS)
            seen = view.clone()
        del view, array
        others = jax.block_until_ready([fill(-1.0) for _ in range(6)])
        reused += address in [other.unsafe_buffer_pointer() for other in others]
        del others
        torch.cuda.synchronize()
        assert torch.isfinite(seen).all()
        wrong += not bool((seen == run).all())
    return wrong, reused


@both_streams
def test_dropped_view_of_a_jax_array(kind: str) -> None:
    wrong, _ = wrong_after_dropping_a_view(to_torch, kind, RUNS)
    assert wrong == 0


@pytest.mark.serial
@both_streams
def test_the_probe_finds_what_plain_dlpack_does(kind: str) -> None:
    wrong, reused = wrong_after_dropping_a_view(torch.from_dlpack, kind, 20)
    assert reused >= 10
    assert wrong >= 10


def test_dropped_view_goes_back_to_jax_afterwards() -> None:
    addresses = set()
    for run in range(50):
        array = fill(float(run)).block_until_ready()
        addresses.add(array.unsafe_buffer_pointer())
        to_torch(array).add_(1)
        del array
        torch.cuda.synchronize()
        assert dlpack.flush(10)
    assert len(addresses) < 25


@both_streams
def test_dropped_tensor_that_jax_still_reads(kind: str, jax_busy) -> None:
    wrong = reused = 0
    stream = stream_of(kind)
    mean(fill(0.0))
    for run in range(1, RUNS + 1):
        with torch.cuda.stream(stream):
            tensor = torch.full((ELEMENTS,), float(run), device="cuda")
            address = tensor.data_ptr()
            array = to_jax(tensor)
            jax_busy()
            result = mean(array)
            del tensor, array
            others = [torch.full((ELEMENTS,), -1.0, device="cuda") for _ in range(4)]
        wrong += float(result) != run
        reused += address in [other.data_ptr() for other in others]
        del others
    assert wrong == 0
    assert reused < RUNS


def test_viewed_array_cannot_be_donated() -> None:
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = fill(1.0)
    view = to_torch(array)
    with pytest.raises(Exception, match=r"(?i)external reference"):
        update(array).block_until_ready()
    assert (view == 1).all()


@pytest.mark.parametrize("direction", ["to_jax", "to_torch"])
def test_a_thousand_hand_overs_leak_nothing(direction: str) -> None:
    device = jax.devices("cuda")[0]

    def in_use() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        assert dlpack.flush(30)
        for _ in range(3):
            gc.collect()
        stats = device.memory_stats() or {}
        return (
            torch.cuda.memory_allocated(),
            stats.get("bytes_in_use", 0),
            len(dlpack._loans._live),
        )

    def once(run: int) -> None:
        if direction == "to_jax":
            mean(to_jax(torch.full((ELEMENTS,), float(run), device="cuda")))
        else:
            to_torch(fill(float(run))).add_(1)

    for run in range(20):
        once(run)
    before = in_use()
    for run in range(1000):
        once(run)
    deadline = time.monotonic() + 10
    while in_use() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert in_use() == before


def test_all_streams_of_torch_are_known() -> None:
    known = set(dlpack._torch_streams(0))
    priorities = torch.cuda.Stream.priority_range()
    for priority, _ in itertools.product({*priorities, -1}, range(70)):
        assert torch.cuda.Stream(priority=priority).cuda_stream in known
    assert torch.cuda.default_stream().cuda_stream in known
    assert len(known) < 1000


def test_drop_in_another_thread() -> None:
    array = fill(5.0)
    views = [to_torch(array)]
    del array
    torch.cuda._sleep(TEN_MS)
    seen = views[0].clone()
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    jax.block_until_ready([fill(-1.0) for _ in range(6)])
    assert (seen == 5).all()


# Graph capture.


def test_refused_under_capture() -> None:
    tensor, array, cache = torch.ones(64, device="cuda"), fill(1.0), ImportCache()
    cache.borrow([tensor])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for hand_over in (
            lambda: to_jax(tensor),
            lambda: to_torch(array),
            lambda: cache.borrow([tensor]),
        ):
            with pytest.raises(ZeroCopyError, match="capture"):
                hand_over()
        result = tensor * 2
    graph.replay()
    assert (result == 2).all()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_other_threads_do_not_spoil_a_capture(mode: str) -> None:
    """In torch's default mode, no other thread may call JAX; what it drops may go back."""
    tensor = torch.arange(64.0, device="cuda")
    arrays = jax.block_until_ready([fill(float(run)) for run in range(8)])
    views = [to_torch(array) for array in arrays[:4]]
    to_jax(tensor)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def other() -> None:
        try:
            views.clear()
            for array in arrays if mode != "global" else ():
                to_torch(array)
                to_jax(tensor)
        except BaseException as error:
            failures.append(error)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        partial = tensor * 2
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        gave_back = dlpack.flush(0.1)
        result = partial + 1
    assert not failures
    assert not gave_back  # the captured stream may still have had older work
    assert dlpack.flush(30)
    tensor.fill_(3)
    graph.replay()
    assert (result == 7).all()


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_captures_while_views_are_dropped(mode: str) -> None:
    """In torch's default mode, no other thread may call JAX; all that it drops may go back."""
    tensor = torch.arange(64.0, device="cuda")
    stop = threading.Event()
    failures: list[BaseException] = []
    arrays = jax.block_until_ready([fill(float(run)) for run in range(8)])
    views = [to_torch(array) for _ in range(500) for array in arrays] if mode == "global" else []
    (tensor * 2 + 1).sqrt()  # loads the kernels, which a capture should find loaded

    def churn() -> None:
        try:
            while not stop.is_set():
                for array in arrays:
                    if mode == "thread_local":
                        to_torch(array)
                    elif views:
                        views.pop()
                time.sleep(0.0005)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for run in range(100):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=mode):
                result = (tensor * run + 1).sqrt()
            graph.replay()
            assert torch.equal(result, (tensor * run + 1).sqrt())
    finally:
        stop.set()
        thread.join()
    assert not failures


# Borrowed imports.


@both_streams
def test_borrowed_memory_may_change_after_settling(kind: str, jax_busy) -> None:
    cache = ImportCache()
    total = jax.jit(lambda x, y, z: x[0] + y[-1] + 0 * z[0, 0])
    wrong = 0
    with torch.cuda.stream(stream_of(kind)):
        kept = torch.zeros(ELEMENTS, device="cuda")
        for run in range(1, RUNS + 1):
            fresh = torch.full((ELEMENTS,), float(run), device="cuda")
            kept.fill_(2.0 * run)
            fresh_array, kept_array = cache.borrow([fresh], [kept])
            result = total(fresh_array, kept_array, jax_busy())
            dlpack.settle(result)
            del fresh, fresh_array
            kept.fill_(-1)
            others = [torch.full((ELEMENTS,), -1.0, device="cuda") for _ in range(2)]
            wrong += float(result) != 3 * run
            del others
    assert wrong == 0


def test_jax_waits_for_the_fence_of_a_borrow() -> None:
    cache = ImportCache()
    total = jax.jit(lambda x, y: x[0] + y[-1])
    fresh, kept = torch.zeros(2, ELEMENTS, device="cuda").unbind()
    for run in range(1, 21):
        torch.cuda._sleep(TEN_MS)
        fresh.fill_(run)
        kept.fill_(run)
        result = total(*cache.borrow([fresh], [kept]))
        dlpack.settle(result)
        assert float(result) == 2 * run


def test_borrowed_memory_is_donated_in_place() -> None:
    cache = ImportCache()
    update = jax.jit(lambda x, y: (x + y[0], y[1]), donate_argnums=0)
    output = torch.zeros(ELEMENTS, device="cuda")
    other = torch.ones(64, device="cuda")
    for run in range(1, 11):
        result, last = update(*cache.borrow([output, other]))
        assert result.unsafe_buffer_pointer() == output.data_ptr()
        dlpack.settle(last)
        assert (output == run).all()
