"""Every argument of the Triton operation, wrong in each way it can be, and what the error says."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from sparse_decode import cases, torch_arrays
from sparse_decode.triton_kernels import sparse_decode_attention, sparse_decode_splits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASE = cases.Case("bad_input", (40, 20), heads=4, groups=2, gate="bfloat16", slots=6)
CALL = cases.build(CASE)  # 4 rows, 2 requests, pages of 64 tokens


def arguments() -> dict[str, Any]:
    tensors = {n: torch_arrays.from_numpy(array, DEVICE) for n, array in CALL.arrays().items()}
    return {**tensors, **CALL.options()}


def shaped(*shape):
    return lambda tensor: torch.zeros(shape, dtype=torch.float32, device=DEVICE).to(tensor.dtype)


def cast(dtype):
    return lambda tensor: tensor.float().to(dtype)


def apart(tensor):
    """The same tensor with last stride 2."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def elsewhere(tensor):
    return tensor.to("meta")


def as_numpy(tensor):
    return torch_arrays.to_numpy(tensor)


def constant(value):
    return lambda _: value


def overlapping(tensor):
    return tensor.as_strided(tensor.shape, (0, 192, 1))


WRONG = [
    ("query", shaped(4, 192), ValueError, "[rows, heads, 192]", "[4, 192]"),
    ("query", shaped(4, 4, 128), ValueError, "[rows, heads, 192]", "[4, 4, 128]"),
    ("query", shaped(4, 17, 192), ValueError, "1 to 16 heads", "17"),
    ("query", shaped(4, 0, 192), ValueError, "1 to 16 heads", "0"),
    ("query", shaped(3, 4, 192), ValueError, "multiples of groups * query_len = 2 * 1", "3 rows"),
    ("query", cast(torch.float32), TypeError, "bfloat16 or float16", "float32"),
    ("query", apart, ValueError, "last stride 1", "strides [1536, 384, 2]"),
    ("query", as_numpy, TypeError, "torch.Tensor", "ndarray"),
    ("query", constant(None), TypeError, "torch.Tensor", "NoneType"),
    ("cache", shaped(5, 64, 384), ValueError, "[pages, groups, page_size, 384]", "[5, 64, 384]"),
    ("cache", shaped(5, 2, 64, 192), ValueError, "page_size, 384]", "[5, 2, 64, 192]"),
    ("cache", shaped(5, 2, 12, 384), ValueError, "multiple of 8", "12"),
    ("cache", shaped(0, 2, 64, 384), ValueError, "at least one page", "[0, 2, 64, 384]"),
    ("cache", cast(torch.float16), TypeError, "bfloat16 or float8_e4m3fn or uint8", "float16"),
    ("cache", cast(torch.float8_e5m2), TypeError, "float8_e4m3fn", "float8_e5m2"),
    ("cache", lambda t: apart(t.view(torch.uint8)), ValueError, "last stride 1", "strides ["),
    ("cache", elsewhere, ValueError, f"device {DEVICE}", "device meta"),
    ("cache", as_numpy, TypeError, "torch.Tensor", "ndarray"),
    ("regions", shaped(4), ValueError, "[rows, slots]", "[4]"),
    ("regions", shaped(5, 6), ValueError, "[4, slots]", "[5, 6]"),
    ("regions", shaped(4, 0), ValueError, "slots >= 1", "[4, 0]"),
    ("regions", cast(torch.int16), TypeError, "int32 or int64", "int16"),
    ("regions", apart, ValueError, "last stride 1", "strides [12, 2]"),
    ("regions", elsewhere, ValueError, f"device {DEVICE}", "device meta"),
    ("regions", constant([[0]]), TypeError, "torch.Tensor", "list"),
    ("block_table", shaped(2), ValueError, "[requests, max_pages]", "[2]"),
    ("block_table", shaped(4, 2), ValueError, "[2, max_pages]", "[4, 2]"),
    ("block_table", shaped(2, 0), ValueError, "max_pages >= 1", "[2, 0]"),
    ("block_table", cast(torch.int64), TypeError, "int32", "int64"),
    ("block_table", apart, ValueError, "last stride 1", "strides [4, 2]"),
    ("block_table", elsewhere, ValueError, f"device {DEVICE}", "device meta"),
    ("block_table", constant(0), TypeError, "torch.Tensor", "int"),
    (
        "block_table",
        lambda t: torch.zeros((2, 1), dtype=t.dtype, device=DEVICE).expand(2, 2**25),
        ValueError,
        "below 2**31",
        "33554432 * 64",
    ),
    ("positions", shaped(2), ValueError, "[4]", "[2]"),
    ("positions", shaped(4, 1), ValueError, "[4]", "[4, 1]"),
    ("positions", cast(torch.int16), TypeError, "int32 or int64", "int16"),
    ("positions", apart, ValueError, "last stride 1", "strides [2]"),
    ("positions", elsewhere, ValueError, f"device {DEVICE}", "device meta"),
    ("positions", as_numpy, TypeError, "torch.Tensor", "ndarray"),
    ("active", shaped(5), ValueError, "[4]", "[5]"),
    ("active", cast(torch.uint8), TypeError, "bool", "uint8"),
    ("active", apart, ValueError, "last stride 1", "strides [2]"),
    ("active", elsewhere, ValueError, f"device {DEVICE}", "device meta"),
    ("active", constant(True), TypeError, "torch.Tensor", "bool"),
    ("output", shaped(4, 8, 192), ValueError, "[4, 4, 192]", "[4, 8, 192]"),
    ("output", cast(torch.float32), TypeError, "bfloat16 or float16", "float32"),
    ("output", apart, ValueError, "last stride 1", "strides [1536, 384, 2]"),
    ("output", overlapping, ValueError, "elements apart", "strides [0, 192, 1]"),
    ("output", elsewhere, ValueError, f"device {DEVICE}", "device meta"),
    ("output", constant(None), TypeError, "torch.Tensor", "NoneType"),
    ("k_scale", constant(None), ValueError, "one float32", "None"),
    ("k_scale", shaped(2), ValueError, "one element", "[2]"),
    ("k_scale", cast(torch.float16), TypeError, "float32", "float16"),
    ("k_scale", elsewhere, ValueError, f"device {DEVICE}", "device meta"),
    ("k_scale", constant(0.5), TypeError, "torch.Tensor", "float"),
    ("v_scale", constant(None), ValueError, "one float32", "None"),
    ("v_scale", shaped(4), ValueError, "one element", "[4]"),
    ("v_scale", cast(torch.float64), TypeError, "float32", "float64"),
    ("v_scale", elsewhere, ValueError, f"device {DEVICE}", "device meta"),
    ("v_scale", constant(np.float32(1)), TypeError, "torch.Tensor", "float32"),
    ("gate", shaped(4, 4), ValueError, "[2, 8]", "[4, 4]"),
    ("gate", cast(torch.float64), TypeError, "bfloat16 or float16 or float32", "float64"),
    ("gate", elsewhere, ValueError, f"device {DEVICE}", "device meta"),
    ("gate", as_numpy, TypeError, "torch.Tensor", "ndarray"),
    ("scale", constant(float("nan")), ValueError, "finite", "nan"),
    ("scale", constant(float("inf")), ValueError, "finite", "inf"),
    ("scale", constant("1"), TypeError, "real number", "str"),
    ("scale", constant([1.0]), TypeError, "real number", "list"),
    ("scale", constant(torch.ones(())), TypeError, "real number", "Tensor"),
    ("query_len", constant(0), ValueError, "at least 1", "0"),
    ("query_len", constant(1.0), TypeError, "integer", "float"),
    ("query_len", constant(True), TypeError, "integer", "bool"),
    ("splits", constant(0), ValueError, "1 to 256", "0"),
    ("splits", constant(257), ValueError, "1 to 256", "257"),
    ("splits", constant(None), TypeError, "integer", "NoneType"),
    ("splits", constant(4.0), TypeError, "integer", "float"),
    ("clear_inactive", constant(1), TypeError, "bool", "int"),
    ("clear_inactive", constant(None), TypeError, "bool", "NoneType"),
]


