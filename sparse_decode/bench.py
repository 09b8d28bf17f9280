"""Times the paths on a GPU as a decode step meets them: cold caches, captured launches.

A setting is timed as a CUDA graph of `SETS` launches over as many sets of (query, regions, block table),
whose pages lie at random in a pool far larger than the L2. Every path's output is held to the oracle
before it is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparse_decode.call import Call
from sparse_decode.contract import CACHE_DIM, HEAD_DIM, REGION_TOKENS
from sparse_decode.tolerance import Limits, judge, limits
from sparse_decode.torch_arrays import to_numpy

SETS = 16
POOL_BYTES = 24 << 30


@dataclass(frozen=True)
class Setting:
    """What is timed.

    Attributes:
        cache: "float8_e4m3fn", "bfloat16" or "float16".
        requests: Requests in the batch.
        heads, groups, query_len, slots, page_size: As in the contract.
        context: Tokens of each request.
        inactive: Share of the requests that is padding.
    """

    cache: str
    requests: int
    heads: int = 8
    groups: int = 1
    query_len: int = 1
    slots: int = 513
    page_size: int = 64
    context: int = 65536
    inactive: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of the call."""
        return self.requests * self.query_len * self.groups

    @property
    def bytes(self) -> float:
        """Bytes of keys and values that active rows attend to."""
        live = min(self.slots, (self.context - 1) // REGION_TOKENS + 1)
        size = 1 if self.cache == "float8_e4m3fn" else 2
        return self.rows * (1 - self.inactive) * live * REGION_TOKENS * CACHE_DIM * size


class Workload:
    """The tensors of a setting on the current GPU: `SETS` calls over one pool of pages."""

    def __init__(self, setting: Setting, pool: torch.Tensor, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        dtype = getattr(torch, setting.cache)
        fp8 = setting.cache == "float8_e4m3fn"
        query_dtype = torch.bfloat16 if fp8 else dtype
        page = setting.groups * setting.page_size * CACHE_DIM
        pool = pool.view(dtype)
        pages = pool.numel() // page
        self.setting = setting
        self.cache = pool[: pages * page].view(
            pages, setting.groups, setting.page_size, CACHE_DIM
        )
        rows, requests = setting.rows, setting.requests
        last = torch.arange(setting.query_len, device="cuda") + setting.context - setting.query_len
        self.positions = last.repeat(requests).repeat_interleave(setting.groups)
        active = torch.arange(requests, device="cuda") >= round(requests * setting.inactive)
        self.active = active.repeat_interleave(rows // requests)
        one = torch.ones((), dtype=torch.float32, device="cuda")
        self.k_scale, self.v_scale = (one * 0.02, one * 0.03) if fp8 else (None, None)
        max_pages = -(-setting.context // setting.page_size)
        history = (setting.context - 1) // REGION_TOKENS
        live = min(setting.slots, history + 1)
        self.sets: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._allowed: dict[int, tuple[Limits, slice]] = {}
        for _ in range(SETS):
            query = torch.randn(
                rows, setting.heads, HEAD_DIM, device="cuda", generator=generator
            ).to(query_dtype)
            table = torch.stack(
                [
                    torch.randint(pages, (max_pages,), device="cuda", generator=generator)
                    for _ in range(requests)
                ]
            ).int()
            scores = torch.rand(rows, history + 1, device="cuda", generator=generator)
            scores[:, -1] = 2
            regions = torch.full((rows, setting.slots), -1, dtype=torch.int64, device="cuda")
            regions[:, setting.slots - live :] = scores.topk(live, sorted=False).indices
            self.sets.append((query, regions, table))

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

    def sample(self, index: int, request: int) -> tuple[Call, slice]:
        """One request of a set as a call of its own, with only the pages that it uses."""
        setting = self.setting
        query, regions, table = self.sets[index]
        each = setting.rows // setting.requests
        rows = slice(request * each, (request + 1) * each)
        used, renamed = torch.unique(table[request].long(), return_inverse=True)
        call = Call(
            query=to_numpy(query[rows]),
            cache=to_numpy(self.cache[used]),
            regions=to_numpy(regions[rows]),
            block_table=to_numpy(renamed.int())[None],
            positions=to_numpy(self.positions[rows]),
            active=to_numpy(self.active[rows]),
            k_scale=None if self.k_scale is None else to_numpy(self.k_scale),
            v_scale=None if self.v_scale is None else to_numpy(self.v_scale),
            query_len=setting.query_len,
        )
        return call, rows

    def fault(self, run: Callable[..., object], samples: Sequence[int] = (0, -1)) -> str | None:
        """What is wrong with a path's result, in words; None if all samples are within tolerance."""
        output = self.output()
        run(**self.arguments(0), output=output)
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


def random_pool(cache: str, size: int = POOL_BYTES) -> torch.Tensor:
    """`size` bytes of random cache content without NaN or infinity, as uint8."""
    pool = torch.empty(size, dtype=torch.uint8, device="cuda")
    block = torch.randn(1 << 26, device="cuda")
    block = (block * 50 if cache == "float8_e4m3fn" else block).to(getattr(torch, cache))
    block = block.view(torch.uint8)
    for begin in range(0, size, block.numel()):
        part = pool[begin : begin + block.numel()]
        part.copy_(block[: part.numel()])
    return pool


def graph_microseconds(launch: Callable[[int], object], replays: int = 30) -> tuple[float, float]:
    """Time of one launch inside a CUDA graph of `SETS` launches.

    Args:
        launch: Launches set `index`.
        replays: Timed replays of the graph.

    Returns:
        Median and the distance between the quartiles, in microseconds.
    """
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        launch(0)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(SETS):
            launch(index)
    for _ in range(3):
        graph.replay()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(replays)
    ]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = np.array([begin.elapsed_time(end) for begin, end in events]) * 1000 / SETS
    low, high = np.quantile(times, (0.25, 0.75))
    return float(statistics.median(times)), float(high - low)
