"""Split and combine as Pallas kernels for JAX's Triton backend.

Split, grid (rows, splits): one program attends with all heads of a row to one share of its live slots,
a tile of tokens at a time, and writes either the output (one split) or a normalised float32 partial
`[rows, splits, heads, 192]` with its base-2 lse. Combine, grid (rows, heads): merges the partials.

Two things differ from the Triton path, both for the sake of FP8 caches:

- An FP8 cache is read as 16-bit words of two neighbouring elements. A word splits into its even and its
  odd element in registers, so everything that runs along the 192 dims (query, keys, values,
  accumulators) comes as separate even and odd pieces; sums over dims do not mind the order.
- Products are transposed: tokens stand first and heads second, so that few heads fill the narrow side
  of the tensor core's shape.

Everything is addressed through two-dimensional dense buffers, `[pages, page stride]`, `[rows, row
stride]` and so on, with the strides inside them as static numbers; a launcher may hand in any memory
that is laid out so.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from sparse_decode.contract import HEAD_DIM, REGION_TOKENS, Geometry
from sparse_decode.pallas_kernels.config import Config

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
COMBINE_WIDTH = 64


@dataclass(frozen=True)
class Plan:
    """Everything static about one launch.

    Strides count elements of the buffer they belong to; for FP8 read as words, `cache_strides` and
    `offset_unit` count words.

    Attributes:
        geometry: Sizes of the call.
        config: Launch settings; its `splits` holds.
        scale: Multiplies q.k.
        clear_inactive: Zero inactive rows; otherwise leave them as they are in `output`.
        return_lse: Whether natural-log lse is computed.
        words: Whether the cache is read as 16-bit words of two FP8 elements.
        query_strides: (row, head).
        cache_strides: (page, group, token).
        regions_stride: Row stride, in elements of the index dtype.
        wide_regions: Whether `regions` is int64, seen as pairs of int32.
        table_stride: Row stride of `block_table`.
        wide_positions: Whether `positions` is int64, seen as pairs of int32.
        output_strides: (row, head).
        gate_strides: (token, head).
        offset_unit: The first page begins `offset * offset_unit` elements into the buffer, with
            `offset` an operand; 0 if there is no such operand.
        dependent_launch: Wait for the preceding kernel inside this one (sm_90 and newer).
        interpret: Run in Pallas' interpreter.
    """

    geometry: Geometry
    config: Config
    scale: float
    clear_inactive: bool
    return_lse: bool
    words: bool
    query_strides: tuple[int, int]
    cache_strides: tuple[int, int, int]
    regions_stride: int
    wide_regions: bool
    table_stride: int
    wide_positions: bool
    output_strides: tuple[int, int]
    gate_strides: tuple[int, int]
    offset_unit: int = 0
    dependent_launch: bool = False
    interpret: bool = False

    @property
    def transposed(self) -> bool:
        """Whether tokens stand first and heads second in the products."""
        return self.words

    @property
    def operand(self) -> Any:
        """Dtype of the operands of the products."""
        return jnp.float16 if self.geometry.fp8 else jnp.dtype(self.geometry.cache_dtype)

    @property
    def padded_heads(self) -> int:
        """Heads, padded to what the tensor core's shape asks for."""
        return max(8 if self.transposed else 16, pl.next_power_of_2(self.geometry.heads))

    @property
    def line(self) -> int:
        """Buffer elements that hold the 192 dims of one key or value."""
        return HEAD_DIM // 2 if self.words else HEAD_DIM

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(begin, width) of the power-of-two pieces that make up a line."""
        half = self.line // 3
        return ((0, 2 * half), (2 * half, half))


# --- layout -----------------------------------------------------------------------------------------


def _within(value: jax.Array, limit: int) -> jax.Array:
    """0 <= value < limit, in one comparison."""
    return value.astype(jnp.uint32) < jnp.uint32(limit)


def _divide(value: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of values that are not negative."""
    if divisor & (divisor - 1) == 0:
        return value >> (divisor.bit_length() - 1), value & (divisor - 1)
    return lax.div(value, jnp.int32(divisor)), lax.rem(value, jnp.int32(divisor))


