"""The raw hand-over on a CPU: same address, same values, right lifetime, or a clear refusal."""

import gc
import itertools
import logging
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_decode import bridge
from sparse_decode.bridge import _jax_dlpack, dlpack
from sparse_decode.bridge.dlpack import ImportCache, ZeroCopyError, to_jax, to_torch

DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
]


def aligned(numel: int, dtype: torch.dtype = torch.float32, lead: int = 0) -> torch.Tensor:
    """A flat tensor `lead` bytes after a multiple of 64, whatever the allocator does."""
    storage = torch.zeros(numel * dtype.itemsize + 128 + lead, dtype=torch.uint8)
    begin = -storage.data_ptr() % 64 + lead
    return storage[begin : begin + numel * dtype.itemsize].view(dtype)


def sample(dtype: str, *shape: int) -> torch.Tensor:
    """Values that every dtype holds exactly, no two neighbours alike."""
    tensor = aligned(int(np.prod(shape)), getattr(torch, dtype)).view(shape)
    modulus = 2 if dtype == "bool" else 7
    values = torch.arange(tensor.numel()) % modulus
    return tensor.copy_(values.view(shape).to(torch.float32).to(tensor.dtype))


def values(array: torch.Tensor | jax.Array) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        complex_or_real = torch.complex64 if array.is_complex() else torch.float32
        return array.to(complex_or_real).numpy()
    return np.asarray(array).astype(np.complex64 if array.dtype.kind == "c" else np.float32)


def same(array: jax.Array, tensor: torch.Tensor) -> None:
    assert array.shape == tuple(tensor.shape)
    assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(values(array), values(tensor))


# Both directions.


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_keep_address_and_values(dtype: str) -> None:
    tensor = sample(dtype, 4, 6)
    array = to_jax(tensor)
    same(array, tensor)
    same(array, to_torch(array))
    computed = jnp.asarray(values(tensor)).astype(dtype)
    same(computed, to_torch(computed))


@pytest.mark.parametrize("dtype", ["int64", "float64", "complex128", "uint64"])
def test_64_bits_with_x64(dtype: str) -> None:
    with jax.enable_x64(True):
        tensor = torch.tensor([2**40 + 5, 1]).to(getattr(torch, dtype))
        array = to_jax(tensor)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        assert array.dtype == dtype
        assert array[0] == 2**40 + 5
        assert to_torch(array).dtype == tensor.dtype


@settings(max_examples=40)
@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_transposed_views(order: list[int], shape: list[int]) -> None:
    tensor = sample("int32", *shape).permute(*order)
    same(to_jax(tensor), tensor)
    back = to_torch(to_jax(tensor))
    same(to_jax(tensor), back)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((1, 4, 8), (777, 8, 1)),
        ((4, 1, 8), (8, 3, 1)),
        ((64, 1), (1, 777)),
        ((1, 1), (5, 9)),
        ((1, 4, 8), (1, 8, 1)),
        ((1,), (0,)),
    ],
)
def test_odd_strides_of_size_1_change_nothing(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    tensor = sample("float32", 64).as_strided(shape, strides)
    array = to_jax(tensor)
    same(array, tensor)
    assert array.format.layout == jnp.zeros(shape).format.layout


def test_odd_strides_of_size_1_in_a_transposed_view() -> None:
    tensor = sample("float32", 32).as_strided((1, 4, 8), (5, 1, 4))
    same(to_jax(tensor), tensor)


@pytest.mark.parametrize("shape", [(0,), (0, 192), (3, 0, 2)])
def test_empty(shape: tuple[int, ...]) -> None:
    array = to_jax(torch.empty(shape, dtype=torch.bfloat16))
    assert (array.shape, array.dtype) == (shape, jnp.bfloat16)
    tensor = to_torch(jnp.empty(shape, jnp.float8_e4m3fn))
    assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.float8_e4m3fn)
    words = to_jax(torch.empty(shape, dtype=torch.int64), int64_as_int32=True)
    assert words.shape == (*shape[:-1], 2 * shape[-1])


def test_scalar() -> None:
    tensor = aligned(1).fill_(3.5).view(())
    same(to_jax(tensor), tensor)
    array = jnp.float32(2.5)
    same(array, to_torch(array))


def test_writes_are_shared() -> None:
    tensor = sample("int32", 16)
    array = to_jax(tensor)
    tensor[3] = 99
    assert array[3] == 99
    view = to_torch(array)
    view[4] = 98
    assert tensor[4] == 98


