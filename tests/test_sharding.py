"""Calls spread over devices, and the merge of shares.

The tests marked `several` need several devices. Where there is no GPU, `test_with_eight_devices`
runs them in a process of its own that splits the CPU into eight.
"""

import dataclasses
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AbstractMesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from sparse_decode.call import page_storage  # noqa: E402
from sparse_decode.cases import BF16, Case, build  # noqa: E402
from sparse_decode.pallas_kernels import (  # noqa: E402
    Config,
    PackedCache,
    context_attention,
    context_specs,
    group_specs,
    merge,
    partial_attention,
    shard_over_context,
    shard_over_groups,
    sparse_decode_attention,
    split_block_table,
    write_kv,
)
from sparse_decode.tolerance import judge, limits  # noqa: E402

if jax.default_backend() == "cpu":
    jax.config.update("jax_disable_most_optimizations", True)

DEVICES = jax.device_count()
FLOAT32_EPS = 2.0**-23
ROWS = ("query", "regions", "positions", "active", "output")
CONFIG = Config(splits=2)
COLLECTIVE = re.compile(r"= .*\b(all-\w+|collective-\w+|reduce-scatter)[(-]")

several = pytest.mark.skipif(DEVICES < 2, reason="needs several devices")


def run_with_devices(**env):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "no:xdist", "-q", __file__],
        cwd=Path(__file__).parents[1],
        env={name: v for name, v in os.environ.items() if "XDIST" not in name} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs several devices" not in done.stdout


@pytest.mark.skipif(DEVICES > 1, reason="there are several devices already")
def test_with_eight_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run_with_devices(
        CUDA_VISIBLE_DEVICES="",
        JAX_PLATFORMS="cpu",
        SPARSE_DECODE_GPU_TESTS="0",
        XLA_FLAGS=flags,
    )


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICES < 2 or os.environ.get("SPARSE_DECODE_INNER") == "1", reason="needs several GPUs"
)
def test_on_several_gpus():
    """The tests of this file that carry no mark of a GPU, natively."""
    run_with_devices(SPARSE_DECODE_INNER="1")


