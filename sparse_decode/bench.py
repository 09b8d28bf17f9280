"""What is timed, and how: decode steps with cold caches, as launches in a CUDA graph.

A setting is timed as a CUDA graph of `SETS` launches over as many sets of (query, regions, block
table), whose pages lie at random in a large pool. Before each replay the L2 is filled with other
data: the sets of a small batch would fit into it all at once. Every path's output is held to the
oracle before it is timed. `bench_suites` names the settings, `bench_run` measures them and
`bench_report` shows the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sparse_decode.bench_suites import Setting
from sparse_decode.call import Call
from sparse_decode.contract import CACHE_DIM, HEAD_DIM, REGION_TOKENS
from sparse_decode.tolerance import Limits, judge, limits
from sparse_decode.torch_arrays import to_numpy

__all__ = [
    "POOL_BYTES",
    "SCALE",
    "SETS",
    "Setting",
    "Time",
    "Workload",
    "blueprint",
    "graph_microseconds",
    "random_pool",
]

SETS = 16
POOL_BYTES = 24 << 30
# Several times the L2 of any GPU.
FLUSH_BYTES = 512 << 20
SCALE = HEAD_DIM**-0.5


class Time(NamedTuple):
    """Time of one launch in microseconds.

    Attributes:
        median: Of all replays.
        spread: Distance between the quartiles.
    """

    median: float
    spread: float


class Workload:
    """The tensors of a setting: calls that differ in query, regions and block table.

    Args:
        setting: What is timed.
        pool: Bytes with the cache's content, from `random_pool`; everything is made on its device.
        seed: Of the random numbers.
        sets: Number of calls.

    Raises:
        ValueError: The pool does not hold a single page.
    """

    def __init__(
        self, setting: Setting, pool: torch.Tensor, seed: int = 0, sets: int = SETS
    ) -> None:
        device = pool.device
        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, setting.cache)
        page = setting.groups * setting.page_size * CACHE_DIM
        pages = pool.numel() // (page * dtype.itemsize)
        if not pages:
            raise ValueError(
                f"pool: expected at least {page * dtype.itemsize} bytes, got {pool.numel()}"
            )
        self.setting = setting
        self.cache = (
            pool[: pages * page * dtype.itemsize]
            .view(dtype)
            .view(pages, setting.groups, setting.page_size, CACHE_DIM)
        )
        rows, requests, context = setting.rows, setting.requests, setting.context
        first = context - setting.query_len
        tokens = torch.arange(first, context, device=device)
        self.positions = tokens.repeat(requests).repeat_interleave(setting.groups)
        active = torch.arange(requests, device=device) >= requests - setting.active_requests
        self.active = active.repeat_interleave(rows // requests)
        one = torch.ones((), dtype=torch.float32, device=device)
        self.k_scale, self.v_scale = (one * 0.02, one * 0.03) if setting.fp8 else (None, None)
        query_dtype = torch.bfloat16 if setting.fp8 else dtype
        max_pages = -(-context // setting.page_size)
        # Whole regions before all tokens of a request, and always the current one.
        history = first // REGION_TOKENS
        live = setting.live_slots
        self.sets: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._allowed: dict[int, tuple[Limits, slice]] = {}
        for _ in range(sets):
            query = torch.randn(rows, setting.heads, HEAD_DIM, device=device, generator=generator)
            table = torch.randint(pages, (requests, max_pages), device=device, generator=generator)
            scores = torch.rand(rows, history + 1, device=device, generator=generator)
            scores[:, -1] = 2
            regions = torch.full((rows, setting.slots), -1, dtype=torch.int64, device=device)
            regions[:, setting.slots - live :] = scores.topk(live, sorted=False).indices
            self.sets.append((query.to(query_dtype), regions, table.int()))

    def output(self) -> torch.Tensor:
        """A new output buffer that holds NaN."""
        return torch.full_like(self.sets[0][0], float("nan"))

    def arguments(self, index: int) -> dict[str, torch.Tensor | None]:
        """Tensors of one set, but for the output, by the contract's names."""
        query, regions, table = self.sets[index]
        return {
            "query": query,
            "cache": self.cache,
            "regions": regions,
            "block_table": table,
            "positions": self.positions,
            "active": self.active,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
        }

    def call(self, index: int, output: torch.Tensor) -> dict[str, Any]:
        """All arguments of one set, but for the splits."""
        options = {"output": output, "scale": SCALE, "query_len": self.setting.query_len}
        return {**self.arguments(index), **options}

    def sample(self, index: int, request: int) -> tuple[Call, slice]:
        """One request of a set as a call of its own, with only the pages that it uses."""
        query, regions, table = self.sets[index]
        each = self.setting.rows // self.setting.requests
        rows = slice(request * each, (request + 1) * each)
        used, renamed = torch.unique(table[request].long(), return_inverse=True)
        cache = self.cache.view(torch.uint8)[used].view(self.cache.dtype)
        call = Call(
            query=to_numpy(query[rows]),
            cache=to_numpy(cache),
            regions=to_numpy(regions[rows]),
            block_table=to_numpy(renamed.int())[None],
            positions=to_numpy(self.positions[rows]),
            active=to_numpy(self.active[rows]),
            k_scale=None if self.k_scale is None else to_numpy(self.k_scale),
            v_scale=None if self.v_scale is None else to_numpy(self.v_scale),
            query_len=self.setting.query_len,
        )
        return call, rows

    def fault(self, run: Callable[..., object], samples: Sequence[int] = (0, -1)) -> str | None:
        """What is wrong with a path's result on the first set.

        Args:
            run: The path; takes `arguments` and `output`.
            samples: Requests that are held to the oracle. All others have to be finite.

        Returns:
            The fault in words; None if there is none.
        """
        output = self.output()
        run(**self.arguments(0), output=output)
        if not output.isfinite().all():
            return "the output is not finite everywhere"
        for request in samples:
            request %= self.setting.requests
            if request not in self._allowed:
                call, rows = self.sample(0, request)
                self._allowed[request] = limits(call), rows
            allowed, rows = self._allowed[request]
            verdict = judge(allowed, to_numpy(output[rows]), None, None)
            if not verdict.ok:
                return f"request {request}: {verdict.fault}"
        return None


