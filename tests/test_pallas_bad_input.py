"""What the public Pallas function says about each argument that is wrong."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from sparse_decode.pallas_kernels import (  # noqa: E402
    Config,
    PackedCache,
    partial_attention,
    sparse_decode_attention,
)
from sparse_decode.pallas_kernels.op import check_device  # noqa: E402

ROWS, HEADS, GROUPS, PAGE_SIZE = 4, 8, 2, 16
PAGE = GROUPS * PAGE_SIZE * 384


def good():
    return {
        "query": jnp.zeros((ROWS, HEADS, 192), jnp.bfloat16),
        "cache": jnp.zeros((3, GROUPS, PAGE_SIZE, 384), jnp.float8_e4m3fn),
        "regions": jnp.zeros((ROWS, 5), jnp.int32),
        "block_table": jnp.zeros((ROWS // GROUPS, 2), jnp.int32),
        "positions": jnp.zeros(ROWS, jnp.int32),
        "active": jnp.ones(ROWS, bool),
        "output": jnp.zeros((ROWS, HEADS, 192), jnp.float16),
        "k_scale": jnp.float32(1),
        "v_scale": jnp.ones(1, jnp.float32),
        "gate": jnp.zeros((ROWS // GROUPS, GROUPS * HEADS), jnp.float32),
        "scale": 0.07,
        "query_len": 1,
        "splits": 4,
        "clear_inactive": True,
        "return_lse": True,
        "config": None,
        "validate": False,
    }


def shape_of(call):
    """Checks the call as its lowering would, without compiling anything."""
    return jax.eval_shape(lambda: sparse_decode_attention(**call))


def zeros(dtype, *shape):
    return lambda: jnp.zeros(shape, dtype)


def value(new):
    return lambda: new


def test_the_call_is_good():
    output, lse = shape_of(good())
    assert (output.shape, output.dtype) == ((ROWS, HEADS, 192), jnp.float16)
    assert (lse.shape, lse.dtype) == ((ROWS, HEADS), jnp.float32)


BF16, F32, I32, FP8 = "bfloat16", "float32", "int32", "float8_e4m3fn"
# argument, what it is in place of the good one, error, message
WRONG = [
    ("query", zeros(BF16, 4, 8 * 192), ValueError, r"\[rows, heads, 192\], got .*\[4, 1536\]"),
    ("query", zeros(BF16, 4, 8, 64), ValueError, r"\[rows, heads, 192\], got .*\[4, 8, 64\]"),
    ("query", zeros(BF16, 4, 17, 192), ValueError, "1 to 16 heads .*, got 17"),
    ("query", zeros(BF16, 3, 8, 192), ValueError, r"groups \* query_len = 2 \* 1, got 3 rows"),
    ("query", zeros(F32, 4, 8, 192), TypeError, "bfloat16 or float16, got float32"),
    ("query", value([1.0]), TypeError, "a JAX array, got list"),
    ("cache", zeros(FP8, 3, 16, 384), ValueError, r"page_size, 384\], got .*\[3, 16, 384\]"),
    ("cache", zeros(FP8, 3, 2, 16, 192), ValueError, r"384\], got .*16, 192\]"),
    ("cache", zeros(FP8, 3, 2, 12, 384), ValueError, "multiple of 8, got 12"),
    ("cache", zeros(FP8, 0, 2, 16, 384), ValueError, r"at least one page .*, got .*\[0, 2"),
    ("cache", zeros("float16", 3, 2, 16, 384), TypeError, "bfloat16 or float8_e4m3fn .* float16"),
    ("cache", zeros("float8_e5m2", 3, 2, 16, 384), TypeError, "uint8 .*, got float8_e5m2"),
    ("cache", value(None), TypeError, "a JAX array, got NoneType"),
    ("regions", zeros(I32, 4), ValueError, r"\[rows, slots\], got shape \[4\]"),
    ("regions", zeros(I32, 5, 5), ValueError, r"\[4, slots\] .*, got shape \[5, 5\]"),
    ("regions", zeros(I32, 4, 0), ValueError, r"slots >= 1, got shape \[4, 0\]"),
    ("regions", zeros("int16", 4, 5), TypeError, "int32 or int64, got int16"),
    ("regions", value(((1, 2),)), TypeError, "a JAX array, got tuple"),
    ("block_table", zeros(I32, 2), ValueError, r"max_pages\], got shape \[2\]"),
    ("block_table", zeros(I32, 4, 2), ValueError, r"\[2, max_pages\] .*, got shape \[4, 2\]"),
    ("block_table", value(np.zeros((2, 2), np.int64)), TypeError, "int32, got int64"),
    ("positions", zeros(I32, 4, 1), ValueError, r"shape \[4\], got shape \[4, 1\]"),
    ("positions", zeros(I32, 2), ValueError, r"shape \[4\], got shape \[2\]"),
    ("positions", zeros(F32, 4), TypeError, "int32 or int64, got float32"),
    ("active", zeros(bool, 3), ValueError, r"shape \[4\], got shape \[3\]"),
    ("active", zeros("uint8", 4), TypeError, "bool, got uint8"),
    ("active", value(True), TypeError, "a JAX array, got bool"),
    ("output", zeros(BF16, 4, 8, 191), ValueError, r"\[4, 8, 192\], got .*191\]"),
    ("output", zeros(F32, 4, 8, 192), TypeError, "bfloat16 or float16, got float32"),
    ("output", value(()), TypeError, "a JAX array, got tuple"),
    ("k_scale", value(None), ValueError, "one float32 .* FP8, got None"),
    ("k_scale", zeros(F32, 2), ValueError, r"one element, got shape \[2\]"),
    ("k_scale", zeros(BF16), TypeError, "float32, got bfloat16"),
    ("k_scale", value(0.5), TypeError, "a JAX array, got float"),
    ("v_scale", value(None), ValueError, "one float32 .* FP8, got None"),
    ("v_scale", zeros(F32, 0), ValueError, r"one element, got shape \[0\]"),
    ("v_scale", zeros("float16"), TypeError, "float32, got float16"),
    ("v_scale", value(np.float32(1)), TypeError, "a JAX array, got float32"),
    ("gate", zeros(F32, 4, 8), ValueError, r"\[2, 16\], got shape \[4, 8\]"),
    ("gate", zeros(I32, 2, 16), TypeError, "float32, got int32"),
    ("gate", value([0.0]), TypeError, "a JAX array, got list"),
    ("scale", value(float("nan")), ValueError, "finite number, got nan"),
    ("scale", value("1"), TypeError, "real number, got str"),
    ("scale", value(None), TypeError, "real number, got NoneType"),
    ("query_len", value(0), ValueError, "at least 1, got 0"),
    ("query_len", value(1.0), TypeError, "integer, got float"),
    ("splits", value(0), ValueError, "1 to 256, got 0"),
    ("splits", value(257), ValueError, "1 to 256, got 257"),
    ("splits", value(True), TypeError, "integer, got bool"),
    ("clear_inactive", value(1), TypeError, "bool, got int"),
    ("return_lse", value(None), TypeError, "bool, got NoneType"),
    ("config", value(4), TypeError, "Config or None, got int"),
    ("config", value({"splits": 4}), TypeError, "Config or None, got dict"),
    ("validate", value(1), TypeError, "bool, got int"),
]


@pytest.mark.parametrize(("name", "make", "error", "message"), WRONG)
def test_each_argument_wrong(name, make, error, message):
    with pytest.raises(error, match=rf"^{name}: expected .*{message}"):
        shape_of({**good(), name: make()})


def test_every_argument_has_a_wrong_one():
    assert {name for name, *_ in WRONG} == set(good())


def test_no_query():
    with pytest.raises(TypeError, match="query"):
        shape_of({**good(), "query": None})


def test_a_traced_scale_is_refused():
    with pytest.raises(TypeError, match="scale: expected a real number, got "):
        jax.eval_shape(lambda scale: sparse_decode_attention(**{**good(), "scale": scale}), 0.5)


def test_wrong_rows_with_no_row():
    call = good() | {"query": jnp.zeros((0, HEADS, 192), jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"regions: expected shape \[0, slots\]"):
        shape_of(call)


def test_numpy_integers_are_integers():
    output, _ = shape_of(good() | {"splits": np.int64(4), "query_len": np.int64(1)})
    assert output.shape == (ROWS, HEADS, 192)


# --- the GPU


def use_gpu(monkeypatch, kind, capability):
    device = SimpleNamespace(device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])


@pytest.mark.parametrize(
    ("capability", "fp8"),
    [("8.0", False), ("8.6", False), ("8.9", True), ("9.0", True), ("10.0", True), ("12.1", True)],
)
def test_gpus_that_are_taken(monkeypatch, capability, fp8):
    use_gpu(monkeypatch, "NVIDIA A card", capability)
    check_device(fp8)


@pytest.mark.parametrize(
    ("kind", "capability", "fp8", "message"),
    [
        ("Tesla T4", "7.5", False, r"query: Triton needs .* 8\.0 or newer, got 7\.5 \(Tesla T4\)"),
        ("Tesla T4", "7.5", True, r"cache: an FP8 cache needs .* 8\.9 or newer, got 7\.5"),
        ("NVIDIA A10", "8.6", True, r"cache: an FP8 cache .*, got 8\.6 \(NVIDIA A10\)"),
        ("AMD Instinct MI250X", "gfx90a", False, r"query: .* an NVIDIA GPU, got AMD .*\(gfx90a\)"),
        ("AMD Instinct MI300X", "gfx942", True, r"query: .* an NVIDIA GPU, got AMD .*\(gfx942\)"),
    ],
)
def test_gpus_that_are_refused(monkeypatch, kind, capability, fp8, message):
    call = good()
    if not fp8:
        call["cache"] = call["cache"].astype(jnp.bfloat16)
    share = {name: call[name] for name in ("scale", "k_scale", "v_scale", "splits")}
    share |= {name: call[name] for name in ("query", "cache", "regions", "block_table")}
    share |= {name: call[name] for name in ("positions", "active")}
    use_gpu(monkeypatch, kind, capability)
    with pytest.raises(NotImplementedError, match=f"^{message}"):
        sparse_decode_attention(**call)
    with pytest.raises(NotImplementedError, match=f"^{message}"):
        partial_attention(**share)


# --- a cache inside larger pages


def packed(**changes):
    fields = {
        "storage": jnp.zeros((3, 2 * PAGE), jnp.float8_e4m3fn),
        "offset": 32,
        "groups": GROUPS,
        "page_size": PAGE_SIZE,
        "group_stride": None,
        "token_stride": None,
        "offset_unit": 16,
    }
    return PackedCache(**(fields | changes))


def test_the_packed_cache_is_good():
    output, _ = shape_of(good() | {"cache": packed()})
    assert output.shape == (ROWS, HEADS, 192)
    last = packed(offset=PAGE, group_stride=384, token_stride=2 * 384)
    assert last.strides() == (2 * PAGE, 384, 768, 1)
    assert shape_of(good() | {"cache": last})[0].shape == (ROWS, HEADS, 192)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"storage": [0]}, TypeError, r"cache\.storage: expected a JAX array, got list"),
        ({"storage": zeros(FP8, 3)()}, ValueError, r"cache\.storage: .* got shape \[3\]"),
        ({"storage": zeros(FP8, 3, 2, PAGE)()}, ValueError, r"cache\.storage: .* got shape \[3,"),
        ({"storage": zeros("int8", 3, 2 * PAGE)()}, TypeError, "cache: expected dtype .* int8"),
        ({"storage": zeros(FP8, 0, 2 * PAGE)()}, ValueError, "cache: .* at least one page"),
        ({"storage": zeros(FP8, 3, PAGE - 1)()}, ValueError, "cache: .* inside a page of 12287"),
        ({"groups": 5}, ValueError, r"cache: .* inside a page of 24576 .*, got groups 5 \* "),
        ({"groups": 0}, ValueError, "cache: expected at least one page and one group"),
        ({"page_size": 64}, ValueError, r"cache: .* got .* page size 64 \* stride 384"),
        ({"page_size": 12}, ValueError, "cache: .* multiple of 8, got 12"),
        ({"group_stride": -384}, ValueError, r"cache\.group_stride: expected at least 0, got -384"),
        ({"group_stride": 2 * PAGE}, ValueError, "cache: expected groups and tokens inside a page"),
        ({"token_stride": -1}, ValueError, r"cache\.token_stride: expected at least 0, got -1"),
        ({"token_stride": 4 * 384}, ValueError, "cache: expected groups and tokens inside a page"),
        ({"offset": -16}, ValueError, rf"cache\.offset: expected 0 to {PAGE}, got -16"),
        ({"offset": PAGE + 16}, ValueError, rf"cache\.offset: expected 0 to {PAGE}, got 12304"),
        ({"offset": 8}, ValueError, r"cache\.offset: .* multiple of offset_unit = 16, got 8"),
        (
            {"offset": np.array(8, np.int32)},
            ValueError,
            r"cache\.offset: .* offset_unit = 16, got 8",
        ),
        ({"offset": 1.5}, TypeError, r"cache\.offset: .* got float"),
        ({"offset": "16"}, TypeError, r"cache\.offset: .* got str"),
        ({"offset": None}, TypeError, r"cache\.offset: .* got NoneType"),
        ({"offset": jnp.float32(16)}, TypeError, r"cache\.offset: .* float32"),
        ({"offset": jnp.zeros(2, jnp.int32)}, ValueError, r"cache\.offset: .*\[2\]"),
        ({"offset": np.int64(-16)}, ValueError, r"cache\.offset: .* got -16"),
        ({"groups": "2"}, TypeError, r"cache\.groups: .* got str"),
        ({"groups": 2.0}, TypeError, r"cache\.groups: .* got float"),
        ({"page_size": 16.0}, TypeError, r"cache\.page_size: .* got float"),
        ({"group_stride": "1"}, TypeError, r"cache\.group_stride: .* got str"),
        ({"token_stride": 384.0}, TypeError, r"cache\.token_stride: .* got float"),
        ({"offset_unit": 0}, ValueError, r"cache\.offset_unit: .* got 0"),
        ({"offset_unit": -16}, ValueError, r"cache\.offset_unit: .* got -16"),
        ({"offset_unit": 16.0}, TypeError, r"cache\.offset_unit: .* got float"),
    ],
)
def test_each_field_of_a_packed_cache_wrong(changes, error, message):
    with pytest.raises(error, match=rf"^{message}"):
        shape_of(good() | {"cache": packed(**changes)})


# --- launch settings


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"splits": 0}, ValueError, "splits: expected 1 to 256, got 0"),
        ({"splits": 257}, ValueError, "splits: expected 1 to 256, got 257"),
        ({"splits": 2.0}, TypeError, "splits: expected an integer, got float"),
        ({"splits": None}, TypeError, "splits: expected an integer, got NoneType"),
        ({"tile": 8}, ValueError, r"tile: expected .*16, 32, 64, 128.*, got 8"),
        ({"tile": 48}, ValueError, r"tile: expected .*16, 32, 64, 128.*, got 48"),
        ({"tile": "64"}, TypeError, "tile: expected an integer, got str"),
        ({"warps": 3}, ValueError, r"warps: expected .*1, 2, 4, 8.*, got 3"),
        ({"warps": True}, TypeError, "warps: expected an integer, got bool"),
        ({"stages": 0}, ValueError, "stages: expected 1 to 8, got 0"),
        ({"stages": 9}, ValueError, "stages: expected 1 to 8, got 9"),
        ({"stages": 3.0}, TypeError, "stages: expected an integer, got float"),
        ({"parts": 2}, ValueError, r"parts: expected .*1, 4.*, got 2"),
        ({"combine_warps": 16}, ValueError, r"combine_warps: expected .*1, 2, 4, 8.*, got 16"),
        ({"combine_warps": "4"}, TypeError, "combine_warps: expected an integer, got str"),
    ],
)
def test_each_setting_wrong(changes, error, message):
    with pytest.raises(error, match=rf"[Cc]onfig\.{message}"):
        Config(**({"splits": 4} | changes))


def test_settings_are_frozen():
    config = Config(splits=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tile = 32
    assert config.tile_regions * 8 == config.tile
    assert hash(config) == hash(Config(splits=4))
    assert dataclasses.replace(config, splits=8).splits == 8
