"""One decode step over long contexts whose pages are spread over all devices.

Each device attends to the tokens whose pages it has, and the results are merged through lse. One
request lies on all devices alike, one on a few pages of each but mostly on the first device, and
one on a single device. All GPUs are used; without one, the CPU plays eight devices. The exit status
is 1 if the result is further from that of one device than rounding explains.

    python examples/context_parallel.py
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
from jax.sharding import NamedSharding, SingleDeviceSharding

from sparse_decode.pallas_kernels import (
    context_specs,
    shard_over_context,
    sparse_decode_attention,
)

DEVICES = jax.device_count()
REGIONS_A_DEVICE, PAGE_SIZE = (256, 64) if ON_GPU else (8, 16)
SLOTS = DEVICES * REGIONS_A_DEVICE  # everything is selected, on every device its share
PAGES = SLOTS * 8 // PAGE_SIZE  # of a request
REQUESTS, GROUPS, HEADS, DIM = 3, 2, 8, 192
ROOM = 3 * PAGES  # pages that fit on a device
ROWS = REQUESTS * GROUPS
SCALE = DIM**-0.5
CHAIN, REPEATS = 50, 7


def place_pages(rng: np.random.Generator) -> np.ndarray:
    """The block table `[requests, pages]`; page `p` lies on device `p // ROOM`."""
    free = [iter(device * ROOM + rng.permutation(ROOM)) for device in range(DEVICES)]
    page = np.arange(PAGES)
    owners = (
        page % DEVICES,
        np.where(page % 4 == 0, page // 4 % DEVICES, 0),
        np.full(PAGES, DEVICES - 1),
    )
    return np.array([[next(free[device]) for device in owner] for owner in owners], np.int32)


def decode_step() -> dict[str, np.ndarray]:
    """All arrays of a step but the cache."""
    rng = np.random.default_rng(0)
    return {
        "query": rng.normal(size=(ROWS, HEADS, DIM)).astype(jnp.bfloat16),
        "regions": np.array([rng.permutation(SLOTS) for _ in range(ROWS)], np.int32),
        "block_table": place_pages(rng),
        "positions": np.full(ROWS, SLOTS * 8 - 3, np.int32),
        "active": np.ones(ROWS, bool),
        "k_scale": np.array(1, np.float32),
        "v_scale": np.array(1, np.float32),
        "gate": rng.normal(size=(REQUESTS, GROUPS * HEADS)).astype(jnp.bfloat16),
    }


def draw_cache(sharding: NamedSharding) -> jax.Array:
    """An FP8 cache, drawn where its parts belong."""
    shape = (DEVICES * ROOM, GROUPS, PAGE_SIZE, 2 * DIM)

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
    mesh = jax.make_mesh((DEVICES,), ("context",))
    specs = context_specs("context")
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    host = decode_step()
    sharded = {name: jax.device_put(array, shardings[name]) for name, array in host.items()}
    sharded["cache"] = draw_cache(shardings["cache"])

    attend_sharded = shard_over_context(mesh, "context")  # the one line
    output, lse = jax.jit(functools.partial(attend_sharded, scale=SCALE, return_lse=True))(
        **sharded
    )
    single = jax.device_put(
        {**host, "cache": sharded["cache"]}, SingleDeviceSharding(jax.devices()[0])
    )
    expected, expected_lse = jax.jit(
        functools.partial(sparse_decode_attention, scale=SCALE, return_lse=True)
    )(**single)

    expected = np.asarray(expected, np.float32)
    difference = np.abs(np.asarray(output, np.float32) - expected)
    # What may differ: float32 sums, probabilities rounded to float16 at another pivot, and three
    # roundings to bfloat16 at the end.
    within = (difference <= 3 * 2**-8 * np.abs(expected) + 2 * 2**-11 * 2).all()
    lse_difference = np.abs(np.asarray(lse) - np.asarray(expected_lse)).max()
    within &= bool(lse_difference <= 2**-18)

    print(f"jax {jax.__version__}, {DEVICES} x {jax.devices()[0].device_kind}")
    print(f"{REQUESTS} requests of {SLOTS} regions each; {GROUPS} groups of {HEADS} heads")
    print(f"{'device':>8}" + "".join(f"{f'request {i}':>12}" for i in range(REQUESTS)))
    for device in range(DEVICES):
        held = (host["block_table"] // ROOM == device).sum(axis=1) * PAGE_SIZE // 8
        print(f"{device:8}" + "".join(f"{count:12}" for count in held))
    print(f"largest difference from one device: output {difference.max():.1e}, ", end="")
    print(f"lse {lse_difference:.1e}: {'within rounding' if within else 'TOO LARGE'}")
    if ON_GPU:
        one = microseconds(sparse_decode_attention, single)
        all_ = microseconds(attend_sharded, sharded)
        print(f"1 GPU: {one:.1f} us a step; {DEVICES} GPUs: {all_:.1f} us, merge included")
    else:
        print("No GPU is visible: Pallas' interpreter was checked, its time says nothing.")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
