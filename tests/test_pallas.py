"""The Pallas path: natively where there is a GPU, through Pallas' interpreter elsewhere."""

import dataclasses
import functools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from sparse_decode import captures  # noqa: E402
from sparse_decode.bridge import lowering  # noqa: E402
from sparse_decode.call import page_storage  # noqa: E402
from sparse_decode.cases import CASES, WIDE_CASES, build  # noqa: E402
from sparse_decode.contract import ArraySpec, check_call  # noqa: E402
from sparse_decode.oracle import evaluate  # noqa: E402
from sparse_decode.pallas_kernels import (  # noqa: E402
    Config,
    PackedCache,
    op,
    sparse_decode_attention,
)
from sparse_decode.paths import PATHS  # noqa: E402
from sparse_decode.plan import make_plan  # noqa: E402
from sparse_decode.tolerance import judge, limits  # noqa: E402

if jax.default_backend() == "cpu":
    # Nearly all the time of these tests is compilation of interpreted kernels that run once.
    jax.config.update("jax_disable_most_optimizations", True)

[PALLAS] = [path for path in PATHS if path.name == "pallas"]
CASE = {case.name: case for case in CASES}
CAPTURES = sorted(Path(__file__).with_name("captures").glob("*.safetensors"))
FLOAT32_EPS = 2.0**-23


def by_name(case):
    return case.name


def narrow(call):
    """The same call with int32 indices, which need no 64-bit JAX."""
    clip = np.iinfo(np.int32)
    regions, positions = (
        np.clip(array, clip.min, clip.max).astype(np.int32)
        for array in (call.regions, call.positions)
    )
    return dataclasses.replace(call, regions=regions, positions=positions)


def arguments(call):
    """The call's arrays as JAX arrays; a cache that is no dense array as a PackedCache."""
    arrays = {name: jnp.asarray(a) for name, a in call.arrays().items() if name != "cache"}
    if call.cache.flags.c_contiguous:
        return {**arrays, "cache": jnp.asarray(call.cache)}
    storage, offset, (_, group, token, _) = page_storage(call.cache)
    _, groups, page_size, _ = call.cache.shape
    packed = PackedCache(
        jnp.asarray(storage),
        jnp.int32(offset),
        groups=groups,
        page_size=page_size,
        group_stride=group,
        token_stride=token,
    )
    return {**arrays, "cache": packed}


def jitted(call, **changes):
    """The operation with the call's options, as a jitted function of a dictionary of arrays."""
    options = {**call.options(), "return_lse": True, **changes}
    return jax.jit(lambda arrays: sparse_decode_attention(**arrays, **options))


def run(call, **changes):
    """Output and lse as NumPy arrays; `changes` replace options."""
    output, lse = jitted(call, **changes)(arguments(call))
    return np.asarray(output), np.asarray(lse)


def check(call, output, lse, before=None):
    verdict = judge(limits(call), np.asarray(output), np.asarray(lse), before)
    assert verdict.ok, verdict.fault


