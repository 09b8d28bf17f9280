"""What a decode step does around the attention: selecting regions, writing K/V, block tables.

All but `build_block_table` are functions of JAX arrays with static shapes, for use inside
`jax.jit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Integral
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_decode.contract import (
    CACHE_DIM,
    FLOAT16_DTYPES,
    FP8_DTYPES,
    HEAD_DIM,
    INDEX_DTYPES,
    REGION_TOKENS,
    check_count,
)
from sparse_decode.pallas_kernels.op import PackedCache, describe_cache, narrow
from sparse_decode.pallas_kernels.promotion import usual_promotion

FP8_MAX = 448.0
INT32_MAX = 2**31 - 1
CACHE_DTYPES = (*FLOAT16_DTYPES, *FP8_DTYPES)
INPUT_DTYPES = (*FLOAT16_DTYPES, "float32")

Cache = TypeVar("Cache", jax.Array, PackedCache)


# --- selection


@usual_promotion
def select_regions(scores: jax.Array, positions: jax.Array, slots: int) -> jax.Array:
    """Selects the regions of the highest scores, and always the current one.

    Args:
        scores: `[rows, max_regions]`, bfloat16, float16 or float32: column `i` scores region `i` of
            the row's request. Of two equal scores the lower region wins. -inf and NaN are never
            selected. Only regions before the current one are looked at.
        positions: `[rows]`, int32 or int64, of the query token; a negative one selects nothing.
        slots: Columns of the result, at least 1.

    Returns:
        `[rows, slots]` int32 region ids as `sparse_decode_attention` takes them: -1 on the left,
        the history from the lowest to the highest score, the current region last.

    Raises:
        TypeError: A dtype or the type of `slots` is wrong.
        ValueError: A shape or `slots` is wrong.
    """
    _expect("scores", scores, (None, None), INPUT_DTYPES)
    rows, max_regions = scores.shape
    current = _current(positions, rows)
    check_count("slots", slots, 1, None)
    earlier = jnp.arange(max_regions, dtype=jnp.int32) < current[:, None]
    scores = jnp.where(earlier & (scores > -jnp.inf), scores, -jnp.inf)
    best, ids = lax.top_k(scores, min(slots - 1, max_regions))
    history = jnp.where(best > -jnp.inf, ids.astype(jnp.int32), -1)
    return _left_padded(history[:, ::-1], current, slots)


@usual_promotion
def pack_selection(
    indices: jax.Array, positions: jax.Array, slots: int, count: jax.Array | None = None
) -> jax.Array:
    """Packs region ids that a selector chose, for example by top-k, and adds the current region.

    Negative ids, the current region and later ones are dropped, wherever they stand. If more than
    `slots - 1` remain, the first ones are kept.

    Args:
        indices: `[rows, k]`, int32 or int64, region ids, the best first. Ids are taken to be
            distinct: one that is listed twice counts twice in the attention.
        positions: `[rows]`, int32 or int64, of the query token; a negative one gives only -1.
        slots: Columns of the result, at least 1.
        count: `[rows]`, int32 or int64: how many leading entries of each row are meant; None means
            all.

    Returns:
        `[rows, slots]` int32 region ids as `sparse_decode_attention` takes them: -1 on the left,
        the history in ascending order, the current region last.

    Raises:
        TypeError: A dtype or the type of `slots` is wrong.
        ValueError: A shape or `slots` is wrong.
    """
    _expect("indices", indices, (None, None), INDEX_DTYPES)
    rows, width = indices.shape
    indices = jnp.asarray(narrow(indices))
    current = _current(positions, rows)
    check_count("slots", slots, 1, None)
    keep = (indices >= 0) & (indices < current[:, None])
    if count is not None:
        _expect("count", count, (rows,), INDEX_DTYPES)
        keep &= jnp.arange(width) < narrow(count)[:, None]
    keep &= jnp.cumsum(keep, axis=1, dtype=jnp.int32) < slots
    history = jnp.sort(jnp.where(keep, indices, -1).astype(jnp.int32), axis=1)
    return _left_padded(history[:, max(0, width - (slots - 1)) :], current, slots)


def _current(positions: jax.Array, rows: int) -> jax.Array:
    """The region of each row's query token; -1 for a negative position."""
    _expect("positions", positions, (rows,), INDEX_DTYPES)
    return _clip(positions) // REGION_TOKENS


