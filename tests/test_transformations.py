"""The operation under `jax.grad`, `jax.vmap`, `lax.scan`, `jit`, donation, and in a decode loop."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from sparse_decode.bridge import lowering  # noqa: E402
from sparse_decode.cases import Case, build  # noqa: E402
from sparse_decode.pallas_kernels import PackedCache, sparse_decode_attention  # noqa: E402

if jax.default_backend() == "cpu":
    # Nearly all the time of these tests is compilation of interpreted kernels that run once.
    jax.config.update("jax_disable_most_optimizations", True)

DEPRECATED = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "jax_decode_loop.py"
CASE = Case(
    "transformations",
    (40, 9),
    heads=2,
    groups=2,
    slots=4,
    page_size=16,
    splits=1,
    gate="bfloat16",
    index="int32",
    inactive=(1,),
    clear_inactive=False,
)
PER_REQUEST = ("query", "regions", "block_table", "positions", "active", "output", "gate")


def arrays_of(case=CASE, names=None):
    call = build(case)
    arrays = {name: jnp.asarray(a) for name, a in call.arrays().items()}
    return {name: a for name, a in arrays.items() if names is None or name in names}


def attend(arrays, **options):
    options = {"scale": 0.07, "splits": 1, "clear_inactive": False, "return_lse": True, **options}
    return sparse_decode_attention(**arrays, **options)


@pytest.mark.parametrize(
    "settings",
    [
        {"jax_default_matmul_precision": "F16_F16_F16"},
        {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"},
    ],
    ids=["precision", "promotion"],
)
def test_settings_of_the_program_do_not_matter(settings, jax_settings):
    arrays = arrays_of()
    expected = attend(arrays)
    with jax_settings(settings):
        found = attend(arrays)
    assert_same_bits(found, expected)


def without_nan(array):
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    wide = np.nan_to_num(np.asarray(array, np.float32), nan=0.5)
    return jnp.asarray(wide.astype(array.dtype))


def batch_of(arrays, names):
    """Three calls that differ in the named arrays, stacked; the others as they are."""
    scales = {"k_scale", "v_scale"}
    shifted = {
        name: jnp.stack([jnp.roll(arrays[name], shift, axis=0) for shift in range(3)])
        for name in names
        if name not in scales
    }
    scaled = {name: arrays[name] * jnp.arange(1.0, 4.0) for name in names if name in scales}
    return arrays | shifted | scaled


def assert_same_bits(first, second):
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        bits = f"u{one.dtype.itemsize}"
        np.testing.assert_array_equal(np.asarray(one).view(bits), np.asarray(other).view(bits))


# --- derivatives

FORWARD_ONLY = r"sparse_decode_attention is forward only.*stop_gradient"


def loss(query, arrays):
    return attend(arrays | {"query": query})[0].astype(jnp.float32).sum()


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, x: jax.grad(f)(x),
        lambda f, x: jax.jit(jax.grad(f))(x),
        lambda f, x: jax.grad(jax.jit(f))(x),
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.vjp(f, x),
        lambda f, x: jax.linearize(f, x),
        lambda f, x: jax.grad(jax.checkpoint(f))(x),
        lambda f, x: jax.vmap(jax.grad(f))(x[None]),
        lambda f, x: jax.grad(lambda x: jax.vmap(f)(x[None]).sum())(x),
    ],
    ids=[
        "grad",
        "jit_grad",
        "grad_jit",
        "jvp",
        "vjp",
        "linearize",
        "remat",
        "vmap_grad",
        "grad_vmap",
    ],
)
def test_no_derivative(differentiate):
    arrays = arrays_of()
    with pytest.raises(NotImplementedError, match=FORWARD_ONLY):
        differentiate(functools.partial(loss, arrays=arrays), arrays["query"])


@pytest.mark.parametrize("name", ["cache", "gate", "k_scale", "v_scale", "output"])
def test_no_derivative_by_any_argument(name):
    arrays = arrays_of()
    with pytest.raises(NotImplementedError, match=FORWARD_ONLY):
        jax.jvp(lambda x: attend(arrays | {name: x}), (arrays[name],), (arrays[name],))


def test_gradients_stop_at_its_inputs():
    arrays = arrays_of()

    def total(x):
        return loss(jax.lax.stop_gradient(arrays["query"] * x), arrays) + x.astype(jnp.float32)

    assert jax.eval_shape(jax.grad(total), jnp.bfloat16(2)).dtype == jnp.bfloat16
    assert "sparse_decode_split" in str(jax.make_jaxpr(jax.grad(total))(jnp.bfloat16(2)))


# --- vmap


@pytest.mark.parametrize(
    "names",
    [("query",), PER_REQUEST, ("query", "cache"), ("query", "k_scale", "v_scale")],
    ids=["query", "per_request", "cache", "scales"],
)
def test_vmap_is_a_loop(names):
    arrays = {name: without_nan(array) for name, array in arrays_of().items()}
    calls = batch_of(arrays, names)
    axes = {name: 0 if name in names else None for name in arrays}
    found = jax.jit(jax.vmap(attend, in_axes=(axes,)))(calls)
    one = jax.jit(attend)
    results = [
        one({name: a[index] if name in names else a for name, a in calls.items()})
        for index in range(3)
    ]
    assert_same_bits(found, jax.tree.map(lambda *parts: jnp.stack(parts), *results))
    assert not jnp.array_equal(results[0][1], results[1][1])


def test_vmap_over_no_calls():
    arrays = arrays_of()
    names = PER_REQUEST
    calls = {name: a[None][:0] if name in names else a for name, a in arrays.items()}
    axes = {name: 0 if name in names else None for name in arrays}
    output, lse = jax.vmap(attend, in_axes=(axes,))(calls)
    assert (output.shape, lse.shape) == ((0, *arrays["query"].shape), (0, 4, 2))


def test_vmap_over_requests_is_one_call_of_more_rows():
    arrays = arrays_of()
    calls = batch_of(arrays, ("query", "regions"))
    axes = {name: 0 if name in ("query", "regions") else None for name in arrays}
    mapped = jax.vmap(attend, in_axes=(axes,))
    with lowering._Jax.find().targeting(90):
        text = jax.jit(mapped).trace(calls).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1
    assert "stablehlo.while" not in text
    assert "grid_x = 12 : i32" in text  # 3 calls of 2 requests of 2 groups


def test_nested_vmap_and_out_axes():
    arrays = arrays_of(names=("query", "regions"))
    fixed = {name: a for name, a in arrays_of().items() if name not in arrays}
    query = jnp.stack(
        [jnp.stack([arrays["query"] * (1 + i + j) for j in range(2)]) for i in range(3)]
    )

    def one(query):
        return attend(fixed | {"query": query, "regions": arrays["regions"]})[0]

    found = jax.jit(jax.vmap(jax.vmap(one), in_axes=0, out_axes=2))(query)
    flat = jax.jit(jax.vmap(one))(query.reshape(6, *query.shape[2:]))
    assert_same_bits(jnp.moveaxis(found, 2, 0).reshape(flat.shape), flat)


# --- loops, traces, donation


def layered(layers=3):
    """The storage of a cache that holds all layers in each page, and the caches on their own."""
    call = build(dataclasses.replace(CASE, cache="uint8"))
    pages, groups, page_size, _ = call.cache.shape
    rng = np.random.default_rng(1)
    caches = [call.cache[..., [*rng.permutation(192), *range(192, 384)]] for _ in range(layers)]
    storage = np.concatenate([cache.reshape(pages, -1) for cache in caches], axis=1)
    return jnp.asarray(storage), [jnp.asarray(cache) for cache in caches], groups, page_size


def test_scan_over_layers_and_one_trace():
    storage, caches, groups, page_size = layered()
    arrays = {name: a for name, a in arrays_of().items() if name != "cache"}
    traces = []

    @jax.jit
    def model(storage, arrays):
        traces.append(storage)

        def layer(query, index):
            offset = index * (groups * page_size * 384)
            cache = PackedCache(storage, offset, groups=groups, page_size=page_size)
            output, lse = attend(arrays | {"query": query, "cache": cache}, clear_inactive=True)
            return output, lse

        return jax.lax.scan(layer, arrays["query"], jnp.arange(len(caches)))

    one = jax.jit(functools.partial(attend, clear_inactive=True))
    for shift in (0, -8):  # other values
        arrays["positions"] = arrays["positions"] + shift
        output, lse = model(storage, arrays)
        query = arrays["query"]
        for index, cache in enumerate(caches):
            query, expected = one(arrays | {"query": query, "cache": cache})
            assert_same_bits(lse[index], expected)
        assert_same_bits(output, query)
    assert len(traces) == model._cache_size() == one._cache_size() == 1


@pytest.mark.parametrize("splits", [1, 2])
def test_donated_output_is_aliased(splits):
    arrays = arrays_of()
    output = arrays.pop("output")

    def step(output, arrays):
        return attend(arrays | {"output": output}, splits=splits)

    donating, keeping = jax.jit(step, donate_argnums=0), jax.jit(step)
    with lowering._Jax.find().targeting(90):
        donated, kept = (
            f.trace(output, arrays).lower(lowering_platforms=("cuda",)).as_text()
            for f in (donating, keeping)
        )
    assert "tf.aliasing_output = 0" in donated or "jax.buffer_donor = true" in donated
    assert "tf.aliasing_output" not in kept
    assert donated.count("operand_index") == 1
    assert donated.count("@__gpu$xla.gpu.triton") == splits


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2])
def test_donated_output_keeps_its_address(splits):
    arrays = arrays_of()
    output = arrays.pop("output")
    step = jax.jit(
        lambda output, arrays: attend(arrays | {"output": output}, splits=splits)[0],
        donate_argnums=0,
    )
    address = output.unsafe_buffer_pointer()
    for _ in range(3):
        output = step(output, arrays)
        assert output.unsafe_buffer_pointer() == address


# --- the example


def run_example(folder, *arguments, **env):
    kept = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-W", DEPRECATED, EXAMPLE, *arguments],
        cwd=folder,
        env=kept | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


def test_decode_loop_on_a_cpu(tmp_path):
    printed = run_example(tmp_path, CUDA_VISIBLE_DEVICES="")
    checked = re.findall(r"^ +\d+ .*?(\d+) rows, +(\S+)(?: +-| +\d+ rows, +(\S+))$", printed, re.M)
    assert len(checked) >= 8
    assert all(int(rows) > 0 and float(share) <= 1 for rows, share, _ in checked)
    assert any(float(other) > 10 for *_, other in checked if other)  # the check can tell
    assert re.search(r"^6 requests, 96 new tokens", printed, re.M)
    assert "traced 1 time, compiled 1 time; no step moved anything" in printed
    assert "Dense attention where all is covered." in printed


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [(), ("--large",)], ids=["small", "large"])
def test_decode_loop_on_a_gpu(arguments, tmp_path):
    printed = run_example(tmp_path, *arguments)
    assert re.search(
        r"ms a step with a full batch: .* ms attention, .* ms the rest$", printed, re.M
    )
    assert "traced 1 time, compiled 1 time; no step moved anything" in printed
    assert "Dense attention where all is covered." in printed