def test_to_torch_waits_for_the_value() -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jnp.sin(y) + 1, x))
    array = slow(jnp.ones(100_000))
    np.testing.assert_array_equal(to_torch(array).numpy().copy(), np.asarray(array))


def test_jitted_program_reads_torch_memory() -> None:
    tensor = sample("float32", 8, 8)
    result = jax.jit(lambda x: x.T @ x)(to_jax(tensor))
    np.testing.assert_allclose(to_torch(result).numpy(), (tensor.T @ tensor).numpy(), rtol=1e-6)


# 64-bit integers.


def test_int64_as_words() -> None:
    tensor = torch.tensor([[2**40 + 5, -1], [7, 2**31]])
    tensor = aligned(4, torch.int64).view(2, 2).copy_(tensor)
    words = to_jax(tensor, int64_as_int32=True)
    assert (words.shape, words.dtype) == ((2, 4), jnp.int32)
    assert words.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(words), tensor.numpy().view(np.int32))
    assert sys.byteorder == "big" or words[0, 0] == 5


def test_int64_as_words_leaves_other_dtypes() -> None:
    tensor = sample("int32", 8)
    same(to_jax(tensor, int64_as_int32=True), tensor)


# Refusals.


def fake(shape: tuple[int, ...] = (4,)) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape)


def freed() -> torch.Tensor:
    tensor = torch.zeros(64)
    tensor.untyped_storage().resize_(0)
    return tensor


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8)


REFUSED = {
    "requires grad": (lambda: torch.ones(4, requires_grad=True), r"requires grad.*detach\(\)"),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(4)), r"requires grad.*detach\(\)"),
    "conjugated": (lambda: torch.ones(4, dtype=torch.complex64).conj(), r"resolve_conj\(\)"),
    "negated": (lambda: torch.ones(4, dtype=torch.complex64).conj().imag, r"resolve_neg\(\)"),
    "sparse": (lambda: torch.eye(4).to_sparse(), r"sparse_coo.*to_dense\(\)"),
    "meta": (lambda: torch.empty(4, device="meta"), "device meta holds no memory"),
    "fake": (fake, "FakeTensor has no memory of its own"),
    "empty fake": (lambda: fake((0,)), "FakeTensor has no memory of its own"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(4)), "functionalized"),
    "freed": (freed, "no memory; its storage was freed"),
    "int64": (lambda: torch.ones(8, dtype=torch.int64), "narrow int64.*int64_as_int32=True"),
    "float64": (lambda: torch.ones(8, dtype=torch.float64), "narrow float64.*convert"),
    "complex128": (lambda: torch.ones(8, dtype=torch.complex128), "narrow complex128"),
    "complex32": (lambda: torch.empty(64, dtype=torch.complex32), "no dtype for torch.complex32"),
    "sliced": (lambda: aligned(64).view(8, 8)[:, :4], "strides.*packed_to_jax"),
    "stepped": (lambda: aligned(64)[::2], "strides.*packed_to_jax"),
    "expanded": (lambda: aligned(16).expand(4, 16), "strides.*packed_to_jax"),
    "overlapping": (lambda: aligned(64).as_strided((4, 4), (2, 1)), "strides"),
    "misaligned": (lambda: aligned(16, lead=16), "address .* not a multiple of 64.*clone"),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_tensors(case: str) -> None:
    make, message = REFUSED[case]
    tensor = make()
    with pytest.raises(ZeroCopyError, match=message):
        to_jax(tensor)
    with pytest.raises(ZeroCopyError, match=message):
        ImportCache().borrow([tensor])


@pytest.mark.filterwarnings("ignore:.*quantize.*", "ignore:.*TypedStorage.*")
def test_refused_quantized() -> None:
    with pytest.raises(ZeroCopyError, match=r"int_repr\(\)"):
        to_jax(quantized())


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_refused_under_transforms(transform) -> None:
    for hand_over in (to_jax, lambda tensor: ImportCache().borrow([tensor])):
        with pytest.raises(ZeroCopyError, match=r"torch\.func|requires grad"):
            transform(lambda x, call=hand_over: (call(x), x.sum())[1])(torch.ones(64))


