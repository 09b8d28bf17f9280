"""The op through JAX on CUDA tensors, and Triton on JAX arrays: in place, in order, no leaks."""

import dataclasses
import gc
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import jax.numpy as jnp  # noqa: E402
from gpu_work import TEN_MS, both_streams, stream_of  # noqa: E402

from sparse_decode import captures, torch_arrays  # noqa: E402
from sparse_decode.bridge import (  # noqa: E402
    ZeroCopyError,
    dlpack,
    jax_route,
    sparse_decode_attention,
    triton_sparse_decode_attention,
)
from sparse_decode.call import Call  # noqa: E402
from sparse_decode.cases import CASES, Case, build  # noqa: E402
from sparse_decode.paths import PATHS  # noqa: E402
from sparse_decode.tolerance import judge, limits  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settled")]

PATH = {path.name: path for path in PATHS}
CASE = {case.name: case for case in CASES}
CAPTURES = sorted(Path(__file__).with_name("captures").glob("*.safetensors"))
RUNS = 200

# One program for nearly everything below: the case's layout, this scale.
ONE = Case("bridge op on a GPU", (200, 77), slots=17, splits=4, gate="bfloat16")

both_paths = pytest.mark.parametrize("path", ["dlpack", "triton-on-jax"])


def tensors_of(call: Call) -> dict[str, torch.Tensor]:
    return {name: torch_arrays.from_numpy(a, "cuda") for name, a in call.arrays().items()}


def attend(call: Call, tensors: dict[str, torch.Tensor]) -> None:
    sparse_decode_attention(**tensors, **call.options(), route="dlpack")


def fault(call: Call, tensors: dict[str, torch.Tensor]) -> str | None:
    before = torch_arrays.to_numpy(tensors["output"])
    attend(call, tensors)
    return judge(limits(call), torch_arrays.to_numpy(tensors["output"]), None, before).fault


def arrays_of(call: Call) -> dict[str, jax.Array]:
    return {name: jnp.asarray(a) for name, a in call.arrays().items() if name != "output"}


def triton_options(call: Call) -> dict[str, object]:
    return {name: value for name, value in call.options().items() if name != "clear_inactive"}


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """Two calls of one layout with different content, rows and results."""
    return [build(dataclasses.replace(ONE, name=name)) for name in ("first", "second")]


@pytest.fixture(scope="module")
def expected(calls: list[Call]) -> list[torch.Tensor]:
    """Their results on the GPU, held to the oracle."""
    results = []
    for call in calls:
        tensors = tensors_of(call)
        assert fault(call, tensors) is None
        results.append(tensors["output"])
    assert not torch.equal(*results)
    return results


# Shared cases and captures.


@both_paths
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shared_cases(path: str, case: Case) -> None:
    call = build(case)
    outcome = PATH[path].run(call)
    assert judge(limits(call), outcome.output, None, outcome.before).fault is None


@both_paths
@pytest.mark.parametrize("file", CAPTURES, ids=lambda file: file.stem)
def test_captures(path: str, file: Path) -> None:
    call = captures.load(file).call
    outcome = PATH[path].run(call)
    assert judge(limits(call), outcome.output, None, outcome.before).fault is None


def test_captures_are_there() -> None:
    assert len(CAPTURES) == 12


# In place.


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Addresses of the arrays that JAX got, call by call; the first is the output's."""
    seen = []
    real = jax_route._IMPORTS.lend

    def spy(*args):
        arrays = real(*args)
        seen.append([array.unsafe_buffer_pointer() for array in arrays])
        return arrays

    monkeypatch.setattr(jax_route._IMPORTS, "lend", spy)
    return seen


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of JAX's results."""
    seen = []
    real = jax_route.settle

    def spy(array, device):
        seen.append(array.unsafe_buffer_pointer())
        real(array, device)

    monkeypatch.setattr(jax_route, "settle", spy)
    return seen