def assert_same_bits(first, second):
    for one, other in zip(first, second, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(*(a.view(f"u{a.dtype.itemsize}") for a in (one, other)))


# --- the shared cases and the recorded calls


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_case(case):
    call = build(case)
    outcome = PALLAS.run(call)
    assert outcome.output.dtype == call.output.dtype
    assert outcome.lse.dtype == np.float32
    check(call, outcome.output, outcome.lse, outcome.before)


@pytest.mark.gpu
@pytest.mark.parametrize("case", WIDE_CASES, ids=by_name)
def test_wide_case(case):
    call = build(case)
    outcome = PALLAS.run(call)
    check(call, outcome.output, outcome.lse, outcome.before)


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_recorded_call(path):
    capture = captures.load(path)
    outcome = PALLAS.run(capture.call)
    check(capture.call, outcome.output, outcome.lse)
    # Two results within tolerance of the oracle are no further apart than both tolerances.
    distance = np.abs(outcome.output.astype(float) - capture.output.astype(float))
    assert (distance <= 2 * limits(capture.call).output[:, :, None]).all()


# --- what must not change a result


@pytest.mark.parametrize("name", ["fp8_split2_gate", "bf16", "uint8_verify4_groups2"])
def test_two_runs_are_bit_equal(name):
    call = narrow(build(CASE[name]))
    function, arrays = jitted(call), arguments(call)
    first = [np.array(array) for array in function(arrays)]
    assert_same_bits(first, function(arrays))


@pytest.mark.parametrize(("name", "others"), [("fp8_output_fp16", (2, 3, 32, 256)), ("fp16", (3,))])
def test_splits_agree(name, others):
    """Up to float32 rounding, and that of the 16-bit probabilities, which have another pivot.

    lse: 8 float32 roundings of its size. Output: one rounding of each probability to 16 bits and
    one of the output, for each of the two results that are compared.
    """
    call = narrow(build(CASE[name]))
    reference = evaluate(call)
    results = {splits: run(call, splits=splits) for splits in (1, *others)}
    size = np.abs(reference.exact).max(axis=2) + reference.value_size
    roundoff = float(np.finfo(np.float16).eps) / 2
    for output, lse in results.values():
        apart = np.abs(output.astype(float) - results[1][0].astype(float)).max(axis=2)
        assert (apart <= 2 * roundoff * size).all()
        np.testing.assert_array_less(
            np.abs(lse - results[1][1]), 8 * FLOAT32_EPS * (1 + np.abs(reference.lse))
        )


def some_requests(call, requests):
    """The call of the given requests alone."""
    group_rows = call.cache.shape[1] * call.query_len
    rows = np.concatenate([np.arange(group_rows) + group_rows * r for r in requests])
    tokens = np.concatenate([np.arange(call.query_len) + call.query_len * r for r in requests])
    picks = {
        **dict.fromkeys(("query", "regions", "positions", "active", "output"), rows),
        "block_table": list(requests),
        "gate": tokens,
    }
    arrays = call.arrays()
    changed = {name: arrays[name][pick] for name, pick in picks.items() if name in arrays}
    return dataclasses.replace(call, **changed), rows


@pytest.mark.parametrize("name", ["fp8_inactive", "uint8_verify4_groups2", "bf16_outside"])
def test_the_batch_around_a_row_does_not_matter(name):
    call = build(CASE[name])
    call = dataclasses.replace(narrow(call), output=None)
    requests = len(call.block_table)
    batch, alone = jitted(call), jitted(call)
    whole = [np.array(array) for array in batch(arguments(call))]
    for request in range(requests):
        part, rows = some_requests(call, [request])
        assert_same_bits(alone(arguments(part)), [array[rows] for array in whole])
    part, rows = some_requests(call, range(requests)[::-1])
    assert_same_bits(batch(arguments(part)), [array[rows] for array in whole])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("fp8_padded", Config(splits=1, pieces=2, parts=4)),
        ("fp8_padding_between", Config(splits=3, parts=4)),
        ("bf16_verify4", Config(splits=2, tile=16, parts=4)),
    ],
    ids=["split1", "split3", "verify4"],
)
def test_who_is_active_does_not_matter(name, config):
    """Programs of inactive rows help others, with the same result whoever they are."""
    call = narrow(build(CASE[name]))
    call, _ = some_requests(call, np.flatnonzero(call.active)[:: call.query_len] // call.query_len)
    call, _ = some_requests(call, np.arange(8) % len(call.block_table))
    call = dataclasses.replace(call, output=None, splits=None)
    rows, function = len(call.query), jitted(call, config=config)
    whole = [np.array(array) for array in function(arguments(call))]
    check(call, *whole)
    alone, _ = some_requests(call, [1])
    expected = [array[call.query_len : 2 * call.query_len] for array in whole]
    assert_same_bits(jitted(alone, config=config)(arguments(alone)), expected)
    rng, row = np.random.default_rng(0), np.arange(rows)
    patterns = [row < rows // 4, row >= rows // 2, row % 4 == 1, row < rows * 3 // 4, row < 0]
    patterns += [rng.random(rows) < share for share in (0.2, 0.3, 0.5, 0.7)]
    for active in patterns:
        part = dataclasses.replace(call, active=active)
        found = [np.array(array) for array in function(arguments(part))]
        check(part, *found)
        assert_same_bits([x[active] for x in found], [x[active] for x in whole])


@pytest.mark.parametrize(
    "name", ["fp8_packed", "bf16_packed_strided", "fp8_token_major_strided", "fp16_token_major"]
)
def test_layout_does_not_matter(name):
    call = narrow(build(CASE[name]))
    dense = dataclasses.replace(call, cache=np.ascontiguousarray(call.cache))
    assert isinstance(arguments(call)["cache"], PackedCache)
    assert_same_bits(run(call), run(dense))


@pytest.mark.parametrize("name", ["fp8_packed", "fp16_token_major"])
@pytest.mark.parametrize(
    ("tokens", "group", "token"),
    [
        (40, 16 * 384, 384),  # groups first, other layers behind
        (16, 384, 2 * 384),  # tokens first
        (33, 16 * 800 + 400, 800),  # a group begins in the middle of a token of the other
    ],
)
def test_a_cache_of_lines(name, tokens, group, token):
    """Without an offset, which the interpreter would address otherwise."""
    call = narrow(build(dataclasses.replace(CASE[name], page_size=16)))
    pages = len(call.cache)
    storage = np.full((pages, tokens * token), np.nan, call.cache.dtype)
    strides = (storage.shape[1], group, token, 1)
    view = np.lib.stride_tricks.as_strided(
        storage, call.cache.shape, [stride * storage.itemsize for stride in strides]
    )
    view[:] = call.cache
    specs = {name: ArraySpec(a.shape, a.dtype.name) for name, a in call.arrays().items()}
    specs["cache"] = specs["cache"]._replace(strides=strides)
    options = {**call.options(), "splits": call.splits}
    geometry = check_call(**specs, **options)
    del options["query_len"]
    plan = make_plan(geometry, specs, **options, return_lse=True)
    assert plan.page_lines == tokens
    dense = dataclasses.replace(call, cache=np.ascontiguousarray(call.cache))
    arrays = arguments(dense)
    found = jax.jit(functools.partial(op._run, plan))({**arrays, "cache": jnp.asarray(storage)})
    check(dense, *found, dense.output)
    assert_same_bits(found, run(dense))


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "bfloat16"])
def test_one_compiled_function_for_all_layers(stored):
    """Three layers lie in each page at offsets that are a traced operand."""
    call = narrow(build(CASE["fp8_heads4" if stored == "float8_e4m3fn" else "bf16"]))
    pages, _, page_size, dim = call.cache.shape
    size, rng = page_size * dim, np.random.default_rng(0)
    storage = np.full((pages, 3 * size + 160), np.nan, stored)
    layers = {}
    for layer in (2, 0, 1):
        at = 16 + 64 * layer + size * layer
        columns = [*rng.permutation(192), *range(192, 384)]
        mixed = np.ascontiguousarray(call.cache[..., columns])
        storage[:, at : at + size] = mixed.reshape(pages, size)
        layers[at] = dataclasses.replace(call, cache=mixed)
    traces = []

    @jax.jit
    def attend(storage, offset, arrays):
        traces.append(offset)
        packed = PackedCache(storage, offset, groups=1, page_size=page_size)
        options = {**call.options(), "return_lse": True}
        return sparse_decode_attention(**arrays, cache=packed, **options)

    arrays = arguments(call)
    del arrays["cache"]
    dense = jitted(call)
    found = []
    for at, layer in layers.items():
        found.append(attend(jnp.asarray(storage), jnp.int32(at), arrays))
        assert_same_bits(found[-1], dense(arguments(layer)))
    assert len(traces) == attend._cache_size() == 1
    assert not np.array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize(("name", "pieces"), [("fp8_heads4", 3), ("fp8_heads4", 2), ("bf16", 3)])
