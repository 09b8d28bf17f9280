"""The op through JAX on CPU tensors, and the Triton path on JAX arrays."""

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import jax.numpy as jnp  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from sparse_decode import captures, torch_arrays  # noqa: E402
from sparse_decode.bridge import (  # noqa: E402
    ZeroCopyError,
    jax_route,
    sparse_decode_attention,
    to_jax,
    triton_sparse_decode_attention,
)
from sparse_decode.cases import CASES, Case, build  # noqa: E402
from sparse_decode.contract import ARRAY_NAMES, CACHE_DIM  # noqa: E402
from sparse_decode.pallas_kernels import Config, PackedCache  # noqa: E402
from sparse_decode.paths import PATHS  # noqa: E402
from sparse_decode.tolerance import judge, limits  # noqa: E402

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="runs the interpreters, on the CPU"
)
if jax.default_backend() == "cpu":
    # Nearly all the time of these tests is compilation of interpreted kernels that run once.
    jax.config.update("jax_disable_most_optimizations", True)

PATH = {path.name: path for path in PATHS}
CASE = {case.name: case for case in CASES}
CAPTURES = Path(__file__).with_name("captures")

# Quick to compile. Every call of one layout and scale shares its program.
QUICK = Config(splits=1, tile=16)
FP8 = Case("bridge op", (20, 9), heads=2, page_size=8, slots=3, splits=1)
BF16 = dataclasses.replace(FP8, cache="bfloat16")


def tensors_of(call):
    return {name: torch_arrays.from_numpy(array) for name, array in call.arrays().items()}


def attend(call, tensors, **changes):
    """Runs the op on tensors that hold the call's values; returns what is wrong with the result."""
    before = torch_arrays.to_numpy(tensors["output"])
    options = {**call.options(), "config": QUICK, "route": "dlpack", **changes}
    sparse_decode_attention(**tensors, **options)
    return judge(limits(call), torch_arrays.to_numpy(tensors["output"]), None, before).fault


def bits(tensor):
    return np.frombuffer(torch_arrays.to_numpy(tensor).tobytes(), np.uint8)


@pytest.fixture
def plans(monkeypatch):
    """The plan of each program, as it is traced."""
    traced = []
    real = jax_route.attend

    def spy(plan, buffers):
        traced.append(plan)
        return real(plan, buffers)

    monkeypatch.setattr(jax_route, "attend", spy)
    return traced


@pytest.fixture
def lent(monkeypatch):
    """What JAX got, call by call: (address, shape, dtype) of each array."""
    calls = []
    real = jax_route._IMPORTS.lend

    def spy(*args):
        arrays = real(*args)
        calls.append([(a.unsafe_buffer_pointer(), a.shape, a.dtype.name) for a in arrays])
        return arrays

    monkeypatch.setattr(jax_route._IMPORTS, "lend", spy)
    return calls


def padded(tensor, *, lead=0):
    """A view with the same values, padded at the end of every dimension, and its whole memory."""
    itemsize = tensor.element_size()
    shape = [tensor.shape[0], *(extent + 32 for extent in tensor.shape[1:])]
    base = torch.full((lead * tensor.shape[0] + int(np.prod(shape)),), 7, dtype=tensor.dtype)
    assert itemsize * lead % 64 == 0
    view = base[lead : lead + int(np.prod(shape))].view(shape)
    view = view[tuple(slice(extent) for extent in tensor.shape)]
    view.copy_(tensor)
    return view, base


# Shared cases and captures.


@pytest.mark.parametrize(
    "name",
    [
        "fp8_split2_gate",
        "fp8_output_fp16",
        "uint8_verify4_groups2",
        "fp8_heads5",
        "fp8_inactive_kept",
        "fp8_outside",
        "fp8_packed",
        "fp8_token_major_strided",
        "bf16_split1_gate",
        "bf16_packed_strided",
        "fp16_heads4_gate",
        "empty",
    ],
)
def test_shared_cases(name):
    call = build(CASE[name])
    outcome = PATH["dlpack"].run(call)
    assert outcome.before is not None
    assert judge(limits(call), outcome.output, None, outcome.before).fault is None