def _left_padded(history: jax.Array, current: jax.Array, slots: int) -> jax.Array:
    """Puts -1 before, and the current region behind, up to `slots - 1` earlier regions."""
    regions = jnp.concatenate([history, current[:, None]], axis=1)
    return jnp.pad(regions, ((0, 0), (slots - regions.shape[1], 0)), constant_values=-1)


# --- cache


@usual_promotion
def write_kv(
    cache: Cache,
    key: jax.Array,
    value: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> Cache:
    """Writes the keys and values of new tokens into the paged cache.

    Under `jax.jit` with a donated cache nothing but the new lines is touched; otherwise the result
    is a copy. Arguments are per token, not per row: `rows` of the attention are these, repeated for
    each group. Inactive tokens, negative positions and positions without a page inside the cache
    write nothing. Two tokens must not have the same place.

    Args:
        cache: `[pages, groups, page_size, 384]`, bfloat16, float16 or FP8 E4M3 (float8_e4m3fn, or
            uint8 holding it), or a `PackedCache`.
        key: `[tokens, groups, 192]`, bfloat16, float16 or float32; `tokens = requests * query_len`.
        value: As `key`.
        block_table: `[requests, max_pages]` int32, logical to physical page.
        positions: `[tokens]`, int32 or int64, of the new tokens.
        active: `[tokens]` bool, false for padding.
        k_scale: One float32, required with an FP8 cache and otherwise unused: the cache holds
            `key / k_scale`, and what exceeds FP8's range becomes its largest number, 448.
        v_scale: The same for values.

    Returns:
        The cache with the new lines, in the form of `cache`.

    Raises:
        TypeError: A dtype or the type of an argument is wrong.
        ValueError: A shape is wrong, or an FP8 scale is missing.
        NotImplementedError: A page has 2**31 elements or more.
    """
    if isinstance(cache, PackedCache):
        packed = cache
    else:
        _expect("cache", cache, (None, None, None, CACHE_DIM), CACHE_DTYPES)
        pages, groups, page_size, _ = cache.shape
        packed = PackedCache(
            cache.reshape(pages, groups * page_size * CACHE_DIM),
            0,
            groups=groups,
            page_size=page_size,
        )
    describe_cache(packed)
    _expect("cache", packed.storage, (None, None), CACHE_DTYPES)
    if packed.storage.shape[1] > INT32_MAX:
        raise NotImplementedError(
            f"cache: expected pages of fewer than 2**31 elements, got {packed.storage.shape[1]}"
        )
    groups = packed.groups
    _expect("key", key, (None, groups, HEAD_DIM), INPUT_DTYPES)
    _expect("value", value, key.shape, INPUT_DTYPES)
    _expect("block_table", block_table, (None, None), ("int32",))
    tokens, requests = key.shape[0], block_table.shape[0]
    if tokens % max(requests, 1) or (tokens and not requests):
        raise ValueError(
            f"key: expected tokens in multiples of {requests} requests, the rows of block_table, "
            f"got {tokens} tokens"
        )
    _expect("positions", positions, (tokens,), INDEX_DTYPES)
    _expect("active", active, (tokens,), ("bool",))
    lines = jnp.concatenate(
        [
            _stored("k_scale", key, k_scale, packed.storage.dtype),
            _stored("v_scale", value, v_scale, packed.storage.dtype),
        ],
        axis=-1,
    )
    if not lines.size or not block_table.shape[1]:
        return cache
    page, column = _places(packed, block_table, positions, active)
    storage = _scatter_lines(packed.storage, lines, page, column)
    if isinstance(cache, PackedCache):
        return dataclasses.replace(cache, storage=storage)
    return storage.reshape(cache.shape)


def _places(
    cache: PackedCache, block_table: jax.Array, positions: jax.Array, active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Page `[tokens]` and first element `[tokens, groups]` of new lines; no page is `pages`."""
    pages = cache.storage.shape[0]
    requests, max_pages = block_table.shape
    position = _clip(positions)
    logical, token = position // cache.page_size, position % cache.page_size
    request = jnp.arange(len(position), dtype=jnp.int32) // (len(position) // requests)
    valid = active & (position >= 0) & (logical < max_pages)
    page = block_table[request, jnp.where(valid, logical, 0)]
    page = jnp.where(valid & (page >= 0) & (page < pages), page, pages)
    _, group_stride, token_stride, _ = cache.strides()
    group = jnp.arange(cache.groups, dtype=jnp.int32)
    column = _offset(cache) + token[:, None] * token_stride + group * group_stride
    return page, column


def _offset(cache: PackedCache) -> jax.Array | int:
    """Where the cache begins in each page; a traced value is moved inside, as the kernels do it."""
    if isinstance(cache.offset, Integral):
        return int(cache.offset)
    page, group, token, _ = cache.strides()
    last = page - (cache.groups - 1) * group - (cache.page_size - 1) * token - CACHE_DIM
    offset = jnp.clip(jnp.asarray(cache.offset), 0, last).astype(jnp.int32)
    return offset // cache.offset_unit * cache.offset_unit


def _stored(name: str, x: jax.Array, scale: jax.Array | None, dtype: np.dtype) -> jax.Array:
    """Keys or values as the cache holds them; FP8 as float8_e4m3fn."""
    if dtype.name not in FP8_DTYPES:
        return jnp.asarray(x).astype(dtype)
    if scale is None:
        raise ValueError(f"{name}: expected one float32, as the cache is FP8, got None")
    one = scale.shape if getattr(scale, "size", 0) == 1 else (1,)
    _expect(name, scale, one, ("float32",))
    scaled = jnp.asarray(x).astype(jnp.float32) / jnp.asarray(scale).reshape(())
    return jnp.clip(scaled, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)


def _scatter_lines(
    storage: jax.Array, lines: jax.Array, page: jax.Array, column: jax.Array
) -> jax.Array:
    """Writes lines `[tokens, groups, 384]` into `[pages, page stride]` at (page, column).

    All are seen as integers: XLA may widen a whole array of small floats to scatter into it.
    """
    bits = jnp.dtype(f"uint{8 * storage.dtype.itemsize}")
    index = jnp.stack([jnp.broadcast_to(page[:, None], column.shape), column], axis=-1)
    written = lax.scatter(
        lax.bitcast_convert_type(storage, bits),
        index,
        lax.bitcast_convert_type(lines, bits),
        lax.ScatterDimensionNumbers(
            update_window_dims=(2,),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0, 1),
        ),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
    return lax.bitcast_convert_type(written, storage.dtype)


def build_block_table(pages_of_requests: Sequence[Sequence[int]], max_pages: int) -> np.ndarray:
    """Builds a block table on the host.

    Args:
        pages_of_requests: For each request its physical pages in logical order; empty for padding.
        max_pages: Columns of the table.

    Returns:
        `[requests, max_pages]` int32 NumPy array; -1 where a request has no page.

    Raises:
        TypeError: A page or `max_pages` is no integer.
        ValueError: A request has more than `max_pages` pages, or a page is no int32 or negative.
    """
    check_count("max_pages", max_pages, 1, None)
    table = np.full((len(pages_of_requests), max_pages), -1, np.int32)
    for request, pages in enumerate(pages_of_requests):
        if len(pages) > max_pages:
            raise ValueError(
                f"pages_of_requests[{request}]: expected at most max_pages = {max_pages} pages, "
                f"got {len(pages)}"
            )
        for page in pages:
            check_count(f"pages_of_requests[{request}]", page, 0, INT32_MAX)
        table[request, : len(pages)] = pages
    return table


# --- checks


def _clip(positions: jax.Array) -> jax.Array:
    """Positions as int32; every negative one is -1."""
    return jnp.clip(jnp.asarray(narrow(positions)), -1, INT32_MAX).astype(jnp.int32)


def _expect(
    name: str, array: object, shape: tuple[int | None, ...], dtypes: tuple[str, ...]
) -> None:
    """Checks type, shape and dtype of an array; None stands for any extent."""
    if not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(f"{name}: expected a JAX array, got {type(array).__name__}")
    if len(array.shape) != len(shape) or any(
        want not in (None, got) for want, got in zip(shape, array.shape, strict=True)
    ):
        expected = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name}: expected shape [{expected}], got shape {list(array.shape)}")
    if array.dtype.name not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(dtypes)}, got {array.dtype.name}")
