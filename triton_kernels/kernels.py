"""Triton kernels of `sparse_decode_attention`: split and combine.

`_split` runs on a grid of (rows, splits). A program takes all heads of one row, padded to 16, for
one contiguous share of the row's live slots, cut at whole tiles of eight slots (64 tokens). With
one split it writes the output; otherwise it leaves a normalised float32 partial
`[rows, splits, heads, 192]` and a base-2 lse `[rows, splits, heads]`. `_combine` runs on a grid of
(rows, heads) and merges the splits.

Both finish an output the same way: attention rounded to the output dtype, times the sigmoid of the
gate rounded to the gate dtype, rounded again. The algorithm is that of vLLM's Step-5 sparse decode
attention, except that ids and table entries that point outside are unused, and that inactive rows
are exactly zero.
"""

# Type checkers cannot follow Triton's language.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparse_decode import contract

# Fusion is what Triton has always done; from 3.9 on it wants to be asked for. Four stages let the
# loads of a tile's indices run ahead of those of its lines.
OPTIONS = {"enable_fp_fusion": True}
SPLIT_OPTIONS = {**OPTIONS, "num_warps": 4, "num_stages": 4}


def combine_options(splits_padded: int) -> dict[str, object]:
    """Options of `_combine`: as few warps as hold the partials of so many splits in registers."""
    # Without a bound, the compiler for architecture 80 keeps a warp to 128 registers, and spills.
    return {**OPTIONS, "num_warps": max(1, splits_padded // 32), "maxnreg": 160}


INTERPRETED = tl.constexpr(knobs.runtime.interpret)
HEAD_DIM = tl.constexpr(contract.HEAD_DIM)
REGION_TOKENS = tl.constexpr(contract.REGION_TOKENS)
FP8_QUERY_MAX = tl.constexpr(contract.FP8_QUERY_MAX)
HEADS_PADDED = tl.constexpr(contract.MAX_HEADS)
TILE_SLOTS = tl.constexpr(8)
TILE_TOKENS = tl.constexpr(8 * contract.REGION_TOKENS)
PIECE = tl.constexpr(64)  # HEAD_DIM is no power of two: it is worked in three pieces.
MAX_INT32 = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _lines(
    regions_ptr,
    block_table_ptr,
    first_slot,
    position,
    max_regions,
    pages,
    cache_page_stride,
    cache_token_stride,
    SLOTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Layout: where the 64 tokens of the eight slots from `first_slot` on lie.

    Returns:
        `(line, attended)`, two vectors of 64: the offset of each token's line from the group's
        first line in page 0, and whether the token is attended. No other line may be touched.
    """
    lane = tl.arange(0, TILE_TOKENS)
    slot = first_slot + lane // REGION_TOKENS
    region = tl.load(regions_ptr + slot, mask=slot < SLOTS, other=-1)
    attended = _within(region, max_regions)
    token = region.to(tl.int32) * REGION_TOKENS + lane % REGION_TOKENS
    attended = attended & (token <= position)
    place = token.to(tl.uint32)
    page = tl.load(block_table_ptr + place // PAGE_SIZE, mask=attended, other=-1)
    attended = attended & _within(page, pages)
    offset = (place % PAGE_SIZE).to(tl.int64)
    line = page.to(tl.int64) * cache_page_stride + offset * cache_token_stride
    return line, attended


@triton.jit
def _within(x, limit):
    """0 <= x < limit, in one comparison."""
    if x.dtype.is_int64():
        return x.to(tl.uint64, bitcast=True) < limit.to(tl.uint64)
    else:
        return x.to(tl.uint32, bitcast=True) < limit.to(tl.uint32)


@triton.jit
def _carry(attended):
    """The mask itself, by way of shared memory to where the logits are.

    Without this, Triton computes it anew there, and loads regions and table a second time.
    """
    return tl.gather(attended.to(tl.int32), tl.arange(0, TILE_TOKENS), 0) != 0


@triton.jit
def _load_lines(line_ptrs, attended, OPERAND: tl.constexpr):
    """64 elements of each line, `[64 tokens, 64 dims]` as `OPERAND`; 0 where not attended."""
    dim = tl.arange(0, PIECE)
    lines = tl.load(line_ptrs[:, None] + dim[None, :], mask=attended[:, None], other=0.0)
    return lines.to(OPERAND)


@triton.jit
def _load_query(query_ptrs, is_head, OPERAND: tl.constexpr, FP8: tl.constexpr):
    """64 elements of each head's query, `[padded heads, 64]` as `OPERAND`; 0 in padding heads."""
    query = tl.load(query_ptrs, mask=is_head[:, None], other=0.0)
    if FP8:
        limit: tl.constexpr = FP8_QUERY_MAX
        query = tl.clamp(query.to(tl.float32), -limit, limit, tl.PropagateNan.ALL)
    return query.to(OPERAND)


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    """Float32 rounded to `DTYPE`, to nearest even."""
    if INTERPRETED and DTYPE.is_bf16():
        # The interpreter's own cast to bfloat16 truncates.
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.uint16).to(DTYPE, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def _dot(a, b, accumulator):
    """`a @ b + accumulator` in float32."""
    if INTERPRETED and a.dtype.is_bf16():
        # The interpreter's dot would multiply the raw bits of bfloat16.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator)


@triton.jit
def _gate(gate_ptr, offset, mask, GATED: tl.constexpr):
    """The sigmoid of the gate, rounded to the gate dtype, in float32; 1 without a gate."""
    if GATED:
        logit = tl.load(gate_ptr + offset, mask=mask).to(tl.float32)
        sigmoid = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
        return _round(sigmoid, gate_ptr.dtype.element_ty).to(tl.float32)
    else:
        return 1.0


@triton.jit
def _finish(attention, gate, OUTPUT: tl.constexpr, GATED: tl.constexpr):
    """The output for float32 attention, by way of the contract's rounding points."""
    output = _round(attention, OUTPUT)
    if GATED:
        output = _round(output.to(tl.float32) * gate, OUTPUT)
    return output


@triton.jit(do_not_specialize=["max_regions", "pages", "regions_row_stride", "table_row_stride"])
def _split(
    query_ptr,
    cache_ptr,
    regions_ptr,
    block_table_ptr,
    positions_ptr,
    active_ptr,
    output_ptr,
    partial_ptr,
    lse_ptr,
    k_scale_ptr,
    v_scale_ptr,
    gate_ptr,
    scale,
    max_regions,
    pages,
    query_row_stride,
    query_head_stride,
    cache_page_stride,
    cache_group_stride,
    cache_token_stride,
    regions_row_stride,
    table_row_stride,
    output_row_stride,
    output_head_stride,
    gate_token_stride,
    gate_head_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS_PER_REQUEST: tl.constexpr,
    SLOTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    FP8: tl.constexpr,
    GATED: tl.constexpr,
    CLEAR_INACTIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of one row over one share of its live slots; grid (rows, splits)."""
    if PDL:
        # Before the first load: the kernel in front may be what produces any of the inputs.
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.arange(0, HEADS_PADDED)
    dim = tl.arange(0, PIECE)
    is_head = head < HEADS
    output_ptrs = (
        output_ptr + row * output_row_stride + head.to(tl.int64)[:, None] * output_head_stride + dim
    )

    # What the row itself says is loaded side by side, before the first branch waits for any of it.
    active = tl.load(active_ptr + row)
    position = tl.load(positions_ptr + row)
    if FP8:
        OPERAND: tl.constexpr = tl.float16
        logit_scale = scale * LOG2_E * tl.load(k_scale_ptr)
        value_scale = tl.load(v_scale_ptr)
    else:
        OPERAND: tl.constexpr = cache_ptr.dtype.element_ty
        logit_scale = scale * LOG2_E
        value_scale = 1.0
    query_ptrs = (
        query_ptr + row * query_row_stride + head.to(tl.int64)[:, None] * query_head_stride + dim
    )
    query0 = _load_query(query_ptrs, is_head, OPERAND, FP8)
    query1 = _load_query(query_ptrs + PIECE, is_head, OPERAND, FP8)
    query2 = _load_query(query_ptrs + 2 * PIECE, is_head, OPERAND, FP8)

    part = (row * SPLITS + split) * HEADS + head
    if not active:
        if SPLITS > 1:
            tl.store(lse_ptr + part, float("-inf"), mask=is_head)
        elif CLEAR_INACTIVE:
            zero = tl.zeros([HEADS_PADDED, PIECE], output_ptr.dtype.element_ty)
            for piece in tl.static_range(HEAD_DIM // PIECE):
                tl.store(output_ptrs + piece * PIECE, zero, mask=is_head[:, None])
        return

    position = tl.maximum(tl.minimum(position, MAX_INT32), -1).to(tl.int32)
    live = tl.minimum(tl.maximum(position, 0) // REGION_TOKENS + 1, SLOTS)
    tiles = tl.cdiv(live, TILE_SLOTS)
    first_tile = split * (tiles // SPLITS) + tl.minimum(split, tiles % SPLITS)
    last_tile = first_tile + tiles // SPLITS + tl.where(split < tiles % SPLITS, 1, 0)

    if SPLITS > 1:
        partial_ptrs = partial_ptr + part[:, None] * HEAD_DIM + dim
        if first_tile >= last_tile:
            zero = tl.zeros([HEADS_PADDED, PIECE], tl.float32)
            for piece in tl.static_range(HEAD_DIM // PIECE):
                tl.store(partial_ptrs + piece * PIECE, zero, mask=is_head[:, None])
            tl.store(lse_ptr + part, float("-inf"), mask=is_head)
            return

    group = row % GROUPS
    regions_ptr += row * regions_row_stride
    block_table_ptr += row // ROWS_PER_REQUEST * table_row_stride
    cache_ptr += group * cache_group_stride
    largest = tl.full([HEADS_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([HEADS_PADDED], tl.float32)
    value0 = tl.zeros([HEADS_PADDED, PIECE], tl.float32)
    value1 = tl.zeros([HEADS_PADDED, PIECE], tl.float32)
    value2 = tl.zeros([HEADS_PADDED, PIECE], tl.float32)
    for tile in range(first_tile, last_tile):
        line, attended = _lines(
            regions_ptr,
            block_table_ptr,
            SLOTS - live + tile * TILE_SLOTS,
            position,
            max_regions,
            pages,
            cache_page_stride,
            cache_token_stride,
            SLOTS,
            PAGE_SIZE,
        )
        key_ptrs = cache_ptr + line
        value_ptrs = key_ptrs + HEAD_DIM

        logits = tl.zeros([HEADS_PADDED, TILE_TOKENS], tl.float32)
        logits = _dot(query0, _load_lines(key_ptrs, attended, OPERAND).trans(), logits)
        logits = _dot(query1, _load_lines(key_ptrs + PIECE, attended, OPERAND).trans(), logits)
        logits = _dot(query2, _load_lines(key_ptrs + 2 * PIECE, attended, OPERAND).trans(), logits)
        logits = tl.where(_carry(attended)[None, :], logits * logit_scale, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(logits, 1))
        pivot = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay = tl.exp2(largest - pivot)
        weights = tl.exp2(logits - pivot[:, None])
        total = total * decay + tl.sum(weights, 1)
        largest = new_largest

        weights = _round(weights, OPERAND)
        decay = decay[:, None]
        value0 = _dot(weights, _load_lines(value_ptrs, attended, OPERAND), value0 * decay)
        value1 = _dot(weights, _load_lines(value_ptrs + PIECE, attended, OPERAND), value1 * decay)
        value2 = _dot(
            weights, _load_lines(value_ptrs + 2 * PIECE, attended, OPERAND), value2 * decay
        )

    if PDL:
        gdc_launch_dependents()
    blank = total == 0.0
    factor = tl.where(blank, 0.0, value_scale / tl.where(blank, 1.0, total))[:, None]
    if SPLITS == 1:
        all_heads = group * HEADS + head
        gate_offset = row // GROUPS * gate_token_stride + all_heads * gate_head_stride
        gate = _gate(gate_ptr, gate_offset[:, None], is_head[:, None], GATED)
        OUTPUT: tl.constexpr = output_ptr.dtype.element_ty
        value0 = _finish(value0 * factor, gate, OUTPUT, GATED)
        value1 = _finish(value1 * factor, gate, OUTPUT, GATED)
        value2 = _finish(value2 * factor, gate, OUTPUT, GATED)
        tl.store(output_ptrs, value0, mask=is_head[:, None])
        tl.store(output_ptrs + PIECE, value1, mask=is_head[:, None])
        tl.store(output_ptrs + 2 * PIECE, value2, mask=is_head[:, None])
    else:
        lse = tl.where(blank, float("-inf"), largest + tl.log2(total))
        tl.store(lse_ptr + part, lse, mask=is_head)
        tl.store(partial_ptrs, value0 * factor, mask=is_head[:, None])
        tl.store(partial_ptrs + PIECE, value1 * factor, mask=is_head[:, None])
        tl.store(partial_ptrs + 2 * PIECE, value2 * factor, mask=is_head[:, None])


@triton.jit
def _merge(partial_ptrs, weights, is_split):
    """64 dims of a head's attention from the partials of its splits."""
    partial = tl.load(partial_ptrs, mask=is_split[:, None], other=0.0)
    return tl.sum(partial * weights[:, None], 0)


@triton.jit
def _combine(
    partial_ptr,
    lse_ptr,
    active_ptr,
    output_ptr,
    gate_ptr,
    output_row_stride,
    output_head_stride,
    gate_token_stride,
    gate_head_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    GATED: tl.constexpr,
    CLEAR_INACTIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges the splits of one head of one row; grid (rows, heads)."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, PIECE)
    output_ptrs = output_ptr + row * output_row_stride + head * output_head_stride + dim
    OUTPUT: tl.constexpr = output_ptr.dtype.element_ty

    active = tl.load(active_ptr + row)
    split = tl.arange(0, SPLITS_PADDED)
    is_split = split < SPLITS
    place = (row * SPLITS + split) * HEADS + head
    lse = tl.load(lse_ptr + place, mask=is_split, other=float("-inf"))
    if not active:
        if CLEAR_INACTIVE:
            for piece in tl.static_range(HEAD_DIM // PIECE):
                tl.store(output_ptrs + piece * PIECE, tl.zeros([PIECE], OUTPUT))
        return

    largest = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    weights = weights / tl.where(total == 0.0, 1.0, total)

    all_heads = row % GROUPS * HEADS + head
    gate_offset = row // GROUPS * gate_token_stride + all_heads * gate_head_stride
    gate = _gate(gate_ptr, gate_offset, None, GATED)
    # Stores come last: what is loaded after a store waits for it.
    partial_ptrs = partial_ptr + place[:, None] * HEAD_DIM + dim
    attention0 = _merge(partial_ptrs, weights, is_split)
    attention1 = _merge(partial_ptrs + PIECE, weights, is_split)
    attention2 = _merge(partial_ptrs + 2 * PIECE, weights, is_split)
    tl.store(output_ptrs, _finish(attention0, gate, OUTPUT, GATED))
    tl.store(output_ptrs + PIECE, _finish(attention1, gate, OUTPUT, GATED))
    tl.store(output_ptrs + 2 * PIECE, _finish(attention2, gate, OUTPUT, GATED))