def _load_index(ref, lead: tuple, last, wide: bool, **masking) -> jax.Array:
    """Loads int32, or int64 pairs: what exceeds int32 becomes the nearest int32."""
    if not wide:
        return plt.load(ref.at[*lead, last], **masking)
    low = plt.load(ref.at[*lead, 2 * last], **masking)
    high = plt.load(ref.at[*lead, 2 * last + 1], **masking)
    fits = high == (low >> 31)
    return jnp.where(fits, low, jnp.where(high < 0, jnp.int32(-(2**31)), jnp.int32(2**31 - 1)))


def _row_of(row: jax.Array, stride: int) -> jax.Array:
    """The row of a buffer; every row is the first where the stride is 0."""
    return row if stride else row * 0


def _live_slots(position: jax.Array, active: jax.Array, slots: int) -> jax.Array:
    """How many trailing slots of a row are read."""
    live = jnp.minimum(_divide(jnp.maximum(position, 0), REGION_TOKENS)[0] + 1, slots)
    return jnp.where(active & (position >= 0), live, 0)


def _locate(plan: Plan, refs, row, first_slot, position, offset):
    """Places of the tile's tokens: page, element inside the page, and whether it is attended."""
    geometry = plan.geometry
    lane = jnp.arange(plan.config.tile, dtype=jnp.int32)
    slot = first_slot + (lane >> 3)
    region = _load_index(
        refs["regions"],
        (_row_of(row, plan.regions_stride),),
        slot,
        plan.wide_regions,
        mask=slot < geometry.slots,
        other=-1,
    )
    token = region * REGION_TOKENS + (lane & 7)
    valid = _within(region, geometry.max_regions) & (token <= position)
    logical, in_page = _divide(token, geometry.page_size)
    request = lax.div(row, jnp.int32(geometry.rows_per_request))
    page = plt.load(
        refs["block_table"].at[_row_of(request, plan.table_stride), logical], mask=valid, other=-1
    )
    valid = valid & _within(page, geometry.pages)
    _, group_stride, token_stride = plan.cache_strides
    group = lax.rem(row, jnp.int32(geometry.groups))
    return page, in_page * token_stride + (group * group_stride + offset), valid


# --- pieces of a line -------------------------------------------------------------------------------


def _decode(plan: Plan, words: jax.Array) -> list[jax.Array]:
    """Splits words into their even and odd FP8 elements, exactly, as float16."""
    if plan.interpret:
        halves = (words & 0xFF, words >> 8)
        return [
            lax.bitcast_convert_type(half.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float16)
            for half in halves
        ]
    decoded = []
    for selector in ("0x4420", "0x4431"):
        asm = (
            "{ .reg .b32 pair; .reg .b16 low, high; "
            f"prmt.b32 pair, $1, 0, {selector}; mov.b32 {{low, high}}, pair; "
            "cvt.rn.f16x2.e4m3x2 $0, low; }"
        )
        (half,) = plt.elementwise_inline_asm(
            asm,
            args=[words],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.float16)],
        )
        decoded.append(half)
    return decoded


def _load_lines(plan: Plan, cache_ref, page, element, valid, first: int) -> list[jax.Array]:
    """Loads `[tile, width]` pieces of keys (`first` 0) or values (`first` = `plan.line`)."""
    tiles = []
    for begin, width in plan.pieces:
        column = first + begin + jnp.arange(width, dtype=jnp.int32)
        at = cache_ref.at[page[:, None], element[:, None] + column[None, :]]
        tile = plt.load(at, mask=valid[:, None], other=0)
        if plan.words:
            tiles += _decode(plan, tile)
        else:
            tiles.append(tile.astype(plan.operand))
    return tiles


def _dims(plan: Plan) -> list[jax.Array]:
    """The dims that each piece holds, in the order of `_load_lines`."""
    if not plan.words:
        return [begin + jnp.arange(width, dtype=jnp.int32) for begin, width in plan.pieces]
    return [
        2 * (begin + jnp.arange(width, dtype=jnp.int32)) + odd
        for begin, width in plan.pieces
        for odd in (0, 1)
    ]


