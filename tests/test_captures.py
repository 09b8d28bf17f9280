"""Captures: what is written is what is read, files are whole or old, and damage is told."""

import dataclasses
import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from sparse_decode import _files, captures
from sparse_decode.captures import Capture, load, save
from sparse_decode.cases import CASES, build
from sparse_decode.oracle import evaluate

CASE = {case.name: case for case in CASES}
RECORDED = sorted(Path(__file__).with_name("captures").glob("*.safetensors"))


def capture_of(name="fp8_heads4", **changes):
    call = build(CASE[name])
    output = evaluate(call).output
    return Capture(dataclasses.replace(call, output=None, **changes), output, "a test")


def content(array):
    return array.dtype, array.shape, np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_round_trip(case, tmp_path):
    path = tmp_path / "one.safetensors"
    capture = capture_of(case.name)
    save(path, capture)
    again = load(path)
    assert again.call.options() == capture.call.options()
    assert again.call.arrays().keys() == capture.call.arrays().keys()
    assert again.call.output is None
    for name, array in capture.call.arrays().items():
        found = getattr(again.call, name)
        assert content(found) == content(array), name
        assert found.flags.c_contiguous
    assert content(again.output) == content(capture.output)
    assert again.source == "a test"
    # Strided arrays became dense, and nothing else changed.
    np.testing.assert_array_equal(
        evaluate(again.call).exact,
        evaluate(capture.call).exact,
    )


def test_without_output_source_or_splits(tmp_path):
    path = tmp_path / "one.safetensors"
    save(path, Capture(capture_of("fp8_heuristic_splits").call))
    again = load(path)
    assert (again.output, again.source, again.call.splits) == (None, "", None)
    with safetensors.safe_open(path, "np") as file:
        assert set(file.metadata()) == {"scale", "query_len", "clear_inactive"}
        assert "output" not in set(file.keys())


def test_a_buffer_before_the_call_is_not_recorded(tmp_path):
    path = tmp_path / "one.safetensors"
    call = build(CASE["fp8_heads4"])
    assert call.output is not None
    save(path, Capture(call))
    assert load(path).output is None


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 0.1 + 0.2},
        {"scale": 1e-300},
        {"scale": 1, "splits": None},
        {"scale": -0.5, "splits": 256},
        {"clear_inactive": False},
    ],
)
def test_options_survive_exactly(changes, tmp_path):
    path = tmp_path / "one.safetensors"
    capture = capture_of(**changes)
    save(path, capture)
    found = load(path).call.options()
    assert found == capture.call.options()
    assert type(found["scale"]) is float


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": np.float64(0.07)},
        {"scale": np.float32(0.07)},
        {"query_len": np.int64(1)},
        {"splits": np.int32(2)},
    ],
)
def test_options_as_numpy_scalars(changes, tmp_path):
    path = tmp_path / "one.safetensors"
    save(path, capture_of(**changes))
    [(name, value)] = changes.items()
    assert load(path).call.options()[name] == value


def test_scales_that_are_not_looked_at(tmp_path):
    path = tmp_path / "one.safetensors"
    save(path, capture_of("bf16", k_scale=np.ones(3)))
    assert load(path).call.geometry().cache_dtype == "bfloat16"


def test_format_of_the_file(tmp_path):
    """Any safetensors reader sees the contract's names, and options as text."""
    path = tmp_path / "one.safetensors"
    save(path, capture_of("uint8_verify4_groups2"))
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    header = json.loads(path.read_bytes()[8 : 8 + size])
    metadata = header.pop("__metadata__")
    assert metadata["query_len"] == "4"
    assert metadata["clear_inactive"] == "True"
    assert float(metadata["scale"]) == 192**-0.5
    assert {name: entry["dtype"] for name, entry in header.items()} == {
        "query": "BF16",
        "cache": "U8",
        "regions": "I64",
        "block_table": "I32",
        "positions": "I64",
        "active": "BOOL",
        "output": "BF16",
        "k_scale": "F32",
        "v_scale": "F32",
        "gate": "F32",
    }


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_captures_survive_a_round_trip(path, tmp_path):
    first = load(path)
    save(tmp_path / "copy.safetensors", first)
    again = load(tmp_path / "copy.safetensors")
    assert first.output is not None
    assert content(first.output) == content(again.output)
    for name, array in first.call.arrays().items():
        assert content(array) == content(getattr(again.call, name))
    assert first.call.options() == again.call.options()
    assert first.source == again.source


# --- whole or old


def test_an_existing_file_is_replaced(tmp_path):
    path = tmp_path / "one.safetensors"
    save(path, capture_of("fp8_heads4"))
    save(str(path), capture_of("fp8_head1"))
    assert load(path).call.query.shape[1] == 1
    assert os.listdir(tmp_path) == ["one.safetensors"]


