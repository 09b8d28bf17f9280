"""Whole calls drawn by hypothesis: few geometries, as each is compiled once, and free contents.

Hypothesis draws a handful of scalars, NumPy fills the arrays from them. So an example is small, its
failure can be read and repeated, and drawing costs nearly nothing.
"""

import functools
import zlib
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from sparse_decode import cases, hazards
from sparse_decode.call import Call
from sparse_decode.cases import BF16, FP16, Case

# Contexts say here how many requests there are and how long the longest is. The first four are for
# the interpreters too.
GEOMETRIES = (
    Case("fp8_heads4", (70, 70), heads=4, slots=9, page_size=16, splits=2, gate="bfloat16"),
    Case("uint8_packed", (40,), cache="uint8", groups=2, slots=5, page_size=8, splits=1,
         index="int32", layout="packed", strided=True, output="float16", heads=5),
    Case("bf16_head1", (70, 70), heads=1, slots=9, page_size=32, splits=1, **BF16),
    Case("fp16_verify2", (70,), heads=8, slots=9, page_size=24, splits=3, query_len=2,
         gate="float32", clear_inactive=False, **FP16),
    Case("fp8_split1", (320,) * 4, heads=8, slots=33, splits=1),
    Case("fp8_split4", (320,) * 4, heads=8, slots=33, splits=4, gate="float32"),
    Case("fp8_split32", (320,) * 2, heads=8, slots=40, splits=32, page_size=32),
    Case("fp8_own_splits", (300,) * 4, heads=8, slots=40, splits=None, gate="bfloat16"),
    Case("fp8_kept", (200,) * 4, heads=8, slots=17, splits=1, clear_inactive=False),
    Case("fp8_heads16", (200,) * 3, heads=16, slots=25, splits=3, page_size=128, gate="float16"),
    Case("fp8_head1", (200,) * 3, heads=1, slots=25, splits=2, index="int32"),
    Case("fp8_heads5_page24", (150,) * 4, heads=5, slots=17, splits=2, page_size=24),
    Case("fp8_groups4", (120,) * 2, groups=4, slots=16, heads=4, splits=2, layout="token_major",
         gate="bfloat16"),
    Case("fp8_verify4_groups2", (160,), groups=2, query_len=4, slots=20, splits=4,
         gate="bfloat16", strided=True),
    Case("fp8_query_fp16", (200,) * 4, query="float16", slots=20, splits=5, layout="packed"),
    Case("uint8_split256", (90,) * 2, cache="uint8", slots=12, splits=256, heads=4, page_size=8),
    Case("uint8_one_slot", (90,) * 4, cache="uint8", slots=1, splits=2, page_size=16),
    Case("bf16_split3", (300,) * 4, slots=33, splits=3, gate="bfloat16", **BF16),
    Case("bf16_heads16", (200,) * 2, heads=16, slots=25, splits=1, page_size=16,
         gate="float32", **BF16),
    Case("bf16_groups2", (150,) * 2, groups=2, heads=4, slots=20, splits=2, layout="token_major",
         strided=True, **BF16),
    Case("bf16_verify4", (200,) * 2, query_len=4, heads=8, slots=17, splits=8, index="int32",
         clear_inactive=False, gate="bfloat16", **BF16),
    Case("bf16_packed", (150,) * 3, heads=5, slots=20, splits=32, layout="packed",
         output="float16", **BF16),
    Case("fp16_split1", (200,) * 3, heads=4, slots=25, splits=1, page_size=128, gate="float16",
         strided=True, **FP16),
    Case("fp16_groups3", (90,) * 2, groups=3, heads=1, slots=12, splits=4, page_size=8,
         layout="packed", **FP16),
)  # fmt: skip


@dataclass(frozen=True)
class Contents:
    """What fills the arrays of a geometry.

    Attributes:
        seed: Of everything that is random.
        logit_size: Standard deviation of the scaled logits, about.
        value_scale: Multiplies the values of an FP8 cache.
        near_start: Share of rows with positions among the first regions.
        odd_positions: Share of rows with positions before the start or past the table.
        repeated: Whether ids of a row may be equal.
        holes: Share of unused slots among the live ones.
        odd_ids: Share of ids that point outside, past the position, or wrap around.
        odd_pages: Share of table entries that point outside.
        inactive: Share of inactive rows.
        poison: What stands in everything that is not attended.
    """

    seed: int
    logit_size: float
    value_scale: float
    near_start: float
    odd_positions: float
    repeated: bool
    holes: float
    odd_ids: float
    odd_pages: float
    inactive: float
    poison: str