@pytest.mark.parametrize("name", ["fp8_poisoned", "uint8_verify4_gate", "bf16_groups2_page16"])
def test_captures(name):
    capture = captures.load(CAPTURES / f"{name}.safetensors")
    outcome = PATH["dlpack"].run(capture.call)
    assert judge(limits(capture.call), outcome.output, None, outcome.before).fault is None


# Memory that is lent as it is.


def test_everything_is_lent_where_it_lies(lent):
    call = build(FP8)
    tensors = tensors_of(call)
    assert attend(call, tensors) is None
    [arrays] = lent
    assert arrays[0][0] == tensors["output"].data_ptr()
    assert {address for address, _, _ in arrays} == {t.data_ptr() for t in tensors.values()}
    by_address = {address: rest for address, *rest in arrays}
    assert by_address[tensors["regions"].data_ptr()] == [(2, 6), "int32"]
    assert by_address[tensors["positions"].data_ptr()] == [(4,), "int32"]
    assert by_address[tensors["cache"].data_ptr()][1] == "uint16"


def test_int32_indices_are_lent_too(lent):
    call = build(dataclasses.replace(FP8, index="int32"))
    tensors = tensors_of(call)
    assert attend(call, tensors) is None
    assert tensors["regions"].data_ptr() in [address for address, _, _ in lent[0]]


def test_uint8_and_float8_are_the_same_memory(lent):
    call = build(FP8)
    tensors = tensors_of(call)
    attend(call, tensors)
    first = bits(tensors["output"])
    tensors["cache"] = tensors["cache"].view(torch.uint8)
    tensors["output"].fill_(float("nan"))
    attend(call, tensors)
    np.testing.assert_array_equal(bits(tensors["output"]), first)
    assert all(tensors["cache"].data_ptr() in [a for a, _, _ in arrays] for arrays in lent)


def test_strided_tensors(lent):
    call = build(dataclasses.replace(FP8, gate="bfloat16"))
    tensors, bases = tensors_of(call), {}
    for name in ("query", "regions", "block_table", "gate", "output"):
        tensors[name], bases[name] = padded(tensors[name])
        assert not tensors[name].is_contiguous()
    untouched = bits(bases["output"])
    outside = torch.ones_like(bases["output"], dtype=torch.bool)
    outside.as_strided(tensors["output"].shape, tensors["output"].stride()).fill_(False)
    outside = np.repeat(outside.numpy(), 2)
    assert attend(call, tensors) is None
    assert {t.data_ptr() for t in tensors.values()} == {address for address, _, _ in lent[0]}
    np.testing.assert_array_equal(bits(bases["output"])[outside], untouched[outside])


