"""One decode step over long contexts whose pages are spread over devices, next to one device.

Each device attends to the tokens whose pages it has, and the results are merged through lse. Of
three requests one lies on all devices alike, one on a few pages of each but mostly on the first
device, and one on the last device alone. On GPUs the step is then timed on one and on all. Without
a GPU the CPU plays the devices. The exit status is 1 if the result is further from that of one
device than rounding explains.

    python examples/context_parallel.py               # all GPUs, or the CPU as eight devices
    python examples/context_parallel.py --devices 2
    python examples/context_parallel.py --no-large    # a GPU at the sizes of the CPU
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from sparse_decode.devices import gpu_count
from sparse_decode.pallas_kernels import (
    context_specs,
    shard_over_context,
    sparse_decode_attention,
)

HEADS, DIM = 8, 192  # query heads of a group
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Sizes:
    """Of a step. Every row attends to its whole context."""

    requests: int = 3
    groups: int = 2
    regions: int = 8  # of a context, for each device
    page_size: int = 16


LARGE = Sizes(requests=24, groups=8, regions=512, page_size=64)
STEPS, ROUNDS, REPEATS = 40, 20, 15  # steps a program, programs a measurement, measurements


def place_pages(sizes: Sizes, devices: int) -> tuple[np.ndarray, int]:
    """Decides which device has which page.

    Returns:
        The block table `[requests, pages]`, and how many pages each device has room for: page `p`
        lies on device `p // room`.
    """
    page = np.arange(sizes.regions * devices * 8 // sizes.page_size)
    layouts = (
        page % devices,
        np.where(page % 4 == 0, page // 4 % devices, 0),
        np.full_like(page, devices - 1),
    )
    owner = np.array([layouts[i % 3] for i in range(sizes.requests)])
    room = np.bincount(owner.ravel()).max()
    rng = np.random.default_rng(1)
    table = np.empty_like(owner)
    for device in range(devices):
        here = owner == device
        table[here] = device * room + rng.permutation(room)[: here.sum()]
    return table.astype(np.int32), int(room)


def decode_step(sizes: Sizes, block_table: np.ndarray) -> dict[str, np.ndarray]:
    """All arrays of a step but the cache."""
    rng = np.random.default_rng(0)
    rows = sizes.requests * sizes.groups
    regions = block_table.shape[1] * sizes.page_size // 8
    return {
        "query": rng.normal(size=(rows, HEADS, DIM)).astype(jnp.bfloat16),
        "regions": np.array([rng.permutation(regions) for _ in range(rows)], np.int32),
        "block_table": block_table,
        "positions": np.full(rows, regions * 8 - 3, np.int32),
        "active": np.ones(rows, bool),
        "k_scale": np.array(1, np.float32),
        "v_scale": np.array(1, np.float32),
        "gate": rng.normal(size=(sizes.requests, sizes.groups * HEADS)).astype(jnp.bfloat16),
    }


def draw_cache(sizes: Sizes, pages: int, sharding: NamedSharding) -> jax.Array:
    """An FP8 cache, drawn where its parts belong."""
    shape = (pages, sizes.groups, sizes.page_size, 2 * DIM)

    @functools.partial(jax.jit, out_shardings=sharding)
    def draw():
        return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16).astype(jnp.float8_e4m3fn)

    return draw()


def microseconds(attend: Callable[..., Any], arrays: dict[str, jax.Array]) -> Callable[[], float]:
    """Compiles a program of many steps, each with the last one's output as its query.

    Returns:
        A function that runs it and tells the time of a step.
    """

    @jax.jit
    def steps(arrays):
        query = arrays["query"]
        for _ in range(STEPS):
            query = attend(**{**arrays, "query": query}, scale=SCALE)
        return query

    def run() -> float:
        began = time.perf_counter()
        jax.block_until_ready([steps(arrays) for _ in range(ROUNDS)])
        return (time.perf_counter() - began) / (STEPS * ROUNDS) * 1e6

    run()  # compiles
    return run


def run(sizes: Sizes, mesh: Mesh) -> bool:
    """Runs the step on all devices of the mesh and on one; returns whether all is right."""
    devices = mesh.devices.size
    block_table, room = place_pages(sizes, devices)
    host = decode_step(sizes, block_table)
    rows, slots = host["regions"].shape
    print(f"jax {jax.__version__}, {devices} x {jax.devices()[0].device_kind}")
    print(f"{rows} rows: {sizes.requests} requests of {sizes.groups} groups, {HEADS} heads a group")
    print(f"{slots} regions each, of which lie on")
    print(f"{'device':>8}" + "".join(f"{f'request {i}':>12}" for i in range(3)))
    for device in range(devices):
        held = (block_table[:3] // room == device).sum(axis=1) * sizes.page_size // 8
        print(f"{device:8}" + "".join(f"{count:12}" for count in held))

    specs = context_specs("context")
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    sharded = {name: jax.device_put(array, shardings[name]) for name, array in host.items()}
    sharded["cache"] = draw_cache(sizes, devices * room, shardings["cache"])
    attend_sharded = shard_over_context(mesh, "context")  # the one line

    first = SingleDeviceSharding(mesh.devices[0])
    single = jax.device_put({**host, "cache": sharded["cache"]}, first)

    options = {"scale": SCALE, "return_lse": True}
    results = jax.jit(functools.partial(attend_sharded, **options))(**sharded)
    expected = jax.jit(functools.partial(sparse_decode_attention, **options))(**single)
    output, lse, one_output, one_lse = (np.asarray(x, np.float32) for x in (*results, *expected))
    # What may differ: float32 sums, probabilities rounded to float16 at another pivot (of values
    # whose mean is less than 2), and three roundings to bfloat16 at the end.
    difference, allowed = np.abs(output - one_output), 3 * 2**-8 * np.abs(one_output) + 2**-9
    lse_difference = np.abs(lse - one_lse).max()
    within = bool((difference <= allowed).all() and lse_difference <= 2**-18)
    print(f"largest difference from one device: output {difference.max():.1e}, ", end="")
    print(f"lse {lse_difference:.1e}: {'within rounding' if within else 'TOO LARGE'}")

    if jax.default_backend() == "gpu":
        runs = microseconds(sparse_decode_attention, single), microseconds(attend_sharded, sharded)
        times = [[run() for run in runs] for _ in range(REPEATS)]  # in turns
        one, all_ = map(statistics.median, zip(*times, strict=True))
        print(f"1 GPU: {one:.1f} us a step; {devices} GPUs: {all_:.1f} us, {one / all_:.2f} x")
    else:
        print("JAX sees no GPU: Pallas' interpreter was checked, its time says nothing.")
    return within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, help="how many; by default all GPUs, or 8")
    parser.add_argument(
        "--large", action=argparse.BooleanOptionalAction, help="sizes worth timing; on a GPU"
    )
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", chosen.devices or 8)
    if not gpu_count():
        jax.config.update("jax_platforms", "cpu")
    on_gpu, available = jax.default_backend() == "gpu", jax.device_count()
    devices = available if chosen.devices is None else chosen.devices
    if not 1 <= devices <= available:
        parser.error(f"--devices: expected 1 to {available}, got {devices}")

    mesh = jax.make_mesh((devices,), ("context",), devices=jax.devices()[:devices])
    large = on_gpu if chosen.large is None else chosen.large
    return 0 if run(LARGE if large else Sizes(), mesh) else 1


if __name__ == "__main__":
    sys.exit(main())