def blueprint(setting: Setting, pool_bytes: int = POOL_BYTES) -> dict[str, Any]:
    """What `Workload.call` returns, without memory: the tensors are on the meta device."""
    rows, requests = setting.rows, setting.requests
    dtype = getattr(torch, setting.cache)
    page = (setting.groups, setting.page_size, CACHE_DIM)
    pages = pool_bytes // (math.prod(page) * dtype.itemsize)
    query = (rows, setting.heads, HEAD_DIM), torch.bfloat16 if setting.fp8 else dtype
    described = {
        "query": query,
        "cache": ((pages, *page), dtype),
        "regions": ((rows, setting.slots), torch.int64),
        "block_table": ((requests, -(-setting.context // setting.page_size)), torch.int32),
        "positions": ((rows,), torch.int64),
        "active": ((rows,), torch.bool),
        "output": query,
        "k_scale": ((), torch.float32) if setting.fp8 else None,
        "v_scale": ((), torch.float32) if setting.fp8 else None,
    }
    tensors = {
        name: entry and torch.empty(entry[0], dtype=entry[1], device="meta")
        for name, entry in described.items()
    }
    return {**tensors, "scale": SCALE, "query_len": setting.query_len}


def random_pool(
    cache: str, size: int = POOL_BYTES, device: torch.device | str = "cuda"
) -> torch.Tensor:
    """Random cache content without NaN or infinity, as bytes."""
    pool = torch.empty(size, dtype=torch.uint8, device=device)
    block = torch.randn(min(1 << 26, size), device=device)
    block = (block * 50 if cache == "float8_e4m3fn" else block).to(getattr(torch, cache))
    block = block.view(torch.uint8)
    for begin in range(0, size, block.numel()):
        part = pool[begin : begin + block.numel()]
        part.copy_(block[: part.numel()])
    return pool


def graph_microseconds(
    launch: Callable[[int], object], replays: int = 30, sets: int = SETS, cold: bool = True
) -> Time:
    """Time of one launch inside a CUDA graph of `sets` launches.

    Args:
        launch: Launches set `index`.
        replays: Timed replays of the graph.
        sets: Launches in the graph.
        cold: Whether the L2 is filled with other data before each replay.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch(0)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for index in range(sets):
            launch(index)
    for _ in range(3):
        graph.replay()
    # Read, not written: lines that were written would have to leave the L2 within the time.
    flush = torch.zeros(FLUSH_BYTES // 4 if cold else 1, dtype=torch.int32, device="cuda")
    return time_of(event_microseconds(graph.replay, replays, before=flush.sum), sets)


def event_microseconds(
    run: Callable[[], object], times: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Time between two events around each of several runs, in microseconds.

    Args:
        run: What is timed.
        times: Number of runs.
        before: Runs before each of them and is not timed.
    """
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(times)
    ]
    for begin, end in events:
        before()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1000 for begin, end in events]


def time_of(microseconds: Sequence[float], each: int = 1) -> Time:
    """Median and distance between the quartiles of measurements of `each` launches."""
    low, middle, high = np.quantile(np.array(microseconds) / each, (0.25, 0.5, 0.75))
    return Time(float(middle), float(high - low))
