"""One decode step with the KV heads sharded over all devices, next to the same step on one.

Each device has some KV groups: their rows, their part of the cache and of the gate. Nothing is
communicated. All GPUs are used; without one, the CPU plays eight devices. The exit status is 1 if
the two results are further apart than rounding explains.

    python examples/tensor_parallel.py
"""

# ruff: noqa: E402 - the environment has to be set before JAX is imported.

import functools
import os
import statistics
import sys
import time
import warnings

from sparse_decode.devices import gpu_count

ON_GPU = gpu_count() > 0
if not ON_GPU:
    eight = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {eight}"
    os.environ["JAX_PLATFORMS"] = "cpu"
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from sparse_decode.pallas_kernels import (
    group_specs,
    shard_over_groups,
    sparse_decode_attention,
)

DEVICES = jax.device_count()
GROUPS = -(-8 // DEVICES) * DEVICES  # 8, or the next number that the devices can share
TOKENS, CONTEXT, SLOTS, PAGE_SIZE = (32, 8192, 513, 64) if ON_GPU else (3, 64, 5, 16)
HEADS, DIM = 8, 192
SCALE = DIM**-0.5
CHAIN, REPEATS = 50, 7
ROWS = ("query", "regions", "positions", "active")


def decode_step() -> dict[str, np.ndarray]:
    """All arrays of a step but the cache, with rows as `[tokens, groups]`."""
    rng = np.random.default_rng(0)
    pages = CONTEXT // PAGE_SIZE
    positions = CONTEXT - 1 - rng.integers(0, 8, TOKENS)  # all in the last region
    current = CONTEXT // 8 - 1
    regions = [[*rng.permutation(current)[: SLOTS - 1], current] for _ in range(TOKENS * GROUPS)]
    return {
        "query": rng.normal(size=(TOKENS, GROUPS, HEADS, DIM)).astype(jnp.bfloat16),
        "regions": np.array(regions, np.int32).reshape(TOKENS, GROUPS, SLOTS),
        "block_table": rng.permutation(TOKENS * pages).reshape(TOKENS, pages).astype(np.int32),
        "positions": positions[:, None].repeat(GROUPS, axis=1).astype(np.int32),
        "active": np.ones((TOKENS, GROUPS), bool),
        "k_scale": np.array(1, np.float32),
        "v_scale": np.array(1, np.float32),
        "gate": rng.normal(size=(TOKENS, GROUPS * HEADS)).astype(jnp.bfloat16),
    }


def draw_cache(sharding: NamedSharding) -> jax.Array:
    """An FP8 cache, drawn where its parts belong."""
    shape = (TOKENS * (CONTEXT // PAGE_SIZE), GROUPS, PAGE_SIZE, 2 * DIM)

    @functools.partial(jax.jit, out_shardings=sharding)
    def draw():
        return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16).astype(jnp.float8_e4m3fn)

    return draw()


def microseconds(attend, arrays: dict[str, jax.Array]) -> float:
    """Time of a step: the median of several chains of steps, each inside one program."""

    @jax.jit
    def chain(arrays):
        def step(_, query):
            return attend(**{**arrays, "query": query}, scale=SCALE)

        return jax.lax.fori_loop(0, CHAIN, step, arrays["query"])

    jax.block_until_ready(chain(arrays))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(chain(arrays))
        times.append(time.perf_counter() - began)
    return statistics.median(times) / CHAIN * 1e6


def main() -> int:
    mesh = jax.make_mesh((DEVICES,), ("model",))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in group_specs("model").items()}
    host = decode_step()
    sharded = {name: jax.device_put(array, shardings[name]) for name, array in host.items()}
    sharded["cache"] = draw_cache(shardings["cache"])

    attend_sharded = shard_over_groups(mesh, "model")  # the one line
    output, lse = jax.jit(functools.partial(attend_sharded, scale=SCALE, return_lse=True))(
        **sharded
    )
    wanted = NamedSharding(mesh, PartitionSpec(None, "model"))
    in_place = output.sharding.is_equivalent_to(wanted, output.ndim)

    flat = {
        name: array.reshape(-1, *array.shape[2:]) if name in ROWS else array
        for name, array in host.items()
    }
    single = jax.device_put(
        {**flat, "cache": sharded["cache"]}, SingleDeviceSharding(jax.devices()[0])
    )
    expected, expected_lse = jax.jit(
        functools.partial(sparse_decode_attention, scale=SCALE, return_lse=True)
    )(**single)

    found = np.asarray(output, np.float32).reshape(expected.shape)
    expected = np.asarray(expected, np.float32)
    difference = np.abs(found - expected)
    # Launch settings follow the rows of a device, so sums may run in another order. That leaves
    # probabilities rounded to float16 at another pivot, and three roundings to bfloat16.
    within = (difference <= 3 * 2**-8 * np.abs(expected) + 2 * 2**-11 * 2).all()
    lse_difference = np.abs(np.asarray(lse).reshape(expected_lse.shape) - expected_lse).max()
    within &= bool(lse_difference <= 2**-18)

    print(f"jax {jax.__version__}, {DEVICES} x {jax.devices()[0].device_kind}")
    print(f"{TOKENS * GROUPS} rows: {TOKENS} tokens of {GROUPS} groups, {HEADS} heads a group")
    print(f"{SLOTS} slots of {CONTEXT // 8} regions; FP8 pages of {PAGE_SIZE} tokens")
    print(f"output stays sharded over groups: {'yes' if in_place else 'no'}")
    print(f"largest difference from one device: output {difference.max():.1e}, ", end="")
    print(f"lse {lse_difference:.1e}: {'within rounding' if within else 'TOO LARGE'}")
    if ON_GPU:
        one = microseconds(sparse_decode_attention, single)
        all_ = microseconds(attend_sharded, sharded)
        print(f"1 GPU: {one:.1f} us a step; {DEVICES} GPUs: {all_:.1f} us, {one / all_:.2f} x")
    else:
        print("No GPU is visible: Pallas' interpreter was checked, its time says nothing.")
    return 0 if within and in_place else 1


if __name__ == "__main__":
    sys.exit(main())
