"""Random calls and replays of CUDA graphs for some minutes; exit status 1 if one is wrong.

    python tests/soak.py --minutes 10 --json soak.json

A place holds the tensors of a few layers of one kind, and on a GPU a CUDA graph of their calls.
Each round takes a few places, overwrites all that they hold but the caches (padding, ids that point
outside and all), and lets each run on a stream drawn anew: as a replay, or eagerly by the direct
route, the Triton path or the DLPack route on tensors of its own. Every row is then compared with
another path on the device, direct results bit for bit with a second call, and some rows with the
float64 oracle.

Memory must not grow either. Only what this process holds is counted, so that others may use the GPU
meanwhile. Without a GPU, smaller calls run through the interpreters of Triton and Pallas.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparse_decode.devices import use_interpreters_without_gpu

if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if use_interpreters_without_gpu():
        # Triton's interpreter computes masked lanes too, in NumPy, and discards them afterwards.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")

import numpy as np
import torch

from sparse_decode import torch_arrays
from sparse_decode.call import Call
from sparse_decode.contract import ARRAY_NAMES, CACHE_DIM, HEAD_DIM, REGION_TOKENS
from sparse_decode.parity import versions
from sparse_decode.tolerance import judge, limits

LAYERS = 2
PLACES_A_KIND = 2
PLACES_A_ROUND = 3
STREAMS = 3
ORACLE_EVERY = 16
ORACLE_ROWS = 2
SETTLE_SECONDS = 10
FP8_SCALE = 1 / 16

MIB = 1 << 20
# Bytes by which a process may grow after the first tenth of the time. Tensors of PyTorch's: none.
# The rest is for caches with a bound that fill up, and for what allocators hold in reserve.
ALLOWED_GROWTH = {
    "torch allocated": 0,
    "torch reserved": 64 * MIB,
    "jax": MIB,
    "device": 128 * MIB,
    "host": 128 * MIB,
}

Arguments = dict[str, Any]


# Calls.


@dataclass(frozen=True)
class Kind:
    """The sizes of some calls; names as in the contract."""

    requests: int
    cache: str = "float8_e4m3fn"
    query: str = "bfloat16"
    heads: int = 8
    groups: int = 1
    query_len: int = 1
    slots: int = 65
    page_size: int = 64
    pages: int = 256
    max_pages: int = 32
    splits: int | None = None
    gate: str | None = None
    index: str = "int64"


KINDS = (
    Kind(16, gate="bfloat16"),
    Kind(64, slots=513, max_pages=128, pages=2048),
    Kind(8, cache="uint8", query_len=4, groups=2, gate="float32", splits=4),
    Kind(1, slots=1025, max_pages=512, pages=1024, splits=32),
    Kind(4, cache="bfloat16", heads=16, groups=8, page_size=16, max_pages=128),
    Kind(33, cache="bfloat16", splits=1, gate="bfloat16"),
    Kind(12, cache="float16", query="float16", heads=5, page_size=24, index="int32"),
)
SMALL_KINDS = (
    Kind(2, slots=9, page_size=16, pages=8, max_pages=4, splits=2, gate="bfloat16"),
    Kind(
        1, cache="bfloat16", heads=3, groups=2, slots=5, page_size=8, pages=8, max_pages=4, splits=1
    ),
)


def draw(kind: Kind, device: str, generator: torch.Generator, layers: int = 1) -> list[Arguments]:
    """Calls of a kind, one a layer, with the same index tensors and with content from `refill`."""

    def empty(dtype: str, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    tokens = kind.requests * kind.query_len
    rows = tokens * kind.groups
    fp8 = kind.cache in ("float8_e4m3fn", "uint8")
    shared = {
        "regions": empty(kind.index, rows, kind.slots),
        "block_table": empty("int32", kind.requests, kind.max_pages),
        "positions": empty(kind.index, rows),
        "active": empty("bool", rows),
        "scale": HEAD_DIM**-0.5,
        "query_len": kind.query_len,
        "splits": kind.splits,
    }
    if fp8:
        shared |= {name: torch.tensor(FP8_SCALE, device=device) for name in ("k_scale", "v_scale")}
    calls = []
    for _ in range(layers):
        shape = (kind.pages, kind.groups, kind.page_size, CACHE_DIM)
        lines = torch.randn(shape, device=device, generator=generator)
        cache = (lines / FP8_SCALE).to(torch.float8_e4m3fn) if fp8 else lines
        own = {
            "query": empty(kind.query, rows, kind.heads, HEAD_DIM),
            "cache": cache.view(torch.uint8)
            if kind.cache == "uint8"
            else cache.to(getattr(torch, kind.cache)),
            "output": empty(kind.query, rows, kind.heads, HEAD_DIM),
        }
        if kind.gate:
            own["gate"] = empty(kind.gate, tokens, kind.groups * kind.heads)
        calls.append({**shared, **own})
    refill(calls, generator)
    return calls


def refill(calls: Sequence[Arguments], generator: torch.Generator) -> None:
    """New content for calls that share their index tensors, in the same memory; caches stay."""
    first = calls[0]
    rows, slots = first["regions"].shape
    pages, groups, page_size, _ = first["cache"].shape
    requests, max_pages = first["block_table"].shape
    tokens, longest = rows // groups, max_pages * page_size
    device, index = first["query"].device, first["regions"].dtype

    def share(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device, generator=generator)

    def below(limit: int | torch.Tensor, *shape: int) -> torch.Tensor:
        return (share(*shape) * limit).long()

    table = below(pages, requests, max_pages)
    first["block_table"].copy_(table.masked_fill_(share(requests, max_pages) < 0.01, pages))

    positions = below(longest, tokens).masked_fill_(share(tokens) < 0.02, -1)
    positions = positions.repeat_interleave(groups)
    first["positions"].copy_(positions)

    regions = below(positions.clamp(min=0)[:, None] // REGION_TOKENS + 1, rows, slots)
    regions[:, -1] = positions.clamp(min=0) // REGION_TOKENS
    regions.masked_fill_(share(rows, slots) < 0.05, -1)
    outside = 2**32 + 1 if index == torch.int64 else 2**31 - 1
    first["regions"].copy_(regions.masked_fill_(share(rows, slots) < 0.02, outside))

    padding = torch.arange(tokens, device=device) > below(tokens, 1)
    active = ~padding & (share(tokens) < 0.95)
    first["active"].copy_(active.repeat_interleave(groups))

    for call in calls:
        call["query"].normal_(generator=generator)
        call["output"].fill_(torch.nan)
        if "gate" in call:
            call["gate"].normal_(0, 2, generator=generator)


def attend(path: str, arguments: Arguments) -> None:
    """A call through the Triton path or a route of the bridge."""
    if path != "triton":
        from sparse_decode.bridge import sparse_decode_attention

        sparse_decode_attention(**arguments, route=path)
        return
    from sparse_decode.triton_kernels import sparse_decode_attention, sparse_decode_splits

    splits = arguments["splits"] or sparse_decode_splits(len(arguments["query"]))
    sparse_decode_attention(**{**arguments, "splits": splits})


def result(path: str, arguments: Arguments, **changed: object) -> torch.Tensor:
    """The output of a call with some arguments changed, in a buffer of its own."""
    output = torch.full_like(arguments["output"], torch.nan)
    attend(path, {**arguments, **changed, "output": output})
    return output


# Judgement.


def sampled(arguments: Arguments, rows: Sequence[int]) -> Call:
    """Some rows of a call as a small call, whose results are those rows' results.

    Each row becomes a request of one group, and each region that it names a page of its own, so
    that no more of the cache is held than these rows can attend to. Positions and region ids stay.
    """
    cache, table = arguments["cache"], arguments["block_table"]
    pages, groups, page_size, _ = cache.shape
    max_regions = table.shape[1] * page_size // REGION_TOKENS
    chosen = torch.as_tensor(rows, device=cache.device)
    arrays = {
        name: torch_arrays.to_numpy(arguments[name][chosen])
        for name in ("query", "regions", "positions", "active", "output")
    }
    tables = torch_arrays.to_numpy(table[chosen // (groups * arguments["query_len"])])
    words = cache.view(torch.uint8) if cache.itemsize == 1 else cache

    new_table = np.full((len(rows), max_regions), -1, np.int32)
    new_pages = [torch.full((1, REGION_TOKENS, CACHE_DIM), 0x7F, dtype=words.dtype)]
    count = 1
    for index, row in enumerate(rows):
        ids = np.unique(arrays["regions"][index])
        ids = ids[(ids >= 0) & (ids < max_regions)]
        page = tables[index, ids * REGION_TOKENS // page_size].astype(np.int64)
        inside = (page >= 0) & (page < pages)
        ids, page = ids[inside], page[inside]
        new_table[index, ids] = count + np.arange(len(ids))
        token = (ids * REGION_TOKENS % page_size)[:, None] + np.arange(REGION_TOKENS)
        at = [torch.as_tensor(where, device=cache.device) for where in (page[:, None], token)]
        new_pages.append(words[at[0], row % groups, at[1]].cpu())
        count += len(ids)
    new_cache = torch.cat(new_pages)[:, None].view(cache.dtype)

    if arguments.get("gate") is not None:
        gate = arguments["gate"].unflatten(1, (groups, -1))
        arrays["gate"] = torch_arrays.to_numpy(gate[chosen // groups, chosen % groups])
    for name in ("k_scale", "v_scale"):
        if arguments.get(name) is not None:
            arrays[name] = torch_arrays.to_numpy(arguments[name])
    return Call(
        **arrays,
        cache=torch_arrays.to_numpy(new_cache),
        block_table=new_table,
        scale=arguments["scale"],
        clear_inactive=arguments.get("clear_inactive", True),
    )


def fault_of_rows(arguments: Arguments, rows: Sequence[int]) -> str | None:
    """How some rows of a call's output differ from the oracle; None if they are within tolerance.

    Args:
        arguments: A call that was made, with `clear_inactive`.
        rows: Which rows.
    """
    call = sampled(arguments, rows)
    fault = judge(limits(call), call.output, None, None).fault
    return fault and f"{fault}, of rows {list(rows)}"


def fault_between(
    arguments: Arguments, found: torch.Tensor, other: torch.Tensor, path: str
) -> str | None:
    """How two outputs of one call differ more than the tolerance allows; None if they do not.

    Either may be off the oracle by what `tolerance.limits` allows, in which the error of a plain
    program is at most one rounding of the probabilities, the output and the gate. Those are
    relative to `sum(p * |v|)`, which is the result of the same call over a cache of |v|.

    Args:
        arguments: The call.
        found: `[rows, heads, 192]`.
        other: The same by another path.
        path: The path that computes `sum(p * |v|)`.
    """
    cache = arguments["cache"]
    words = cache.clone().view(torch.uint8 if cache.itemsize == 1 else torch.int16)
    words[..., HEAD_DIM:] &= 0x7F if cache.itemsize == 1 else 0x7FFF
    size = result(path, arguments, cache=words.view(cache.dtype)).float().amax(2)

    operand = torch.float16 if cache.itemsize == 1 else cache.dtype
    output = torch.finfo(found.dtype)
    found, other = found.float(), other.float()
    largest = torch.maximum(found.abs(), other.abs()).amax(2)
    roundings = torch.finfo(operand).eps / 2 * size + output.eps / 2 * largest
    if arguments.get("gate") is not None:
        gate = torch.finfo(arguments["gate"].dtype)
        roundings += output.eps / 2 * largest + gate.eps / 2 * size
    allowed = 6 * roundings + output.tiny * output.eps
    # Not-a-number is within nothing.
    wrong = ~((found - other).abs() <= allowed[:, :, None]).all(2).all(1)
    count = int(wrong.sum())
    if not count:
        return None
    row = int(wrong.nonzero()[0])
    return f"{count} rows differ, first {row} by {(found - other)[row].abs().max():.3g}"


# Memory.


def memory() -> dict[str, int]:
    """Bytes that this process holds, by kind; kinds that cannot be told are left out."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = {"host": pages * os.sysconf("SC_PAGE_SIZE")}
    if not torch.cuda.is_available():
        gc.collect()
        return held
    import jax

    from sparse_decode.bridge import dlpack

    torch.cuda.synchronize()
    dlpack.flush(30)
    for _ in range(3):
        gc.collect()
    held["torch allocated"] = torch.cuda.memory_allocated()
    held["torch reserved"] = torch.cuda.memory_reserved()
    held["jax"] = jax.devices("cuda")[0].memory_stats()["bytes_in_use"]
    device = _device_memory()
    return held if device is None else held | {"device": device}