def _load_query(plan: Plan, query_ref, row) -> list[jax.Array]:
    """Loads `[padded heads, width]` pieces of a row's queries; padding heads are zero."""
    row_stride, head_stride = plan.query_strides
    head = jnp.arange(plan.padded_heads, dtype=jnp.int32)[:, None]
    return [
        plt.load(
            query_ref.at[_row_of(row, row_stride), head * head_stride + dims[None, :]],
            mask=jnp.broadcast_to(
                head < plan.geometry.heads, (plan.padded_heads, dims.shape[0])
            ),
            other=0,
        ).astype(plan.operand)
        for dims in _dims(plan)
    ]


# --- split ------------------------------------------------------------------------------------------


def _dot(a: jax.Array, a_axis: int, b: jax.Array, b_axis: int) -> jax.Array:
    """Sums products over `a_axis` of a and `b_axis` of b, in float32."""
    return lax.dot_general(
        a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32
    )


def _split_kernel(*args, plan: Plan, names: tuple[str, ...]):
    refs = dict(zip(names, args, strict=True))
    geometry, config = plan.geometry, plan.config
    row, split = _wait(plan, pl.program_id(0)), pl.program_id(1)
    position = _load_index(refs["positions"], (), row, plan.wide_positions)
    active = refs["active"][row]
    live = _live_slots(position, active, geometry.slots)
    tiles, _ = _divide(live + (config.tile_regions - 1), config.tile_regions)
    offset = refs["offset"][0] * plan.offset_unit if plan.offset_unit else 0

    token_axis = 0 if plan.transposed else 1
    by_head = (lambda x: x[None, :]) if plan.transposed else (lambda x: x[:, None])
    by_token = (lambda x: x[:, None]) if plan.transposed else (lambda x: x[None, :])

    query = _load_query(plan, refs["query"], row)
    logit_scale = plan.scale * LOG2_E
    if geometry.fp8:
        logit_scale = logit_scale * refs["k_scale"][0]

    def scores(keys):
        pairs = zip(keys, query, strict=True)
        if plan.transposed:
            return functools.reduce(jnp.add, (_dot(key, 1, q, 1) for key, q in pairs))
        return functools.reduce(jnp.add, (_dot(q, 1, key, 1) for key, q in pairs))

    def weigh(weights, value):
        return _dot(value, 0, weights, 0) if plan.transposed else _dot(weights, 1, value, 0)

    def attend(tile, carry):
        peak, total, sums = carry
        first_slot = geometry.slots - live + tile * config.tile_regions
        page, element, valid = _locate(plan, refs, row, first_slot, position, offset)
        keys = _load_lines(plan, refs["cache"], page, element, valid, 0)
        values = _load_lines(plan, refs["cache"], page, element, valid, plan.line)
        logits = jnp.where(by_token(valid), scores(keys) * logit_scale, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=token_axis))
        pivot = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weights = jnp.exp2(logits - by_head(pivot))
        shrink = jnp.exp2(peak - pivot)
        total = total * shrink + jnp.sum(weights, axis=token_axis)
        weights = weights.astype(plan.operand)
        sums = tuple(
            acc * by_head(shrink) + weigh(weights, value)
            for acc, value in zip(sums, values, strict=True)
        )
        return new_peak, total, sums

    heads = plan.padded_heads
    widths = [piece.shape[1] for piece in query]
    empty = (
        jnp.full((heads,), -jnp.inf, jnp.float32),
        jnp.zeros((heads,), jnp.float32),
        tuple(
            jnp.zeros((w, heads) if plan.transposed else (heads, w), jnp.float32) for w in widths
        ),
    )
    begin = lax.div(split * tiles, jnp.int32(config.splits))
    end = lax.div((split + 1) * tiles, jnp.int32(config.splits))
    peak, total, sums = lax.fori_loop(begin, end, attend, empty)

    none = total == 0
    norm = jnp.where(none, 0.0, 1.0 / jnp.where(none, 1.0, total))
    if geometry.fp8:
        norm = norm * refs["v_scale"][0]
    lse = jnp.where(none, -jnp.inf, peak + jnp.log2(jnp.where(none, 1.0, total)))
    head = jnp.arange(heads, dtype=jnp.int32)
    present = head < geometry.heads
    if config.splits == 1:
        for dims, acc in zip(_dims(plan), sums, strict=True):
            _finish(plan, refs, row, active, by_head(head), by_token(dims), acc * by_head(norm))
        if plan.return_lse:
            plt.store(refs["lse"].at[row, head], lse * LN_2, mask=present)
        return
    line = (row * config.splits + split) * geometry.heads + head
    for dims, acc in zip(_dims(plan), sums, strict=True):
        plt.store(
            refs["partial"].at[by_head(line), by_token(dims)],
            acc * by_head(norm),
            mask=jnp.broadcast_to(by_head(present), acc.shape),
        )
    plt.store(refs["partial_lse"].at[line], lse, mask=present)


