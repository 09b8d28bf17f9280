"""The frozen case list that tests, the command line and benchmarks share.

A `Case` names a call by its traits; `build` draws its arrays from the case's own seed. Whatever the
contract says must not matter is poisoned: pages, tokens and lines that are not attended hold NaN,
dead slots and table entries hold garbage ids, and the output buffer holds NaN before the call.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparse_decode.call import Call
from sparse_decode.contract import CACHE_DIM, HEAD_DIM, REGION_TOKENS
from sparse_decode.oracle import attended

GARBAGE_ID = 0x7FFF_FFF0


@dataclass(frozen=True)
class Case:
    """The traits of one call.

    Attributes:
        name: Unique; also the seed.
        contexts: For each request, tokens up to and including its last query token; 0 gives
            positions of -1.
        cache: "float8_e4m3fn", "uint8", "bfloat16" or "float16".
        query: "bfloat16" or "float16".
        output: Dtype of the output; None is the dtype of `query`.
        heads, groups, query_len, slots, page_size, splits: As in the contract.
        gate: Dtype of the gate, or None.
        index: Dtype of `regions` and `positions`.
        inactive: Query tokens that are padding.
        clear_inactive: As in the contract.
        blank: Rows whose slots are all unused.
        masked: Share of the live slots, from and to, that is set to unused.
        repeated: Whether every id of a row is the current region.
        outside: Whether a third of the ids and some table entries point outside the cache.
        layout: "dense", "packed" (pages stand apart and begin inside a larger page) or
            "token_major" (groups inside tokens, `[pages, page_size, groups, 384]` in memory).
        strided: Whether query, regions, block_table, gate and output are padded views.
        logit_size: Standard deviation of the scaled logits, about.
        value_scale: Standard deviation of the values, about.
    """

    name: str
    contexts: tuple[int, ...]
    cache: str = "float8_e4m3fn"
    query: str = "bfloat16"
    output: str | None = None
    heads: int = 8
    groups: int = 1
    query_len: int = 1
    slots: int = 17
    page_size: int = 64
    splits: int | None = 4
    gate: str | None = None
    index: str = "int64"
    inactive: tuple[int, ...] = ()
    clear_inactive: bool = True
    blank: tuple[int, ...] = ()
    masked: tuple[float, float] = (0, 0)
    repeated: bool = False
    outside: bool = False
    layout: str = "dense"
    strided: bool = False
    logit_size: float = 1.5
    value_scale: float = 1.0


BF16: dict[str, Any] = {"cache": "bfloat16", "query": "bfloat16"}
FP16: dict[str, Any] = {"cache": "float16", "query": "float16"}

CASES = (
    Case("fp8", (200, 77, 130)),
    Case("fp8_split1", (200, 77, 130), splits=1),
    Case("fp8_split2_gate", (200, 77), splits=2, gate="bfloat16"),
    Case("fp8_split32", (300, 77, 1), splits=32, slots=33),
    Case("fp8_splits_above_slots", (120, 9), splits=32, slots=9),
    Case("fp8_heuristic_splits", (200, 500), splits=None, slots=65),
    Case("fp8_query_fp16", (200, 77), query="float16", gate="float16"),
    Case("fp8_output_fp16", (200, 77), output="float16"),
    Case("uint8_verify4_groups2", (70, 33), cache="uint8", query_len=4, groups=2, gate="float32"),
    Case("fp8_int32_indices", (200, 77), index="int32"),
    Case("fp8_head1", (200, 77), heads=1),
    Case("fp8_heads4", (200, 77), heads=4, page_size=16),
    Case("fp8_heads5", (90, 40), heads=5, page_size=24),
    Case("fp8_heads16_gate", (200, 77), heads=16, page_size=128, gate="bfloat16"),
    Case("fp8_groups3", (60, 40), groups=3, page_size=8),
    Case("fp8_one_slot", (5, 30), slots=1, splits=2),
    Case("fp8_edges", (1, 7, 8, 9, 63, 64, 65, 0), splits=2, gate="bfloat16"),
    Case("fp8_inactive", (200, 77, 50, 9), inactive=(0, 2), gate="bfloat16"),
    Case("fp8_inactive_split1", (200, 77, 50), inactive=(1,), splits=1, gate="float32"),
    Case("fp8_inactive_kept", (200, 77, 50), inactive=(1,), clear_inactive=False),
    Case("fp8_inactive_kept_split1", (90, 50), inactive=(0,), clear_inactive=False, splits=1),
    Case("fp8_padded", (200, 77, 130, 9, 50, 1, 0, 90), inactive=(2, 3, 4, 5, 6, 7), splits=2),
    Case("fp8_padding_between", (200, 77, 130, 90, 9, 300, 50, 8), inactive=(1, 4, 7), splits=3),
    Case("fp8_blank_rows", (200, 77, 90), blank=(1,), gate="bfloat16"),
    Case("fp8_first_masked", (270, 250), masked=(0, 0.4), slots=33),
    Case("fp8_middle_masked", (270, 250), masked=(0.2, 0.75), slots=33, splits=1),
    Case("fp8_last_masked", (270, 250), masked=(0.6, 1), slots=33, splits=2),
    Case("fp8_holes_repeated", (200, 77), masked=(0.2, 0.3), repeated=True),
    Case("fp8_outside", (200, 300), outside=True, slots=33),
    Case("fp8_packed", (200, 77), layout="packed", groups=2),
    Case("fp8_token_major_strided", (200, 77), layout="token_major", groups=2, strided=True),
    Case("fp8_strided_gate", (200, 77), strided=True, gate="bfloat16", query_len=2),
    Case("fp8_sharp", (200, 77), logit_size=40.0, value_scale=30.0),
    Case("bf16", (200, 77, 130), **BF16),
    Case("bf16_split1_gate", (200, 77), splits=1, gate="bfloat16", **BF16),
    Case("bf16_split32", (300, 77, 1), splits=32, slots=33, **BF16),
    Case("bf16_head1_page8", (60, 77), heads=1, page_size=8, **BF16),
    Case("bf16_heads16_groups2", (80, 40), heads=16, groups=2, page_size=16, **BF16),
    Case("bf16_verify4", (70, 33), query_len=4, page_size=32, gate="float32", **BF16),
    Case("bf16_edges", (1, 8, 9, 64, 65, 0), splits=2, **BF16),
    Case("bf16_inactive", (200, 77, 50), inactive=(1,), gate="bfloat16", **BF16),
    Case("bf16_half_padded", (90, 200, 300, 130), inactive=(2, 3), gate="bfloat16", **BF16),
    Case("bf16_padded_kept", (9, 200, 1, 77), inactive=(0, 2, 3), clear_inactive=False, **BF16),
    Case("bf16_middle_masked", (270, 250), masked=(0.2, 0.75), slots=33, splits=1, **BF16),
    Case("bf16_outside", (200, 300), outside=True, slots=33, **BF16),
    Case("bf16_packed_strided", (200, 77), layout="packed", strided=True, gate="float16", **BF16),
    Case("bf16_sharp", (200, 77), logit_size=40.0, **BF16),
    Case("fp16", (200, 77, 130), **FP16),
    Case("fp16_heads4_gate", (200, 77), heads=4, page_size=128, gate="float16", **FP16),
    Case("fp16_token_major", (200, 77), layout="token_major", groups=2, splits=1, **FP16),
    Case("empty", ()),
)

WIDE_CASES = (
    Case("wide_fp8", (65536, 40000, 4104, 100), slots=513, splits=None),
    Case("wide_fp8_groups8", (9000, 5000), slots=513, groups=8, splits=8, gate="bfloat16"),
    Case("wide_fp8_r1025_verify4", (20000,), slots=1025, query_len=4, splits=32),
    Case("wide_fp8_packed_page16", (9000, 5000), slots=513, layout="packed", page_size=16),
    Case("wide_bf16", (65536, 40000, 4104, 100), slots=513, splits=None, **BF16),
    Case("wide_bf16_heads16", (9000, 5000), slots=513, heads=16, splits=1, **BF16),
    Case("wide_fp16", (9000, 5000), slots=513, splits=16, **FP16),
)


def build(case: Case) -> Call:
    """Draws the arrays of a case; the same case always gives the same bits."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    groups, query_len, page_size = case.groups, case.query_len, case.page_size
    requests = len(case.contexts)
    tokens, rows = requests * query_len, requests * query_len * groups

    last = np.repeat(np.asarray(case.contexts, np.int64) - 1, query_len)
    position = np.maximum(last - np.tile(np.arange(query_len)[::-1], requests), -1)
    positions = np.repeat(position, groups).astype(case.index)
    active = np.ones(tokens, bool)
    active[list(case.inactive)] = False
    active = np.repeat(active, groups)

    max_context = max((*case.contexts, page_size))
    max_pages = -(-max_context // page_size) + 1
    used_pages = [-(-context // page_size) for context in case.contexts]
    pages = sum(used_pages) + 3
    order = rng.permutation(pages)
    block_table = np.full((requests, max_pages), GARBAGE_ID, np.int32)
    block_table[:, ::2] = -1
    for request, count in enumerate(used_pages):
        block_table[request, :count], order = order[:count], order[count:]

    regions = np.full((rows, case.slots), GARBAGE_ID, case.index)
    for row in range(rows):
        _select(regions[row], int(positions[row]), case, rng)
    regions[list(case.blank)] = -1
    regions[~active] = GARBAGE_ID
    if case.outside:
        _point_outside(regions, block_table, pages, rng)

    query = rng.normal(size=(rows, case.heads, HEAD_DIM)) * case.logit_size
    lines = rng.normal(size=(pages, groups, page_size, CACHE_DIM))
    lines[..., HEAD_DIM:] *= case.value_scale
    gate = rng.normal(size=(tokens, groups * case.heads)) * 2
    query[~active] = np.nan
    gate[~active.reshape(tokens, groups)[:, 0]] = np.nan

    fp8 = case.cache in ("float8_e4m3fn", "uint8")
    k_scale, v_scale = (np.float32(0.037), np.float32(0.029)) if fp8 else (1.0, 1.0)
    lines[..., :HEAD_DIM] /= k_scale
    lines[..., HEAD_DIM:] /= v_scale
    stored = "float8_e4m3fn" if fp8 else case.cache
    if fp8:
        lines = np.clip(lines, -448, 448)
    cache = _storage(case, (pages, groups, page_size, CACHE_DIM), stored)
    cache[:] = lines
    output = _view(np.full(query.shape, np.nan), case.output or case.query, case.strided)

    call = Call(
        query=_view(query, case.query, case.strided),
        cache=cache,
        regions=_view(regions, case.index, case.strided),
        block_table=_view(block_table, "int32", case.strided),
        positions=positions,
        active=active,
        output=output,
        k_scale=np.asarray(k_scale, np.float32) if fp8 else None,
        v_scale=np.asarray(v_scale, np.float32) if fp8 else None,
        gate=_view(gate, case.gate, case.strided) if case.gate else None,
        query_len=query_len,
        splits=case.splits,
        clear_inactive=case.clear_inactive,
    )
    keep = np.zeros(cache.shape[:3], bool)
    for row in range(rows):
        at_pages, at_offsets = attended(call, row)
        keep[at_pages, row % groups, at_offsets] = True
    cache[~keep] = np.nan
    if case.cache == "uint8":
        call = _with_cache(call, cache.view(np.uint8))
    return call


def _with_cache(call: Call, cache: np.ndarray) -> Call:
    return Call(**{**call.arrays(), **call.options(), "cache": cache})


def _select(slots: np.ndarray, position: int, case: Case, rng: np.random.Generator) -> None:
    """Fills the trailing slots of one row with a random selection that holds the current region."""
    if position < 0:
        return
    current = position // REGION_TOKENS
    live = min(current + 1, len(slots))
    ids = np.append(rng.permutation(current)[: live - 1], current)
    if case.repeated:
        ids[:] = current
    rng.shuffle(ids)
    begin, end = (round(share * live) for share in case.masked)
    ids[begin:end] = -1
    slots[len(slots) - live :] = ids


def _point_outside(
    regions: np.ndarray, block_table: np.ndarray, pages: int, rng: np.random.Generator
) -> None:
    """Lets ids and table entries point before, just past and far past what they index."""
    info = np.iinfo(regions.dtype)
    outside = np.array([-2, info.min, info.max, GARBAGE_ID, 1 << 28], regions.dtype)
    if info.bits == 64:
        outside = np.append(outside, [(1 << 32) + 1, -(1 << 32)])
    hit = rng.random(regions.shape) < 0.3
    regions[hit] = rng.choice(outside, hit.sum())
    block_table[:, 1] = (-1, pages)
    block_table[:, 2] = (np.iinfo(np.int32).max, np.iinfo(np.int32).min)


def _storage(case: Case, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An uninitialised cache of `shape` in the case's layout; everything around it is NaN."""
    pages, groups, page_size, dim = shape
    if case.layout == "dense":
        return np.empty(shape, dtype)
    if case.layout == "token_major":
        return np.empty((pages, page_size, groups, dim), dtype).swapaxes(1, 2)
    page = groups * page_size * dim
    storage = np.full((pages, 2 * page + 256), np.nan, dtype)
    return storage[:, 128 : 128 + page].reshape(shape)


def _view(array: np.ndarray, dtype: str, strided: bool) -> np.ndarray:
    """`array` in `dtype`; padded at the end of every dimension but the first if `strided`."""
    if not strided:
        return array.astype(dtype)
    padded = np.zeros((array.shape[0], *(extent + 32 for extent in array.shape[1:])), dtype)
    view = padded[tuple(slice(extent) for extent in array.shape)]
    view[:] = array
    return view