def test_refused_int64_words() -> None:
    with pytest.raises(ZeroCopyError, match=r"scalar.*reshape it to \[1\]"):
        to_jax(torch.tensor(3), int64_as_int32=True)
    with pytest.raises(ZeroCopyError, match="last dimension has stride 4"):
        to_jax(torch.zeros(4, 4, dtype=torch.int64).T, int64_as_int32=True)


def test_refused_types() -> None:
    with pytest.raises(TypeError, match=r"torch\.Tensor, got ndarray"):
        to_jax(np.ones(4))
    with pytest.raises(TypeError, match=r"torch\.Tensor, got list"):
        ImportCache().borrow([[1]])
    with pytest.raises(TypeError, match=r"jax\.Array, got ndarray"):
        to_torch(np.ones(4))


def test_refused_device_without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_dlpack, "find_device", lambda kind, index: None)
    with pytest.raises(ZeroCopyError, match=r"JAX has no device for cpu.*JAX_PLATFORMS"):
        to_jax(torch.ones(4))


@pytest.mark.parametrize("fault", [None, ZeroCopyError("refused")])
def test_the_current_device_stays(monkeypatch: pytest.MonkeyPatch, fault: Exception | None) -> None:
    current = [0]
    gpus = {"is_initialized": lambda: True, "device_count": lambda: 2}
    gpus |= {"current_device": lambda: current[-1], "set_device": current.append}
    for name, stand_in in gpus.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    @dlpack.keeps_device
    def work(value: int) -> int:
        current.append(1)
        if fault:
            raise fault
        return value

    if fault:
        with pytest.raises(ZeroCopyError, match="refused"):
            work(7)
    else:
        assert work(7) == 7
    assert current == [0, 1, 0]


def test_refused_copies_behind_our_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_dlpack, "import_capsules", lambda *_: [jnp.ones(16)])
    with pytest.raises(ZeroCopyError, match="disagree about the address"):
        to_jax(aligned(16))


def test_refused_tracer() -> None:
    for transform in (jax.jit, jax.vmap, jax.grad):
        with pytest.raises(ZeroCopyError, match="traced value"):
            transform(lambda x: to_torch(x) and x.sum())(jnp.ones(4))


def test_refused_deleted() -> None:
    array = jnp.ones(4)
    array.delete()
    with pytest.raises(ZeroCopyError, match="deleted or donated"):
        to_torch(array)


def test_refused_prng_key() -> None:
    with pytest.raises(ZeroCopyError, match=r"key_data\(key\)"):
        to_torch(jax.random.key(0))


def test_refused_jax_dtype() -> None:
    with pytest.raises(ZeroCopyError, match="torch has no dtype for int4"):
        to_torch(jnp.zeros(4, jnp.int4))


def run_python(code: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", **env},
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.strip()


def test_refused_sharded() -> None:
    code = """
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P
        from sparse_decode.bridge import to_torch
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        for spec in (P("x"), P()):
            array = jax.device_put(jnp.arange(8), NamedSharding(mesh, spec))
            try:
                to_torch(array)
            except ValueError as error:
                print(error)
            print(to_torch(array.addressable_shards[1].data).sum().item())
    """
    lines = run_python(code, XLA_FLAGS="--xla_force_host_platform_device_count=2").splitlines()
    assert all("spread over several devices" in line for line in lines[::2])
    assert lines[1::2] == ["22", "28"]


# Lifetime.


def collect() -> None:
    """Lets go of everything: JAX frees what a capsule held at the next collection of any kind."""
    for _ in range(20):
        gc.collect(0)


def storage_of(tensor: torch.Tensor, ends: list[int]) -> weakref.ref:
    return weakref.ref(tensor.untyped_storage(), lambda _: ends.append(1))


def test_torch_memory_goes_when_jax_drops_it() -> None:
    ends: list[int] = []
    tensor = aligned(64)
    storage = storage_of(tensor, ends)
    array = to_jax(tensor)
    del tensor
    collect()
    assert storage() is not None
    assert not ends
    assert array[0] == 0
    del array
    collect()
    assert ends == [1]


def test_torch_memory_stays_while_jax_computes() -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: jnp.sin(y) @ x, x).sum())
    tensor = aligned(300 * 300).view(300, 300).fill_(0.01)
    expected = slow(jnp.asarray(tensor.numpy().copy()))
    ends: list[int] = []
    storage = storage_of(tensor, ends)
    result = slow(to_jax(tensor))
    del tensor
    assert result.block_until_ready() == expected
    collect()
    assert storage() is None
    assert ends == [1]