# --- combine ----------------------------------------------------------------------------------------


def _combine_kernel(*args, plan: Plan, names: tuple[str, ...]):
    refs = dict(zip(names, args, strict=True))
    geometry, splits = plan.geometry, plan.config.splits
    row, head = _wait(plan, pl.program_id(0)), pl.program_id(1)
    active = refs["active"][row]
    split = jnp.arange(pl.next_power_of_2(splits), dtype=jnp.int32)
    line = (row * splits + split) * geometry.heads + head
    lse = plt.load(refs["partial_lse"].at[line], mask=split < splits, other=-jnp.inf)
    peak = jnp.max(lse, axis=0)
    pivot = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp2(lse - pivot)
    total = jnp.sum(weights, axis=0)
    none = total == 0
    weights = weights * (1.0 / jnp.where(none, 1.0, total))
    for begin in range(0, HEAD_DIM, COMBINE_WIDTH):
        dims = begin + jnp.arange(COMBINE_WIDTH, dtype=jnp.int32)
        partial = plt.load(
            refs["partial"].at[line[:, None], dims[None, :]],
            mask=jnp.broadcast_to((lse != -jnp.inf)[:, None], (split.size, COMBINE_WIDTH)),
            other=0,
        )
        attention = jnp.sum(weights[:, None] * partial, axis=0)
        _finish(plan, refs, row, active, head, dims, attention)
    if plan.return_lse:
        lse = jnp.where(none, -jnp.inf, peak + jnp.log2(jnp.where(none, 1.0, total)))
        refs["lse"][row, head] = lse * LN_2


# --- gate and output --------------------------------------------------------------------------------


def _divide_exactly(plan: Plan, numerator, denominator):
    """IEEE division; the GPU's plain float32 division is an approximation."""
    if plan.interpret:
        return numerator / denominator
    (quotient,) = plt.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;",
        args=[jnp.full_like(denominator, numerator), denominator],
        constraints="=r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(denominator.shape, jnp.float32)],
    )
    return quotient


def _gate(plan: Plan, gate_ref, row, head, mask):
    """`sigmoid(gate)` of a row's heads, rounded to the gate's dtype, as float32."""
    geometry = plan.geometry
    token_stride, head_stride = plan.gate_strides
    token, group = _divide(row, geometry.groups)
    column = (group * geometry.heads + head) * head_stride
    gate = plt.load(gate_ref.at[_row_of(token, token_stride), column], mask=mask, other=0)
    sigmoid = _divide_exactly(plan, 1.0, 1.0 + jnp.exp(-gate.astype(jnp.float32)))
    return sigmoid.astype(gate_ref.dtype).astype(jnp.float32)