def test_output_is_written_in_place(calls, expected, lent, results) -> None:
    tensors = tensors_of(calls[0])
    address = tensors["output"].data_ptr()
    attend(calls[0], tensors)
    assert torch.equal(tensors["output"], expected[0])
    assert tensors["output"].data_ptr() == address
    assert results == [address]
    assert set(lent[0]) == {tensor.data_ptr() for tensor in tensors.values()}
    assert lent[0][0] == address


def test_strided_output_keeps_its_surroundings(results) -> None:
    call = build(CASE["fp8_strided_gate"])
    tensors = tensors_of(call)
    output = tensors["output"]
    base = output.as_strided((output.untyped_storage().nbytes() // 2,), (1,), 0)
    base.fill_(7)
    inside = torch.zeros_like(base, dtype=torch.bool)
    inside.as_strided(output.shape, output.stride(), output.storage_offset()).fill_(True)
    assert not inside.all()
    assert fault(call, tensors) is None
    assert results == [output.data_ptr()]
    assert (base[~inside] == 7).all()


def test_heads_outermost(calls, expected) -> None:
    tensors = tensors_of(calls[0])
    for name in ("query", "output"):
        tensors[name] = tensors[name].transpose(0, 1).contiguous().transpose(0, 1)
    attend(calls[0], tensors)
    torch.testing.assert_close(tensors["output"], expected[0], rtol=0, atol=0)


def test_no_memory_of_the_size_of_the_output() -> None:
    """One split leaves no scratch, so whatever JAX allocates would be a copy."""
    case = Case("large output", (9,) * 4096, heads=16, page_size=8, slots=1, splits=1)
    call = build(case)
    tensors = tensors_of(call)
    attend(call, tensors)
    torch.cuda.synchronize()
    gc.collect()
    device = jax.devices("cuda")[0]
    stats = device.memory_stats()
    # With it JAX is at its peak, so that a copy would raise the peak.
    below = stats["peak_bytes_in_use"] - stats["bytes_in_use"]
    ballast = jnp.zeros((below + (1 << 20),), jnp.uint8).block_until_ready()
    before = device.memory_stats()["peak_bytes_in_use"]
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    attend(call, tensors)
    torch.cuda.synchronize()
    size = tensors["output"].nbytes
    assert size > 20 << 20
    assert device.memory_stats()["peak_bytes_in_use"] - before < size // 4
    assert torch.cuda.max_memory_allocated() - base < size // 4
    del ballast
    assert torch.isfinite(tensors["output"]).all()


# Packed caches.


def test_layers_of_one_storage_share_a_program(calls, expected, lent, monkeypatch) -> None:
    plans = []
    real = jax_route.attend
    monkeypatch.setattr(jax_route, "attend", lambda *args: (plans.append(args[0]), real(*args))[1])
    call = calls[0]
    shape, page = call.cache.shape, call.cache[0].nbytes
    storage = torch.full((shape[0], 3 * page + 256), 0x7F, dtype=torch.uint8, device="cuda")
    tensors = tensors_of(call)
    dense = tensors["cache"]
    for number in range(3):
        storage.fill_(0x7F)
        layer = storage[:, number * page : (number + 1) * page].view(torch.float8_e4m3fn)
        tensors["cache"] = layer.view(shape).copy_(dense)
        tensors["output"].fill_(float("nan"))
        attend(call, tensors)
        assert torch.equal(tensors["output"], expected[0])
        assert storage.data_ptr() in lent[-1]
    assert len(plans) == 1


@pytest.mark.parametrize("lead", [1, 2, 8])
def test_offsets_inside_a_page(lead: int, lent) -> None:
    call = build(Case("bridge op offsets", (20, 9), heads=2, page_size=8, slots=3, splits=1))
    tensors = tensors_of(call)
    page = call.cache[0].nbytes + 64
    storage = torch.full((len(call.cache) * page,), 0x7F, dtype=torch.uint8, device="cuda")
    view = storage.view(torch.float8_e4m3fn)
    view = view.as_strided(call.cache.shape, (page, *tensors["cache"].stride()[1:]), lead)
    tensors["cache"] = view.copy_(tensors["cache"])
    assert fault(call, tensors) is None
    assert storage.data_ptr() in lent[0]


@pytest.mark.parametrize("name", ["query", "cache", "output"])
def test_an_address_that_is_no_multiple_of_32(name: str, calls) -> None:
    tensors = tensors_of(calls[0])
    source = tensors[name]
    shift = 16 // source.element_size()
    base = source.new_zeros(source.numel() + shift)
    tensors[name] = base[shift:].view(source.shape).copy_(source)
    assert tensors[name].data_ptr() % 32 == 16
    before = torch_arrays.to_numpy(tensors["output"]).tobytes()
    with pytest.raises(ZeroCopyError, match=rf'^{name}: .*multiple of 32.*route="direct"'):
        attend(calls[0], tensors)
    assert torch_arrays.to_numpy(tensors["output"]).tobytes() == before


# Order and lifetime.


@both_streams
def test_between_long_work_of_torch(kind: str, calls, expected) -> None:
    """Inputs come late, and the output is read and overwritten right after, without a sync."""
    source = [tensors_of(call) for call in calls]
    wrong = 0
    torch.cuda.synchronize()
    with torch.cuda.stream(stream_of(kind)):
        tensors = {name: torch.zeros_like(tensor) for name, tensor in source[0].items()}
        for run in range(40):
            torch.cuda._sleep(TEN_MS)
            for name, tensor in source[run % 2].items():
                tensors[name].copy_(tensor)
            attend(calls[run % 2], tensors)
            seen = tensors["output"].clone()
            tensors["output"].fill_(-1)
            tensors["query"].fill_(float("nan"))
            tensors["cache"].view(torch.uint8).fill_(0x7F)
            wrong += not torch.equal(seen, expected[run % 2])
    assert wrong == 0


@pytest.mark.serial
def test_the_host_does_not_wait(calls, jax_busy) -> None:
    tensors = tensors_of(calls[0])
    attend(calls[0], tensors)
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * TEN_MS)
    began = time.perf_counter()
    attend(calls[0], tensors)
    took = time.perf_counter() - began
    assert not torch.cuda.current_stream().query()
    assert took < 0.05
    torch.cuda.synchronize()
    last = [jax_busy() for _ in range(20)][-1]
    began = time.perf_counter()
    attend(calls[0], tensors)
    took = time.perf_counter() - began
    assert not last.is_ready()
    assert took < 0.05


@pytest.mark.serial
@both_streams
def test_dropped_inputs(kind: str, calls, expected, jax_busy) -> None:
    """Torch gets the memory of the inputs back at once, and overwrites it, while JAX is busy."""
    source = [tensors_of(call) for call in calls]
    outputs = [torch.empty_like(expected[0]) for _ in range(2)]
    wrong = reused = early = 0
    torch.cuda.synchronize()
    with torch.cuda.stream(stream_of(kind)):
        for run in range(RUNS):
            tensors = {name: tensor.clone() for name, tensor in source[run % 2].items()}
            tensors["output"] = outputs[run % 2].fill_(float("nan"))
            addresses = {name: t.data_ptr() for name, t in tensors.items() if name != "output"}
            shapes = {name: (t.shape, t.dtype) for name, t in tensors.items()}
            last = jax_busy()
            attend(calls[run % 2], tensors)
            del tensors
            others = [
                torch.empty(shapes[name][0], dtype=shapes[name][1], device="cuda")
                for name in addresses
            ]
            for other in others:
                other.view(-1).view(torch.uint8).fill_(0x7F)
            early += not last.is_ready()
            reused += any(other.data_ptr() in addresses.values() for other in others)
            wrong += not torch.equal(outputs[run % 2], expected[run % 2])
            del others, last
    assert wrong == 0
    # The probe proves nothing unless memory was reused while JAX was still to run.
    assert reused == RUNS
    assert early > RUNS // 2


@both_streams
def test_triton_on_arrays_dropped_at_once(kind: str, calls, jax_busy) -> None:
    """JAX gets the inputs back only after Triton; the result is read by JAX without a sync."""
    narrow = [
        dataclasses.replace(
            call,
            regions=np.clip(call.regions, -1, 2**31 - 1).astype(np.int32),
            positions=call.positions.astype(np.int32),
        )
        for call in calls
    ]
    options = triton_options(narrow[0])
    host = [arrays_of(call) for call in narrow]
    wanted = [np.asarray(triton_sparse_decode_attention(**it, **options)) for it in host]
    for call, array in zip(narrow, wanted, strict=True):
        assert judge(limits(call), array, None, None).fault is None
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    poison = jax.jit(lambda tree: jax.tree.map(lambda a: jnp.full(a.shape, 1, a.dtype), tree))
    wrong = 0
    with torch.cuda.stream(stream_of(kind)):
        for run in range(RUNS // 2):
            arrays = copy(host[run % 2])
            if run % 2:
                torch.cuda._sleep(TEN_MS)
            else:
                jax_busy()
            result = triton_sparse_decode_attention(**arrays, **options)
            del arrays
            others = [poison(host[0]) for _ in range(2)]
            wrong += not np.array_equal(
                np.asarray(jnp.copy(result)).view(np.uint8), wanted[run % 2].view(np.uint8)
            )
            del others, result
    assert wrong == 0


# Kept imports.


def test_a_cache_that_is_updated_in_place(calls, expected) -> None:
    source = [tensors_of(call) for call in calls]
    tensors = {name: tensor.clone() for name, tensor in source[0].items()}
    for run in range(40):
        torch.cuda._sleep(TEN_MS // 10)
        for name, tensor in source[run % 2].items():
            tensors[name].copy_(tensor)
        attend(calls[run % 2], tensors)
        assert torch.equal(tensors["output"], expected[run % 2])


def test_another_layout_at_the_same_address(calls, expected) -> None:
    call = calls[0]
    tensors = tensors_of(call)
    pages, _, page_size, dim = call.cache.shape
    room = torch.zeros(2 * pages * page_size * dim, dtype=torch.float8_e4m3fn, device="cuda")
    dense = tensors["cache"]
    layouts = [
        room[: dense.numel()].view(dense.shape),
        room.view(pages, 2, page_size, dim)[:, :1],
        room.view(pages, 1, page_size, 2 * dim)[..., :dim],
    ]
    for layout in (*layouts, *layouts):
        room.view(torch.uint8).fill_(0x7F)
        tensors["cache"] = layout.copy_(dense)
        assert layout.data_ptr() == room.data_ptr()
        tensors["output"].fill_(float("nan"))
        attend(call, tensors)
        assert torch.equal(tensors["output"], expected[0])


def test_memory_that_was_given_back_to_the_driver(calls, expected) -> None:
    addresses = set()
    for run in range(10):
        which = run % 2
        tensors = tensors_of(calls[which])
        ballast = [torch.empty(run << 20, dtype=torch.uint8, device="cuda")]
        cache = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        size = tensors["cache"].nbytes
        moved = cache[:size].view(torch.float8_e4m3fn).view(tensors["cache"].shape)
        tensors["cache"] = moved.copy_(tensors["cache"])
        addresses.add(moved.data_ptr())
        attend(calls[which], tensors)
        assert torch.equal(tensors["output"], expected[which])
        del tensors, cache, moved, ballast
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert len(addresses) < 10


# Leaks.


def in_use() -> tuple[int, int, int]:
    torch.cuda.synchronize()
    assert dlpack.flush(30)
    for _ in range(3):
        gc.collect()
    stats = jax.devices("cuda")[0].memory_stats()
    return torch.cuda.memory_allocated(), stats["bytes_in_use"], len(dlpack._loans._live)


def leaves_nothing(once: Callable[[], object], runs: int = 1000) -> None:
    for _ in range(20):
        once()
    before = in_use()
    for _ in range(runs):
        once()
    deadline = time.monotonic() + 10
    while in_use() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert in_use() == before


def test_a_thousand_calls_leak_nothing(calls) -> None:
    source = tensors_of(calls[0])
    fresh = ("query", "regions", "positions", "active", "output", "gate")

    def once() -> None:
        attend(calls[0], source | {name: source[name].clone() for name in fresh})

    leaves_nothing(once)


def test_a_thousand_calls_at_new_addresses(calls, expected) -> None:
    """Imports of what has gone are forgotten, and never found again for something else."""
    source = tensors_of(calls[0])
    size = source["query"].numel()
    room = torch.zeros(1200, math.ceil(size / 64) * 64, dtype=torch.bfloat16, device="cuda")
    for row in room:
        query = row[:size].view(source["query"].shape).copy_(source["query"])
        attend(calls[0], source | {"query": query})
    assert len(jax_route._IMPORTS._arrays) <= 1024
    assert len(jax_route._IMPORTS._layouts) <= 1024
    assert torch.equal(source["output"], expected[0])


def test_a_thousand_calls_of_triton_leak_nothing(calls) -> None:
    with jax.enable_x64(True):
        arrays = arrays_of(calls[0])
    options = triton_options(calls[0])
    leaves_nothing(lambda: triton_sparse_decode_attention(**arrays, **options))


# Captures and threads.


@pytest.mark.parametrize("known", [True, False])
def test_refused_under_capture(known: bool, calls, expected, lent) -> None:
    call = dataclasses.replace(calls[0], scale=calls[0].scale if known else 0.5)
    tensors = tensors_of(call)
    count = torch.zeros(1, device="cuda")
    before = torch_arrays.to_numpy(tensors["output"]).tobytes()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count += 1
        with pytest.raises(RuntimeError, match=r'CUDA graph.*route="direct"'):
            attend(call, tensors)
        count += 1
    assert not lent
    for _ in range(3):
        graph.replay()
    assert count.item() == 6
    assert torch_arrays.to_numpy(tensors["output"]).tobytes() == before
    attend(calls[0], tensors)
    assert torch.equal(tensors["output"], expected[0])


def test_triton_refused_under_capture(calls) -> None:
    with jax.enable_x64(True):
        arrays = arrays_of(calls[0])
    options = triton_options(calls[0])
    first = np.asarray(triton_sparse_decode_attention(**arrays, **options))
    count = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count += 1
        with pytest.raises(ZeroCopyError, match="capture"):
            triton_sparse_decode_attention(**arrays, **options)
    graph.replay()
    assert count.item() == 1
    again = np.asarray(triton_sparse_decode_attention(**arrays, **options))
    np.testing.assert_array_equal(again.view(np.uint8), first.view(np.uint8))


def test_threads_on_their_own_streams(calls, expected) -> None:
    source = [tensors_of(call) for call in calls]
    torch.cuda.synchronize()
    wrong, failures = [], []

    def work(which: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for run in range(50):
                    tensors = {name: t.clone() for name, t in source[which].items()}
                    attend(calls[which], tensors)
                    if not torch.equal(tensors["output"], expected[which]):
                        wrong.append((which, run))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_of_the_tensors_decides(calls, expected) -> None:
    tensors = {name: tensor.to("cuda:1") for name, tensor in tensors_of(calls[0]).items()}
    attend(calls[0], tensors)
    assert torch.cuda.current_device() == 0
    assert torch.equal(tensors["output"].to("cuda:0"), expected[0])
    page = tensors["cache"][0].numel()
    storage = torch.zeros(len(tensors["cache"]), 2 * page, dtype=torch.uint8, device="cuda:1")
    layer = storage[:, page:].view(torch.float8_e4m3fn).view(tensors["cache"].shape)
    tensors["cache"] = layer.copy_(tensors["cache"])
    tensors["output"].fill_(float("nan"))
    attend(calls[0], tensors)
    assert torch.equal(tensors["output"].to("cuda:0"), expected[0])