def test_odd_strides(name, pieces):
    """Nothing is even, so that FP8 cannot be read as 16-bit words."""
    call = narrow(build(CASE[name]))
    pages, _, page_size, dim = call.cache.shape
    storage = np.full((pages, 77 + page_size * 387), np.nan, call.cache.dtype)
    lines = storage[:, 77:].reshape(pages, page_size, 387)[..., :dim]
    lines[:] = call.cache[:, 0]
    packed = PackedCache(
        jnp.asarray(storage),
        77,
        groups=1,
        page_size=page_size,
        token_stride=387,
        offset_unit=1,
    )
    config = Config(splits=call.splits, pieces=pieces)
    output, lse = jitted(call, config=config)({**arguments(call), "cache": packed})
    check(call, output, lse, call.output)


def test_uint8_is_float8():
    call = narrow(build(CASE["fp8_inactive"]))
    raw = dataclasses.replace(call, cache=call.cache.view(np.uint8))
    assert_same_bits(run(call), run(raw))


@pytest.mark.parametrize(
    "config",
    [
        Config(splits=1, tile=16, warps=1, stages=1),
        Config(splits=1, tile=32, warps=1, pieces=2),
        Config(splits=3, tile=32, warps=2, stages=2),
        Config(splits=2, tile=64, warps=1, pieces=2),
        Config(splits=2, tile=128, warps=8, stages=4),
    ],
    ids=lambda config: f"tile{config.tile}-pieces{config.pieces}",
)
@pytest.mark.parametrize("name", ["fp8_outside", "bf16_verify4"])
def test_every_tile_size(name, config):
    call = dataclasses.replace(narrow(build(CASE[name])), splits=None)
    output, lse = run(call, config=config)
    check(call, output, lse, call.output)