@pytest.mark.parametrize("broken", ["write", "replace"])
def test_a_failing_write_leaves_the_old_file(broken, tmp_path, monkeypatch):
    path = tmp_path / "one.safetensors"
    save(path, capture_of("fp8_heads4"))
    before = path.read_bytes()

    def half_write(self, content):
        with self.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError("no space left")

    def no_replace(source, target):
        assert Path(source).parent == tmp_path, "a draft elsewhere may be on another file system"
        raise OSError("no space left")

    if broken == "write":
        monkeypatch.setattr(Path, "write_bytes", half_write)
    else:
        monkeypatch.setattr(_files.os, "replace", no_replace)
    with pytest.raises(OSError, match="no space left"):
        save(path, capture_of("fp8_head1"))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["one.safetensors"]


def test_a_call_that_breaks_the_contract_is_not_written(tmp_path):
    path = tmp_path / "one.safetensors"
    capture = capture_of(query_len=5)
    with pytest.raises(ValueError, match=r"query: expected rows in multiples of .* got 2 rows"):
        save(path, capture)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (np.zeros((2, 4, 191), np.float16), ValueError, r"output: .*\[2, 4, 192\], got .*191\]"),
        (np.zeros((3, 4, 192), np.float16), ValueError, r"output: .*\[2, 4, 192\], got .*\[3,"),
        (np.zeros((2, 4, 192), np.float32), TypeError, "output: .*bfloat16 or float16.*float32"),
    ],
)
def test_an_output_that_does_not_fit_is_not_written(output, error, message, tmp_path):
    capture = dataclasses.replace(capture_of(), output=output)
    with pytest.raises(error, match=message):
        save(tmp_path / "one.safetensors", capture)
    assert not os.listdir(tmp_path)


def test_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        save(tmp_path / "missing" / "one.safetensors", capture_of())
    with pytest.raises(FileNotFoundError, match="missing"):
        load(tmp_path / "missing" / "one.safetensors")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        load(tmp_path)


# --- damage


def written(tmp_path, tensors=None, metadata=None, drop=()):
    """A file with the given tensors and metadata in place of the good ones."""
    path = tmp_path / "one.safetensors"
    capture = capture_of()
    arrays = {**capture.call.arrays(), "output": capture.output, **(tensors or {})}
    options = {name: repr(value) for name, value in capture.call.options().items()}
    options |= metadata or {}
    arrays = {
        name: np.ascontiguousarray(array) if array.ndim else array.copy()
        for name, array in arrays.items()
        if name not in drop
    }
    options = {name: text for name, text in options.items() if name not in drop}
    specs = {
        name: safetensors.TensorSpec(
            dtype=array.dtype.name,
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    path.write_bytes(safetensors.serialize(specs, options))
    return path


def test_the_helper_writes_a_good_file(tmp_path):
    assert load(written(tmp_path)).call.query.shape == (2, 4, 192)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda whole: b"", id="empty"),
        pytest.param(lambda whole: whole[:4], id="cut in the length"),
        pytest.param(lambda whole: whole[:100], id="cut in the header"),
        pytest.param(lambda whole: whole[:-1], id="cut at the end"),
        pytest.param(lambda whole: whole + b"\0", id="too long"),
        pytest.param(lambda whole: whole[:8] + b"x" + whole[9:], id="header is no JSON"),
        pytest.param(lambda whole: b"\xff" * 8 + whole[8:], id="huge length"),
        pytest.param(lambda whole: b"\x93NUMPY" + bytes(200), id="another format"),
        pytest.param(lambda whole: b"plain text, and more of it\n", id="text"),
    ],
)
def test_damaged_file(damage, tmp_path):
    path = written(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="expected a safetensors file, got") as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_foreign_file(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"weight": np.zeros(3, np.float32)}, path)
    with pytest.raises(ValueError, match=r"without .* and with unknown weight") as caught:
        load(path)
    for name in ("query", "cache", "regions", "block_table", "positions", "active", "scale"):
        assert name in str(caught.value).partition(" and with ")[0]


@pytest.mark.parametrize(
    "name", ["query", "cache", "regions", "block_table", "positions", "active", "scale"]
)
def test_missing(name, tmp_path):
    path = written(tmp_path, drop=[name])
    with pytest.raises(ValueError, match=rf"expected the tensors of one call, .* without {name}"):
        load(path)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_missing_scale_of_an_fp8_cache(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name}: expected one float32 .* FP8, got None"):
        load(written(tmp_path, drop=[name]))


