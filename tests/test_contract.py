"""The host checks: every argument wrong in every way, and the sizes that a checked call has."""

import dataclasses
import math

import numpy as np
import pytest

from sparse_decode.call import Call, describe, page_storage
from sparse_decode.contract import MAX_SPLITS, ArraySpec, Geometry, check_call, default_splits

ROWS, HEADS, GROUPS, QUERY_LEN, SLOTS, PAGES, PAGE_SIZE, MAX_PAGES = 12, 8, 3, 2, 17, 5, 16, 4


def arguments() -> dict:
    """A legal call: 2 requests of 2 tokens in 3 groups, FP8."""
    specs = {
        "query": ArraySpec((ROWS, HEADS, 192), "bfloat16"),
        "cache": ArraySpec((PAGES, GROUPS, PAGE_SIZE, 384), "float8_e4m3fn"),
        "regions": ArraySpec((ROWS, SLOTS), "int64"),
        "block_table": ArraySpec((ROWS // GROUPS // QUERY_LEN, MAX_PAGES), "int32"),
        "positions": ArraySpec((ROWS,), "int64"),
        "active": ArraySpec((ROWS,), "bool"),
        "output": ArraySpec((ROWS, HEADS, 192), "float16"),
        "k_scale": ArraySpec((), "float32"),
        "v_scale": ArraySpec((1,), "float32"),
        "gate": ArraySpec((ROWS // GROUPS, GROUPS * HEADS), "float32"),
    }
    placed = {name: spec._replace(device="cuda:0") for name, spec in specs.items()}
    return {**placed, "scale": 0.07, "query_len": QUERY_LEN, "splits": 4, "clear_inactive": True}


def shape(*extents: int):
    return lambda spec: spec._replace(shape=extents, strides=None)


def dtype(name: str):
    return lambda spec: spec._replace(dtype=name)


def strides(*steps: int):
    return lambda spec: spec._replace(strides=steps)


def elsewhere(spec: ArraySpec) -> ArraySpec:
    return spec._replace(device="cuda:1")


def value(new: object):
    return lambda _: new


# argument, what is done to it, error, expected part and got part of the message
WRONG = [
    ("query", shape(ROWS, HEADS * 192), ValueError, r"shape \[rows, heads, 192\]", r"\[12, 1536\]"),
    ("query", shape(ROWS, HEADS, 192, 1), ValueError, r"\[rows, heads, 192\]", r"192, 1\]"),
    ("query", shape(ROWS, HEADS, 128), ValueError, r"\[rows, heads, 192\]", r"\[12, 8, 128\]"),
    ("query", shape(ROWS, 0, 192), ValueError, "1 to 16 heads", "0"),
    ("query", shape(ROWS, 17, 192), ValueError, "1 to 16 heads", "17"),
    ("query", shape(ROWS + 1, HEADS, 192), ValueError, r"groups \* query_len = 3 \* 2", "13 rows"),
    ("query", dtype("float32"), TypeError, "bfloat16 or float16", "float32"),
    ("query", dtype("float8_e4m3fn"), TypeError, "bfloat16 or float16", "float8_e4m3fn"),
    ("query", strides(3072, 384, 2), ValueError, "last stride 1", r"\[3072, 384, 2\]"),
    ("query", strides(1, 12, 96), ValueError, "last stride 1", r"\[1, 12, 96\]"),
    ("cache", shape(PAGES, PAGE_SIZE, 384), ValueError, r"\[pages, groups,", r"\[5, 16, 384\]"),
    ("cache", shape(PAGES, GROUPS, PAGE_SIZE, 192), ValueError, "page_size, 384", "16, 192"),
    ("cache", shape(PAGES, GROUPS, 12, 384), ValueError, "page size .* multiple of 8", "12"),
    ("cache", shape(PAGES, GROUPS, 0, 384), ValueError, "page size .* multiple of 8", "0"),
    ("cache", shape(0, GROUPS, PAGE_SIZE, 384), ValueError, "at least one page", r"\[0, 3, 16"),
    ("cache", shape(PAGES, 0, PAGE_SIZE, 384), ValueError, "one group", r"\[5, 0, 16"),
    ("cache", dtype("float16"), TypeError, "bfloat16 or float8_e4m3fn or uint8", "float16"),
    ("cache", dtype("float8_e5m2"), TypeError, "float8_e4m3fn", "float8_e5m2"),
    ("cache", dtype("int8"), TypeError, "uint8", "int8"),
    ("cache", strides(36864, 12288, 768, 2), ValueError, "last stride 1", r"768, 2\]"),
    ("cache", elsewhere, ValueError, "device cuda:0", "device cuda:1"),
    ("regions", shape(ROWS), ValueError, r"\[rows, slots\]", r"\[12\]"),
    ("regions", shape(ROWS - 1, SLOTS), ValueError, r"\[12, slots\]", r"\[11, 17\]"),
    ("regions", shape(ROWS, 0), ValueError, "slots >= 1", r"\[12, 0\]"),
    ("regions", dtype("int16"), TypeError, "int32 or int64", "int16"),
    ("regions", dtype("uint32"), TypeError, "int32 or int64", "uint32"),
    ("regions", dtype("float32"), TypeError, "int32 or int64", "float32"),
    ("regions", strides(34, 2), ValueError, "last stride 1", r"\[34, 2\]"),
    ("regions", elsewhere, ValueError, "device cuda:0", "device cuda:1"),
    ("block_table", shape(MAX_PAGES), ValueError, r"\[requests, max_pages\]", r"\[4\]"),
    ("block_table", shape(4, MAX_PAGES), ValueError, r"\[2, max_pages\].*2 requests", r"\[4, 4\]"),
    ("block_table", shape(2, 0), ValueError, "max_pages >= 1", r"\[2, 0\]"),
    ("block_table", shape(2, 2**27), ValueError, r"below 2\*\*31", r"134217728 \* 16"),
    ("block_table", dtype("int64"), TypeError, "int32", "int64"),
    ("block_table", strides(8, 2), ValueError, "last stride 1", r"\[8, 2\]"),
    ("block_table", elsewhere, ValueError, "device cuda:0", "device cuda:1"),
    ("positions", shape(ROWS, 1), ValueError, r"shape \[12\]", r"\[12, 1\]"),
    ("positions", shape(ROWS // GROUPS), ValueError, r"shape \[12\]", r"\[4\]"),
    ("positions", dtype("int16"), TypeError, "int32 or int64", "int16"),
    ("positions", strides(2), ValueError, "last stride 1", r"\[2\]"),
    ("positions", elsewhere, ValueError, "device cuda:0", "device cuda:1"),
    ("active", shape(), ValueError, r"shape \[12\]", r"\[\]"),
    ("active", shape(ROWS + 1), ValueError, r"shape \[12\]", r"\[13\]"),
    ("active", dtype("uint8"), TypeError, "bool", "uint8"),
    ("active", dtype("int32"), TypeError, "bool", "int32"),
    ("active", strides(4), ValueError, "last stride 1", r"\[4\]"),
    ("active", elsewhere, ValueError, "device cuda:0", "device cuda:1"),
    ("output", shape(ROWS, HEADS * 192), ValueError, r"\[12, 8, 192\]", r"\[12, 1536\]"),
    ("output", shape(ROWS, HEADS + 1, 192), ValueError, r"\[12, 8, 192\]", r"\[12, 9, 192\]"),
    ("output", dtype("float32"), TypeError, "bfloat16 or float16", "float32"),
    ("output", strides(3072, 384, 2), ValueError, "last stride 1", r"384, 2\]"),
    ("output", strides(0, 192, 1), ValueError, "keep elements apart", r"\[0, 192, 1\]"),
    ("output", strides(1536, 0, 1), ValueError, "keep elements apart", r"\[1536, 0, 1\]"),
    ("output", strides(1536, 191, 1), ValueError, "keep elements apart", r"191, 1\]"),
    ("output", strides(1535, 192, 1), ValueError, "keep elements apart", r"\[1535,"),
    ("output", strides(192, 192, 1), ValueError, "keep elements apart", r"\[192, 192, 1\]"),
    ("output", strides(-1536, 192, 1), ValueError, "keep elements apart", r"\[-1536,"),
    ("output", elsewhere, ValueError, "device cuda:0", "device cuda:1"),
    ("k_scale", value(None), ValueError, "one float32 .* FP8", "None"),
    ("k_scale", shape(3), ValueError, "one element", r"\[3\]"),
    ("k_scale", shape(0), ValueError, "one element", r"\[0\]"),
    ("k_scale", dtype("float64"), TypeError, "float32", "float64"),
    ("k_scale", elsewhere, ValueError, "device cuda:0", "device cuda:1"),
    ("v_scale", value(None), ValueError, "one float32 .* FP8", "None"),
    ("v_scale", shape(1, 2), ValueError, "one element", r"\[1, 2\]"),
    ("v_scale", dtype("bfloat16"), TypeError, "float32", "bfloat16"),
    ("v_scale", elsewhere, ValueError, "device cuda:0", "device cuda:1"),
    ("gate", shape(ROWS, HEADS), ValueError, r"\[4, 24\]", r"\[12, 8\]"),
    ("gate", shape(4, 24, 1), ValueError, r"\[4, 24\]", r"\[4, 24, 1\]"),
    ("gate", dtype("float64"), TypeError, "bfloat16 or float16 or float32", "float64"),
    ("gate", elsewhere, ValueError, "device cuda:0", "device cuda:1"),
    ("scale", value(math.nan), ValueError, "finite", "nan"),
    ("scale", value(-math.inf), ValueError, "finite", "-inf"),
    ("scale", value(1e39), ValueError, "float32's range", "1e\\+39"),
    ("scale", value(10**400), ValueError, "float32's range", "1000"),
    ("scale", value("0.07"), TypeError, "real number", "str"),
    ("scale", value(None), TypeError, "real number", "NoneType"),
    ("scale", value(True), TypeError, "real number", "bool"),
    ("scale", value(1j), TypeError, "real number", "complex"),
    ("query_len", value(0), ValueError, "at least 1", "0"),
    ("query_len", value(-1), ValueError, "at least 1", "-1"),
    ("query_len", value(1.0), TypeError, "integer", "float"),
    ("query_len", value(True), TypeError, "integer", "bool"),
    ("query_len", value(None), TypeError, "integer", "NoneType"),
    ("splits", value(0), ValueError, "1 to 256", "0"),
    ("splits", value(257), ValueError, "1 to 256", "257"),
    ("splits", value(4.0), TypeError, "integer", "float"),
    ("splits", value("4"), TypeError, "integer", "str"),
    ("clear_inactive", value(1), TypeError, "bool", "int"),
    ("clear_inactive", value(None), TypeError, "bool", "NoneType"),
]


@pytest.mark.parametrize(("name", "change", "error", "expected", "got"), WRONG)
def test_each_argument_wrong(name, change, error, expected, got):
    call = arguments()
    call[name] = change(call[name])
    with pytest.raises(error, match=rf"^{name}: expected .*{expected}.*, got .*{got}"):
        check_call(**call)


def test_every_argument_has_a_wrong_one():
    assert {name for name, *_ in WRONG} == set(arguments())


def test_wrong_query_len_is_told_by_its_consequence():
    call = arguments() | {"query_len": 5}
    with pytest.raises(ValueError, match=r"query: .* groups \* query_len = 3 \* 5, got 12 rows"):
        check_call(**call)
    call = arguments() | {"query_len": 4}
    with pytest.raises(ValueError, match=r"block_table: .*\(1 requests = 12 rows / "):
        check_call(**call)


def test_sizes_of_a_legal_call():
    geometry = check_call(**arguments())
    assert geometry == Geometry(
        rows=12,
        heads=8,
        groups=3,
        query_len=2,
        slots=17,
        pages=5,
        page_size=16,
        max_pages=4,
        splits=4,
        query_dtype="bfloat16",
        cache_dtype="float8_e4m3fn",
        output_dtype="float16",
        gate_dtype="float32",
    )
    assert geometry.fp8
    assert (geometry.tokens, geometry.rows_per_request, geometry.requests) == (4, 6, 2)
    assert geometry.max_regions == 8  # 4 pages of 16 tokens, 8 tokens a region
    assert {"rows", "splits"} <= {field.name for field in dataclasses.fields(geometry)}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"output": None, "gate": None}, id="nothing optional"),
        pytest.param({"query": strides(5000, 200, 1)}, id="padded query"),
        pytest.param({"query": strides(192, 12 * 192, 1)}, id="heads outside rows"),
        pytest.param({"query": strides(0, 0, 1)}, id="one query for all"),
        pytest.param({"cache": strides(10**6, 384, 3 * 384, 1)}, id="token-major in larger pages"),
        pytest.param({"cache": dtype("uint8")}, id="FP8 as bytes"),
        pytest.param({"regions": strides(1025, 1)}, id="padded regions"),
        pytest.param({"regions": strides(0, 1)}, id="one selection for all"),
        pytest.param({"block_table": strides(0, 1)}, id="one table for all"),
        pytest.param({"output": strides(192, 12 * 192, 1)}, id="output with heads outside"),
        pytest.param({"output": strides(2000, 200, 1)}, id="padded output"),
        pytest.param({"gate": strides(1, 4)}, id="transposed gate"),
        pytest.param({"k_scale": shape(1, 1, 1), "v_scale": shape()}, id="scales of any rank"),
        pytest.param({"splits": value(MAX_SPLITS)}, id="most splits"),
        pytest.param({"splits": value(np.int64(3)), "scale": value(np.float32(-1))}, id="NumPy's"),
        pytest.param({"positions": dtype("int32"), "regions": dtype("int32")}, id="int32"),
        pytest.param({"cache": lambda spec: spec._replace(device=None)}, id="place not known"),
        pytest.param({"query": lambda spec: spec._replace(device=None)}, id="query's not known"),
    ],
)
def test_legal_variations(changes):
    call = arguments()
    for name, change in changes.items():
        call[name] = change(call[name]) if change else None
    geometry = check_call(**call)
    assert geometry.rows == ROWS
    assert geometry.cache_dtype == "float8_e4m3fn"
    assert geometry.output_dtype == ("float16" if call["output"] else "bfloat16")
    assert geometry.gate_dtype == ("float32" if call["gate"] else None)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_scales_are_not_looked_at_with_a_16_bit_cache(name):
    call = arguments()
    call["query"], call["cache"] = dtype(name)(call["query"]), dtype(name)(call["cache"])
    call["k_scale"], call["v_scale"] = None, ArraySpec((7,), "int8", device="elsewhere")
    geometry = check_call(**call)
    assert (geometry.cache_dtype, geometry.fp8) == (name, False)


def test_one_element_needs_no_unit_stride():
    call = arguments()
    call |= {
        "query": ArraySpec((1, 1, 192), "float16", (7, 7, 1)),
        "cache": ArraySpec((1, 1, 8, 384), "float16"),
        "regions": ArraySpec((1, 1), "int32", (5, 5)),
        "block_table": ArraySpec((1, 1), "int32", (9, 9)),
        "positions": ArraySpec((1,), "int32", (3,)),
        "active": ArraySpec((1,), "bool", (3,)),
        "output": None,
        "gate": None,
        "query_len": 1,
    }
    assert check_call(**call).max_regions == 1


def test_no_rows():
    call = arguments()
    empty = {
        "query": (0, HEADS, 192),
        "regions": (0, SLOTS),
        "block_table": (0, MAX_PAGES),
        "positions": (0,),
        "active": (0,),
        "output": (0, HEADS, 192),
        "gate": (0, GROUPS * HEADS),
    }
    call |= {name: call[name]._replace(shape=extents) for name, extents in empty.items()}
    geometry = check_call(**call)
    assert (geometry.rows, geometry.tokens, geometry.requests) == (0, 0, 0)
    call["active"] = ArraySpec((1,), "bool", device="cuda:0")
    with pytest.raises(ValueError, match=r"active: expected shape \[0\], got shape \[1\]"):
        check_call(**call)


def test_largest_table():
    """2**31 - 1 tokens at most: an index that is still an int32."""
    call = arguments()
    call["cache"] = shape(PAGES, GROUPS, 8, 384)(call["cache"])
    call["block_table"] = shape(2, 2**28 - 1)(call["block_table"])
    assert check_call(**call).max_regions == 2**28 - 1
    call["block_table"] = shape(2, 2**28)(call["block_table"])
    with pytest.raises(ValueError, match=r"block_table: expected .* got 268435456 \* 8"):
        check_call(**call)


def test_default_splits():
    """The largest power of two up to 32 for which rows * splits stays at 256 or below, else 1."""
    expected = {
        rows: max(splits for splits in (1, 2, 4, 8, 16, 32) if splits == 1 or rows * splits <= 256)
        for rows in range(1, 513)
    }
    assert {rows: default_splits(rows) for rows in range(1, 513)} == expected


def test_default_splits_of_an_empty_batch():
    assert default_splits(0) == 32


@pytest.mark.parametrize(
    ("spec", "dim", "expected"),
    [
        (ArraySpec((2, 3, 4), "bool"), 0, 12),
        (ArraySpec((2, 3, 4), "bool"), 1, 4),
        (ArraySpec((2, 3, 4), "bool"), -1, 1),
        (ArraySpec((2, 3, 4), "bool"), -3, 12),
        (ArraySpec((2, 3, 4), "bool", (40, 5, 1)), -2, 5),
        (ArraySpec((7,), "bool"), 0, 1),
    ],
)
def test_stride(spec, dim, expected):
    assert spec.stride(dim) == expected


# --- NumPy calls


def test_describe():
    array = np.zeros((4, 6, 10), np.int32)[::2, :, 3:7]
    assert describe(array) == ArraySpec((2, 6, 4), "int32", (120, 10, 1))
    assert describe(array[:, ::-1]).strides == (120, -10, 1)


def test_describe_refuses_strides_between_elements():
    record = np.zeros(4, [("a", np.int32), ("b", np.int8)])
    with pytest.raises(TypeError, match="byte order of this machine, got >i4"):
        describe(np.zeros(3, ">i4"))
    with pytest.raises(ValueError, match=r"strides in whole elements, got \(5,\) bytes"):
        describe(record["a"])


def test_call_without_splits_takes_the_default():
    call = Call(
        query=np.zeros((40, 1, 192), np.float16),
        cache=np.zeros((1, 1, 8, 384), np.float16),
        regions=np.zeros((40, 1), np.int32),
        block_table=np.zeros((40, 1), np.int32),
        positions=np.zeros(40, np.int32),
        active=np.ones(40, bool),
    )
    assert call.geometry().splits == 4
    assert "gate" not in call.arrays()
    assert set(call.options()) == {"scale", "query_len", "splits", "clear_inactive"}
    with pytest.raises(ValueError, match="splits: expected 1 to 256, got 300"):
        dataclasses.replace(call, splits=300).geometry()


@pytest.mark.parametrize(
    ("view", "offset"),
    [
        pytest.param(lambda store: store[:, 100:868].reshape(3, 1, 2, 384), 100, id="inside"),
        pytest.param(lambda store: store[1:, :768].reshape(2, 1, 2, 384), 0, id="later pages"),
        pytest.param(
            lambda store: store[:, :768].reshape(3, 2, 1, 384).swapaxes(1, 2), 0, id="token-major"
        ),
    ],
)
def test_page_storage_holds_the_view(view, offset):
    store = np.arange(3 * 1000, dtype=np.int32).reshape(3, 1000)
    cache = view(store)
    storage, found, (page, group, token, last) = page_storage(cache)
    assert (found, page, last) == (offset, 1000, 1)
    assert np.shares_memory(storage, store)
    pages, groups, page_size, _ = cache.shape
    place = [
        [found + g * group + t * token + np.arange(384) for t in range(page_size)]
        for g in range(groups)
    ]
    np.testing.assert_array_equal(storage[:pages][:, np.array(place)], cache)


def test_page_storage_refuses_a_page_that_ends_early():
    store = np.zeros(2 * 1000 - 1, np.int32)
    cache = np.ndarray((2, 1, 2, 384), np.int32, store, 0, (4000, 4000, 1536, 4))
    with pytest.raises(ValueError, match="cache: expected whole pages up to element 2000, got 1"):
        page_storage(cache)


def test_page_storage_of_memory_that_another_library_owns():
    """As torch's `tensor.transpose(1, 2).numpy()` gives it: no NumPy array owns the memory."""
    memory = bytearray(np.arange(2 * 2 * 3 * 384, dtype=np.int32).tobytes())
    cache = np.ndarray((2, 3, 2, 384), np.int32, memory, 0, (9216, 1536, 4608, 4))
    storage, offset, strides = page_storage(cache)
    assert (offset, strides) == (0, (2304, 384, 1152, 1))
    np.testing.assert_array_equal(storage.ravel(), np.arange(2 * 2 * 3 * 384))
