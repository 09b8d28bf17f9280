"""Split and combine as Pallas kernels for JAX's Triton backend.

Split, grid (rows * splits): one program attends with all heads of a row to one share of its live
slots, a tile of tokens at a time, and writes either the output (one split, one part) or a float32
partial `[rows, splits, heads, 192]` with its sum of weights and their base-2 exponent. Combine,
grid (rows, heads, shares of the 192 dims): merges the partials. Programs of inactive rows help
others, if the settings have splits in parts (see "lending").

Two things differ from the Triton path:

- An FP8 cache is read as 16-bit words of two neighbouring elements. A word splits into its even and
  its odd element in registers, so everything that runs along the 192 dims (query, keys, values,
  accumulators) comes as separate even and odd pieces; sums over dims do not mind the order.
- Products are transposed: tokens stand first and heads second, so that few heads fill the narrow
  side of the tensor core's shape.

Everything is addressed through dense buffers with static strides inside, as `sparse_decode.plan`
lays them out; a launcher may hand in any memory that is laid out so.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from sparse_decode.contract import FP8_QUERY_MAX, HEAD_DIM, REGION_TOKENS
from sparse_decode.pallas_kernels.promotion import usual_promotion
from sparse_decode.plan import Plan

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
COMBINE_PIECE = 64


def _assembly(code: str, x: jax.Array, *more, dtype: jnp.dtype | None = None) -> jax.Array:
    """What PTX makes of each 32 bits of elements: `$0` from `$1` on, in a dtype of their size."""
    (result,) = plt.elementwise_inline_asm(
        code,
        args=[x, *more],
        constraints="=r" + ",r" * (1 + len(more)),
        pack=4 // x.dtype.itemsize,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)],
    )
    return result


# --- layout


def _within(value: jax.Array, limit: int) -> jax.Array:
    """0 <= value < limit, in one comparison."""
    return value.astype(jnp.uint32) < jnp.uint32(limit)


def _divide(value: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of values that are not negative."""
    if divisor & (divisor - 1) == 0:
        return value >> (divisor.bit_length() - 1), value & (divisor - 1)
    return lax.div(value, jnp.int32(divisor)), lax.rem(value, jnp.int32(divisor))


def _load_words(ref, lead: tuple, last, wide: bool, **masking) -> tuple[jax.Array, ...]:
    """Loads an index as it is: int32, or the low and the high half of int64."""
    if not wide:
        return (plt.load(ref.at[*lead, last], **masking),)
    return tuple(plt.load(ref.at[*lead, 2 * last + half], **masking) for half in (0, 1))


def _index(words: tuple[jax.Array, ...]) -> jax.Array:
    """The index that was loaded: what exceeds int32 becomes the nearest int32."""
    if len(words) == 1:
        return words[0]
    low, high = words
    fits = high == (low >> 31)
    return jnp.where(fits, low, jnp.where(high < 0, jnp.int32(-(2**31)), jnp.int32(2**31 - 1)))


def _line(index: jax.Array, stride: int) -> jax.Array:
    """The line of a buffer; every line is the first where the stride is 0."""
    return index if stride else jnp.zeros_like(index)


def _live_slots(position: jax.Array, active: jax.Array, slots: int) -> jax.Array:
    """How many trailing slots of a row are read."""
    live = jnp.minimum(_divide(jnp.maximum(position, 0), REGION_TOKENS)[0] + 1, slots)
    return jnp.where(active & (position >= 0), live, 0)