# --- how it is called


def test_eager_and_jitted_are_the_same():
    call = narrow(build(CASE["fp8_split2_gate"]))
    options = {**call.options(), "return_lse": True}
    eager = sparse_decode_attention(**arguments(call), **options)
    assert all(isinstance(array, jax.Array) for array in eager)
    assert_same_bits(eager, run(call))


def test_output_and_lse_are_optional():
    call = narrow(build(CASE["fp8_inactive"]))
    with_buffer = run(call)
    assert_same_bits(run(dataclasses.replace(call, output=None)), with_buffer)
    assert_same_bits([jitted(call, return_lse=False)(arguments(call))], with_buffer[:1])


@pytest.mark.parametrize("splits", [1, 4])
def test_inactive_rows_of_a_new_array_are_zero(splits):
    case = dataclasses.replace(CASE["fp8_inactive_kept"], splits=splits)
    call = narrow(build(case))
    output, lse = run(dataclasses.replace(call, output=None))
    assert not call.clear_inactive
    assert not output[~call.active].astype(np.float32).any()
    assert (lse[~call.active] == -np.inf).all()
    kept, _ = run(call)
    assert_same_bits([kept[~call.active]], [call.output[~call.active]])
    assert_same_bits([kept[call.active]], [output[call.active]])


@pytest.mark.parametrize("name", ["fp8_inactive", "bf16"])
def test_numpy_arrays_with_64_bit_indices(name):
    """Without 64-bit types in JAX, which would cut the indices to 32 bits."""
    call = build(CASE[name])
    assert not jax.config.jax_enable_x64
    assert {call.regions.dtype.name, call.positions.dtype.name} == {"int64"}
    wide = call.regions.copy()
    wide[call.active, -1] += 1 << 32  # no region of any request
    call = dataclasses.replace(call, regions=wide)
    options = {**call.options(), "return_lse": True}
    output, lse = sparse_decode_attention(**call.arrays(), **options)
    check(call, output, lse, call.output)


def test_64_bit_jax():
    call = build(CASE["fp8_output_fp16"])
    narrowed = run(narrow(call))
    with jax.enable_x64(True):
        arrays = arguments(call)
        assert arrays["regions"].dtype == arrays["positions"].dtype == jnp.int64
        results = jitted(call)(arrays)
        assert results[1].dtype == jnp.float32
        assert_same_bits(results, narrowed)


def test_positions_beyond_32_bits():
    """A position past everything attends to all that is selected, and one of -2**32 to nothing."""
    call = build(CASE["fp16"])
    filled = np.nan_to_num(call.cache.astype(np.float32), nan=0.5).astype(np.float16)
    positions = np.array([(1 << 32) + 3, -(1 << 32), 77], np.int64)
    regions = call.regions.copy()
    regions[0] = np.arange(regions.shape[1]) % 7
    call = dataclasses.replace(call, cache=filled, positions=positions, regions=regions)
    outcome = PALLAS.run(call)
    check(call, outcome.output, outcome.lse, outcome.before)
    assert (outcome.lse[1] == -np.inf).all()


def test_donated_output():
    call = narrow(build(CASE["fp8_inactive_kept"]))
    arrays = arguments(call)
    options = {**call.options(), "return_lse": True}
    attend = jax.jit(
        lambda output, arrays: sparse_decode_attention(**arrays, output=output, **options),
        donate_argnums=0,
    )
    expected = run(call)
    buffer = arrays.pop("output")
    results = attend(buffer, arrays)
    assert buffer.is_deleted()
    assert_same_bits(results, expected)
    assert_same_bits(attend(results[0], arrays), expected)