@pytest.fixture(scope="module", autouse=True)
def good_call():
    """A good call comes first, so that what is remembered of it could hide a bad one."""
    sparse_decode_attention(**arguments())


@pytest.mark.parametrize(
    ("name", "change", "error", "expected", "got"),
    [
        pytest.param(*entry, id=f"{number}-{entry[0]}-{entry[2].__name__}")
        for number, entry in enumerate(WRONG)
    ],
)
def test_error_names_argument_expectation_and_finding(name, change, error, expected, got):
    wrong = arguments()
    wrong[name] = change(wrong[name])
    before = torch_arrays.to_numpy(arguments()["output"])
    with pytest.raises(error) as caught:
        sparse_decode_attention(**wrong)
    message = str(caught.value)
    assert message.startswith(f"{name}: expected "), message
    found = re.match(r".*? expected (.*), got (.*)", message)
    assert found, message
    assert expected in found[1]
    assert got in found[2]
    if isinstance(wrong["output"], torch.Tensor) and name != "output":
        after = torch_arrays.to_numpy(wrong["output"])
        np.testing.assert_array_equal(after.view(np.uint8), before.view(np.uint8))


def test_every_argument_is_covered():
    assert {entry[0] for entry in WRONG} == set(arguments())


def test_query_len_that_does_not_divide_the_rows():
    with pytest.raises(ValueError, match=r"query: .*groups \* query_len = 2 \* 3, got 4 rows"):
        sparse_decode_attention(**{**arguments(), "query_len": 3})


@pytest.mark.parametrize("name", ["query", "output", "gate", "k_scale"])
def test_gradients_are_refused_where_they_would_be_lost(name):
    wrong = arguments()
    wrong[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name}: expected .* got requires_grad=True"):
        sparse_decode_attention(**wrong)
    with torch.no_grad():
        sparse_decode_attention(**wrong)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (-1, ValueError, "rows: expected at least 0, got -1"),
        (1.0, TypeError, "rows: expected an integer, got float"),
        (True, TypeError, "rows: expected an integer, got bool"),
        (None, TypeError, "rows: expected an integer, got NoneType"),
    ],
)
def test_rows_of_the_split_heuristic(rows, error, message):
    with pytest.raises(error, match=message):
        sparse_decode_splits(rows)
