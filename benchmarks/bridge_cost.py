"""What a call costs on the host, in microseconds: plain DLPack calls, the bridge and the others.

Times the call alone, with an idle GPU before each. Every way's output is held to the oracle first.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from sparse_decode import pallas_kernels, torch_arrays, triton_kernels
from sparse_decode.bridge import jax_route, sparse_decode_attention
from sparse_decode.call import Call
from sparse_decode.cases import Case, build
from sparse_decode.tolerance import judge, limits

# 16 rows: 16 requests of one token each.
CASE = Case("bridge cost", (4200,) * 16, heads=8, slots=513, page_size=64, splits=None)
PER_CALL = ("query", "regions", "positions", "active", "output")
ARGUMENTS = (
    "query", "cache", "regions", "block_table", "positions", "active", "k_scale", "v_scale"
)  # fmt: skip

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Host time of one way, in microseconds."""

    name: str
    calls: int
    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, name: str, seconds: list[float]) -> Cost:
        lower, median, upper = np.quantile(np.array(seconds) * 1e6, (0.25, 0.5, 0.75))
        return cls(name, len(seconds), float(lower), float(median), float(upper))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=300, help="timed calls of each way")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        parser.error("needs a GPU that both JAX and PyTorch see")
    costs = measure(build(CASE), arguments.calls)
    where = environment()
    console = Console()
    console.print(table(costs))
    for name, value in where.items():
        console.print(f"{name}: {value}", highlight=False)
    if arguments.json:
        results = [dataclasses.asdict(cost) for cost in costs]
        text = json.dumps({"environment": where, "microseconds": results}, indent=1)
        arguments.json.write_text(text + "\n")


def measure(call: Call, count: int) -> list[Cost]:
    base = {name: torch_arrays.from_numpy(array, "cuda") for name, array in call.arrays().items()}
    allowed = limits(call)
    options = call.options()

    def ours(tensors: Tensors) -> None:
        sparse_decode_attention(**tensors, **options, route="dlpack")

    def direct(tensors: Tensors) -> None:
        sparse_decode_attention(**tensors, **options, route="direct")

    splits = triton_kernels.sparse_decode_splits(len(call.query))

    def triton(tensors: Tensors) -> None:
        triton_kernels.sparse_decode_attention(**tensors, **{**options, "splits": splits})

    plain = plain_calls(options)
    for run in (plain, ours, direct, triton):
        tensors = {**base, "output": torch.full_like(base["output"], float("nan"))}
        result = run(tensors)
        output = tensors["output"] if result is None else result
        verdict = judge(allowed, torch_arrays.to_numpy(output), None, None)
        if not verdict.ok:
            raise SystemExit(f"{run.__name__}: {verdict.fault}")

    def forget() -> None:
        jax_route._IMPORTS._arrays.clear()

    ways = [
        ("plain public DLPack calls, 8 in and 1 out", plain, recycled),
        ("ours, new tensors, addresses never seen", ours, new_addresses),
        ("ours, new tensors, addresses come again", ours, recycled),
        ("ours, the same tensors", ours, same),
        ("direct route, new tensors", direct, recycled),
        ("Triton path, new tensors", triton, recycled),
    ]
    costs = [timed(name, run, source(base), count) for name, run, source in ways]
    cold = timed("ours, cold: no import is remembered", ours, recycled(base), count, forget)
    return [costs[0], cold, *costs[1:]]


def plain_calls(options: dict[str, object]) -> Callable[[Tensors], torch.Tensor]:
    """What one writes without the bridge. JAX narrows the int64 indices, by copies."""

    @jax.jit
    def attend(arrays: dict[str, jax.Array]) -> jax.Array:
        return pallas_kernels.sparse_decode_attention(**arrays, **options)

    def plain(tensors: Tensors) -> torch.Tensor:
        arrays = {name: jax.dlpack.from_dlpack(tensors[name]) for name in ARGUMENTS}
        return torch.from_dlpack(attend(arrays))

    return plain


def recycled(base: Tensors) -> Iterator[Tensors]:
    """New tensors for each call, where torch's allocator puts them: on what was dropped before."""
    while True:
        yield {**base, **{name: base[name].clone() for name in PER_CALL}}


def new_addresses(base: Tensors) -> Iterator[Tensors]:
    """New tensors for each call, none of which is dropped."""
    kept = []
    while True:
        kept.append({**base, **{name: base[name].clone() for name in PER_CALL}})
        yield kept[-1]


def same(base: Tensors) -> Iterator[Tensors]:
    while True:
        yield base


def timed(
    name: str,
    run: Callable[[Tensors], object],
    source: Iterator[Tensors],
    count: int,
    before: Callable[[], None] = lambda: None,
) -> Cost:
    seconds = []
    for number in range(count + 30):
        tensors = next(source)
        before()
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = run(tensors)
        took = time.perf_counter() - began
        if number >= 30:
            seconds.append(took)
        torch.cuda.synchronize()
        del result, tensors
    return Cost.of(name, seconds)


def table(costs: list[Cost]) -> Table:
    title = "host time of a call, us: 16 rows, 8 heads, 513 slots, FP8 cache, page size 64"
    result = Table(title=title, title_justify="left")
    result.add_column("way")
    for heading in ("calls", "lower quartile", "median", "upper quartile"):
        result.add_column(heading, justify="right")
    for cost in costs:
        times = (f"{value:.1f}" for value in (cost.lower, cost.median, cost.upper))
        result.add_row(cost.name, str(cost.calls), *times)
    return result


def environment() -> dict[str, str]:
    found = {"GPU": torch.cuda.get_device_name()}
    for name in ("jax", "jaxlib", "torch", "triton"):
        found[name] = importlib.metadata.version(name)
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        found["commit"] = done.stdout.strip()
    return found


if __name__ == "__main__":
    main()
