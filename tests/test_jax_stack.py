"""What a decode step does around the attention, held to plain NumPy."""

import functools

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")
hypothesis = pytest.importorskip("hypothesis")
import jax.numpy as jnp  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from sparse_decode.pallas_kernels import (  # noqa: E402
    PackedCache,
    build_block_table,
    merge,
    pack_selection,
    select_regions,
    write_kv,
)

FP8 = ml_dtypes.float8_e4m3fn

seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
few = settings(max_examples=15)


def some_positions(rng, rows, regions):
    """Positions at region edges, before the start and past the last region."""
    chosen = rng.integers(-1, regions + 2, rows) * 8 + rng.choice([0, 1, 7], rows)
    return np.where(rng.random(rows) < 0.1, -5, chosen).astype(np.int32)


def assert_packed(row, history, position, slots):
    """`row` holds `history` and the current region, with all -1 on the left."""
    if position < 0:
        assert (row == -1).all()
        return
    live = [*history, position // 8]
    assert len(live) <= min(position // 8 + 1, slots)
    assert (row[: slots - len(live)] == -1).all()
    assert row[-1] == position // 8
    assert sorted(row[slots - len(live) :]) == sorted(live)


# --- selection

select = jax.jit(select_regions, static_argnums=2)
pack = jax.jit(pack_selection, static_argnums=2)


@few
@given(rng=seeds, slots=st.sampled_from([1, 2, 5, 12, 20]))
def test_selection_is_the_best_of_the_history(rng, slots):
    rows, regions = 6, 11
    scores = rng.integers(-2, 3, (rows, regions)).astype(np.float32)  # many ties
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    scores[rng.random(scores.shape) < 0.1] = np.nan
    positions = some_positions(rng, rows, regions)
    found = np.asarray(select(scores, positions, slots))
    assert (found.dtype, found.shape) == (np.int32, (rows, slots))
    for row, position in enumerate(positions):
        earlier = [
            region for region in range(min(position // 8, regions)) if scores[row, region] > -np.inf
        ]
        earlier.sort(key=lambda region: (-scores[row, region], region))
        history = earlier[: slots - 1]
        assert_packed(found[row], history, position, slots)
        if position >= 0:
            assert list(found[row, slots - 1 - len(history) : -1]) == history[::-1]


@few
@given(
    rng=seeds,
    slots=st.sampled_from([1, 4, 9, 14]),
    counted=st.booleans(),
    dtype=st.sampled_from(["int32", "int64"]),
)
def test_packing_keeps_the_first_of_the_history(rng, slots, counted, dtype):
    rows, width, regions = 6, 9, 12
    indices = np.stack([rng.permutation(regions)[:width] for _ in range(rows)]).astype(dtype)
    indices[rng.random(indices.shape) < 0.2] = -1
    if dtype == "int64":
        indices[:, 3] += 1 << 32  # no region of any request
    positions = some_positions(rng, rows, regions).astype(dtype)
    count = rng.integers(0, width + 1, rows).astype(dtype) if counted else None
    found = np.asarray(pack_selection(indices, positions, slots, count))
    assert (found.dtype, found.shape) == (np.int32, (rows, slots))
    for row, position in enumerate(positions):
        meant = indices[row, : width if count is None else count[row]]
        history = [i for i in meant if 0 <= i < position // 8][: slots - 1]
        assert_packed(found[row], history, position, slots)
        if position >= 0:
            assert (np.diff(found[row, -1 - len(history) : -1]) > 0).all()


def test_packed_top_k_is_the_selection():
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.normal(size=(5, 12)), jnp.bfloat16)
    positions = jnp.full(5, 12 * 8 - 1, jnp.int32)
    _, indices = jax.lax.top_k(scores.at[:, -1].set(jnp.inf), 5)  # the current region among them
    packed, selected = pack(indices, positions, 5), select(scores, positions, 5)
    np.testing.assert_array_equal(packed[:, -1], 11)
    np.testing.assert_array_equal(*(np.sort(np.asarray(a), axis=1) for a in (packed, selected)))


def test_selection_under_vmap_and_without_columns():
    scores = jnp.arange(24.0).reshape(2, 3, 4)
    positions = jnp.array([[31, 9, -1], [0, 16, 23]], jnp.int32)
    mapped = jax.vmap(lambda s, p: select_regions(s, p, 3))(scores, positions)
    one_by_one = [select(s, p, 3) for s, p in zip(scores, positions, strict=True)]
    np.testing.assert_array_equal(mapped, np.stack(one_by_one))
    nothing = pack_selection(jnp.zeros((3, 0), jnp.int32), positions[0], 2)
    np.testing.assert_array_equal(nothing, [[-1, 3], [-1, 1], [-1, -1]])


ROWS3 = np.zeros(3, np.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: select_regions(np.zeros(3, np.float32), ROWS3, 2), ValueError, r"scores: .*\[any"),
        (lambda: select_regions(np.zeros((3, 4), int), ROWS3, 2), TypeError, "scores: .*float32"),
        (lambda: select_regions([[1.0]], ROWS3, 2), TypeError, "scores: expected a JAX array"),
        (
            lambda: select_regions(np.zeros((2, 4), np.float32), ROWS3, 2),
            ValueError,
            r"positions: expected shape \[2\], got shape \[3\]",
        ),
        (lambda: select_regions(np.zeros((3, 4), np.float32), ROWS3, 0), ValueError, "slots: .*1"),
        (lambda: pack_selection(np.zeros((3, 4)), ROWS3, 2), TypeError, "indices: expected dtype"),
        (
            lambda: pack_selection(np.zeros((3, 4), np.int32), ROWS3, 2, ROWS3[:2]),
            ValueError,
            r"count: expected shape \[3\]",
        ),
        (lambda: pack_selection(np.zeros((3, 4), np.int32), ROWS3, 2.0), TypeError, "slots"),
    ],
)
def test_wrong_selections(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- cache

PAGES, GROUPS, PAGE_SIZE = 7, 2, 8
write = jax.jit(write_kv, donate_argnums=0)


def some_cache(layout, dtype):
    """The memory of a cache, `[pages, groups, page_size, 384]` of it, and a copy for JAX."""
    rng = np.random.default_rng(1)
    bits = f"u{np.dtype(dtype).itemsize}"
    if layout == "dense":
        shape = (PAGES, GROUPS, PAGE_SIZE, 384)
        memory = rng.integers(0, 100, shape).astype(bits).view(dtype)
        return memory, memory, jnp.array(memory)
    page = GROUPS * PAGE_SIZE * 384
    memory = rng.integers(0, 100, (PAGES, 2 * page + 64)).astype(bits).view(dtype)
    layer = memory[:, 32 + page : 32 + 2 * page]
    strides = {}
    view = layer.reshape(PAGES, GROUPS, PAGE_SIZE, 384)
    if layout == "token_major":
        strides = {"group_stride": 384, "token_stride": GROUPS * 384}
        view = layer.reshape(PAGES, PAGE_SIZE, GROUPS, 384).swapaxes(1, 2)
    packed = PackedCache(
        jnp.array(memory),
        jnp.int32(32 + page + 3),  # rounded down to a multiple of 16
        groups=GROUPS,
        page_size=PAGE_SIZE,
        **strides,
    )
    return memory, view, packed


def expected_lines(key, value, k_scale, v_scale, dtype):
    if np.dtype(dtype).itemsize > 1:
        return np.concatenate([key, value], axis=-1).astype(np.float32).astype(dtype)
    parts = (
        np.clip(x.astype(np.float32) / scale, -448, 448).astype(FP8)
        for x, scale in ((key, k_scale), (value, v_scale))
    )
    return np.concatenate(list(parts), axis=-1).view(dtype)


@pytest.mark.parametrize("layout", ["dense", "packed", "token_major"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8", "bfloat16", "float16"])
@settings(max_examples=4)
@given(rng=seeds)
def test_written_lines(layout, dtype, rng):
    requests, query_len, max_pages = 4, 2, 3
    tokens = requests * query_len
    memory, expected, cache = some_cache(layout, np.dtype(dtype))
    key = (rng.normal(size=(tokens, GROUPS, 192)) * 100).astype(ml_dtypes.bfloat16)
    value = (rng.normal(size=(tokens, GROUPS, 192)) * 100).astype(np.float32)
    scales = {"k_scale": np.float32([0.7]), "v_scale": np.float32([0.31])}
    table = rng.permutation(PAGES)[: 2 * max_pages].reshape(2, max_pages)
    table = np.concatenate([table, [[-1, PAGES, 0]], [[2**31 - 1, -(2**31), 1]]]).astype(np.int32)
    table[3, 2] = table[2, 2] = -7
    first = rng.integers(-2, max_pages * PAGE_SIZE, requests)
    positions = (first[:, None] + np.arange(query_len)).reshape(-1).astype(np.int32)
    active = rng.random(tokens) < 0.8

    lines = expected_lines(key, value, *scales.values(), dtype)
    for token in range(tokens):
        logical, offset = divmod(int(positions[token]), PAGE_SIZE)
        if active[token] and 0 <= logical < max_pages:
            page = int(table[token // query_len, logical])
            if 0 <= page < PAGES:
                expected[page, :, offset] = lines[token]

    found = write(cache, key, value, table, positions, active, **scales)
    found = np.asarray(found if layout == "dense" else found.storage)
    bits = f"u{found.dtype.itemsize}"
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found.view(bits), memory.view(bits))


def test_fp8_saturates_rounds_and_keeps_nan():
    """All that a float32 can be: far outside, between two FP8 numbers, subnormal, NaN."""
    values = np.array([1e9, -1e9, 448, 463, 465, np.inf, -np.inf, 0.0009, 2.0**-10, 27, 29, 0])
    key = np.zeros((1, 1, 192), np.float32)
    key[0, 0, : len(values)], key[0, 0, -1] = values, np.nan
    cache = jnp.zeros((1, 1, 8, 384), FP8)
    one, half = np.float32([1]), np.float32([0.5])
    table, at = np.zeros((1, 1), np.int32), np.array([3], np.int32)
    found = np.asarray(write(cache, key, key, table, at, np.ones(1, bool), one, half))[0, 0, 3]
    expected = np.clip(key[0, 0], -448, 448).astype(FP8)
    np.testing.assert_array_equal(found[:192].view(np.uint8), expected.view(np.uint8))
    assert list(found[:7].astype(float)) == [448, -448, 448, 448, 448, 448, -448]
    assert np.isnan(found[191].astype(float))
    expected = np.clip(key[0, 0] * 2, -448, 448).astype(FP8)
    np.testing.assert_array_equal(found[192:].view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_a_donated_cache_is_updated_in_place(layout, dtype):
    _, _, cache = some_cache(layout, np.dtype(dtype))
    [address] = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(cache) if a.ndim > 1]
    line = jnp.ones((2, GROUPS, 192), jnp.bfloat16)
    rest = (line, line, np.zeros((2, 1), np.int32), np.arange(2, dtype=np.int32), np.ones(2, bool))
    scale = jnp.ones(1)
    compiled = write.lower(cache, *rest, scale, scale).compile()
    storage = cache if layout == "dense" else cache.storage
    if dtype == "uint8" or jax.default_backend() == "gpu":  # on a CPU, XLA copies a bitcast
        assert compiled.memory_analysis().temp_size_in_bytes < storage.nbytes / 2
    for _ in range(2):
        cache = compiled(cache, *rest, scale, scale)
        [found] = [a for a in jax.tree.leaves(cache) if a.ndim > 1]
        assert found.unsafe_buffer_pointer() == address


def test_64_bit_positions():
    with jax.enable_x64(True):
        for at, page in ((9, 4), ((1 << 32) + 9, None), (-(1 << 32) + 9, None)):
            cache = write(
                jnp.zeros((PAGES, 1, 8, 384), jnp.float16),
                jnp.ones((1, 1, 192), jnp.float16),
                jnp.ones((1, 1, 192), jnp.float16),
                jnp.array([[3, 4]], jnp.int32),
                jnp.array([at], jnp.int64),
                jnp.ones(1, bool),
            )
            written = np.flatnonzero(np.asarray(cache).any(axis=(1, 2, 3)))
            assert list(written) == ([] if page is None else [page])


def test_pages_that_32_bits_do_not_reach_are_refused():
    cache = jax.ShapeDtypeStruct((1, 1, 2**31 // 384 + 1, 384), "bfloat16")
    line, table, at = (
        np.zeros((1, 1, 192), np.float32),
        np.zeros((1, 1), np.int32),
        np.zeros(1, int),
    )
    write = functools.partial(
        write_kv, key=line, value=line, block_table=table, positions=at, active=at == 0
    )
    with pytest.raises(NotImplementedError, match=r"^cache: expected pages of fewer than 2\*\*31"):
        jax.eval_shape(write, cache)


def test_nothing_to_write():
    cache = jnp.ones((PAGES, 1, 8, 384), jnp.float16)
    line = jnp.ones((0, 1, 192), jnp.float16)
    table, at, active = jnp.zeros((0, 2), jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros(0, bool)
    np.testing.assert_array_equal(write_kv(cache, line, line, table, at, active), cache)


def wrong_write(**changes):
    arguments = {
        "cache": jnp.zeros((2, 1, 8, 384), FP8),
        "key": jnp.zeros((2, 1, 192), jnp.bfloat16),
        "value": jnp.zeros((2, 1, 192), jnp.bfloat16),
        "block_table": jnp.zeros((2, 1), jnp.int32),
        "positions": jnp.zeros(2, jnp.int32),
        "active": jnp.ones(2, bool),
        "k_scale": jnp.ones(1),
        "v_scale": jnp.ones(()),
    }
    return write_kv(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cache": jnp.zeros((2, 1, 8, 192), FP8)}, ValueError, r"cache: expected shape .*384"),
        ({"cache": jnp.zeros((2, 1, 8, 384))}, TypeError, "cache: expected dtype .*float32"),
        (
            {"cache": PackedCache(jnp.zeros((2, 64), FP8), 0, groups=1, page_size=8)},
            ValueError,
            "cache: expected groups and tokens inside a page of 64",
        ),
        ({"key": jnp.zeros((2, 2, 192))}, ValueError, r"key: expected shape \[any, 1, 192\]"),
        ({"value": jnp.zeros((1, 1, 192))}, ValueError, r"value: expected shape \[2, 1, 192\]"),
        ({"value": jnp.zeros((2, 1, 192), int)}, TypeError, "value: expected dtype"),
        ({"block_table": jnp.zeros((3, 1), jnp.int32)}, ValueError, "key: .*3 requests.*2 tokens"),
        ({"positions": jnp.zeros(3, jnp.int32)}, ValueError, r"positions: expected shape \[2\]"),
        ({"active": jnp.ones(2)}, TypeError, "active: expected dtype bool, got float32"),
        ({"k_scale": None}, ValueError, "k_scale: expected one float32, as the cache is FP8"),
        ({"v_scale": jnp.ones(2)}, ValueError, r"v_scale: expected shape \[1\], got shape \[2\]"),
        ({"v_scale": 1.0}, TypeError, "v_scale: expected a JAX array, got float"),
        ({"v_scale": jnp.ones(1, int)}, TypeError, "v_scale: expected dtype float32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_writes(changes, error, message):
    with pytest.raises(error, match=message):
        wrong_write(**changes)


# --- block table


@few
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=5))
def test_block_table(pages):
    table = build_block_table(pages, 4)
    assert (table.dtype, table.shape) == (np.int32, (len(pages), 4))
    assert table.tolist() == [own + [-1] * (4 - len(own)) for own in pages]


@pytest.mark.parametrize(
    ("pages", "max_pages", "error", "message"),
    [
        (
            [[0], [1, 2, 3]],
            2,
            ValueError,
            r"pages_of_requests\[1\]: .*at most max_pages = 2.*got 3",
        ),
        ([[0, -1]], 2, ValueError, r"pages_of_requests\[0\]: .*got -1"),
        ([[2**31]], 2, ValueError, r"pages_of_requests\[0\]: .*got 2147483648"),
        ([[0.5]], 2, TypeError, r"pages_of_requests\[0\]: expected an integer, got float"),
        ([[0]], 0, ValueError, "max_pages: expected at least 1, got 0"),
        ([[0]], "2", TypeError, "max_pages: expected an integer"),
    ],
)
def test_wrong_block_tables(pages, max_pages, error, message):
    with pytest.raises(error, match=message):
        build_block_table(pages, max_pages)


def test_strict_promotion_does_not_matter():
    rng = np.random.default_rng(0)
    positions = jnp.asarray([37, -1, 12], jnp.int32)
    scores = jnp.asarray(rng.normal(size=(3, 11)), jnp.float32)
    indices = jnp.asarray(rng.permuted(np.tile(np.arange(11), (3, 1)), axis=1)[:, :4], jnp.int32)
    lines = jnp.asarray(rng.normal(size=(3, 2, 192)), jnp.bfloat16)
    table = jnp.asarray([[0, 1, 2, 3, 4]] * 3, jnp.int32)
    cache = jnp.zeros((5, 2, 8, 384), FP8)
    outputs = jnp.asarray(rng.normal(size=(2, 3, 4, 192)), jnp.float32)
    scale = jnp.asarray(2.0, jnp.float32)

    def all_of_them():
        return (
            select_regions(scores, positions, 3),
            pack_selection(indices, positions, 3),
            write_kv(cache, lines, lines, table, positions, positions > 0, scale, scale),
            merge(outputs, outputs[..., 0]),
        )

    expected = all_of_them()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = all_of_them()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
