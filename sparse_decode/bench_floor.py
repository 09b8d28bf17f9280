"""The two floors: what a copy moves, and what a kernel needs that only reads the same lines."""

# Type checkers cannot follow Triton's language.
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparse_decode.bench import Time, Workload, event_microseconds, graph_microseconds
from sparse_decode.bench_suites import Setting
from sparse_decode.contract import CACHE_DIM, REGION_TOKENS

COPY_BYTES = 4 << 30

# (tokens a tile, warps, stages); with 1 stage the loop has no pipeline. Small tiles of one warp are
# best for FP8; lines of 768 bytes want more in flight.
SHAPES = (
    (8, 1, 1),
    (16, 1, 1),
    (16, 2, 1),
    (32, 4, 1),
    (16, 1, 3),
    (32, 2, 3),
    (64, 4, 3),
)
# Programs over all rows.
PROGRAMS = (256, 1056, 2048, 4096, 8192)


@dataclass(frozen=True)
class Gather:
    """The fastest gather that was found.

    Attributes:
        median, spread: Time of one launch in microseconds.
        splits: Programs a row.
        tile: Tokens a program reads at a time.
        warps, stages: As the kernel was compiled.
    """

    median: float
    spread: float
    splits: int
    tile: int
    warps: int
    stages: int


def copy_bandwidth(size: int = COPY_BYTES) -> float:
    """Bytes read and written in a second by a copy on the current GPU, the best of ten."""
    source = torch.zeros(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes * 1e6 / min(event_microseconds(lambda: target.copy_(source), 10))


@triton.jit(do_not_specialize=["slots", "live", "splits", "table_row_stride"])
def _gather(
    cache_ptr,
    regions_ptr,
    block_table_ptr,
    active_ptr,
    output_ptr,
    slots,
    live,
    splits,
    table_row_stride,
    GROUPS: tl.constexpr,
    ROWS_PER_REQUEST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    REGION: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Reads a share of a row's lines as int32 words and adds them up; grid (rows, splits)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    if not tl.load(active_ptr + row):
        return
    tiles = tl.cdiv(live * REGION, TILE)
    regions_ptr += row * slots + slots - live
    block_table_ptr += row // ROWS_PER_REQUEST * table_row_stride
    WIDE: tl.constexpr = WORDS // 3 * 2
    NARROW: tl.constexpr = WORDS // 3
    wide = tl.zeros([TILE, WIDE], tl.int32)
    narrow = tl.zeros([TILE, NARROW], tl.int32)
    for tile in tl.range(split * tiles // splits, (split + 1) * tiles // splits, num_stages=STAGES):
        lane = tile * TILE + tl.arange(0, TILE)
        slot = lane // REGION
        token = tl.load(regions_ptr + slot, mask=slot < live, other=0) * REGION + lane % REGION
        page = tl.load(block_table_ptr + token // PAGE_SIZE).to(tl.int64)
        line = (page * GROUPS + row % GROUPS) * PAGE_SIZE + token % PAGE_SIZE
        line_ptrs = cache_ptr + line[:, None] * WORDS
        wide += tl.load(line_ptrs + tl.arange(0, WIDE)[None, :])
        narrow += tl.load(line_ptrs + WIDE + tl.arange(0, NARROW)[None, :])
    total = tl.sum(tl.sum(wide, 1), 0) + tl.sum(tl.sum(narrow, 1), 0)
    tl.store(output_ptr + row * splits + split, total)


def launcher(workload: Workload, shape: tuple[int, int, int], splits: int) -> Callable[[int], None]:
    """Launches the gather of a set."""
    setting = workload.setting
    tile, warps, stages = shape
    words = workload.cache.view(torch.uint8).view(torch.int32)
    output = torch.empty(setting.rows * splits, dtype=torch.int32, device=words.device)

    def launch(index: int) -> None:
        _, regions, table = workload.sets[index]
        _gather[setting.rows, splits](
            cache_ptr=words,
            regions_ptr=regions,
            block_table_ptr=table,
            active_ptr=workload.active,
            output_ptr=output,
            slots=setting.slots,
            live=setting.live_slots,
            splits=splits,
            table_row_stride=table.stride(0),
            GROUPS=setting.groups,
            ROWS_PER_REQUEST=setting.groups * setting.query_len,
            PAGE_SIZE=setting.page_size,
            REGION=REGION_TOKENS,
            WORDS=CACHE_DIM * workload.cache.itemsize // 4,
            TILE=tile,
            STAGES=stages,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=True,
        )

    return launch


def candidates(setting: Setting) -> list[tuple[tuple[int, int, int], int]]:
    """The (shape, splits) that are tried."""
    found = {}
    for shape in SHAPES:
        tiles = -(-setting.live_slots * REGION_TOKENS // shape[0])
        for programs in PROGRAMS:
            splits = min(max(1, programs // setting.rows), tiles)
            found[shape, splits] = None
    return [*found]


def gather_floor(
    workload: Workload,
    measure: Callable[..., Time] = graph_microseconds,
    replays: int = 30,
) -> Gather:
    """The fastest of the candidates: each is timed briefly, the best three in full."""
    launches = {
        (shape, splits): launcher(workload, shape, splits)
        for shape, splits in candidates(workload.setting)
    }
    quick = {key: measure(launch, replays=5).median for key, launch in launches.items()}
    best = sorted(quick, key=lambda key: quick[key])[:3]
    times = {key: measure(launches[key], replays=replays) for key in best}
    (shape, splits), time = min(times.items(), key=lambda item: item[1].median)
    return Gather(*time, splits, *shape)