def test_no_rows():
    call = narrow(build(CASE["empty"]))
    output, lse = sparse_decode_attention(**arguments(call), **call.options(), return_lse=True)
    assert (output.shape, output.dtype) == ((0, 8, 192), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((0, 8), jnp.float32)


def test_a_page_of_gigabytes():
    """The cache may begin further inside than 32 bits say; only traced, as no memory is needed."""
    call = narrow(build(CASE["fp8_heads4"]))
    arrays = arguments(call)
    del arrays["cache"]

    def attend(storage, offset, arrays):
        cache = PackedCache(storage, offset, groups=1, page_size=call.cache.shape[2])
        return sparse_decode_attention(**arrays, cache=cache, **call.options())

    storage = jax.ShapeDtypeStruct((5, 5 << 30), jnp.float8_e4m3fn)
    found = jax.eval_shape(attend, storage, jax.ShapeDtypeStruct((), jnp.int32), arrays)
    assert found.shape == call.query.shape


def test_inside_a_loop():
    """As in a model: a scan over the offsets of layers, the output of one feeding the next."""
    call = narrow(build(CASE["fp16"]))
    pages, _, page_size, dim = call.cache.shape
    storage = np.concatenate([call.cache.reshape(pages, -1)] * 2, axis=1)
    arrays = arguments(dataclasses.replace(call, output=None))
    query = arrays.pop("query")
    del arrays["cache"]

    def layer(query, offset, storage):
        cache = PackedCache(storage, offset, groups=1, page_size=page_size)
        return sparse_decode_attention(query, cache, **arrays, **call.options())

    @jax.jit
    def model(query, storage):
        offsets = jnp.arange(2, dtype=jnp.int32) * (page_size * dim)
        return jax.lax.scan(lambda q, at: (layer(q, at, storage), None), query, offsets)[0]

    found = model(query, jnp.asarray(storage))
    dense = jitted(dataclasses.replace(call, output=None), return_lse=False)
    arrays["cache"] = jnp.asarray(call.cache)
    expected = dense({**arrays, "query": dense({**arrays, "query": query})})
    assert_same_bits([found], [expected])


# --- lowering


def structs(call):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments(call))


@pytest.mark.parametrize("name", ["fp8_packed", "bf16_split1_gate", "fp8_inactive_kept"])
def test_one_function_lowers_for_cuda_and_for_cpu(name):
    call = narrow(build(CASE[name]))
    function, specs = jitted(call), structs(call)
    kernels = 1 if call.splits == 1 else 2
    with lowering._Jax.find().targeting(90):
        cuda, cpu = (
            function.trace(specs).lower(lowering_platforms=(platform,)).as_text()
            for platform in ("cuda", "cpu")
        )
    assert cuda.count("@__gpu$xla.gpu.triton") == kernels
    assert "sparse_decode_split" in cuda
    assert ("sparse_decode_combine" in cuda) == (kernels == 2)
    assert "custom_call" not in cpu
    assert "stablehlo.while" in cpu
    assert "stablehlo.while" not in cuda
    assert cuda.count("operand_index") == 1, "the last kernel writes into the buffer it is given"


# --- large caches


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "gib"), [("fp8_heads4", 3), ("fp8_heads4", 5), ("bf16", 3), ("bf16", 5)]
)
def test_pages_past_32_bit_offsets(name, gib):
    """The pages that are read lie at the end of a cache of more than 2**31 bytes or elements."""
    call = narrow(build(CASE[name]))
    pages, *page = call.cache.shape
    total = -(-gib * 2**30 // call.cache[0].nbytes)
    shift = total - pages
    table = np.where(
        (call.block_table >= 0) & (call.block_table < pages), call.block_table + shift, -1
    )
    far = dataclasses.replace(call, block_table=table.astype(np.int32))
    arrays = arguments(far)
    place = jax.jit(
        lambda cache: jnp.zeros((total, *page), cache.dtype).at[shift:].set(cache),
    )
    arrays["cache"] = place(arrays["cache"])
    assert arrays["cache"].nbytes > 2**31
    assert_same_bits(jitted(call)(arrays), run(call))


def test_bfloat16_is_what_numpy_calls_it():
    """The dtype names of the contract are those of JAX arrays."""
    assert jnp.zeros(1, jnp.bfloat16).dtype == np.dtype(ml_dtypes.bfloat16)
    assert jnp.zeros(1, jnp.float8_e4m3fn).dtype.name == "float8_e4m3fn"
