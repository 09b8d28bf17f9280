"""One decode step with the KV heads sharded over devices, next to the same step on one.

Each device has some KV groups: their rows, their part of the cache and of the gate. Nothing is
communicated. With the same launch settings the result has the bits of one device; on GPUs the step
is then timed on one and on all. Without a GPU the CPU plays the devices. The exit status is 1 if
the bits differ, the output is moved, or the compiled program communicates.

    python examples/tensor_parallel.py                # all GPUs, or the CPU as eight devices
    python examples/tensor_parallel.py --devices 2
    python examples/tensor_parallel.py --no-large     # a GPU at the sizes of the CPU
"""

import argparse
import functools
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from sparse_decode.devices import gpu_count
from sparse_decode.pallas_kernels import (
    Config,
    group_specs,
    shard_over_groups,
    sparse_decode_attention,
)

HEADS, DIM = 8, 192  # query heads of a group
SCALE = DIM**-0.5
ROWS = ("query", "regions", "positions", "active")
COLLECTIVE = re.compile(r"\b(all-\w+|collective-\w+|reduce-scatter)[(-]")


@dataclass(frozen=True)
class Sizes:
    """Of a step."""

    groups: int = 8  # or the next number that the devices can share
    tokens: int = 3
    context: int = 64  # tokens of a request
    slots: int = 5
    page_size: int = 16

    @property
    def pages(self) -> int:
        """Pages of a request."""
        return self.context // self.page_size


LARGE = Sizes(tokens=32, context=8192, slots=513, page_size=64)
STEPS, ROUNDS, REPEATS = 40, 20, 15  # steps a program, programs a measurement, measurements


def decode_step(sizes: Sizes) -> dict[str, np.ndarray]:
    """All arrays of a step but the cache, with rows as `[tokens, groups]`."""
    rng = np.random.default_rng(0)
    lead = sizes.tokens, sizes.groups
    current = sizes.context // 8 - 1  # all queries are in the last region
    history = [rng.permutation(current)[: sizes.slots - 1] for _ in range(np.prod(lead))]
    regions = np.pad(history, ((0, 0), (0, 1)), constant_values=current)
    pages = rng.permutation(sizes.tokens * sizes.pages)
    return {
        "query": rng.normal(size=(*lead, HEADS, DIM)).astype(jnp.bfloat16),
        "regions": regions.reshape(*lead, sizes.slots).astype(np.int32),
        "block_table": pages.reshape(sizes.tokens, sizes.pages).astype(np.int32),
        "positions": np.full(lead, sizes.context - 3, np.int32),
        "active": np.ones(lead, bool),
        "k_scale": np.array(1, np.float32),
        "v_scale": np.array(1, np.float32),
        "gate": rng.normal(size=(sizes.tokens, sizes.groups * HEADS)).astype(jnp.bfloat16),
    }


def draw_cache(sizes: Sizes, sharding: NamedSharding) -> jax.Array:
    """An FP8 cache, drawn where its parts belong."""
    shape = (sizes.tokens * sizes.pages, sizes.groups, sizes.page_size, 2 * DIM)

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
    print(f"jax {jax.__version__}, {devices} x {jax.devices()[0].device_kind}")
    print(f"{sizes.tokens * sizes.groups} rows: {sizes.tokens} tokens of {sizes.groups} groups")
    print(f"{HEADS} heads a group; {sizes.slots} slots of {sizes.context // 8} regions")

    shardings = {name: NamedSharding(mesh, spec) for name, spec in group_specs("model").items()}
    host = decode_step(sizes)
    sharded = {name: jax.device_put(array, shardings[name]) for name, array in host.items()}
    sharded["cache"] = draw_cache(sizes, shardings["cache"])
    attend_sharded = shard_over_groups(mesh, "model")  # the one line

    flat = {
        name: array.reshape(-1, *array.shape[2:]) if name in ROWS else array
        for name, array in host.items()
    }
    first = SingleDeviceSharding(mesh.devices[0])
    single = jax.device_put({**flat, "cache": sharded["cache"]}, first)

    options = {"scale": SCALE, "return_lse": True, "config": Config(splits=4)}
    program = jax.jit(functools.partial(attend_sharded, **options)).lower(**sharded).compile()
    results = program(**sharded)
    expected = jax.jit(functools.partial(sparse_decode_attention, **options))(**single)
    same = all(
        np.asarray(found).tobytes() == np.asarray(one).tobytes()
        for found, one in zip(results, expected, strict=True)
    )
    wanted = NamedSharding(mesh, PartitionSpec(None, "model"))
    stays = all(found.sharding.is_equivalent_to(wanted, found.ndim) for found in results)
    collectives = COLLECTIVE.findall(program.as_text())
    print(f"output and lse have the bits of one device: {'yes' if same else 'NO'}")
    print(f"output stays sharded over groups: {'yes' if stays else 'NO'}")
    print(f"collectives in the compiled program: {', '.join(collectives) or 'none'}")

    if jax.default_backend() == "gpu":
        runs = microseconds(sparse_decode_attention, single), microseconds(attend_sharded, sharded)
        times = [[run() for run in runs] for _ in range(REPEATS)]  # in turns
        one, all_ = map(statistics.median, zip(*times, strict=True))
        print(f"1 GPU: {one:.1f} us a step; {devices} GPUs: {all_:.1f} us, {one / all_:.2f} x")
    else:
        print("JAX sees no GPU: Pallas' interpreter was checked, its time says nothing.")
    return same and stays and not collectives


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

    mesh = jax.make_mesh((devices,), ("model",), devices=jax.devices()[:devices])
    large = on_gpu if chosen.large is None else chosen.large
    groups = -(-Sizes.groups // devices) * devices
    return 0 if run(replace(LARGE if large else Sizes(), groups=groups), mesh) else 1


if __name__ == "__main__":
    sys.exit(main())