def _device_memory() -> int | None:
    """This process's memory on the GPU by NVML's account; None where that cannot be had."""
    if not importlib.util.find_spec("pynvml"):
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    except pynvml.NVMLError:
        return None
    return next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), None)


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What has grown by more than is allowed, in words."""
    return [
        f"{name}: {before[name]} to {after[name]} bytes, {ALLOWED_GROWTH[name]} allowed"
        for name in before.keys() & after.keys()
        if after[name] - before[name] > ALLOWED_GROWTH[name]
    ]


# The soak.


@dataclass
class Place:
    """Tensors of a few layers that stay where they are, and a CUDA graph of their calls."""

    kind: Kind
    layers: list[Arguments]
    graph: torch.cuda.CUDAGraph | None = None


@dataclass
class Soak:
    """Places, and what happened on them."""

    kinds: Sequence[Kind]
    seed: int
    device: str = "cpu"
    rounds: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.places = [
            Place(kind, draw(kind, self.device, self.generator, LAYERS))
            for kind in self.kinds
            for _ in range(PLACES_A_KIND)
        ]
        # Ways to run a place, with how often each is taken.
        self.ways = {"triton": 1, "dlpack": 1}
        self.streams: list[Any] = [contextlib.nullcontext()]
        if self.device == "cuda":
            self.ways = {"replay": 12, "direct": 5, "triton": 2, "dlpack": 1}
            self.streams = [torch.cuda.stream(torch.cuda.Stream()) for _ in range(STREAMS)]
            self._capture()

    def _capture(self) -> None:
        from sparse_decode.bridge import warmup

        warmup(layer for place in self.places for layer in place.layers)
        for place in self.places:
            place.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(place.graph):
                for layer in place.layers:
                    attend("direct", layer)

    def warm_up(self) -> None:
        """Every place once in every way on every stream."""
        for stream in self.streams:
            for way in self.ways:
                for place in self.places:
                    self._run([(way, place, stream)])

    def go_on(self, seconds: float) -> None:
        """Rounds for a time, at least one."""
        until = time.monotonic() + seconds
        while True:
            self._run(
                [
                    (
                        self.random.choices([*self.ways], [*self.ways.values()])[0],
                        place,
                        self.random.choice(self.streams),
                    )
                    for place in self.random.sample(
                        self.places, min(PLACES_A_ROUND, len(self.places))
                    )
                ]
            )
            self.rounds += 1
            if time.monotonic() >= until:
                return

    def _run(self, jobs: Sequence[tuple[str, Place, Any]]) -> None:
        """Jobs side by side; checks them when all are done."""
        done = []
        for way, place, stream in jobs:
            with stream:
                done.append((way, place, self._launch(way, place)))
        if self.device == "cuda":
            torch.cuda.synchronize()
        for way, place, layers in done:
            for number, layer in enumerate(layers):
                for fault in self._check(way, layer):
                    self.faults.append(
                        f"round {self.rounds}, {way}, layer {number}: {fault}; {place.kind}"
                    )

    def _launch(self, way: str, place: Place) -> list[Arguments]:
        """Overwrites a place and runs it; returns the calls, whose outputs are now being made."""
        refill(place.layers, self.generator)
        self.calls[way] += 1 if way == "replay" else len(place.layers)
        if place.graph is not None and way == "replay":
            place.graph.replay()
            return place.layers
        layers = [
            {
                name: value.clone() if name in ARRAY_NAMES and name != "cache" else value
                for name, value in layer.items()
            }
            for layer in place.layers
        ]
        for layer in layers:
            attend(way, layer)
        return layers

    def _check(self, way: str, layer: Arguments) -> list[str]:
        faults = []
        pallas = "direct" if self.device == "cuda" else "dlpack"
        other = pallas if way == "triton" else "triton"
        fault = fault_between(layer, layer["output"], result(other, layer), other)
        self.checks["all rows, another path"] += 1
        if fault:
            faults.append(f"against {other}: {fault}")
        if way in ("replay", "direct"):
            self.checks["all rows, bit for bit"] += 1
            again = result("direct", layer)
            if not torch.equal(again.view(torch.int16), layer["output"].view(torch.int16)):
                faults.append("a second call gives other bits")
        if self.checks["all rows, another path"] % ORACLE_EVERY == 1:
            rows = range(len(layer["query"]))
            chosen = self.random.sample(rows, min(ORACLE_ROWS, len(rows)))
            self.checks["rows, oracle"] += len(chosen)
            if fault := fault_of_rows(layer, chosen):
                faults.append(f"against the oracle: {fault}")
        return faults


def run(minutes: float, kinds: Sequence[Kind], device: str, seed: int) -> dict[str, Any]:
    """Soaks, and reports.

    Args:
        minutes: Without the time that setting up and the first call of each sort take.
        kinds: What is called.
        device: "cuda" or "cpu".
        seed: The same one draws the same calls.

    Returns:
        The report, which JSON can hold; `ok` says whether all was right.
    """
    soak = Soak(kinds, seed, device)
    soak.warm_up()
    soak.go_on(60 * minutes / 10)
    before = memory()
    soak.go_on(60 * minutes * 9 / 10)
    # JAX gives memory back a little later than it is done.
    until = time.monotonic() + SETTLE_SECONDS
    while (growth := grown(before, after := memory())) and time.monotonic() < until:
        time.sleep(0.5)
    return {
        "ok": not soak.faults and not growth,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "versions": versions(),
        "minutes": minutes,
        "seed": seed,
        "rounds": soak.rounds,
        "calls": dict(soak.calls),
        "checks": dict(soak.checks),
        "wrong": len(soak.faults),
        "faults": soak.faults[:20],
        "memory": {"before": before, "after": after, "allowed growth": ALLOWED_GROWTH},
        "grown": growth,
    }


def summary(report: dict[str, Any]) -> str:
    """The report in a few lines."""
    before, after = report["memory"]["before"], report["memory"]["after"]
    lines = [
        f"{report['minutes']:g} minutes on {report['device']}, seed {report['seed']}: "
        f"{report['rounds']} rounds",
        "calls: " + ", ".join(f"{count} {name}" for name, count in report["calls"].items()),
        "checks: " + ", ".join(f"{count} {name}" for name, count in report["checks"].items()),
        *(f"memory, {name}: {before[name]} to {after[name]} bytes" for name in before),
        f"wrong results: {report['wrong']}",
        *report["faults"],
        *(f"grown: {line}" for line in report["grown"]),
        "ok" if report["ok"] else "failed",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description="Soak test; see the first lines of the file.")
    parser.add_argument("--minutes", type=float, default=10, help="how long (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as one line")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes: expected more than 0, got {options.minutes:g}")
    cuda = torch.cuda.is_available()
    report = run(
        options.minutes, KINDS if cuda else SMALL_KINDS, "cuda" if cuda else "cpu", options.seed
    )
    if options.json:
        options.json.write_text(json.dumps(report) + "\n")
    print(summary(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
