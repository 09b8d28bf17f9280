"""The frozen case list: that it is frozen, poisoned as it says, and covers the matrix."""

import dataclasses
import zlib

import numpy as np
import pytest

from sparse_decode.cases import CASES, WIDE_CASES, Case, build
from sparse_decode.cli import SHORT
from sparse_decode.contract import default_splits
from sparse_decode.oracle import attended, evaluate

BUILT = {case.name: build(case) for case in CASES}

# CRC-32 over names, dtypes, shapes, strides, contents and options. A changed line here means that
# results measured on the case before and after cannot be compared.
CHECKSUMS = {
    "fp8": "081c1d53",
    "fp8_split1": "77a8fe89",
    "fp8_split2_gate": "c2ddccf6",
    "fp8_split32": "5ca07a56",
    "fp8_splits_above_slots": "bc5487e0",
    "fp8_heuristic_splits": "7e965ad0",
    "fp8_query_fp16": "ce5b1dd8",
    "fp8_output_fp16": "84b4d55c",
    "uint8_verify4_groups2": "a373a1c2",
    "fp8_int32_indices": "4ffa3f15",
    "fp8_head1": "9ffd7e06",
    "fp8_heads4": "c48dcc0d",
    "fp8_heads5": "3e3f3984",
    "fp8_heads16_gate": "0e94c7ea",
    "fp8_groups3": "ddddc74a",
    "fp8_one_slot": "a18f8ac1",
    "fp8_edges": "64564450",
    "fp8_inactive": "9c9f5a15",
    "fp8_inactive_split1": "4c4ae1b7",
    "fp8_inactive_kept": "e08ee4b9",
    "fp8_inactive_kept_split1": "701598cb",
    "fp8_padded": "b8117bce",
    "fp8_padding_between": "ef3b4c26",
    "fp8_blank_rows": "730bbbec",
    "fp8_first_masked": "724e28d0",
    "fp8_middle_masked": "ed685a8d",
    "fp8_last_masked": "9faf2c57",
    "fp8_holes_repeated": "d0dd1541",
    "fp8_outside": "9fac2d28",
    "fp8_packed": "66c9f0e1",
    "fp8_token_major_strided": "2fc07f89",
    "fp8_strided_gate": "0eb7202a",
    "fp8_sharp": "ec645c67",
    "bf16": "bf0ca070",
    "bf16_split1_gate": "8d7a24bb",
    "bf16_split32": "8fd7ea68",
    "bf16_head1_page8": "8ea59d6f",
    "bf16_heads16_groups2": "4ad49209",
    "bf16_verify4": "bd368758",
    "bf16_edges": "a883ff9e",
    "bf16_inactive": "db4aa490",
    "bf16_half_padded": "ad52c405",
    "bf16_padded_kept": "bb4fe3eb",
    "bf16_middle_masked": "a8951080",
    "bf16_outside": "8f3e876c",
    "bf16_packed_strided": "6ebbcc9e",
    "bf16_sharp": "98b09469",
    "fp16": "240f5e13",
    "fp16_heads4_gate": "6c29fe14",
    "fp16_token_major": "fa7c4b4a",
    "empty": "8ca474da",
}