def test_jax_memory_goes_when_torch_drops_its_last_view() -> None:
    before = len(dlpack._loans._live)
    array = jnp.arange(64.0) + 1
    ends: list[int] = []
    watched = weakref.ref(array, lambda _: ends.append(1))
    tensor = to_torch(array)
    view = tensor[10:].view(-1)[::2]
    del array, tensor
    collect()
    assert watched() is not None
    assert len(dlpack._loans._live) == before + 1
    assert view[0] == 11
    del view
    collect()
    assert ends == [1]
    assert len(dlpack._loans._live) == before


def test_deleted_array_keeps_its_memory_for_torch() -> None:
    array = jnp.arange(100_000.0) + 1
    tensor = to_torch(array)
    array.delete()
    others = [jnp.zeros(100_000) + n for n in range(8)]
    jax.block_until_ready(others)
    assert tensor.sum() == torch.arange(1.0, 100_001.0).sum()


def test_round_trips_end_with_the_last_owner() -> None:
    ends: list[int] = []
    tensor = aligned(64).fill_(3)
    storage = storage_of(tensor, ends)
    for _ in range(5):
        tensor = to_torch(to_jax(tensor))
    collect()
    assert storage() is not None
    assert tensor.sum() == 192
    del tensor
    collect()
    assert ends == [1]


def test_failed_import_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(dlpack._loans._live)
    array = jnp.ones(16)
    watched = weakref.ref(array)

    def fail(memory: object, dtype: torch.dtype) -> None:
        raise BufferError("no")

    monkeypatch.setattr(torch, "frombuffer", fail)
    with pytest.raises(BufferError):
        to_torch(array)
    del array
    collect()
    assert watched() is None
    assert len(dlpack._loans._live) == before


def test_many_threads() -> None:
    before = len(dlpack._loans._live)
    cache = ImportCache(max_entries=3)

    def work(number: int) -> bool:
        right = True
        for _ in range(50):
            tensor = aligned(64).fill_(number)
            array = to_jax(tensor)
            view = to_torch(array * 2)
            lent, kept = cache.borrow([tensor], [tensor])
            right &= bool((view == 2 * number).all())
            right &= lent.unsafe_buffer_pointer() == kept.unsafe_buffer_pointer()
            right &= bool((lent + kept == 2 * number).all())
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))
    collect()
    assert len(dlpack._loans._live) == before


def test_tensors_that_outlive_the_interpreter() -> None:
    code = """
        import atexit, builtins, torch, jax.numpy as jnp
        from sparse_decode import bridge
        from sparse_decode.bridge.dlpack import ImportCache
        tensor = bridge.to_torch(jnp.arange(64.0))
        builtins.kept = [bridge.to_torch(jnp.arange(8.0))]
        torch.kept = bridge.to_torch(jnp.ones(1000))
        atexit.register(lambda: builtins.kept.append(tensor[1:]))
        array = bridge.to_jax(torch.zeros(1024))
        builtins.lent = ImportCache().borrow([torch.zeros(1024)])
        cycle = [tensor]; cycle.append(cycle)
        print("done")
    """
    assert run_python(code) == "done"


def test_tensor_that_dies_while_an_exception_is_under_way() -> None:
    def fail() -> None:
        raise KeyError("the caller's own")

    before = len(dlpack._loans._live)
    for _ in range(10):
        with pytest.raises(KeyError, match="the caller's own"):
            print(to_torch(jnp.ones(16)), fail())
    assert len(dlpack._loans._live) == before


def test_lend_after_closing() -> None:
    loans = dlpack._Loans()
    array = jnp.ones(4)
    loans._close()
    with pytest.raises(ZeroCopyError, match="shutting down"):
        loans.lend(array, _jax_dlpack.export_array(array, None), torch.float32, torch.device("cpu"))


# Deferred release: the helper thread, with the GPU's part played here.


