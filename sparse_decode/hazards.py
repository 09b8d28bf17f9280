"""Hazards: calls whose indices, padding, content or sizes are hostile, and what must hold for them.

A `Hazard` is a call of the case list that is then harmed. Its result must lie within tolerance of
the oracle, and where it has a twin, a well-behaved call that means the same, it must have the
twin's bits. `faults` runs both and tells what does not hold.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import finfo, float8_e4m3fn

from sparse_decode import cases, tolerance
from sparse_decode.call import Call
from sparse_decode.cases import BF16, FP16, Case
from sparse_decode.contract import HEAD_DIM, REGION_TOKENS
from sparse_decode.oracle import attended
from sparse_decode.paths import Outcome

Change = Callable[[Call, np.random.Generator], Call]

# What stands in everything that is not attended. FP8 E4M3 has no infinities: its largest value
# takes their place.
POISONS = ("nan", "inf", "-inf", "bits")


@dataclass(frozen=True)
class Hazard:
    """A call and how it is harmed.

    Attributes:
        name: Unique; also the seed of the changes.
        base: The call before it is changed.
        harm: Changes the call.
        tame: Changes the same call into the twin; None where there is no twin.
        poison: What stands in the harmed call wherever nothing is attended; zeros in the twin.
        same_lse: Whether the twin has the same lse too.
    """

    name: str
    base: Case
    harm: Change
    tame: Change | None = None
    poison: str = "nan"
    same_lse: bool = True


class Trial(NamedTuple):
    """The calls of a hazard.

    Attributes:
        call: The harmed call.
        twin: The well-behaved call of the same result, or None.
        same_lse: Whether the twin's lse is the same too.
    """

    call: Call
    twin: Call | None
    same_lse: bool


def build(hazard: Hazard) -> Trial:
    """Draws the calls of a hazard; the same hazard always gives the same bits."""

    def draw(change: Change, poison: str) -> Call:
        rng = np.random.default_rng(zlib.crc32(hazard.name.encode()))
        call = cases.build(hazard.base)
        _fill_lines(call, rng)
        call = change(call, rng)
        poison_unattended(call, poison, rng)
        return call

    twin = None if hazard.tame is None else draw(hazard.tame, "zero")
    return Trial(draw(hazard.harm, hazard.poison), twin, hazard.same_lse)


def faults(trial: Trial, run: Callable[[Call], Outcome]) -> list[str]:
    """Runs a hazard's calls and lists what does not hold, in words.

    Args:
        trial: From `build`.
        run: Computes a call, such as the `run` of a `paths.Path`.
    """
    outcome = run(trial.call)
    allowed = tolerance.limits(trial.call)
    found = call_faults(trial.call, allowed, outcome)
    if trial.twin is None:
        return found
    twin = run(trial.twin)
    reference = allowed.reference
    # Where the oracle has no number, the tolerance has already asked for the same.
    compared = np.isfinite(reference.output.astype(np.float32)) & trial.call.active[:, None, None]
    if not _same_bits(outcome.output[compared], twin.output[compared]):
        found.append(f"output: other bits than the twin's in rows {_rows(outcome, twin, compared)}")
    if outcome.lse is not None and twin.lse is not None and trial.same_lse:
        compared = ~np.isnan(reference.lse)
        if not _same_bits(outcome.lse[compared], twin.lse[compared]):
            found.append("lse: other bits than the twin's")
    return found


def call_faults(call: Call, allowed: tolerance.Limits, outcome: Outcome) -> list[str]:
    """What is wrong with the result of a call, in words; nothing if it is within tolerance.

    Args:
        call: The call.
        allowed: Its `tolerance.limits`.
        outcome: What a path computed for it.
    """
    found = []
    verdict = tolerance.judge(allowed, outcome.output, outcome.lse, outcome.before)
    if verdict.fault:
        found.append(verdict.fault)
    cleared = outcome.output[~call.active]
    if (call.clear_inactive or outcome.before is None) and _bytes(cleared).any():
        found.append("output: an inactive row is not exactly 0")
    return found


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    return np.array_equal(_bytes(first), _bytes(second))


def _rows(outcome: Outcome, twin: Outcome, compared: np.ndarray) -> list[int]:
    """The rows in which two results have other bits."""
    rows = range(len(compared))
    return [
        row
        for row in rows
        if not _same_bits(outcome.output[row][compared[row]], twin.output[row][compared[row]])
    ]


# --- poison


def attended_lines(call: Call) -> np.ndarray:
    """`[pages, groups, page_size]` bool: the lines of the cache that some row attends to."""
    lines = np.zeros(call.cache.shape[:3], bool)
    for row in range(len(call.query)):
        pages, offsets = attended(call, row)
        lines[pages, row % call.cache.shape[1], offsets] = True
    return lines


def poison_unattended(call: Call, poison: str, rng: np.random.Generator) -> None:
    """Overwrites, in place, what must not matter.

    That is: every line that is not attended, the output, and the memory around each array that is
    a view of a larger one. Indices and what inactive rows hold are left as they are.

    Args:
        call: The call.
        poison: One of `POISONS`, or "zero".
        rng: Gives the random bits.
    """
    lines = attended_lines(call)
    kept = call.cache[lines]
    _spoil(call.cache, poison, rng)
    call.cache[lines] = kept
    if call.output is not None:
        _spoil(call.output, poison, rng)
    for array in (call.query, call.regions, call.block_table, call.gate):
        if array is not None and array.base is not None:
            kept = array.copy()
            _spoil(array, "zero" if poison == "zero" else "bits", rng)
            array[...] = kept


def _spoil(view: np.ndarray, poison: str, rng: np.random.Generator) -> None:
    """Overwrites all the memory that a view lies in."""
    dtype = np.dtype(float8_e4m3fn) if view.dtype == np.uint8 else view.dtype
    root = view
    while isinstance(root.base, np.ndarray):
        root = root.base
    memory = root.reshape(-1).view(dtype)
    if poison == "bits":
        memory.view(np.uint8)[:] = np.frombuffer(rng.bytes(memory.nbytes), np.uint8)
    elif poison == "zero":
        memory[:] = 0
    elif poison == "nan":
        memory[:] = np.nan
    else:
        largest = finfo(dtype).max if dtype == float8_e4m3fn else np.inf
        memory[:] = -largest if poison == "-inf" else largest


def _fill_lines(call: Call, rng: np.random.Generator) -> None:
    """Gives the lines that the case poisoned the content of other lines."""
    blank = np.isnan(call.cache[..., 0])
    lines = call.cache[~blank]
    if len(lines):
        call.cache[blank] = lines[rng.integers(len(lines), size=blank.sum())]


# --- indices


def garbage(dtype: Any, shape: tuple[int, ...], valid: int, rng: np.random.Generator) -> np.ndarray:
    """Random bits and, as the more deceptive half, indices from 0 to below `valid`."""
    info = np.iinfo(dtype)
    bits = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    return np.where(rng.random(shape) < 0.5, bits, rng.integers(valid, size=shape, dtype=dtype))


def odd_ids(call: Call) -> np.ndarray:
    """Ids that must count as unused: before, past and far past the table, and such that wrap."""
    return np.array([*_below(call), *_past(call), *_wrapping(call)], call.regions.dtype)


def odd_positions(call: Call) -> np.ndarray:
    """Positions before the start and past the table, and such that wrap."""
    info, end = np.iinfo(call.positions.dtype), table_end(call)
    wrapping = [2**32 + 5, -(2**32) + 5, 2**31 + 5] if info.bits == 64 else []
    odd = [-1, -2, info.min, end, 2**31 - 1, info.max, *wrapping]
    return np.array(odd, call.positions.dtype)


def table_end(call: Call) -> int:
    """Positions at or above this point past the block table."""
    return call.block_table.shape[1] * call.cache.shape[2]


def live_slots(call: Call, row: int) -> slice:
    """The live slots of a row."""
    slots = call.regions.shape[1]
    position = int(call.positions[row])
    return slice(slots - min(max(position, 0) // REGION_TOKENS + 1, slots), slots)


def _request(call: Call) -> np.ndarray:
    """`[rows, 1]`: the request of each row."""
    geometry = call.geometry()
    return np.arange(geometry.rows)[:, None] // geometry.rows_per_request


def _valid(call: Call) -> np.ndarray:
    """`[rows, slots]` bool: ids of live slots that point inside."""
    live = np.zeros(call.regions.shape, bool)
    for row in range(len(live)):
        live[row, live_slots(call, row)] = True
    return live & (call.regions >= 0) & (call.regions < call.geometry().max_regions)


def _logical(call: Call) -> np.ndarray:
    """`[rows, slots]`: the logical page of each id, 0 where there is none."""
    return np.where(_valid(call), call.regions * REGION_TOKENS // call.geometry().page_size, 0)


# --- changes


def _same(call: Call, rng: np.random.Generator) -> Call:
    return call


def _garbage_indices(call: Call, rng: np.random.Generator) -> Call:
    """Garbage in dead slots and in table entries that no live id leads to."""
    geometry = call.geometry()
    read = np.zeros(call.block_table.shape, bool)
    valid = _valid(call)
    read[np.broadcast_to(_request(call), valid.shape)[valid], _logical(call)[valid]] = True
    entries = garbage(np.int32, read.shape, geometry.pages, rng)
    call.block_table[~read] = entries[~read]
    for row, slots in enumerate(call.regions):
        dead = slots[: live_slots(call, row).start]
        dead[:] = garbage(slots.dtype, dead.shape, geometry.max_regions, rng)
    return call


def _no_indices(call: Call, rng: np.random.Generator) -> Call:
    """Dead slots unused, and table entries beyond the context page 0."""
    for row, slots in enumerate(call.regions):
        slots[: live_slots(call, row).start] = -1
    outside = (call.block_table < 0) | (call.block_table >= call.cache.shape[0])
    call.block_table[outside] = 0
    return call


def _ids(values: Callable[[Call], Iterable[int]], call: Call, rng: np.random.Generator) -> Call:
    """Some ids of each row become one of `values`; row 0 may see the whole table."""
    call = _no_indices(call, rng)
    call.positions[0] = table_end(call) - 1
    hit = rng.random(call.regions.shape) < 0.4
    hit[0, -1] = True
    call.regions[hit] = rng.choice(np.array([*values(call)], call.regions.dtype), hit.sum())
    return call


def _unused(call: Call) -> Iterable[int]:
    return [-1]


def _below(call: Call) -> Iterable[int]:
    return [-2, -8, -(2**31), np.iinfo(call.regions.dtype).min]


def _past(call: Call) -> Iterable[int]:
    end = call.geometry().max_regions
    return [end, end + 1, 2**31 - 1, np.iinfo(call.regions.dtype).max]


def _wrapping(call: Call) -> Iterable[int]:
    """Ids of which the low bits, or eight times which the low bits, are those of a valid id."""
    narrow = [-(2**31) + 1, *(2**bits + id for bits in (28, 29, 30) for id in (0, 1))]
    if call.regions.dtype == np.int32:
        return narrow
    return [*narrow, 2**32 + 1, -(2**32) + 1, 2**32 + 2**29, *(2**bits + 1 for bits in (60, 61))]


def _table(call: Call, rng: np.random.Generator) -> Call:
    """Some table entries point outside."""
    hit = rng.random(call.block_table.shape) < 0.4
    outside = [-1, call.cache.shape[0], -(2**31), 2**31 - 1]
    call.block_table[hit] = rng.choice(outside, hit.sum())
    return call


def _without_these_pages(call: Call, rng: np.random.Generator) -> Call:
    """The ids that lead to those entries are unused."""
    hit = rng.random(call.block_table.shape) < 0.4
    call.regions[_valid(call) & hit[_request(call), _logical(call)]] = -1
    return call


def _one_page(call: Call, rng: np.random.Generator) -> Call:
    """Every table entry of a request is its first page."""
    call.block_table[:] = call.block_table[:, :1]
    return call


def _equal_pages(call: Call, rng: np.random.Generator) -> Call:
    """Every page of a request holds what its first page holds."""
    for table in call.block_table:
        inside = table[(table >= 0) & (table < len(call.cache))]
        call.cache[inside] = call.cache[table[0]]
    return call


def _positions(
    values: Callable[[Call], Iterable[int]], call: Call, rng: np.random.Generator
) -> Call:
    call.positions[:] = [*values(call)]
    return call


def _holes(call: Call, rng: np.random.Generator) -> Call:
    """Every second slot is unused."""
    call.regions[:, -2::-2] = -1
    return call


def _right_padded(call: Call, rng: np.random.Generator) -> Call:
    """Live ids sit in the leading slots; those that still are in trailing ones count."""
    for row, slots in enumerate(call.regions):
        ids = slots[live_slots(call, row)].copy()
        slots[:] = -1
        slots[: len(ids)] = ids
    return call


def _right_padded_cleared(call: Call, rng: np.random.Generator) -> Call:
    return _no_indices(_right_padded(call, rng), rng)


def _one_token(call: Call, rng: np.random.Generator) -> Call:
    """Each row attends to its own token alone, the first of its region."""
    call.positions[:] -= call.positions % REGION_TOKENS
    call.regions[:] = -1
    for row, position in enumerate(call.positions):
        slot = rng.integers(live_slots(call, row).start, call.regions.shape[1])
        call.regions[row, slot] = position // REGION_TOKENS
    return call


def _all_scales(scale: float, call: Call) -> None:
    for array in (call.k_scale, call.v_scale):
        if array is not None:
            array[...] = scale


def _wild_padding(call: Call, rng: np.random.Generator) -> Call:
    """Inactive rows hold NaN and garbage; so do the scales if there are no other rows."""
    idle, geometry = ~call.active, call.geometry()
    info = np.iinfo(call.positions.dtype)
    call.positions[idle] = rng.permutation(np.resize([info.max, info.min], idle.sum()))
    shape = call.regions[idle].shape
    call.regions[idle] = garbage(call.regions.dtype, shape, geometry.max_regions, rng)
    idle_requests = np.setdiff1d(_request(call), _request(call)[call.active])
    shape = call.block_table[idle_requests].shape
    call.block_table[idle_requests] = garbage(np.int32, shape, geometry.pages, rng)
    if idle.all():
        _all_scales(np.nan, call)
    return call


def _calm_padding(call: Call, rng: np.random.Generator) -> Call:
    idle = ~call.active
    call.query[idle] = 1
    call.positions[idle] = 0
    call.regions[idle] = -1
    if call.gate is not None:
        call.gate[np.isnan(call.gate)] = 0
    return call


def _blank(query: float, scales: float, call: Call, rng: np.random.Generator) -> Call:
    """Rows that attend to nothing."""
    call.regions[:] = -1
    call.query[:] = query
    _all_scales(scales, call)
    return call


def _attended_nan(call: Call, rng: np.random.Generator) -> Call:
    """A NaN in a query head of row 0, in a value of row 0, and in a key of the last row."""
    call.query[0, 1, 5] = np.nan
    pages, offsets = attended(call, 0)
    call.cache[pages[0], 0, offsets[0], HEAD_DIM + 7] = np.nan
    pages, offsets = attended(call, len(call.query) - 1)
    call.cache[pages[-1], -1, offsets[-1], 9] = np.nan
    return call


def _aligned(query: float, key: float, equal: bool, call: Call, rng: np.random.Generator) -> Call:
    """Every logit is the same size, 192 equal products; one of each row is positive, or all."""
    signs = rng.choice([-1.0, 1.0], HEAD_DIM)
    call.query[:] = query * signs
    call.cache[..., :HEAD_DIM] = (key if equal else -key) * signs
    for row in range(len(call.query)):
        pages, offsets = attended(call, row)
        winner = rng.integers(len(pages))
        call.cache[pages[winner], :, offsets[winner], :HEAD_DIM] = key * signs
    return call


def _codes(low: int, high: int, call: Call, rng: np.random.Generator) -> Call:
    """FP8 elements of random sign with codes from `low` to `high`."""
    codes = rng.integers(low, high, call.cache.shape, np.uint8, endpoint=True)
    call.cache.view(np.uint8)[:] = codes | (rng.integers(2, size=codes.shape, dtype=np.uint8) << 7)
    return call


def _scaled(
    k_scale: float, v_scale: float, query: float, call: Call, rng: np.random.Generator
) -> Call:
    call.k_scale[...], call.v_scale[...] = k_scale, v_scale  # type: ignore[index]
    call.query[:] = call.query * np.asarray(query, call.query.dtype)
    return call


def _subnormal_keys(call: Call, rng: np.random.Generator) -> Call:
    return _scaled(1e4, 1e4, 0.03, _codes(1, 7, call, rng), rng)


def _overflowing(value: float, call: Call, rng: np.random.Generator) -> Call:
    """Every second dim of the values is far beyond the output dtype, the others far inside."""
    if call.v_scale is not None:
        call.v_scale[...] = 1e4
    dims = np.arange(HEAD_DIM)
    call.cache[..., HEAD_DIM:] = np.where(dims % 2, value, 1) * np.where(dims % 3, 1, -1)
    return call


def _beyond_fp16(value: float, call: Call, rng: np.random.Generator) -> Call:
    """Some elements of the queries are `value` or its negative."""
    hit = rng.random(call.query.shape) < 0.05
    call.query[hit] = value * rng.choice([-1.0, 1.0], hit.sum())
    call.k_scale[...] = 1e-6  # type: ignore[index]
    return call


def _largest_fp16(call: Call, rng: np.random.Generator) -> Call:
    """A query in fp16 in which these elements are the largest that fp16 has."""
    largest = float(finfo(np.float16).max)
    query = np.clip(_beyond_fp16(1e6, call, rng).query.astype(np.float32), -largest, largest)
    return dataclasses.replace(call, query=query.astype(np.float16))


# --- the list


_FP8 = Case("hazard", (150, 60, 9), heads=2, page_size=16, gate="bfloat16", splits=1)
_VIEWS: dict[str, Any] = {"contexts": (70, 9), "groups": 2, "strided": True, "slots": 9}

# Few shapes: each is compiled once.
BASES = {
    "fp8": _FP8,
    "fp8_split3": dataclasses.replace(_FP8, splits=3),
    "fp8_int32": dataclasses.replace(_FP8, splits=3, index="int32"),
    "fp8_views": dataclasses.replace(_FP8, splits=2, layout="token_major", **_VIEWS),
    "fp8_to_fp16": dataclasses.replace(_FP8, splits=3, output="float16"),
    "bf16": dataclasses.replace(_FP8, **BF16),
    "bf16_split3": dataclasses.replace(_FP8, splits=3, **BF16),
    "bf16_views": dataclasses.replace(_FP8, layout="packed", **_VIEWS, **BF16),
    "bf16_to_fp16": dataclasses.replace(_FP8, output="float16", **BF16),
    "fp16_split3": dataclasses.replace(_FP8, splits=3, **FP16),
}


def _on(
    bases: str, name: str, harm: Change, tame: Change | None = None, traits: Any = None, **rest: Any
) -> list[Hazard]:
    """A hazard on each of some bases, of which `traits` are changed."""
    return [
        Hazard(
            f"{name}_{base}", dataclasses.replace(BASES[base], **(traits or {})), harm, tame, **rest
        )
        for base in bases.split()
    ]


HAZARDS = (
    # What is not attended.
    *_on("fp8_split3 bf16", "nan", _garbage_indices, _no_indices),
    *_on("fp8 bf16_split3 fp16_split3", "inf", _garbage_indices, _no_indices, poison="inf"),
    *_on("fp8_split3 bf16", "negative_inf", _garbage_indices, _no_indices, poison="-inf"),
    *_on("fp8 fp8_int32 bf16_split3", "bits", _garbage_indices, _no_indices, poison="bits"),
    *_on("fp8_views bf16_views", "bits", _garbage_indices, _no_indices, poison="bits"),
    # Ids.
    *_on("fp8 fp8_int32 bf16_split3", "ids_below", partial(_ids, _below), partial(_ids, _unused)),
    *_on("fp8 fp8_int32 bf16_split3", "ids_past", partial(_ids, _past), partial(_ids, _unused)),
    *_on(
        "fp8_split3 fp8_int32 fp8_views bf16",
        "ids_wrapping",
        partial(_ids, _wrapping),
        partial(_ids, _unused),
    ),
    # Table entries.
    *_on("fp8 bf16_split3", "table_outside", _table, _without_these_pages),
    *_on("fp8_split3 bf16", "table_repeated", _one_page, _equal_pages),
    # Positions.
    *_on(
        "fp8 fp8_int32 bf16_split3",
        "positions_negative",
        partial(_positions, lambda call: [-2, 50, np.iinfo(call.positions.dtype).min]),
        partial(_positions, lambda call: [-1, 50, -1]),
    ),
    *_on(
        "fp8_split3 fp8_int32 bf16",
        "positions_past",
        partial(
            _positions,
            lambda call: [table_end(call), 2**31 - 1, np.iinfo(call.positions.dtype).max],
        ),
        partial(_positions, lambda call: [table_end(call) - 1] * 3),
    ),
    *_on(
        "fp8 bf16_split3",
        "positions_low_words",
        partial(_positions, lambda call: [2**32 + 5, -(2**32) + 5, 2**31 + 5]),
        partial(_positions, lambda call: [table_end(call) - 1, -1, table_end(call) - 1]),
    ),
    # Selections.
    *_on("fp8_split3 bf16", "holes", _holes),
    *_on("fp8_split3 bf16", "right_padded", _right_padded, _right_padded_cleared),
    *_on("fp8_split3 bf16", "first_tile_masked", _same, traits={"masked": (0, 0.5)}),
    *_on("fp8 bf16_split3", "middle_tile_masked", _same, traits={"masked": (0.45, 0.95)}),
    *_on("fp8 bf16_split3", "last_tile_masked", _same, traits={"masked": (0.9, 1)}),
    *_on("fp8 bf16_split3", "one_token", _one_token),
    # Splits.
    *_on("fp8_split3", "splits_without_work", _same, traits={"contexts": (70, 9), "splits": 32}),
    *_on(
        "fp8_split3",
        "splits_above_slots",
        _same,
        traits={"contexts": (70, 9), "slots": 9, "splits": 10},
    ),
    *_on("bf16", "splits_256", _same, traits={"contexts": (30,), "slots": 4, "splits": 256}),
    # Padding rows.
    *_on(
        "fp8 fp8_split3 bf16 bf16_split3",
        "inactive",
        _wild_padding,
        _calm_padding,
        {"inactive": (0, 2)},
    ),
    *_on(
        "fp8 fp8_split3 bf16_split3",
        "inactive_kept",
        _wild_padding,
        _calm_padding,
        {"inactive": (1,), "clear_inactive": False},
    ),
    *_on("fp8 fp8_split3", "all_inactive", _wild_padding, _calm_padding, {"inactive": (0, 1, 2)}),
    *_on("fp8_split3 bf16", "blank", partial(_blank, np.nan, 1), partial(_blank, 1, 1)),
    *_on("fp8 fp8_split3", "blank_scales", partial(_blank, 1, np.nan), partial(_blank, 1, 1)),
    # Extreme values.
    *_on("fp8 fp8_split3 bf16 fp16_split3", "nan_attended", _attended_nan, _same),
    *_on(
        "bf16 bf16_split3 fp16_split3",
        "logits_6e4",
        partial(_aligned, 67.5, 64, False),
        partial(_aligned, 67.5, 0.125, False),
        same_lse=False,
    ),
    *_on(
        "fp8 fp8_split3",
        "logits_6e4",
        partial(_aligned, 256, 448, False),
        partial(_aligned, 0.5, 448, False),
        same_lse=False,
    ),
    *_on(
        "bf16 bf16_split3",
        "logits_1e30",
        partial(_aligned, 2.0**48, 2.0**48, False),
        partial(_aligned, 8, 1, False),
        same_lse=False,
    ),
    *_on(
        "bf16",
        "equal_logits",
        partial(_aligned, 67.5, 64, True),
        partial(_aligned, 0, 64, True),
        same_lse=False,
    ),
    *_on(
        "fp8",
        "equal_logits",
        partial(_aligned, 256, 448, True),
        partial(_aligned, 0, 448, True),
        same_lse=False,
    ),
    # The lse of a split is rounded where it is large, and with it the weight of the split.
    *_on("bf16_split3 fp16_split3", "equal_logits", partial(_aligned, 67.5, 64, True)),
    *_on("fp8", "largest_fp8", partial(_codes, 0x7E, 0x7E)),
    *_on("fp8_split3", "subnormal_fp8", partial(_codes, 1, 7)),
    *_on("fp8", "large_scales", _subnormal_keys),
    *_on("fp8_to_fp16", "small_scales", partial(_scaled, 1e-6, 1e-6, 1e4)),
    *_on("fp8_to_fp16", "overflow", partial(_overflowing, 448), partial(_overflowing, 1)),
    *_on("bf16_to_fp16", "overflow", partial(_overflowing, 1e30), partial(_overflowing, 1)),
    *_on("fp8 fp8_split3", "query_1e6", partial(_beyond_fp16, 1e6), _largest_fp16),
    *_on("fp8 fp8_split3", "query_1e38", partial(_beyond_fp16, 1e38), _largest_fp16),
    *_on("fp8_split3", "query_inf", partial(_beyond_fp16, np.inf), _largest_fp16),
)