def _finish(plan: Plan, refs, row, active, head, dims, attention):
    """Rounds, gates, clears and stores finished attention of a row at (head, dims)."""
    dtype = jnp.dtype(plan.geometry.output_dtype)
    result = attention.astype(dtype)
    mask = jnp.broadcast_to(head < plan.geometry.heads, attention.shape)
    if plan.geometry.gate_dtype is not None:
        gate_mask = None if jnp.ndim(head) == 0 else head < plan.geometry.heads
        gate = _gate(plan, refs["gate"], row, head, gate_mask)
        result = (result.astype(jnp.float32) * gate).astype(dtype)
    if plan.clear_inactive:
        result = jnp.where(active, result, jnp.zeros_like(result))
    else:
        mask = mask & active
    row_stride, head_stride = plan.output_strides
    at = refs["output"].at[_row_of(row, row_stride), head * head_stride + dims]
    plt.store(at, result, mask=mask)


# --- launch -----------------------------------------------------------------------------------------


def _wait(plan: Plan, row: jax.Array) -> jax.Array:
    """`row`, known only once the preceding kernel has finished, so that every load comes after it."""
    if not plan.dependent_launch:
        return row
    (row,) = plt.elementwise_inline_asm(
        "griddepcontrol.wait; mov.b32 $0, $1;",
        args=[row],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(row.shape, row.dtype)],
    )
    return row


def attend(plan: Plan, buffers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Launches split and, with more than one split, combine.

    Args:
        plan: What is static.
        buffers: Dense arrays by name: `query` `[rows, row stride]`; `cache` `[pages, page stride]`,
            uint16 where `plan.words`; `regions` `[rows, row stride]` and `positions` `[rows]`, int32,
            twice as wide for int64; `block_table` `[requests, row stride]` int32; `active` `[rows]` bool; `k_scale` and `v_scale` `[1]` float32 with an FP8 cache; `gate` `[tokens, token stride]`
            where there is one; `offset` `[1]` int32 where `plan.offset_unit`; `output`
            `[rows, row stride]` where one is written in place.

    Returns:
        `output` `[rows, row stride]`, and `lse` `[rows, heads]` float32 (natural logarithm) where
        `plan.return_lse`.
    """
    geometry, config = plan.geometry, plan.config
    rows, heads, splits = geometry.rows, geometry.heads, config.splits
    results = {
        "output": jax.ShapeDtypeStruct(
            (rows, max(plan.output_strides[0], 1)), jnp.dtype(geometry.output_dtype)
        )
    }
    if plan.return_lse:
        results["lse"] = jax.ShapeDtypeStruct((rows, heads), jnp.float32)
    finish = ["active", *(name for name in ("gate", "output") if name in buffers)]
    reads = [name for name in buffers if name not in ("gate", "output", "active")]
    if splits == 1:
        return _launch(
            _split_kernel, plan, (rows, 1), reads + finish, buffers, results, config.warps
        )
    scratch = {
        "partial": jax.ShapeDtypeStruct((rows * splits * heads, HEAD_DIM), jnp.float32),
        "partial_lse": jax.ShapeDtypeStruct((rows * splits * heads,), jnp.float32),
    }
    partials = _launch(
        _split_kernel, plan, (rows, splits), [*reads, "active"], buffers, scratch, config.warps
    )
    return _launch(
        _combine_kernel,
        plan,
        (rows, heads),
        [*scratch, *finish],
        buffers | partials,
        results,
        config.combine_warps,
    )


def _launch(kernel, plan: Plan, grid, reads, buffers, results, warps) -> dict[str, jax.Array]:
    """One `pallas_call`; a result whose name is also read is written in place."""
    names = (*(f"{name} before" if name in results else name for name in reads), *results)
    call = pl.pallas_call(
        functools.partial(kernel, plan=plan, names=names),
        grid=grid,
        out_shape=list(results.values()),
        input_output_aliases={
            reads.index(name): index for index, name in enumerate(results) if name in reads
        },
        compiler_params=plt.CompilerParams(
            num_warps=warps, num_stages=plan.config.stages if kernel is _split_kernel else 1
        ),
        interpret=plan.interpret,
        name=f"sparse_decode_{kernel.__name__.strip('_').removesuffix('_kernel')}",
    )
    return dict(zip(results, call(*(buffers[name] for name in reads)), strict=True))