class Gate:
    """Stands in for the streams of a device: busy until opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waited: list[int] = []

    def enter_thread(self) -> None:
        pass

    def wait(self, index: int, stop) -> bool:
        self.waited.append(index)
        while not self.open.wait(0.001):
            if stop():
                return False
        return True


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(dlpack, "_TorchStreams", lambda: gate)
    return gate


def lend(loans: dlpack._Loans, array: jax.Array, index: int = 0) -> torch.Tensor:
    capsule = _jax_dlpack.export_array(array.block_until_ready(), None)
    dtype = getattr(torch, array.dtype.name)
    return loans.lend(array, capsule, dtype, torch.device("cuda", index))


def test_deferred_until_the_device_is_done(gate: Gate) -> None:
    loans = dlpack._Loans()
    assert loans.flush(1)
    array = jnp.arange(16.0)
    watched = weakref.ref(array)
    tensor = lend(loans, array)
    del array, tensor
    collect()
    assert not loans.flush(0.05)
    assert watched() is not None
    gate.open.set()
    assert loans.flush(10)
    collect()
    assert watched() is None
    loans._close()
    assert not loans._thread.is_alive()


def test_deferred_batches_by_device(gate: Gate) -> None:
    loans = dlpack._Loans()
    tensors = [lend(loans, jnp.arange(16.0), index % 2) for index in range(20)]
    gate.open.set()
    tensors.clear()
    assert loans.flush(10)
    assert set(gate.waited) == {0, 1}
    assert len(gate.waited) <= 20
    assert not loans._live
    loans._close()


def test_closing_never_gives_back_early(gate: Gate) -> None:
    loans = dlpack._Loans()
    dropped, alive = jnp.arange(16.0), jnp.arange(32.0)
    watched = [weakref.ref(dropped), weakref.ref(alive)]
    tensor, kept = lend(loans, dropped), lend(loans, alive)
    del dropped, alive, tensor
    loans._close()
    del kept
    collect()
    assert all(ref() is not None for ref in watched)


class Driver:
    """Stands in for libcuda: streams that are captured or busy for some calls."""

    def __init__(self, capturing: dict[int, list[int]], busy: list[int]) -> None:
        self.capturing = capturing
        self.busy = busy
        self.recorded: list[int] = []
        self.log: list[tuple[str, int]] = []

    def cuCtxSetCurrent(self, context) -> int:
        return 0

    def cuStreamIsCapturing(self, stream, status) -> int:
        answers = self.capturing.get(stream.value or 0, [])
        answer = answers.pop(0) if answers else 0
        self.log.append(("capturing", answer))
        if answer > 1:
            return answer
        status._obj.value = answer
        return 0

    def cuEventRecord(self, event, stream) -> int:
        self.recorded.append(stream.value or 0)
        return 0

    def cuEventQuery(self, event) -> int:
        return self.busy.pop(0) if self.busy else 0


def streams_with(driver: Driver, *streams: int) -> dlpack._TorchStreams:
    waiting = object.__new__(dlpack._TorchStreams)
    pointer = dlpack.ctypes.c_void_p
    waiting._driver = driver
    waiting._reported = set()
    waiting._devices = {0: (pointer(1), [(pointer(it), pointer(it + 100)) for it in streams])}
    return waiting


def test_streams_wait_for_every_event() -> None:
    driver = Driver({}, busy=[600, 600, 0, 600])
    assert streams_with(driver, 0, 7, 8).wait(0, lambda: False)
    assert driver.recorded == [0, 7, 8]
    assert not driver.busy


@pytest.mark.parametrize(
    ("answers", "records"),
    [
        ([1, 1, 0, 0], 1),  # captured at first
        ([0, 1, 1, 0, 0], 2),  # a capture begins while the event is recorded
        ([906, 0, 0], 1),  # the legacy stream while a blocking stream is captured
    ],
)
def test_streams_never_use_an_event_of_a_capture(answers: list[int], records: int) -> None:
    driver = Driver({7: answers}, busy=[])
    assert streams_with(driver, 7).wait(0, lambda: False)
    assert not driver.capturing[7]
    assert len(driver.recorded) == records


def test_an_event_that_a_whole_capture_has_swallowed_is_recorded_again() -> None:
    """The capture began after the first question and was over before the second."""

    class Swallowed(Driver):
        def cuEventQuery(self, event) -> int:
            return 907 if len(self.recorded) == 1 else 0

    driver = Swallowed({}, busy=[])
    turns = iter(range(50))
    assert streams_with(driver, 7).wait(0, lambda: next(turns, None) is None)
    assert driver.recorded == [7, 7]


def test_streams_hold_on_after_errors(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver({}, busy=[719] * 5)
    stops = iter([False] * 3 + [True])
    with caplog.at_level(logging.ERROR):
        assert not streams_with(driver, 7).wait(0, lambda: next(stops))
    assert [record.getMessage() for record in caplog.records] == [
        "cuEventQuery: CUDA error 719; memory that torch viewed stays held"
    ]


def test_all_streams_of_the_pools_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = {priority: itertools.cycle(range(10, 18)) for priority in (-1, 0)}

    class Stream:
        def __init__(self, device: int, priority: int) -> None:
            self.cuda_stream = next(turns[priority]) - 100 * priority

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -1

    class Default:
        cuda_stream = 0

    next(turns[0])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: Default)
    found = dlpack._torch_streams(0)
    assert len(found) == 17
    assert set(found) == {0, *range(10, 18), *range(110, 118)}
    assert next(turns[0]) == 11  # the turn is where it was


# Padded storage.


def in_pages(array: jax.Array, offset: int, tensor: torch.Tensor) -> np.ndarray:
    """The tensor's elements, found in the packed array as a kernel would find them."""
    inner = np.add.reduce(
        np.meshgrid(
            *(np.arange(n) * s for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)),
            indexing="ij",
        )
    )
    return np.asarray(array)[:, offset + inner]