@pytest.mark.parametrize("name", ["regions", "block_table", "query"])
def test_overlapping_lines_are_refused_by_the_interpreter(name):
    call = build(BF16)
    tensors = tensors_of(call)
    shape, stride = tensors[name].shape, tensors[name].stride()
    tensors[name] = tensors[name].as_strided(shape, (stride[0] // 2, *stride[1:]))
    with pytest.raises(NotImplementedError, match=f"^{name}: expected what shares the first index"):
        attend(call, tensors)


@pytest.mark.parametrize("name", ["query", "output"])
def test_heads_outermost_are_refused_by_the_interpreter(name):
    call = build(BF16)
    tensors = tensors_of(call)
    tensors[name] = tensors[name].transpose(0, 1).contiguous().transpose(0, 1)
    assert tensors[name].stride(1) > tensors[name].stride(0)
    with pytest.raises(NotImplementedError, match=f"^{name}: expected what shares the first index"):
        attend(call, tensors)


def test_strides_of_single_elements_do_not_matter():
    call = build(dataclasses.replace(FP8, contexts=(5,), slots=1))
    tensors = tensors_of(call)
    for name in ("regions", "positions", "active"):
        shape = tensors[name].shape
        base = tensors[name].new_zeros(64)
        view = base.as_strided(shape, (7,) * len(shape))
        tensors[name] = view.copy_(tensors[name])
    assert attend(call, tensors) is None


@pytest.mark.parametrize("name", ["query", "output", "regions"])
def test_last_line_past_the_storage(name):
    call = build(FP8)
    tensors = tensors_of(call)
    whole, _ = padded(tensors[name])
    span = 1 + sum((n - 1) * s for n, s in zip(whole.shape, whole.stride(), strict=True))
    short = whole.new_zeros(span).as_strided(whole.shape, whole.stride())
    tensors[name] = short.copy_(whole)
    with pytest.raises(ZeroCopyError, match=rf"^{name}: its last line .*use a copy"):
        attend(call, tensors)


@pytest.mark.parametrize("name", ["query", "cache", "positions", "gate", "output"])
def test_misaligned(name):
    call = build(dataclasses.replace(FP8, gate="float32"))
    tensors = tensors_of(call)
    source = tensors[name]
    base = source.new_zeros(source.numel() + 16 // source.element_size())
    tensors[name] = base[16 // source.element_size() :].view(source.shape).copy_(source)
    with pytest.raises(ZeroCopyError, match=rf"^{name}: expected an address .*use a copy"):
        attend(call, tensors)


# Packed caches.


def pages_around(cache, lead, page_bytes):
    """Pages of poison that hold `cache` after `lead` bytes, and the view of it."""
    item = cache.element_size()
    storage = torch.full((cache.shape[0], page_bytes), 0x7F, dtype=torch.uint8)
    flat = storage.view(cache.dtype)
    strides = (page_bytes // item, *cache.stride()[1:])
    view = flat.view(-1).as_strided(cache.shape, strides, lead // item)
    view.copy_(cache)
    return storage, view


def test_layers_of_one_storage_share_a_program(plans, lent):
    calls = [build(dataclasses.replace(FP8, name=f"layer {number}")) for number in range(3)]
    calls = [dataclasses.replace(call, scale=0.25) for call in calls]
    page = calls[0].cache[0].nbytes
    storage = torch.full((calls[0].cache.shape[0], 3 * page + 64), 0x7F, dtype=torch.uint8)
    for number, call in enumerate(calls):
        tensors = tensors_of(call)
        layer = storage[:, number * page : (number + 1) * page].view(torch.float8_e4m3fn)
        tensors["cache"] = layer.view(tensors["cache"].shape).copy_(tensors["cache"])
        assert tensors["cache"].stride(0) > page
        before = storage.clone()
        assert attend(call, tensors) is None
        assert torch.equal(storage, before)
    assert len(plans) == 1
    assert (plans[0].offset_unit, plans[0].words) == (16, True)
    for arrays in lent:
        assert (storage.data_ptr(), (len(storage), (3 * page + 64) // 2), "uint16") in arrays


@pytest.mark.parametrize(
    ("dtype", "lead", "stride", "unit", "words"),
    [
        ("float8_e4m3fn", 48, 64, 16, True),
        ("float8_e4m3fn", 8, 64, 8, True),
        ("uint8", 2, 64, 2, True),
        ("float8_e4m3fn", 1, 64, 1, False),
        ("uint8", 33, 77, 1, False),
        ("bfloat16", 16, 64, 8, False),
        ("bfloat16", 2, 66, 1, False),
    ],
)
def test_offsets_inside_a_page(dtype, lead, stride, unit, words, plans, lent):
    """`stride` is what a page takes beyond the layer; all in bytes."""
    call = build(dataclasses.replace(FP8, cache=dtype))
    call = dataclasses.replace(call, scale=0.3)
    tensors = tensors_of(call)
    page = call.cache[0].nbytes + stride
    storage, tensors["cache"] = pages_around(tensors["cache"], lead, page)
    assert attend(call, tensors) is None
    assert storage.data_ptr() in [address for address, _, _ in lent[0]]
    [plan] = plans
    assert (plan.offset_unit, plan.words) == (unit, words)


def test_token_major_pages_inside_larger_ones(plans):
    call = build(dataclasses.replace(FP8, groups=2, layout="token_major"))
    tensors = tensors_of(call)
    pages, groups, page_size, _ = call.cache.shape
    storage = torch.full((pages, 2, page_size, groups, CACHE_DIM), 0x7F, dtype=torch.uint8)
    view = storage[:, 1].view(torch.float8_e4m3fn).transpose(1, 2)
    tensors["cache"] = view.copy_(tensors["cache"])
    assert attend(call, tensors) is None
    assert plans[-1].words


@pytest.mark.parametrize("stride", [64, 65])
def test_one_page(stride):
    """Its stride means nothing, and may be odd where everything else is even."""
    call = build(dataclasses.replace(FP8, contexts=(8,), slots=1))
    place = int(call.block_table[0, 0])
    call = dataclasses.replace(
        call, cache=call.cache[place : place + 1], block_table=np.array([[0, -1]], np.int32)
    )
    tensors = tensors_of(call)
    page = call.cache[0].nbytes
    storage = torch.full((2 * page + stride,), 0x7F, dtype=torch.uint8)
    view = storage.view(torch.float8_e4m3fn).as_strided(
        call.cache.shape, (page + stride, page, CACHE_DIM + 2, 1), 2
    )
    tensors["cache"] = view.copy_(tensors["cache"])
    assert not tensors["cache"].is_contiguous()
    assert attend(call, tensors) is None


def test_last_page_past_the_storage():
    call = build(FP8)
    tensors = tensors_of(call)
    page = call.cache[0].nbytes
    storage, view = pages_around(tensors["cache"], 0, page + 64)
    short = storage.view(-1)[:-64].clone().view(torch.float8_e4m3fn)
    tensors["cache"] = short.as_strided(view.shape, view.stride())
    with pytest.raises(ZeroCopyError, match=r"^cache: .*allocate the last page complete"):
        attend(call, tensors)


# What is kept between calls.


def test_content_may_change_and_memory_may_be_reused():
    call = build(FP8)
    tensors = tensors_of(call)
    assert attend(call, tensors) is None
    again = build(dataclasses.replace(FP8, name="other values"))
    for name, tensor in tensors_of(again).items():
        tensors[name].copy_(tensor)
    assert attend(again, tensors) is None
    # A cache of another layout at the same address.
    flat = tensors["cache"].view(-1)
    tensors["cache"] = flat.view(again.cache.swapaxes(1, 2).shape).transpose(1, 2)
    assert tensors["cache"].data_ptr() == flat.data_ptr()
    assert attend(again, tensors) is None


def test_kept_imports_are_bounded():
    call = build(FP8)
    tensors = tensors_of(call)
    queries = [tensors["query"].clone() for _ in range(1200)]
    for query in queries:
        tensors["query"] = query
        sparse_decode_attention(**tensors, **call.options(), config=QUICK, route="dlpack")
    assert len(jax_route._IMPORTS._arrays) <= 1024
    assert attend(call, tensors) is None


def test_inputs_are_not_written():
    call = build(dataclasses.replace(FP8, gate="float32", inactive=(1,)))
    tensors = tensors_of(call)
    before = {name: bits(tensor) for name, tensor in tensors.items()}
    assert attend(call, tensors) is None
    for name in set(tensors) - {"output"}:
        np.testing.assert_array_equal(bits(tensors[name]), before[name], err_msg=name)


def test_threads():
    call = dataclasses.replace(build(BF16), scale=0.17)
    sets = [tensors_of(call) for _ in range(3)]
    faults = []

    def work(tensors):
        faults.extend(attend(call, tensors) for _ in range(5))

    threads = [threading.Thread(target=work, args=(tensors,)) for tensors in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [None] * 15


def test_x64_changes_nothing():
    call = build(FP8)
    tensors = tensors_of(call)
    assert attend(call, tensors) is None
    first = bits(tensors["output"])
    with jax.enable_x64(True):
        assert attend(call, tensors) is None
    np.testing.assert_array_equal(bits(tensors["output"]), first)


# Inactive rows, empty batches, gradients and errors.


@pytest.mark.parametrize("clear", [False, True])
def test_inactive_rows(clear):
    call = build(dataclasses.replace(FP8, inactive=(1,), clear_inactive=clear))
    tensors = tensors_of(call)
    tensors["output"].fill_(3)
    assert attend(call, tensors) is None
    assert (tensors["output"][1] == (0 if clear else 3)).all()


def test_empty_batch_does_not_reach_jax(lent):
    call = build(CASE["empty"])
    tensors = tensors_of(call)
    assert attend(call, tensors) is None
    assert not lent


def test_gradients():
    call = build(FP8)
    tensors = tensors_of(call)
    for name in ("query", "k_scale"):
        tensors[name] = tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=r"^query: .*without gradient"):
        attend(call, tensors)
    with torch.no_grad():
        assert attend(call, tensors) is None


def test_pending_negation():
    call = build(dataclasses.replace(FP8, gate="float32"))
    tensors = tensors_of(call)
    assert attend(call, tensors) is None
    tensors["gate"] = torch._neg_view(tensors["gate"])
    with pytest.raises(ZeroCopyError, match="resolve_neg"):
        attend(call, tensors)


def test_fake_tensors():
    call = build(FP8)
    tensors = tensors_of(call)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
        with pytest.raises(ZeroCopyError, match="FakeTensor"):
            sparse_decode_attention(**fakes, **call.options(), route="dlpack")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k_scale": None}, ValueError, "k_scale: expected one float32"),
        ({"query": None}, TypeError, "query: expected a torch.Tensor, got NoneType"),
        ({"regions": torch.zeros(3, 3)}, ValueError, "regions: expected shape"),
        ({"scale": float("nan")}, ValueError, "scale: expected a finite number"),
        ({"splits": 0}, ValueError, "splits: expected 1 to 256"),
        ({"config": 4}, TypeError, "config: expected a Config"),
        ({"route": "jax"}, ValueError, 'route: expected "direct" or "dlpack"'),
        ({"route": "direct"}, NotImplementedError, 'on the CPU, ask for route="dlpack"'),
    ],
)
def test_errors_name_the_argument(changes, error, message):
    call = build(FP8)
    arguments = {**tensors_of(call), **call.options(), "route": "dlpack", **changes}
    with pytest.raises(error, match=message):
        sparse_decode_attention(**arguments)


# The Triton path on JAX arrays.


def arrays_of(call):
    arrays = {name: jnp.asarray(array) for name, array in call.arrays().items()}
    del arrays["output"]
    return arrays


def triton_fault(call, arrays):
    options = {name: value for name, value in call.options().items() if name != "clear_inactive"}
    before = {
        name: np.asarray(a).tobytes() for name, a in arrays.items() if isinstance(a, jax.Array)
    }
    output = triton_sparse_decode_attention(**arrays, **options)
    assert isinstance(output, jax.Array)
    assert (output.shape, output.dtype) == (call.query.shape, call.query.dtype)
    for name, array in before.items():
        assert np.asarray(arrays[name]).tobytes() == array, name
    return judge(limits(call), np.asarray(output), None, None).fault


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("cache", ["float8_e4m3fn", "uint8", "bfloat16"])
def test_triton_on_arrays(index, cache):
    call = build(dataclasses.replace(FP8, cache=cache, index=index, gate="float32", inactive=(1,)))
    with jax.enable_x64(index == "int64"):
        arrays = arrays_of(call)
        assert arrays["regions"].dtype == index
        assert triton_fault(call, arrays) is None
    # The arrays keep their 64 bits outside.
    assert triton_fault(call, arrays) is None


@pytest.mark.parametrize("name", ["fp8_packed", "bf16_packed_strided", "fp16_token_major", "empty"])
def test_triton_on_shared_cases(name):
    call = build(CASE[name])
    outcome = PATH["triton-on-jax"].run(call)
    assert judge(limits(call), outcome.output, None, None).fault is None


def packed(call, **changes):
    """The call's cache as the second of three layers."""
    pages, groups, page_size, _ = call.cache.shape
    storage = np.full((pages, 3, call.cache[0].size), np.nan, call.cache.dtype)
    storage[:, 1] = call.cache.reshape(pages, -1)
    fields = {"storage": jnp.asarray(storage.reshape(pages, -1)), "offset": call.cache[0].size}
    return PackedCache(**{**fields, "groups": groups, "page_size": page_size, **changes})


@pytest.mark.parametrize("kind", [int, jnp.int32])
def test_triton_on_a_packed_cache(kind):
    call = build(dataclasses.replace(FP8, index="int32"))
    cache = packed(call, offset=kind(call.cache[0].size))
    assert triton_fault(call, {**arrays_of(call), "cache": cache}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 3 * 3072}, "cache.offset: expected"),
        ({"offset": jnp.int32(3 * 3072)}, "cache.offset: expected"),
        ({"offset": -16}, "cache.offset: expected"),
        ({"offset": 8}, "cache.offset: expected a multiple"),
        ({"offset": jnp.int32(8)}, "cache.offset: expected a multiple"),
        ({"token_stride": 4096}, "cache: expected groups and tokens inside a page"),
        ({"storage": jnp.zeros(64, jnp.float8_e4m3fn)}, "cache.storage: expected shape"),
    ],
)
def test_triton_refuses_wrong_packed_caches(changes, message):
    call = build(dataclasses.replace(FP8, index="int32"))
    with pytest.raises(ValueError, match=message):
        triton_fault(call, {**arrays_of(call), "cache": packed(call, **changes)})


def test_triton_refuses_transposed_storage():
    call = build(dataclasses.replace(FP8, index="int32"))
    cache = packed(call)
    turned = torch_arrays.from_numpy(np.ascontiguousarray(np.asarray(cache.storage).T)).T
    cache = dataclasses.replace(cache, storage=to_jax(turned))
    with pytest.raises(ZeroCopyError, match=r"^cache\.storage: expected a row-major layout"):
        triton_fault(call, {**arrays_of(call), "cache": cache})


def test_triton_refuses_traced_arrays():
    call = build(dataclasses.replace(FP8, index="int32"))

    @jax.jit
    def inside(arrays):
        return triton_sparse_decode_attention(**arrays, scale=1.0)

    with pytest.raises(ZeroCopyError, match="query: a traced value has no memory"):
        inside(arrays_of(call))


@pytest.mark.parametrize("name", [n for n in ARRAY_NAMES if n not in ("output", "gate")])
def test_triton_names_arrays_it_cannot_take(name):
    call = build(dataclasses.replace(FP8, index="int32"))
    arrays = arrays_of(call)
    arrays[name].delete()
    with pytest.raises(ZeroCopyError, match=f"^{name}: the array was deleted or donated"):
        triton_sparse_decode_attention(**arrays, scale=1.0)
    with pytest.raises(TypeError, match=rf"^{name}: expected a jax\.Array, got ndarray"):
        triton_sparse_decode_attention(**arrays | {name: np.zeros(3)}, scale=1.0)


def test_triton_result_owns_its_memory():
    call = build(dataclasses.replace(FP8, index="int32"))
    options = {name: value for name, value in call.options().items() if name != "clear_inactive"}
    arrays = arrays_of(call)
    first = triton_sparse_decode_attention(**arrays, **options)
    kept = np.array(first)
    later = [triton_sparse_decode_attention(**arrays, **options) * 0 for _ in range(3)]
    assert all((np.asarray(array) == 0).all() for array in later)
    np.testing.assert_array_equal(np.asarray(first).view(np.uint8), kept.view(np.uint8))