def checksum(call) -> int:
    crc = zlib.crc32(repr(sorted(call.options().items())).encode())
    for name, array in call.arrays().items():
        crc = zlib.crc32(f"{name} {array.dtype.name} {array.shape} {array.strides}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(array).view(np.uint8), crc)
    return crc


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_content_is_frozen(case):
    assert f"{checksum(BUILT[case.name]):08x}" == CHECKSUMS[case.name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_building_twice_gives_the_same_bits(case):
    first, second = BUILT[case.name], build(case)
    assert first.options() == second.options()
    assert first.arrays().keys() == second.arrays().keys()
    for name, array in first.arrays().items():
        other = second.arrays()[name]
        assert array.strides == other.strides
        assert not np.shares_memory(array, other)
        assert np.ascontiguousarray(array).tobytes() == np.ascontiguousarray(other).tobytes()


def test_names():
    names = [case.name for case in (*CASES, *WIDE_CASES)]
    assert len(set(names)) == len(names)
    assert set(CHECKSUMS) == set(BUILT)
    assert set(SHORT) <= set(BUILT)
    assert all(case.name.startswith("wide_") for case in WIDE_CASES)


def test_the_name_is_the_seed():
    renamed = build(dataclasses.replace(CASES[0], name="another"))
    assert checksum(renamed) != checksum(BUILT[CASES[0].name])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_has_its_traits(case):
    call = BUILT[case.name]
    geometry = call.geometry()
    assert geometry.requests == len(case.contexts)
    assert call.cache.dtype.name == case.cache
    assert (geometry.query_dtype, geometry.gate_dtype) == (case.query, case.gate)
    assert geometry.output_dtype == (case.output or case.query)
    traits = ("heads", "groups", "query_len", "slots", "page_size")
    assert [getattr(geometry, t) for t in traits] == [getattr(case, t) for t in traits]
    assert call.splits == case.splits
    assert geometry.splits == (case.splits or default_splits(geometry.rows))
    assert {call.regions.dtype.name, call.positions.dtype.name} == {case.index}
    assert call.clear_inactive == case.clear_inactive
    assert (~call.active).sum() == len(case.inactive) * case.groups
    assert call.cache.flags.c_contiguous == (case.layout == "dense")
    if len(case.contexts):
        last = call.positions.reshape(len(case.contexts), case.query_len, case.groups)[:, -1, 0]
        assert (last + 1).tolist() == list(case.contexts)
    for name in ("query", "regions", "block_table", "output", "gate"):
        array = getattr(call, name)
        if array is not None and array.size:
            assert array.flags.c_contiguous != case.strided


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_everything_else_is_poisoned(case):
    call = BUILT[case.name]
    if not len(call.query):
        pytest.skip("no rows")
    live = np.zeros(call.cache.shape[:3], bool)
    for row in range(len(call.query)):
        pages, offsets = attended(call, row)
        live[pages, row % case.groups, offsets] = True
    cache = call.cache
    nan = np.isnan(cache.view("float8_e4m3fn") if case.cache == "uint8" else cache)
    np.testing.assert_array_equal(nan.any(axis=3), nan.all(axis=3))
    np.testing.assert_array_equal(nan[..., 0], ~live)
    assert not live.all()
    assert np.isnan(call.output).all()
    assert np.isnan(call.query[~call.active]).all()
    assert np.isfinite(call.query[call.active].astype(np.float32)).all()
    assert np.isfinite(evaluate(call).exact).all()


def test_packed_pages_lie_in_nan():
    call = BUILT["fp8_packed"]
    memory = call.cache.base
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    inside = np.zeros(memory.shape, bool)
    inside[:, 128 : 128 + call.cache[0].size] = True
    assert inside.sum() == call.cache.size
    assert np.isnan(memory[~inside].astype(np.float32)).all()


def test_outside_points_outside():
    for name in ("fp8_outside", "bf16_outside"):
        call = BUILT[name]
        geometry = call.geometry()
        live = call.regions[call.positions >= 8 * geometry.slots]
        assert live.size
        assert (live < -1).any()
        assert (live >= geometry.max_regions).any()
        assert ((live > 2**31 - 1) & ((live & 0xFFFF_FFFF) < geometry.max_regions)).any()
        assert (call.block_table[:, 1:3] >= geometry.pages).any()
        assert (call.block_table[:, 1:3] < -1).any()
        assert all(len(attended(call, row)[0]) for row in range(geometry.rows))


def tiles(name):
    """Whether each tile of eight live slots of the first row holds anything, in order."""
    call = BUILT[name]
    ids = call.regions[0, -min(int(call.positions[0]) // 8 + 1, call.regions.shape[1]) :]
    return [bool((ids[i : i + 8] >= 0).any()) for i in range(0, len(ids), 8)]


def test_first_and_last_tile_fully_masked():
    assert not tiles("fp8_first_masked")[0]
    assert tiles("fp8_first_masked")[-1]
    assert tiles("fp8_last_masked")[0]
    assert not tiles("fp8_last_masked")[-1]


@pytest.mark.parametrize("name", ["fp8_middle_masked", "bf16_middle_masked"])
def test_middle_tile_fully_masked(name):
    first, *middle, last = tiles(name)
    assert first
    assert last
    assert not all(middle)


def values(trait: str, cases=CASES) -> set:
    return {getattr(case, trait) for case in cases}


FP8_CASES = [case for case in CASES if case.cache in ("float8_e4m3fn", "uint8")]
BF16_CASES = [case for case in CASES if case.cache == "bfloat16"]
FP16_CASES = [case for case in CASES if case.cache == "float16"]


@pytest.mark.parametrize(
    ("cases", "trait", "needed"),
    [
        (CASES, "cache", {"float8_e4m3fn", "uint8", "bfloat16", "float16"}),
        (CASES, "query", {"bfloat16", "float16"}),
        (FP8_CASES, "query", {"bfloat16", "float16"}),
        (CASES, "output", {None, "float16"}),
        (FP8_CASES, "splits", {1, 2, 4, 32, None}),
        (BF16_CASES, "splits", {1, 2, 4, 32}),
        (FP16_CASES, "splits", {1, 4}),
        (CASES, "query_len", {1, 2, 4}),
        (FP8_CASES, "heads", {1, 4, 5, 8, 16}),
        (BF16_CASES, "heads", {1, 8, 16}),
        (FP16_CASES, "heads", {4, 8}),
        (CASES, "groups", {1, 2, 3}),
        (CASES, "page_size", {8, 16, 24, 32, 64, 128}),
        (CASES, "slots", {1, 9, 17, 33, 65}),
        (FP8_CASES, "gate", {None, "bfloat16", "float16", "float32"}),
        (BF16_CASES, "gate", {None, "bfloat16", "float16", "float32"}),
        (CASES, "index", {"int32", "int64"}),
        (CASES, "layout", {"dense", "packed", "token_major"}),
        (CASES, "strided", {False, True}),
        (CASES, "clear_inactive", {False, True}),
        (CASES, "outside", {False, True}),
        (CASES, "repeated", {False, True}),
        (WIDE_CASES, "cache", {"float8_e4m3fn", "bfloat16", "float16"}),
        (WIDE_CASES, "slots", {513, 1025}),
        (WIDE_CASES, "splits", {None, 1, 8, 16, 32}),
        (WIDE_CASES, "groups", {1, 8}),
        (WIDE_CASES, "heads", {8, 16}),
        (WIDE_CASES, "query_len", {1, 4}),
    ],
)
def test_matrix(cases, trait, needed):
    assert needed <= values(trait, cases)


def some(**traits) -> list[Case]:
    return [
        case for case in CASES if all(getattr(case, name) == want for name, want in traits.items())
    ]


def test_matrix_of_combinations():
    positions = {
        kind: np.concatenate([BUILT[case.name].positions for case in cases])
        for kind, cases in (("fp8", FP8_CASES), ("bf16", BF16_CASES))
    }
    for found in positions.values():  # first, and just around edges of regions and pages
        assert {-1, 0, 7, 8, 63, 64} <= set(found.tolist())
    for cases in (FP8_CASES, BF16_CASES):
        inactive = [case for case in cases if case.inactive]
        assert any(case.gate for case in inactive)
        assert all(len(case.inactive) < len(case.contexts) for case in inactive)
    first_rows = [case.inactive[0] for case in CASES if case.inactive]
    assert {0, 1} <= set(first_rows)
    assert some(clear_inactive=False, splits=1)
    assert [case for case in some(clear_inactive=False) if case.splits != 1]
    assert [case for case in CASES if case.inactive and case.clear_inactive and case.splits == 1]
    assert [case for case in CASES if case.splits and case.splits > case.slots]
    assert [case for case in CASES if case.splits and case.splits > -(-case.slots // 8) > 1]
    assert [case for case in CASES if case.query_len > 1 and case.groups > 1]
    assert [case for case in CASES if case.layout == "packed" and case.groups > 1]
    assert [case for case in CASES if case.strided and case.gate]
    assert [case for case in CASES if case.blank]
    assert [case for case in CASES if not case.contexts]
    assert [case for case in CASES if case.page_size & (case.page_size - 1)]
    selected = [
        case for case in CASES if any(context > 8 * case.slots for context in case.contexts)
    ]
    assert {"float8_e4m3fn", "bfloat16"} <= values("cache", selected)


def test_wide_cases_are_legal():
    """Their arrays are large, so only the smallest is built here."""
    case = min(WIDE_CASES, key=lambda case: sum(case.contexts) * case.groups)
    call = build(case)
    assert call.geometry().slots == case.slots
    assert len(attended(call, 0)[0]) == 8 * (case.slots - 1) + (int(call.positions[0]) & 7) + 1