def _group_begin(plan: Plan, refs, row) -> tuple[jax.Array | int, jax.Array | int]:
    """Where a row's group begins in each page of the buffer: in which line, at which element.

    A cache at an offset into larger pages never begins where it would not fit.
    """
    line, element = 0, 0
    if plan.geometry.groups > 1:
        group = lax.rem(row, jnp.int32(plan.geometry.groups))
        _, stride, token_stride = plan.cache_strides
        lines, elements = divmod(stride, token_stride) if plan.page_lines else (0, stride)
        line, element = group * lines, group * elements
    unit = plan.offset_unit
    if unit:
        offset = jnp.minimum(jnp.maximum(refs["offset"][0], 0), plan.last_offset)
        element += lax.div(offset, jnp.int32(unit)) * (unit // 2 if plan.words else unit)
    return line, element


def _load_regions(plan: Plan, refs, row, first_slot) -> tuple[jax.Array, ...]:
    """Loads the words of the region of each of the tile's tokens; -1 past the last slot."""
    slot = first_slot + (jnp.arange(plan.config.tile, dtype=jnp.int32) >> 3)
    return _load_words(
        refs["regions"],
        (_line(row, plan.regions_stride),),
        slot,
        plan.wide_regions,
        mask=slot < plan.geometry.slots,
        other=-1,
    )


def _load_pages(plan: Plan, refs, row, region, position) -> tuple[jax.Array, jax.Array]:
    """Loads each token's page, -1 if it is not attended; with it comes the token of the page."""
    geometry = plan.geometry
    token = region * REGION_TOKENS + (jnp.arange(plan.config.tile, dtype=jnp.int32) & 7)
    logical, in_page = _divide(token, geometry.page_size)
    request = lax.div(row, jnp.int32(geometry.rows_per_request))
    page = plt.load(
        refs["block_table"].at[_line(request, plan.table_stride), logical],
        mask=_within(region, geometry.max_regions) & (token <= position),
        other=-1,
    )
    return page, in_page


def _locate(plan: Plan, page, in_page, first_line) -> jax.Array:
    """Places of the tile's tokens: lines of the cache, or `page * page_size + token of the page`.

    -1 for a token that is not attended.
    """
    geometry = plan.geometry
    place = page * (plan.page_lines or geometry.page_size) + in_page + first_line
    return jnp.where(_within(page, geometry.pages), place, -1)


def _once(x: jax.Array, axis: int) -> jax.Array:
    """`x`, computed once: where Triton wants it in another layout, it moves it there.

    Left to itself Triton computes indices anew, all loads included, in each layout that they are
    used in. It does not look past a reduction, and this is the maximum of two copies along `axis`.
    """
    shape = (2, x.size) if axis == 0 else (x.size, 2)
    return jnp.max(jnp.broadcast_to(jnp.expand_dims(x, axis), shape), axis=axis)


# --- pieces of a line


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
        decoded.append(_assembly(asm, words, dtype=jnp.dtype("float16")))
    return decoded


def _load_lines(plan: Plan, cache_ref, place, first, values: bool) -> list[jax.Array]:
    """Loads `[tile, width]` pieces of keys or `[width, tile]` pieces of values.

    So the products want them: both are copied asynchronously to shared memory, and FP8 is only
    decoded on its way out of it.
    """
    token_axis = 1 if values else 0
    part, pieces = (plan.line, plan.value_pieces) if values else (0, plan.key_pieces)
    place = jnp.expand_dims(_once(place, token_axis), 1 - token_axis)
    line, element = place, first
    if not plan.page_lines:
        page_stride, _, token_stride = plan.cache_strides
        page, token = _divide(place, plan.geometry.page_size)
        line, element = _line(page, page_stride), token * token_stride + first
    tiles = []
    for begin, width in pieces:
        column = jnp.expand_dims(part + begin + jnp.arange(width, dtype=jnp.int32), token_axis)
        at = cache_ref.at[line, element + column]
        tile = plt.load(at, mask=place >= 0, other=jnp.zeros((), cache_ref.dtype))
        if plan.words:
            tiles += _decode(plan, tile)
        else:
            tiles.append(tile.astype(plan.operand))
    return tiles


def _dims(plan: Plan, pieces: tuple[tuple[int, int], ...]) -> list[jax.Array]:
    """The dims that each piece holds, in the order of `_load_lines`."""
    if not plan.words:
        return [begin + jnp.arange(width, dtype=jnp.int32) for begin, width in pieces]
    return [
        2 * (begin + jnp.arange(width, dtype=jnp.int32)) + odd
        for begin, width in pieces
        for odd in (0, 1)
    ]


def _load_query(plan: Plan, query_ref, row) -> list[jax.Array]:
    """Loads `[padded heads, width]` pieces of a row's queries; padding heads are zero."""
    row_stride, head_stride = plan.query_strides
    head = jnp.arange(plan.padded_heads, dtype=jnp.int32)[:, None]
    pieces = []
    for dims in _dims(plan, plan.key_pieces):
        piece = plt.load(
            query_ref.at[_line(row, row_stride), head * head_stride + dims[None, :]],
            mask=jnp.broadcast_to(head < plan.geometry.heads, (plan.padded_heads, dims.shape[0])),
            other=0,
        )
        if plan.geometry.fp8:
            piece = piece.astype(jnp.float32)
            # The GPU's minimum and maximum drop NaN.
            number = piece == piece
            piece = jnp.where(number, jnp.clip(piece, -FP8_QUERY_MAX, FP8_QUERY_MAX), piece)
        pieces.append(piece.astype(plan.operand))
    return pieces


# --- attention so far


class _State(NamedTuple):
    """Attention to some of a row's tokens.

    Attributes:
        peak: `[heads]`, base-2 exponent of weight 1: the largest logit; -inf if none. In combine,
            `[splits]` of one head; so with `total` and `sums`.
        total: `[heads]` or, by token, `[tile, heads]`: sum of weights.
        sums: `[dims, heads]` pieces: values, weighted and summed.
    """

    peak: jax.Array
    total: jax.Array
    sums: tuple[jax.Array, ...]


def _merge(plan: Plan, one: _State, other: _State) -> _State:
    """Attention to the tokens of both; an empty state changes nothing.

    The bits are the same wherever it takes place: no compiler chooses which product is rounded.
    """
    peak = jnp.maximum(one.peak, other.peak)
    pivot = jnp.where(peak == -jnp.inf, 0.0, peak)
    ours, theirs = jnp.exp2(one.peak - pivot), jnp.exp2(other.peak - pivot)

    def add(a, b):
        if plan.interpret:
            return a * ours + b * theirs
        return _assembly(
            "{ .reg .f32 a; mul.rn.f32 a, $1, $2; fma.rn.f32 $0, $3, $4, a; }",
            *(a, jnp.broadcast_to(ours, a.shape), b, jnp.broadcast_to(theirs, b.shape)),
        )

    sums = (add(a, b) for a, b in zip(one.sums, other.sums, strict=True))
    return _State(peak, add(one.total, other.total), tuple(sums))


# --- lending
#
# A split is attended to in parts. Four rows, a quarter of the batch apart, are mates: programs of
# inactive ones take parts of active ones over. A row that is alone has one of its four parts
# attended to by each mate's program; of two, each has its last two parts attended to by one mate's.
# Of three, each does all of its own. What comes of a part, and what is merged with what, is the
# same whoever attends to it.


def _mates(plan: Plan, row: jax.Array) -> list[jax.Array]:
    """The row and its mates. The i-th mate of a row's i-th mate is the row."""
    if not plan.lends:
        return [row]
    quarter = plan.geometry.rows // 4
    member, first = _divide(row, quarter)
    return [first + (member ^ other) * quarter for other in range(4)]


def _company(active: list[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether none, one or two of a row's mates are active, of which `active` tells after it."""
    _, a, b, c = active
    odd = a ^ b ^ c
    return ~(a | b | c), odd & ~(a & b & c), (a | b | c) & ~odd


def _share_out(plan: Plan, active: list[jax.Array], *values: list[jax.Array]):
    """What the program of a row attends to.

    Args:
        plan: What is static.
        active: Whether the row and each of its mates is active.
        values: Lists of what belongs to the row and to each of its mates.

    Returns:
        Whether there is anything; the values of the row that it belongs to; the first part, and
        that after the last.
    """
    if not plan.lends:
        return active[0], [value[0] for value in values], 0, 4
    none, one, two = _company(active)
    helps = ~active[0] & (one | two)

    def first_active(choices):
        return jnp.where(active[1], choices[1], jnp.where(active[2], choices[2], choices[3]))

    chosen = [jnp.where(helps, first_active(value), value[0]) for value in values]
    # Pallas would take a Python number for a truth value here.
    count = [np.int32(number) for number in range(5)]
    begin = jnp.where(helps, jnp.where(one, first_active(count), count[2]), count[0])
    single, double = jnp.where(helps, one, none), jnp.where(helps, two, one)
    parts = jnp.where(single, count[1], jnp.where(double, count[2], count[4]))
    return active[0] | helps, chosen, begin, begin + parts


def _helpers(mates: list[jax.Array], active: list[jax.Array]):
    """Whether a row is helped; who attends to its other parts, in their order, and whether it does.

    What is attended to together comes with the first of it.
    """
    none, one, _ = _company(active)
    third = jnp.where(none | active[1], mates[2], mates[1])
    return active[0] & (none | one), ((mates[1], none), (third, True), (mates[3], none))


# --- split


def _dot(a: jax.Array, a_axis: int, b: jax.Array, b_axis: int) -> jax.Array:
    """Sums products over `a_axis` of a and `b_axis` of b, in float32."""
    return lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((), ())),
        precision=lax.Precision.DEFAULT,  # whatever `jax_default_matmul_precision` says
        preferred_element_type=jnp.float32,
    )


def _split_kernel(*args, plan: Plan, names: tuple[str, ...]):
    refs = dict(zip(names, args, strict=True))
    geometry, config = plan.geometry, plan.config
    own, turn = _divide(_wait(plan, pl.program_id(0)), config.splits)
    # Programs go round the multiprocessors in order. The splits of a row come next to each other,
    # so that active rows are spread evenly wherever padding stands; and which of them comes first
    # changes from row to row, so that the longer splits are spread as well.
    _, split = _divide(turn + own + _divide(own, config.splits)[0], config.splits)
    mates = _mates(plan, own)
    positions = [
        _index(_load_words(refs["positions"], (), mate, plan.wide_positions)) for mate in mates
    ]
    active, (row, position), first_part, after_part = _share_out(
        plan, [refs["active"][mate] for mate in mates], mates, positions
    )
    live = _live_slots(position, active, geometry.slots)
    tiles, _ = _divide(live + (config.tile_regions - 1), config.tile_regions)
    first_line, first = _group_begin(plan, refs, row)

    heads = plan.padded_heads
    # Weights summed by token are summed over tokens once, after the loop, if they fit registers.
    by_token = config.tile * heads <= 512
    query = _load_query(plan, refs["query"], row)
    value_dims = _dims(plan, plan.value_pieces)
    logit_scale = plan.scale * LOG2_E
    if geometry.fp8:
        logit_scale = logit_scale * refs["k_scale"][0]
    if not config.combines:
        v_scale = _value_scale(plan, refs)

    def load_regions(tile):
        return _load_regions(plan, refs, row, geometry.slots - live + tile * config.tile_regions)

    def load_pages(regions):
        return _load_pages(plan, refs, row, _index(regions), position)

    def empty(by_token=False):
        return _State(
            jnp.full((heads,), -jnp.inf, jnp.float32),
            jnp.zeros((config.tile, heads) if by_token else (heads,), jnp.float32),
            tuple(jnp.zeros((dims.size, heads), jnp.float32) for dims in value_dims),
        )

    def summed(state):
        return state._replace(total=jnp.sum(state.total, axis=0)) if by_token else state

    def attend(tile, carry):
        # The pages of the next tile and the regions of the one after it are loaded here and looked
        # at in the next turn. What a turn hands on is its own: Triton does not pipeline a loop that
        # hands on what it was given, as the regions would be.
        pages, regions, state, *aside = carry
        place = _locate(plan, *pages, first_line)
        ahead = load_pages(regions), load_regions(tile + 2)
        keys = _load_lines(plan, refs["cache"], place, first, values=False)
        products = (_dot(key, 1, q, 1) for key, q in zip(keys, query, strict=True))
        logits = functools.reduce(jnp.add, products) * logit_scale
        logits = jnp.where(_once(place, 0)[:, None] >= 0, logits, -jnp.inf)
        peak = jnp.maximum(state.peak, jnp.max(logits, axis=0))
        pivot = jnp.where(peak == -jnp.inf, 0.0, peak)
        weights = jnp.exp2(logits - pivot[None, :])
        shrink = jnp.exp2(state.peak - pivot)
        total = state.total * shrink + (weights if by_token else jnp.sum(weights, axis=0))
        weights = weights.astype(plan.operand)
        values = _load_lines(plan, refs["cache"], place, first, values=True)
        sums = tuple(
            acc * shrink[None, :] + _dot(value, 1, weights, 0)
            for acc, value in zip(state.sums, values, strict=True)
        )
        states = _State(peak, total, sums), *aside
        return *ahead, *(set_aside(tile + 1, *states) if aside else states)

    def set_aside(tile, state, part, half):
        """Begins anew where a part ends; what it gave is kept, or what the first two gave."""
        # One branch with another inside would cost copies of all states in every turn.
        part_ends = (tile == ends[0]) | (tile == ends[2])
        half_ends = tile == ends[1]
        state, part, half = lax.cond(
            half_ends,
            lambda: (empty(by_token), empty(), _merge(plan, part, summed(state))),
            lambda: (state, part, half),
        )
        state, part = lax.cond(
            part_ends & ~half_ends,
            lambda: (empty(by_token), summed(state)),
            lambda: (state, part),
        )
        return state, part, half

    share, rest = _divide(tiles, config.splits)
    start = split * share + jnp.minimum(split, rest)
    count = share + (split < rest).astype(jnp.int32)
    *ends, begin, end = (start + (count * part >> 2) for part in (1, 2, 3, first_part, after_part))
    regions = load_regions(begin), load_regions(begin + 1)
    indices = load_pages(regions[0]), regions[1]
    aside = (empty(), empty()) if config.parts > 1 else ()
    carry = lax.fori_loop(begin, end, attend, (*indices, empty(by_token), *aside))
    state, *aside = carry[2:]
    state = summed(state)
    state = state._replace(total=_release(plan, state.total))
    for earlier in aside:
        state = _merge(plan, earlier, state)

    head = jnp.arange(heads, dtype=jnp.int32)
    present = head < geometry.heads
    if not config.combines:
        norm = _norm(state.total, v_scale)
        attention = [
            (dims[:, None], sums * norm[None, :])
            for dims, sums in zip(value_dims, state.sums, strict=True)
        ]
        _finish(plan, refs, own, active, head[None, :], attention)
        if plan.return_lse:
            plt.store(refs["lse"].at[own, head], _lse(state.peak, state.total), mask=present)
        return
    line = (own * config.splits + split) * geometry.heads + head
    for dims, sums in zip(value_dims, state.sums, strict=True):
        plt.store(
            refs["partial"].at[line[None, :], dims[:, None]],
            sums,
            mask=jnp.broadcast_to(present[None, :], sums.shape),
        )
    plt.store(refs["partial_peak"].at[line], state.peak, mask=present)
    plt.store(refs["partial_total"].at[line], state.total, mask=present)


def _value_scale(plan: Plan, refs):
    """What values are multiplied with: loaded up front, so that nothing waits for it at the end."""
    return refs["v_scale"][0] if plan.geometry.fp8 else 1.0


def _norm(total: jax.Array, v_scale) -> jax.Array:
    """What weighted sums of values are multiplied with, given the sum of weights."""
    none = total == 0
    return jnp.where(none, 0.0, 1.0 / jnp.where(none, 1.0, total) * v_scale)


def _lse(peak: jax.Array, total: jax.Array) -> jax.Array:
    """Natural logarithm of the sum of exponentials."""
    none = total == 0
    return jnp.where(none, -jnp.inf, (peak + jnp.log2(jnp.where(none, 1.0, total))) * LN_2)


# --- combine


def _combine_kernel(*args, plan: Plan, names: tuple[str, ...]):
    refs = dict(zip(names, args, strict=True))
    geometry, splits = plan.geometry, plan.config.splits
    row, head = _wait(plan, pl.program_id(0)), jnp.full((1,), pl.program_id(1))
    mates = _mates(plan, row)
    active = [refs["active"][mate] for mate in mates]
    v_scale = _value_scale(plan, refs)
    split = jnp.arange(pl.next_power_of_2(splits), dtype=jnp.int32)
    first = pl.program_id(2) * plan.config.combine_width
    width = min(plan.config.combine_width, COMBINE_PIECE)
    columns = [
        first + begin + jnp.arange(width, dtype=jnp.int32)
        for begin in range(0, plan.config.combine_width, width)
    ]

    def load(mate, mask):
        line = (mate * splits + split) * geometry.heads + head
        sums = tuple(
            plt.load(
                refs["partial"].at[line[None, :], dims[:, None]],
                mask=jnp.broadcast_to(mask[None, :], (width, split.size)),
                other=0,
            )
            for dims in columns
        )
        peak = plt.load(refs["partial_peak"].at[line], mask=mask, other=-jnp.inf)
        total = plt.load(refs["partial_total"].at[line], mask=mask, other=0)
        return _State(peak, total, sums)

    state = load(row, split < splits)
    if plan.lends:
        helped, helpers = _helpers(mates, active)

        def with_helpers():
            one, two, three = (load(mate, (split < splits) & helps) for mate, helps in helpers)
            return _merge(plan, _merge(plan, state, one), _merge(plan, two, three))

        state = lax.cond(helped, with_helpers, lambda: state)
    peak = jnp.max(jnp.where(active[0], state.peak, -jnp.inf), axis=0)
    weights = jnp.exp2(state.peak - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = jnp.where(active[0], jnp.sum(state.total * weights, axis=0), 0.0)
    weights = weights * _norm(total, v_scale)
    attention = [
        (dims, jnp.sum(weights[None, :] * sums, axis=1))
        for dims, sums in zip(columns, state.sums, strict=True)
    ]
    _finish(plan, refs, row, active[0], head, attention)
    if plan.return_lse:
        plt.store(refs["lse"].at[row, head], jnp.full((1,), _lse(peak, total)))


# --- gate and output


def _reciprocal(plan: Plan, x):
    """1 / x as IEEE defines it; the GPU's plain float32 division is an approximation."""
    if plan.interpret:
        return 1 / x
    return _assembly("rcp.rn.f32 $0, $1;", x)


def _gate(plan: Plan, gate_ref, row, head):
    """`sigmoid(gate)` of a row's heads, rounded to the gate's dtype, as float32."""
    geometry = plan.geometry
    token_stride, head_stride = plan.gate_strides
    token, group = _divide(row, geometry.groups)
    column = (group * geometry.heads + head) * head_stride
    at = gate_ref.at[_line(token, token_stride), column]
    gate = plt.load(at, mask=head < geometry.heads, other=0)
    sigmoid = _reciprocal(plan, 1.0 + jnp.exp(-gate.astype(jnp.float32)))
    return sigmoid.astype(gate_ref.dtype).astype(jnp.float32)


def _finish(plan: Plan, refs, row, active, head, attention):
    """Rounds, gates, clears and stores a row's attention, a list of pieces: dims and values.

    Stores come last: what is loaded after a store waits for it.
    """
    dtype = jnp.dtype(plan.geometry.output_dtype)
    gated = plan.geometry.gate_dtype is not None
    gate = _gate(plan, refs["gate"], row, head) if gated else None
    row_stride, head_stride = plan.output_strides
    for dims, values in attention:
        result = values.astype(dtype)
        if gated:
            result = (result.astype(jnp.float32) * gate).astype(dtype)
        mask = jnp.broadcast_to(head < plan.geometry.heads, values.shape)
        if plan.clear_inactive:
            result = jnp.where(active, result, jnp.zeros_like(result))
        else:
            mask = mask & active
        at = refs["output"].at[_line(row, row_stride), head * head_stride + dims]
        plt.store(at, result, mask=mask)


# --- launch


def _wait(plan: Plan, row: jax.Array) -> jax.Array:
    """`row`, known only once the preceding kernel has finished: every load comes after it."""
    if not plan.dependent_launch:
        return row
    return jnp.max(_assembly("griddepcontrol.wait; mov.b32 $0, $1;", jnp.full((1,), row)))


def _release(plan: Plan, x: jax.Array) -> jax.Array:
    """`x`; once all programs have it, the next kernel's may take their places and wait there."""
    if not plan.dependent_launch:
        return x
    return _assembly("griddepcontrol.launch_dependents; mov.b32 $0, $1;", x)


@usual_promotion
def attend(plan: Plan, buffers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Launches split and, where `config.combines`, combine.

    Args:
        plan: What is static.
        buffers: Arrays by name. In the shapes of `plan.shapes`: `query`, `cache` (uint16 where
            `plan.words`), `regions` and `block_table` (int32; int64 as pairs), and where there are
            such, `gate` and an `output` that is written in place. `positions` `[rows]` int32 (int64
            as pairs); `active` `[rows]` bool; `k_scale` and `v_scale` `[1]` float32 with an FP8
            cache; `offset` `[1]` int32 where `plan.offset_unit`, in elements of the cache.

    Returns:
        `output` in its shape of `plan.shapes`, and `lse` `[rows, heads]` float32 (natural
        logarithm) where `plan.return_lse`.
    """
    geometry, config = plan.geometry, plan.config
    rows, heads, splits = geometry.rows, geometry.heads, config.splits
    if plan.page_lines:
        buffers = buffers | {"cache": buffers["cache"].reshape(-1, plan.cache_strides[2])}
    results = {"output": jax.ShapeDtypeStruct(plan.buffer("output")[1], geometry.output_dtype)}
    if plan.return_lse:
        results["lse"] = jax.ShapeDtypeStruct((rows, heads), jnp.float32)
    finish = ["active", *(name for name in ("gate", "output", "v_scale") if name in buffers)]
    reads = [name for name in buffers if name not in ("v_scale", *finish)]
    if not config.combines:
        return _launch(_split_kernel, plan, (rows,), reads + finish, buffers, results, config.warps)
    scratch = {
        "partial": jax.ShapeDtypeStruct((rows * splits * heads, HEAD_DIM), jnp.float32),
        "partial_peak": jax.ShapeDtypeStruct((rows * splits * heads,), jnp.float32),
        "partial_total": jax.ShapeDtypeStruct((rows * splits * heads,), jnp.float32),
    }
    partials = _launch(
        _split_kernel, plan, (rows * splits,), [*reads, "active"], buffers, scratch, config.warps
    )
    return _launch(
        _combine_kernel,
        plan,
        (rows, heads, HEAD_DIM // config.combine_width),
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