_shares = st.sampled_from([0.0, 0.0, 0.1, 0.4, 1.0])
contents = st.builds(
    Contents,
    seed=st.integers(0, 2**32 - 1),
    logit_size=st.sampled_from([1.5, 0.0, 0.1, 8.0, 40.0]),
    value_scale=st.sampled_from([1.0, 1e-5, 30.0]),
    near_start=_shares,
    odd_positions=_shares,
    repeated=st.booleans(),
    holes=_shares,
    odd_ids=_shares,
    odd_pages=_shares,
    inactive=_shares,
    poison=st.sampled_from(hazards.POISONS),
)


@functools.cache
def _template(case: Case) -> tuple[Call, np.ndarray]:
    """A call with the arrays of a geometry, and the lines of its cache."""
    call = cases.build(case)
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    lines = rng.normal(size=call.cache.shape)
    if call.k_scale is not None:
        fp8 = np.clip(lines / call.k_scale, -448, 448).astype("float8_e4m3fn")
        return call, fp8.view(call.cache.dtype)
    return call, lines.astype(call.cache.dtype)


def fill(case: Case, contents: Contents) -> Call:
    """The call of a geometry with these contents; valid until the next one of the same geometry."""
    call, lines = _template(case)
    geometry = call.geometry()
    rows, groups, heads = geometry.rows, geometry.groups, geometry.heads
    rng = np.random.default_rng([zlib.crc32(case.name.encode()), contents.seed])

    def hit(share: float, shape: tuple[int, ...]) -> np.ndarray:
        return rng.random(shape) < share

    _fill_positions(call, contents, rng, hit)
    _fill_regions(call, contents, rng, hit)
    call.block_table[:] = rng.integers(geometry.pages, size=call.block_table.shape)
    odd = hit(contents.odd_pages / 2, call.block_table.shape)
    outside = [-1, geometry.pages, -(2**31), 2**31 - 1]
    call.block_table[odd] = rng.choice(outside, odd.sum())

    call.active[:] = ~hit(contents.inactive / 2, (rows,))
    call.query[:] = rng.normal(size=call.query.shape) * contents.logit_size
    call.query[~call.active] = np.nan
    if call.gate is not None:
        gate = rng.normal(size=(rows, heads)) * 2
        gate[~call.active] = np.nan
        call.gate[:] = gate.reshape(rows // groups, groups * heads)
    if call.v_scale is not None:
        call.v_scale[...] = 0.037 * contents.value_scale
    call.cache[:] = lines
    hazards.poison_unattended(call, contents.poison, rng)
    return call


def _fill_positions(call: Call, contents: Contents, rng, hit) -> None:
    """Half of the positions at an edge of a region, or of a page."""
    rows, end = len(call.query), hazards.table_end(call)
    positions = rng.integers(end, size=rows)
    near = hit(contents.near_start, (rows,))
    positions[near] %= 20
    unit = rng.choice([8, call.geometry().page_size], rows)
    edge = positions // unit * unit - rng.integers(2, size=rows)
    call.positions[:] = np.where(hit(0.5, (rows,)), edge, positions)
    odd = hit(contents.odd_positions / 2, (rows,))
    call.positions[odd] = rng.choice(hazards.odd_positions(call), odd.sum())


def _fill_regions(call: Call, contents: Contents, rng, hit) -> None:
    """Random ids up to the current region in the live slots, some of them spoiled; dead garbage."""
    geometry = call.geometry()
    dtype, shape = call.regions.dtype, call.regions.shape
    call.regions[:] = hazards.garbage(dtype, shape, geometry.max_regions, rng)
    for row, slots in enumerate(call.regions):
        live = slots[hazards.live_slots(call, row)]
        current = min(max(int(call.positions[row]) // 8, 0), geometry.max_regions - 1)
        if contents.repeated:
            live[:] = rng.integers(current + 1, size=len(live))
        else:
            live[:] = -1
            ids = rng.permutation(current + 1)[: len(live)]
            live[len(live) - len(ids) :] = ids
        live[hit(contents.holes / 2, live.shape)] = -1
        odd = hit(contents.odd_ids / 2, live.shape)
        choice = np.append(hazards.odd_ids(call), np.array([current + 1], dtype))
        live[odd] = rng.choice(choice, odd.sum())