def own_storage(numel: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A tensor that begins its storage at a multiple of 64, as torch allocates on a CPU."""
    tensor = (torch.arange(numel) % 97).to(dtype)
    assert not tensor.data_ptr() % 64
    return tensor


def cache_layers(pages=5, groups=2, page_size=8, count=3, side=64, header=0, tail=0):
    layer = groups * page_size * 384
    stride = count * layer + side
    storage = own_storage(header + pages * stride + tail)
    shape, strides = (pages, groups, page_size, 384), (stride, page_size * 384, 384, 1)
    views = [storage.as_strided(shape, strides, header + it * layer) for it in range(count)]
    return views, stride, storage


def test_layers_share_one_array_and_one_program() -> None:
    views, stride, storage = cache_layers()
    take = jax.jit(lambda array, offset: jax.lax.dynamic_slice(array, (1, offset), (2, 384)))
    for number, view in enumerate(views):
        with pytest.raises(ZeroCopyError, match="packed_to_jax"):
            to_jax(view)
        array, offset = bridge.packed_to_jax(view)
        assert array.shape == (5, stride)
        assert array.unsafe_buffer_pointer() == storage.data_ptr()
        assert offset == number * 2 * 8 * 384
        np.testing.assert_array_equal(in_pages(array, offset, view), view.numpy())
        np.testing.assert_array_equal(take(array, offset), view[1:3, 0, 0].numpy())
    assert take._cache_size() == 1


@pytest.mark.parametrize("header", [0, 32, 384, 5000 * 32])
@pytest.mark.parametrize("tail", [0, 32, 100_000])
def test_layers_behind_a_header(header: int, tail: int) -> None:
    views, stride, storage = cache_layers(header=header, tail=tail)
    for view in views:
        array, offset = bridge.packed_to_jax(view)
        assert array.shape == (5, stride)
        assert storage.data_ptr() <= array.unsafe_buffer_pointer() <= view.data_ptr()
        assert array.unsafe_buffer_pointer() + 2 * offset == view.data_ptr()
        np.testing.assert_array_equal(in_pages(array, offset, view), view.numpy())


@pytest.mark.parametrize("pages", [1, 2, 4])
def test_some_of_the_pages(pages: int) -> None:
    views, stride, storage = cache_layers()
    view = views[1][1 : 1 + pages]
    array, offset = bridge.packed_to_jax(view)
    assert array.shape == (pages, stride)
    assert array.unsafe_buffer_pointer() == storage.data_ptr() + 2 * stride
    np.testing.assert_array_equal(in_pages(array, offset, view), view.numpy())


@pytest.mark.parametrize("stride", [0, 1, 7, 2 * 8 * 384, 1 << 40])
@pytest.mark.parametrize("start", [0, 32, 48, 384])
def test_one_page_has_no_stride(stride: int, start: int) -> None:
    storage = own_storage(2 * 8 * 384 + start)
    view = storage.as_strided((1, 2, 8, 384), (stride, 8 * 384, 384, 1), start)
    array, offset = bridge.packed_to_jax(view)
    assert array.unsafe_buffer_pointer() + 2 * offset == view.data_ptr()
    np.testing.assert_array_equal(in_pages(array, offset, view), view.numpy())


def test_odd_strides_of_one_group_and_one_token() -> None:
    storage = own_storage(4 * 512)
    view = storage.as_strided((4, 1, 1, 384), (512, 99999, 77777, 1), 64)
    array, offset = bridge.packed_to_jax(view)
    assert (array.shape, offset) == ((4, 512), 64)
    np.testing.assert_array_equal(in_pages(array, offset, view), view.numpy())


@pytest.mark.parametrize("dtype", ["uint16", "uint8"])
def test_packed_as_words(dtype: str) -> None:
    storage = own_storage(4 * 8192, torch.float32).to(torch.float8_e4m3fn)
    view = storage.as_strided((4, 1, 8, 384), (8192, 384 * 8, 384, 1), 3072)
    array, offset = bridge.packed_to_jax(view, dtype=getattr(torch, dtype))
    item = array.dtype.itemsize
    assert (array.shape, offset) == ((4, 8192 // item), 3072 // item)
    assert array.dtype == dtype
    words = np.asarray(array)[:, offset : offset + 384 // item].view(np.uint8)
    np.testing.assert_array_equal(words, view[:, 0, 0].view(torch.uint8).numpy())


def test_packed_refusals() -> None:
    storage = own_storage(4 * 512 - 64)
    with pytest.raises(ZeroCopyError, match="last page complete"):
        bridge.packed_to_jax(storage.as_strided((4, 1, 1, 384), (512, 384, 384, 1), 0))
    with pytest.raises(ZeroCopyError, match="interleaved"):
        bridge.packed_to_jax(storage.as_strided((2, 2, 1, 384), (384, 768, 384, 1), 0))
    with pytest.raises(ZeroCopyError, match=r"whole torch\.int32 elements"):
        bridge.packed_to_jax(own_storage(2 * 511).view(2, 511)[:, :9], dtype=torch.int32)
    with pytest.raises(ZeroCopyError, match="page dimension"):
        bridge.packed_to_jax(torch.tensor(1.0))
    with pytest.raises(ZeroCopyError, match="detach"):
        bridge.packed_to_jax(torch.ones(2, 2, requires_grad=True))


def test_packed_empty() -> None:
    array, offset = bridge.packed_to_jax(own_storage(512).view(1, 512)[:0])
    assert (array.shape, offset) == ((0, 512), 0)


# Borrowed imports.


def test_kept_imports_follow_the_content() -> None:
    cache = ImportCache()
    fresh, kept = sample("float32", 16), sample("bfloat16", 8, 8)
    first = cache.borrow([fresh], [kept])
    same(first[0], fresh)
    same(first[1], kept)
    program = jax.jit(lambda x, y: x.sum() + y.astype(jnp.float32).sum())
    for value in range(1, 4):
        kept.fill_(value)
        zeros = torch.zeros(1024)
        fresh_array, kept_array = cache.borrow([zeros], [kept])
        assert kept_array is first[1]
        result = program(fresh_array, kept_array)
        dlpack.settle(result)
        assert result == 64 * value


def test_borrowed_arrays_hold_no_memory() -> None:
    cache = ImportCache()
    ends: list[int] = []
    tensor = aligned(64)
    storage = storage_of(tensor, ends)
    arrays = cache.borrow([tensor], [tensor])
    del tensor
    collect()
    assert storage() is None
    assert ends == [1]
    del cache
    collect()
    arrays.clear()
    collect()


def test_kept_import_at_a_reused_address_is_that_of_the_new_tensor() -> None:
    cache = ImportCache()
    storage = aligned(64)
    [old] = cache.borrow([], [storage.view(8, 8)])
    again = cache.borrow([storage], [storage.view(8, 8), storage.view(4, 16), storage.view(8, 8).T])
    for array, shape in zip(again[1:], [(8, 8), (4, 16), (8, 8)], strict=True):
        assert array.shape == shape
        assert array.unsafe_buffer_pointer() == old.unsafe_buffer_pointer()
    storage.copy_(torch.arange(64.0))
    np.testing.assert_array_equal(again[3], storage.view(8, 8).T.numpy())


def test_kept_imports_are_bounded() -> None:
    cache = ImportCache(max_entries=4)
    tensors = [aligned(16 * (size + 1)) for size in range(10)]
    for tensor in tensors:
        same(cache.borrow([tensor], [tensor])[1], tensor)
    assert len(cache._arrays) == 4
    assert len(cache._layouts) == 4


def test_known_layouts_do_not_admit_what_is_refused() -> None:
    cache = ImportCache()
    cache.borrow([aligned(16)], [aligned(16)])
    for refused, message in [
        (aligned(16).requires_grad_(), "detach"),
        (aligned(17)[1:], "multiple of 64"),
        (torch.zeros(16, dtype=torch.complex64).conj().imag, "resolve_neg"),
    ]:
        for arguments in [([refused],), ([aligned(16)], [refused])]:
            with pytest.raises(ZeroCopyError, match=message):
                cache.borrow(*arguments)


@pytest.mark.parametrize(("device", "handle"), [("cuda", 7), ("cuda:0", 1), ("cuda:2", 7)])
def test_stream_that_waits_for_a_result(device: str, handle: int, monkeypatch) -> None:
    """The device's current one; the current device's where none is said; 1 is the default one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(dlpack, "current_stream", lambda index: {0: 0, 2: 7}[index])
    waits: list[int] = []
    monkeypatch.setattr(_jax_dlpack, "make_wait", lambda stream, array: waits.append(stream))
    dlpack.settle(jnp.ones(4), torch.device(device))
    assert waits == [handle]


def test_lent_by_layout_and_address() -> None:
    cache = ImportCache(int64_as_int32=True)
    layouts = cache.layouts([aligned(16), aligned(8, torch.int64), torch.zeros(0, 3)])
    for _ in range(2):
        fresh, kept = aligned(16).fill_(3), aligned(8, torch.int64).fill_(-2)
        arrays = cache.lend(layouts, [fresh.data_ptr(), kept.data_ptr(), 0], 1)
        same(arrays[0], fresh)
        assert arrays[1].unsafe_buffer_pointer() == kept.data_ptr()
        np.testing.assert_array_equal(arrays[1], [-2, -1] * 8)
        assert arrays[2].shape == (0, 3)
    for address, message in [(fresh.data_ptr() + 16, "multiple of 64"), (0, "no memory")]:
        for fresh_count in (1, 2):
            with pytest.raises(ZeroCopyError, match=message):
                cache.lend(layouts[:2], [fresh.data_ptr(), address], fresh_count)
    for count, fresh_count in [(1, 1), (3, 0), (3, 4)]:
        with pytest.raises(ValueError, match="an address for each layout"):
            cache.lend(layouts, [fresh.data_ptr()] * count, fresh_count)


def test_borrowed_int64_and_empty() -> None:
    cache = ImportCache(int64_as_int32=True)
    tensors = [aligned(8, torch.int64).fill_(-2), torch.zeros(0, 3)]
    words, empty, kept = cache.borrow(tensors, [torch.zeros(0, dtype=torch.int64)])
    np.testing.assert_array_equal(words, [-2, -1] * 8)
    assert (empty.shape, kept.shape, kept.dtype) == ((0, 3), (0,), jnp.int32)
    assert cache.borrow([]) == []


def test_borrowed_from_one_device() -> None:
    with pytest.raises(ZeroCopyError, match="several devices"):
        ImportCache().borrow([torch.ones(4), torch.ones(4, device="meta")])


def test_donated_kept_import_is_made_again() -> None:
    cache = ImportCache()
    tensor = aligned(16)
    _, array = cache.borrow([tensor], [tensor])
    array.delete()
    same(cache.borrow([tensor], [tensor])[1], tensor)


# The package and its private knowledge.


def test_public_calls_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _jax_dlpack.uses_private_entry_points()
    monkeypatch.setattr(_jax_dlpack, "_import_capsule", None)
    monkeypatch.setattr(_jax_dlpack, "_export_array", None)
    assert not _jax_dlpack.uses_private_entry_points()
    for dtype in DTYPES:
        tensor = sample(dtype, 4, 8)
        same(to_jax(tensor), tensor)
        same(to_jax(tensor.T), tensor.T)
        array = jnp.ones(4, dtype)
        same(array, to_torch(array))
    same(ImportCache().borrow([tensor], [tensor])[1], tensor)


def test_names_load_on_use() -> None:
    code = """
        import sys
        from sparse_decode import bridge
        assert not {"jax", "torch"} & set(sys.modules)
        assert "to_jax" in dir(bridge)
        try:
            bridge.nothing
        except AttributeError as error:
            print(error)
        bridge.to_jax
        assert {"jax", "torch"} <= set(sys.modules)
    """
    assert run_python(code) == "module 'sparse_decode.bridge' has no attribute 'nothing'"
    assert all(callable(getattr(bridge, name)) for name in bridge.__all__)
    assert issubclass(bridge.ZeroCopyError, ValueError)