def test_missing_options_take_their_defaults(tmp_path):
    call = load(written(tmp_path, drop=["query_len", "splits", "clear_inactive"])).call
    assert (call.query_len, call.splits, call.clear_inactive) == (1, None, True)


def test_unknown_tensor(tmp_path):
    path = written(tmp_path, tensors={"lse": np.zeros(3, np.float32), "key": np.zeros(2, np.int8)})
    with pytest.raises(ValueError, match=r"one\.safetensors: .* with unknown key, lse$"):
        load(path)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("scale", "a lot", "float"),
        ("scale", "", "float"),
        ("scale", "None", "float"),
        ("scale", "'0.07'", "float"),
        ("scale", "__import__('os').getpid()", "float"),
        ("query_len", "1.0", "int"),
        ("query_len", "True", "int"),
        ("splits", "four", "int"),
        ("splits", "[4]", "int"),
        ("clear_inactive", "1", "bool"),
        ("clear_inactive", "yes", "bool"),
        ("clear_inactive", "true", "bool"),
    ],
)
def test_option_that_is_no_value(name, text, kind, tmp_path):
    path = written(tmp_path, metadata={name: text})
    with pytest.raises(ValueError, match=rf"{name}: expected {kind} as text, got ") as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).endswith(repr(text))


def test_scale_that_is_a_bool(tmp_path):
    with pytest.raises(ValueError, match="scale: expected float as text, got 'True'"):
        load(written(tmp_path, metadata={"scale": "True"}))


@pytest.mark.parametrize(
    "text",
    [
        "(" * 500 + ")" * 500,
        "1\0",
        "9" * 5000,
        "-" * 5000 + "1",
    ],
    ids=["brackets", "null", "digits", "signs"],
)
def test_option_text_that_strains_the_parser(text, tmp_path):
    with pytest.raises(ValueError, match="splits: expected int as text"):
        load(written(tmp_path, metadata={"splits": text}))


@pytest.mark.parametrize(
    ("name", "tensor", "error", "message"),
    [
        ("positions", np.zeros(2, np.float64), TypeError, "positions: expected dtype .* got F64"),
        ("query", np.zeros((2, 4, 192), np.float32), TypeError, "query: .* got float32"),
        (
            "query",
            np.zeros((2, 4, 64), np.float16),
            ValueError,
            r"query: .* got shape \[2, 4, 64\]",
        ),
        ("cache", np.zeros((3, 1, 12, 384), np.uint8), ValueError, "multiple of 8, got 12"),
        ("regions", np.zeros((3, 5), np.int32), ValueError, r"regions: .*\[2, slots\].*\[3, 5\]"),
        ("block_table", np.zeros((1, 5), np.int32), ValueError, "block_table: .* got shape"),
        ("active", np.zeros(2, np.uint8), TypeError, "active: expected dtype bool, got uint8"),
        ("k_scale", np.zeros(2, np.float32), ValueError, "k_scale: expected one element"),
        ("gate", np.zeros((2, 5), np.float32), ValueError, r"gate: .*\[2, 4\].*\[2, 5\]"),
        ("output", np.zeros((2, 5, 192), np.float16), ValueError, r"output: .*\[2, 5, 192\]"),
    ],
)
def test_content_that_breaks_the_contract(name, tensor, error, message, tmp_path):
    with pytest.raises(error, match=message):
        load(written(tmp_path, tensors={name: tensor}))


def test_content_that_breaks_the_contract_names_the_file(tmp_path):
    path = written(tmp_path, metadata={"query_len": "5"})
    with pytest.raises(ValueError, match="query: expected rows in multiples") as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("splits", "0", "splits: expected 1 to 256, got 0"),
        ("scale", "1e999", "scale: expected a finite number, got inf"),
        ("query_len", "-1", "query_len: expected at least 1, got -1"),
    ],
)
def test_option_out_of_range(option, text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(written(tmp_path, metadata={option: text}))


def test_dtype_that_no_capture_has(tmp_path):
    wrong = np.zeros((3, 1, 16, 384), ml_dtypes.float8_e5m2)
    with pytest.raises(TypeError, match=r"cache: expected dtype BOOL .* F8_E4M3, got F8_E5M2"):
        load(written(tmp_path, tensors={"cache": wrong}))


def test_what_is_loaded_has_nothing_to_do_with_the_file_any_more(tmp_path):
    path = written(tmp_path)
    capture = load(path)
    before = content(capture.call.cache)
    path.write_bytes(b"gone")
    path.unlink()
    assert content(capture.call.cache) == before
    assert capture.call.k_scale.shape == ()
    assert captures.Capture(capture.call).source == ""