def assert_same_bits(first, second):
    for one, other in zip(first, second, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(*(a.view(f"u{a.dtype.itemsize}") for a in (one, other)))


def options(call, **changes):
    return {**call.options(), "splits": None, "config": CONFIG, "return_lse": True, **changes}


def place(mesh, specs, arrays):
    return {
        name: jax.device_put(array, NamedSharding(mesh, specs[name]))
        for name, array in arrays.items()
    }


# --- tensor parallel


def by_group(arrays, groups):
    """Arrays of rows as `[tokens, groups, ...]`."""
    return {
        name: array.reshape(-1, groups, *array.shape[1:]) if name in ROWS else array
        for name, array in arrays.items()
    }


@several
def test_groups():
    """Bit-equal with one device, without communication, into a donated buffer."""
    case = Case("groups", (70, 9), groups=8, query_len=2, heads=4, slots=5, page_size=16)
    case = dataclasses.replace(case, index="int32", gate="bfloat16", inactive=(2,))
    call = dataclasses.replace(build(case), clear_inactive=False)
    mesh = jax.make_mesh((DEVICES,), ("model",))
    arrays = {name: jnp.asarray(array) for name, array in call.arrays().items()}
    expected = jax.jit(lambda a: sparse_decode_attention(**a, **options(call)))(arrays)
    verdict = judge(limits(call), *map(np.asarray, expected), call.output)
    assert verdict.ok, verdict.fault

    specs = group_specs("model")
    sharded = place(mesh, specs, by_group(arrays, 8))
    output = sharded.pop("output")
    attend = jax.jit(
        lambda output, a: shard_over_groups(mesh, "model")(**a, output=output, **options(call)),
        donate_argnums=0,
    )
    program = attend.lower(output, sharded).compile()
    assert not COLLECTIVE.search(program.as_text())
    results = program(output, sharded)
    assert output.is_deleted()
    for result in results:
        wanted = NamedSharding(mesh, specs["query"])
        assert result.sharding.is_equivalent_to(wanted, result.ndim)
    flat = [np.asarray(result).reshape(-1, *result.shape[2:]) for result in results]
    assert_same_bits(flat, expected)


@several
def test_groups_of_a_packed_cache_on_a_larger_mesh():
    """Each device's part of a page has a header before its groups; the mesh has one axis more."""
    case = Case("packed groups", (40,), groups=4, heads=2, slots=3, page_size=8, **BF16)
    call = dataclasses.replace(build(dataclasses.replace(case, index="int32")), output=None)
    mesh = jax.make_mesh((2, DEVICES // 2), ("data", "model"))
    parts = DEVICES // 2
    arrays = {name: jnp.asarray(array) for name, array in call.arrays().items()}
    expected = jax.jit(lambda a: sparse_decode_attention(**a, **options(call)))(arrays)

    header = 32
    dense = call.cache.reshape(len(call.cache), parts, -1)
    storage = np.full((*dense.shape[:2], header + dense.shape[2]), np.nan, dense.dtype)
    storage[..., header:] = dense
    storage = jax.device_put(
        storage.reshape(len(storage), -1), NamedSharding(mesh, P(None, "model"))
    )
    packed = PackedCache(storage, header, groups=4, page_size=8)
    del arrays["cache"]
    sharded = place(mesh, group_specs("model"), by_group(arrays, 4))
    attend = jax.jit(
        lambda a, cache: shard_over_groups(mesh, "model")(cache=cache, **a, **options(call))
    )
    results = attend(sharded, packed)
    flat = [np.asarray(result).reshape(-1, *result.shape[2:]) for result in results]
    assert_same_bits(flat, expected)


@several
def test_requests_in_a_shard_map_of_ones_own():
    """Requests sharded, the cache replicated."""
    case = Case("requests", (40, 9) * DEVICES, heads=2, slots=3, page_size=8, index="int32", **BF16)
    call = dataclasses.replace(build(case), output=None)
    arrays = {name: jnp.asarray(array) for name, array in call.arrays().items()}
    expected = jax.jit(lambda a: sparse_decode_attention(**a, **options(call)))(arrays)
    mesh = jax.make_mesh((DEVICES,), ("data",))
    specs = {name: P() if name == "cache" else P("data") for name in arrays}
    attend = jax.shard_map(
        lambda a: sparse_decode_attention(**a, **options(call)),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=P("data"),
        check_vma=False,
    )
    program = jax.jit(attend).lower(place(mesh, specs, arrays)).compile()
    assert not COLLECTIVE.search(program.as_text())
    assert_same_bits(program(place(mesh, specs, arrays)), expected)


def own_pages(cache, key, value, block_table, *rest):
    first = jax.lax.axis_index("x") * cache.shape[0]
    return write_kv(cache, key, value, block_table - first, *rest)


@several
@pytest.mark.parametrize(
    ("write", "cache_spec", "line_spec"),
    [(write_kv, P(None, "x"), P(None, "x")), (own_pages, P("x"), P())],
    ids=["groups", "pages"],
)
def test_writing_into_a_sharded_cache(write, cache_spec, line_spec):
    """As docs/jax.md has it: in place, without communication."""
    rng = np.random.default_rng(0)
    tokens, groups, pages = 5, 2 * DEVICES, 3 * DEVICES
    cache = rng.integers(0, 100, (pages, groups, 8, 384)).astype(np.uint8)
    key, value = (rng.normal(size=(tokens, groups, 192)).astype(np.float32) for _ in range(2))
    table = rng.permutation(pages)[:tokens].reshape(tokens, 1).astype(np.int32)
    table[1] = -1
    positions, active = rng.integers(0, 8, tokens).astype(np.int32), np.arange(tokens) != 2
    arrays = [cache, key, value, table, positions, active, np.float32(0.5), np.float32(2)]
    expected = write_kv(*map(jnp.asarray, arrays))
    assert (np.asarray(expected) != cache).any(axis=(1, 2, 3)).sum() == tokens - 2

    mesh = jax.make_mesh((DEVICES,), ("x",))
    specs = (cache_spec, line_spec, line_spec, *[P()] * 5)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    mapped = jax.shard_map(write, mesh=mesh, in_specs=specs, out_specs=cache_spec)
    program = jax.jit(mapped, donate_argnums=0).lower(*placed).compile()
    assert not COLLECTIVE.search(program.as_text())
    assert_same_bits([program(*placed)], [expected])
    assert placed[0].is_deleted()


ABSTRACT = AbstractMesh((8,), ("x",))


def struct_call(pages=8, groups=8):
    """Arguments of the right shapes for both functions, but that rows are `[tokens, groups]`."""
    return {
        "query": jnp.zeros((3, groups, 4, 192), jnp.bfloat16),
        "cache": jnp.zeros((pages, groups, 8, 384), jnp.bfloat16),
        "regions": jnp.zeros((3, groups, 5), jnp.int32),
        "block_table": jnp.zeros((3, 2), jnp.int32),
        "positions": jnp.zeros((3, groups), jnp.int32),
        "active": jnp.ones((3, groups), bool),
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": jnp.zeros((24, 4, 192), jnp.bfloat16)}, ValueError, r"query: .*\[tokens, 8, h"),
        ({"positions": jnp.zeros(24, jnp.int32)}, ValueError, r"positions: .*\[tokens, 8\], got"),
        ({"regions": jnp.zeros((3, 4, 5), jnp.int32)}, ValueError, r"regions: .*\[tokens, 8, slo"),
        ({"active": np.ones((3, 8), bool)}, TypeError, "active: expected a JAX array, got ndarray"),
        (struct_call(groups=4), ValueError, r"cache: expected groups in multiples of the 8 devi"),
        ({"cache": jnp.zeros((8, 384), jnp.bfloat16)}, ValueError, r"cache: expected shape \[page"),
    ],
)
def test_wrong_groups(changes, error, message):
    with pytest.raises(error, match=message):
        shard_over_groups(ABSTRACT, "x")(**{**struct_call(), **changes}, scale=1.0)


def test_wrong_axis():
    for shard in (shard_over_groups, shard_over_context):
        with pytest.raises(ValueError, match=r"axis: expected one of \['x'\], got 'y'"):
            shard(ABSTRACT, "y")


# --- context parallel

SPREAD = Case(
    "spread",
    (100, 60, 1),
    groups=2,
    heads=4,
    slots=8,
    page_size=8,
    gate="bfloat16",
    index="int32",
    inactive=(2,),
    blank=(3,),
)


def long_case(regions):
    """A context of so many regions for each device, all attended, between two short ones."""
    regions *= DEVICES
    contexts = (200, regions * 8 - 3, 40)
    long = Case(f"long {regions}", contexts, heads=4, slots=regions, gate="bfloat16")
    return dataclasses.replace(long, index="int32", inactive=(2,))


LONG = [128, pytest.param(1024, marks=pytest.mark.gpu)]


def spread(case, name):
    """The call with its pages spread over the devices, and its share for each device."""
    call = dataclasses.replace(build(case), output=None)
    pages = len(call.cache)  # room on each device
    total = pages * DEVICES
    mixed = np.random.default_rng(7).permutation(total)
    places = {
        "even": mixed,
        "uneven": np.concatenate([[0, 1, 2], mixed[mixed >= pages]]),  # three on the first device
        "last": np.arange(total)[::-1],  # all on the last device
    }[name][:pages]
    cache = np.full((total, *call.cache.shape[1:]), np.nan, call.cache.dtype)
    cache[places] = call.cache
    table = call.block_table.copy()
    inside = (table >= 0) & (table < pages)
    table[inside] = places[table[inside]]
    call = dataclasses.replace(call, cache=cache, block_table=table)
    shares = [
        dataclasses.replace(
            call,
            cache=cache[first : first + pages],
            block_table=np.where(table // pages == first // pages, table - first, -1),
            gate=None,
        )
        for first in range(0, total, pages)
    ]
    return call, shares


@cache
def attend_over_context(mesh, case):
    return jax.jit(lambda a: shard_over_context(mesh, "context")(**a, **options(build(case))))


@cache
def attend_to_shares(case):
    settings = {"scale": build(case).scale, "config": CONFIG}
    return jax.jit(lambda a: partial_attention(**a, **settings))


def merge_in_float64(outputs, lses):
    """What `merge` computes, and the error that float32 may add to it."""
    outputs, lses = np.asarray(outputs, np.float64), np.asarray(lses, np.float64)
    lse = np.logaddexp.reduce(lses, axis=0)
    with np.errstate(invalid="ignore"):
        weights = np.where(lses == -np.inf, 0, np.exp(lses - lse))
        span = np.where(lses == -np.inf, 0, lses.max(axis=0) - lses).max(axis=0)
    parts = np.where((lses == -np.inf)[..., None], 0, outputs)
    output = (weights[..., None] * parts).sum(axis=0)
    size = (weights[..., None] * np.abs(parts)).sum(axis=0)
    # Differences of lse round relative to their size; exp, sum, quotient, product and sum add some
    # roundings each.
    error = FLOAT32_EPS * (2 * len(lses) + 8 + span)
    lse_error = error + FLOAT32_EPS * np.where(lse == -np.inf, 0, np.abs(lse))
    return output, lse, error[..., None] * size, lse_error


def assert_merged(found, outputs, lses):
    output, lse, error, lse_error = merge_in_float64(outputs, lses)
    assert (np.abs(np.asarray(found[0], np.float64) - output) <= error).all()
    some = lse > -np.inf
    assert (np.asarray(found[1])[~some] == -np.inf).all()
    assert (np.abs(np.asarray(found[1], np.float64)[some] - lse[some]) <= lse_error[some]).all()


def check_context(case, name):
    """Against the oracle, and against the merge in float64 of what each device attends to."""
    call, shares = spread(case, name)
    mesh = jax.make_mesh((DEVICES,), ("context",))
    attend = attend_over_context(mesh, case)

    def run(call):
        arrays = {name: jnp.asarray(array) for name, array in call.arrays().items()}
        return map(np.asarray, attend(place(mesh, context_specs("context"), arrays)))

    output, lse = run(call)
    verdict = judge(limits(call), output, lse, None)
    assert verdict.ok, verdict.fault

    attend_to_share = attend_to_shares(case)
    parts = [attend_to_share(jax.tree.map(jnp.asarray, share.arrays())) for share in shares]
    outputs, lses = (np.stack(arrays) for arrays in zip(*parts, strict=True))
    assert outputs.dtype == np.float32
    nothing = (lses == -np.inf).all(axis=(1, 2))
    assert name != "last" or nothing.tolist() == [True] * (DEVICES - 1) + [False]
    # With a gate of 1, what differs from the merge in float64 is float32 and one last rounding.
    output, lse = run(dataclasses.replace(call, gate=np.full_like(call.gate, 100)))
    exact, exact_lse, error, lse_error = merge_in_float64(outputs, lses)
    roundoff = float(jnp.finfo(output.dtype).eps) / 2
    assert (np.abs(output.astype(np.float64) - exact) <= roundoff * np.abs(exact) + error).all()
    some = exact_lse > -np.inf
    assert (np.abs(lse[some] - exact_lse[some]) <= lse_error[some]).all()
    assert (lse[~some] == -np.inf).all()
    return lses


@several
@pytest.mark.parametrize("name", ["even", "uneven", "last"])
def test_context(name):
    lses = check_context(SPREAD, name)
    assert (lses[:, 3:] == -np.inf).all()


@several
@pytest.mark.parametrize("regions", LONG)
@pytest.mark.parametrize("name", ["even", "uneven", "last"])
def test_long_context(regions, name):
    lses = check_context(long_case(regions), name)
    attending = (lses[:, 1] > -np.inf).all(axis=-1)
    assert attending.sum() == (1 if name == "last" else DEVICES)


@several
def test_context_moves_output_and_lse_alone():
    call, _ = spread(SPREAD, "even")
    mesh = jax.make_mesh((DEVICES,), ("context",))
    arrays = {name: jnp.asarray(array) for name, array in call.arrays().items()}
    placed = place(mesh, context_specs("context"), arrays)
    lowered = attend_over_context(mesh, SPREAD).lower(placed)
    gathers = re.findall(r"stablehlo\.all_gather.*-> tensor<(\w+)>", lowered.as_text())
    share = f"{DEVICES}x{call.query.shape[0]}x{call.query.shape[1]}"
    assert sorted(gathers) == sorted([f"{share}x192xf32", f"{share}xf32"])
    kinds = COLLECTIVE.findall(lowered.compile().as_text())
    assert kinds
    assert all(kind.startswith("all-gather") for kind in kinds)


@several
@pytest.mark.parametrize("own_shard_map", [False, True])
def test_context_with_a_table_for_each_device(own_shard_map):
    """Any page on any device; a packed cache, an output buffer whose inactive rows stay."""
    case = Case("tables", (50, 20), heads=2, slots=4, page_size=8, inactive=(1,), **BF16)
    case = dataclasses.replace(case, index="int32", output="float16", layout="packed")
    call = dataclasses.replace(build(case), clear_inactive=False)
    storage, offset, _ = page_storage(call.cache)
    pages = len(storage)
    owner = np.random.default_rng(0).integers(0, DEVICES - 1, pages)  # nothing on the last one
    room = np.bincount(owner).max()
    spread = np.full((DEVICES, room, storage.shape[1]), np.nan, storage.dtype)
    for device in range(DEVICES):
        held = storage[owner == device]
        spread[device, : len(held)] = held
    mesh = jax.make_mesh((DEVICES,), ("context",))
    specs = {**context_specs("context"), "block_table": P("context")}
    packed = PackedCache(
        jax.device_put(spread.reshape(-1, storage.shape[1]), NamedSharding(mesh, P("context"))),
        jnp.int32(offset),
        groups=1,
        page_size=8,
    )
    arrays = {name: jnp.asarray(a) for name, a in call.arrays().items() if name != "cache"}
    arrays["block_table"] = split_block_table(arrays["block_table"], jnp.asarray(owner), DEVICES)
    arrays = place(mesh, specs, arrays)

    def on_device(storage, arrays):
        arrays = {**arrays, "block_table": arrays["block_table"][0]}
        cache = dataclasses.replace(packed, storage=storage)
        return context_attention(cache=cache, axis="context", **arrays, **options(call))

    if own_shard_map:
        mapped = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(P("context"), {name: specs[name] for name in arrays}),
            out_specs=P(),
            check_vma=False,
        )
        output, lse = jax.jit(mapped)(packed.storage, arrays)
    else:
        attend = shard_over_context(mesh, "context")
        output, lse = jax.jit(lambda a, c: attend(cache=c, **a, **options(call)))(arrays, packed)
    assert output.dtype == jnp.float16
    verdict = judge(limits(call), np.asarray(output), np.asarray(lse), call.output)
    assert verdict.ok, verdict.fault


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (struct_call(pages=9), r"cache: expected pages in multiples of the 8 devices .* 9 pages"),
        ({"block_table": jnp.zeros((4, 3, 2), jnp.int32)}, r"block_table: expected .*\[8, requ"),
    ],
)
def test_wrong_context(changes, message):
    with pytest.raises(ValueError, match=message):
        shard_over_context(ABSTRACT, "x")(**{**struct_call(), **changes}, scale=1.0)


def test_split_block_table():
    table = np.array([[0, 3, 4, -1], [2, 1, 5, 2**31 - 1]], np.int32)
    owner = np.array([1, 0, 1, 1, 0])  # and 5 is no page
    split = np.asarray(split_block_table(table, owner, 3))
    assert split.dtype == np.int32
    np.testing.assert_array_equal(split[0], [[-1, -1, 1, -1], [-1, 0, -1, -1]])
    np.testing.assert_array_equal(split[1], [[0, 2, -1, -1], [1, -1, -1, -1]])
    np.testing.assert_array_equal(split[2], np.full((2, 4), -1))
    with pytest.raises(ValueError, match=r"owner: expected shape \[pages\], got shape \[0\]"):
        split_block_table(table, owner[:0], 3)


# --- merge


def draw_shares(shares):
    rng = np.random.default_rng(shares)
    outputs = rng.normal(size=(shares, 6, 3, 192)).astype(np.float32)
    lses = (rng.normal(size=(shares, 6, 3)) * 8 + 300).astype(np.float32)
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    lses[:, 0] = -np.inf
    outputs[lses == -np.inf] = np.nan
    return outputs, lses


@pytest.mark.parametrize("shares", [1, 2, 8, 33])
def test_merge(shares):
    outputs, lses = draw_shares(shares)
    found = merge(outputs, lses)
    assert {array.dtype.name for array in found} == {"float32"}
    assert_merged(found, outputs, lses)
    assert not np.asarray(found[0])[0].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_merge_of_rounded_shares(dtype):
    """Rounding each share errs by one rounding of `sum(w * |output|)`, however many there are."""
    outputs, lses = draw_shares(8)
    exact, _, error, _ = merge_in_float64(outputs, lses)
    size, *_ = merge_in_float64(np.abs(outputs), lses)
    found, _ = merge(jnp.asarray(outputs, dtype), lses)
    roundoff = float(jnp.finfo(dtype).eps) / 2
    assert (np.abs(np.asarray(found, np.float64) - exact) <= roundoff * size + error).all()


def test_merge_in_steps():
    """Each lse in between is rounded, which the next weights inherit."""
    outputs, lses = draw_shares(8)
    halves = [merge(outputs[half], lses[half]) for half in (slice(3), slice(3, 8))]
    found = merge(*map(jnp.stack, zip(*halves, strict=True)))
    exact, lse, error, lse_error = merge_in_float64(outputs, lses)
    size, *_ = merge_in_float64(np.abs(outputs), lses)
    some = lse > -np.inf
    inherited = FLOAT32_EPS * np.where(some, np.abs(lse), 0)[..., None] * size
    assert (np.abs(np.asarray(found[0]) - exact) <= 2 * error + inherited).all()
    assert (np.abs(np.asarray(found[1])[some] - lse[some]) <= 2 * lse_error[some]).all()


def test_a_nan_stays_where_it_is():
    outputs, lses = draw_shares(2)
    lses[:, 1, 1] = (np.nan, 0)
    outputs[:, 2:, 1], lses[:, 2:, 1] = 1, 0
    output, lse = map(np.asarray, merge(outputs, lses))
    assert np.isnan(output[1, 1]).all()
    assert np.isnan(lse[1, 1])
    assert np.isnan(lse).sum() == 1


@pytest.mark.parametrize(
    ("outputs", "lses", "message"),
    [
        ((2, 3, 4, 192), (2, 3, 5), r"outputs: expected shape \[2, 3, 5, 192\]"),
        ((0, 3, 4, 192), (0, 3, 4), "lses: expected one share or more"),
    ],
)
def test_wrong_shares(outputs, lses, message):
    with pytest.raises(ValueError, match=message):
        merge(jnp.zeros(outputs), jnp.zeros(lses))
