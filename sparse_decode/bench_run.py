"""Measures settings: correctness first, then each path, the floors, the host and JAX in turn.

Results are plain dictionaries, as they stand in the JSON file.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparse_decode import plan, torch_arrays
from sparse_decode.bench import (
    POOL_BYTES,
    SCALE,
    SETS,
    Setting,
    Time,
    Workload,
    blueprint,
    graph_microseconds,
    random_pool,
    time_of,
)
from sparse_decode.bench_peers import PEERS, Peer
from sparse_decode.bench_suites import SUITES
from sparse_decode.bridge import sparse_decode_attention, warmup
from sparse_decode.parity import versions
from sparse_decode.plan import Config

HOST_CALLS = 50
PAGES_TO_COMPILE = 64

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Tools:
    """What measuring takes from the machine; replaced where there is no GPU.

    Attributes:
        measure: Time of one launch, given a function that launches set `index`.
        triton, pallas: The two paths, as functions of `Workload.call`.
        gather: The gather floor of a workload.
        split: A function that launches the first Pallas kernel alone; None if it is the only one.
        inside_jax: Times a workload inside a jitted program; None where that is not measured.
    """

    measure: Callable[[Callable[[int], object]], Time]
    triton: Callable[[Workload], Callable[..., object]]
    pallas: Callable[[Workload], Callable[..., object]]
    gather: Callable[[Workload], Any] | None = None
    split: Callable[[Workload, torch.Tensor], Callable[[int], object] | None] = lambda *_: None
    inside_jax: Callable[[Workload], dict[str, Time] | None] = lambda _: None


def triton_path(workload: Workload) -> Callable[..., object]:
    """The Triton kernels."""
    from sparse_decode import triton_kernels

    splits = triton_kernels.sparse_decode_splits(workload.setting.rows)
    return partial(triton_kernels.sparse_decode_attention, splits=splits)


def pallas_path(_: Workload) -> Callable[..., object]:
    """The Pallas kernels, launched directly."""
    return sparse_decode_attention


def split_alone(workload: Workload, output: torch.Tensor) -> Callable[[int], object] | None:
    """Launches only the first kernel of the direct route; None if there is no second one."""
    from sparse_decode.bridge import op
    from sparse_decode.bridge.compile import Executable
    from sparse_decode.bridge.launch import DirectProgram

    call = op._describe(workload.call(0, output), "direct")
    whole = call.programs[()].executable
    if len(whole.kernels) == 1:
        return None
    program = dataclasses.replace(whole.program, calls=whole.program.calls[:1])
    first = DirectProgram(Executable(program, whole.kernels[:1]))
    first.load(call.device)
    calls = [workload.call(index, output) for index in range(len(workload.sets))]
    tensors = [[given[name] for name in call.names] for given in calls]
    return lambda index: first.launch(tensors[index])


def default_config(setting: Setting, pool_bytes: int = POOL_BYTES) -> Config:
    """The launch settings that the Pallas kernels choose."""
    given = blueprint(setting, pool_bytes)
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    options = {"scale": SCALE, "query_len": setting.query_len, "splits": 1}
    return plan.default_config(torch_arrays.geometry(tensors, options))


def gpu_tools(replays: int, inside_jax: Callable[[Workload], Any] = lambda _: None) -> Tools:
    """The tools for the current GPU."""
    from sparse_decode.bench_floor import gather_floor

    return Tools(
        measure=partial(graph_microseconds, replays=replays),
        triton=triton_path,
        pallas=pallas_path,
        gather=partial(gather_floor, replays=replays),
        split=split_alone,
        inside_jax=inside_jax,
    )


def measure_setting(workload: Workload, bandwidth: float, tools: Tools) -> dict[str, Any]:
    """Everything about one setting, times in microseconds.

    Args:
        workload: Its tensors.
        bandwidth: Bytes that a copy reads and writes in a second.
        tools: How to measure.
    """
    setting, output = workload.setting, workload.output()
    streaming = setting.bytes / bandwidth * 1e6
    result: dict[str, Any] = {
        "name": setting.name,
        "setting": {**dataclasses.asdict(setting), "rows": setting.rows, "bytes": setting.bytes},
        "config": dataclasses.asdict(default_config(setting, workload.cache.nbytes)),
        "streaming": streaming,
        "gather": tools.gather and dataclasses.asdict(tools.gather(workload)),
        "paths": {
            "triton": _path(workload, tools.triton(workload), output, tools),
            "pallas": _path(workload, tools.pallas(workload), output, tools),
            **{peer.name: _peer(peer, workload, output, tools) for peer in PEERS},
        },
    }
    if any(result["paths"][name]["fault"] for name in ("triton", "pallas")):
        return result
    pallas = result["paths"]["pallas"]["median"]
    result["ratio"] = result["paths"]["triton"]["median"] / pallas
    result["streaming_share"] = streaming / pallas
    if result["gather"]:
        result["gather_share"] = result["gather"]["median"] / pallas
    alone = tools.split(workload, output)
    if alone:
        split = tools.measure(alone)
        result["split"] = split._asdict()
        result["rest"] = pallas - split.median
    inside = tools.inside_jax(workload)
    if inside:
        excess = inside["attention"].median / pallas - 1
        inside = {**{name: time._asdict() for name, time in inside.items()}, "excess": excess}
    result["jax"] = inside
    return result


def _path(
    workload: Workload, run: Callable[..., object], output: torch.Tensor, tools: Tools
) -> dict[str, Any]:
    """A path's fault and, if there is none, its times."""
    fault = workload.fault(lambda output, **_: run(**workload.call(0, output)))
    if fault:
        return {"fault": fault}
    calls = [workload.call(index, output) for index in range(len(workload.sets))]
    time_of_launch = tools.measure(lambda index: run(**calls[index]))
    host = host_microseconds(lambda: run(**calls[0]))
    return {"fault": None, **time_of_launch._asdict(), "host": host._asdict()}


def _peer(peer: Peer, workload: Workload, output: torch.Tensor, tools: Tools) -> dict[str, Any]:
    """A peer's time, or why there is none; its faults are its own."""
    if absent := peer.absent():
        return {"absent": absent}
    try:
        launch = peer.prepare(workload)
        if launch is None:
            return {"absent": "does not compute this setting"}
        fault = workload.fault(lambda output, **_: launch(0, output))
        if fault:
            return {"fault": fault}
        return {"fault": None, **tools.measure(lambda index: launch(index, output))._asdict()}
    except Exception as error:  # Another project's code may fail in any way; ours goes on.
        return {"absent": f"failed: {type(error).__name__}: {str(error)[:300]}"}


def host_microseconds(call: Callable[[], object], batches: int = 15) -> Time:
    """Host time of one eager call: launches pile up, and the device is awaited in between.

    What else the host does only adds to it, so that `median` is the lowest of all batches' means.
    """
    times = []
    for _ in range(batches):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        times.append((time.perf_counter() - began) * 1e6)
    return Time(min(times) / HOST_CALLS, time_of(times, HOST_CALLS).spread)


# --- compilation


def compile_all(settings: Sequence[Setting], pool_bytes: int, processes: int | None = None) -> None:
    """Compiles the kernels of all settings in parallel, so that later calls only load them."""
    # Triton compiles in the process that launches; others fill its cache on disk beforehand.
    jobs = [*(partial(_compile_triton, setting) for setting in settings), *_gather_jobs(settings)]
    count = min(len(jobs), processes or os.cpu_count() or 1)
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(job) for job in jobs]
        warmup([blueprint(setting, pool_bytes) for setting in settings], processes=processes)
        for done in waiting:
            done.result()


def _small(setting: Setting) -> Workload:
    """A workload whose kernels are those of the setting, with hardly any memory."""
    page = setting.groups * setting.page_size * 384 * (1 if setting.fp8 else 2)
    return Workload(setting, random_pool(setting.cache, PAGES_TO_COMPILE * page), sets=1)


def _compile_triton(setting: Setting) -> None:
    workload = _small(setting)
    triton_path(workload)(**workload.call(0, workload.output()))
    torch.cuda.synchronize()


def _gather_jobs(settings: Sequence[Setting]) -> Iterator[Callable[[], None]]:
    from sparse_decode.bench_floor import SHAPES

    # The number of rows is no part of the kernel.
    kinds = {
        (s.cache, s.groups, s.query_len, s.page_size): dataclasses.replace(s, requests=1)
        for s in settings
    }
    for setting in kinds.values():
        for shape in SHAPES:
            yield partial(_compile_gather, setting, shape)


def _compile_gather(setting: Setting, shape: tuple[int, int, int]) -> None:
    from sparse_decode.bench_floor import launcher

    launcher(_small(setting), shape, 1)(0)
    torch.cuda.synchronize()


# --- the whole run


def run(
    settings: Sequence[Setting],
    *,
    pool_bytes: int = POOL_BYTES,
    replays: int = 30,
    commit: str | None = None,
    says: Callable[[str], object] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Measures settings on the current GPU.

    Args:
        settings: Those with one cache dtype stand side by side.
        pool_bytes: Size of the pool of pages.
        replays: Timed replays of each CUDA graph.
        commit: The commit that is measured, where it cannot be found out.
        says: Is told what is being done.

    Yields:
        The document after each setting; its "results" have grown by one.

    Raises:
        ValueError: The GPU's free memory does not hold the pool.
    """
    check_memory(pool_bytes)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    says("compiling the kernels")
    began = time.perf_counter()
    compile_all(settings, pool_bytes)
    says("compiling the JAX programs")
    inside_jax, why_not = _jax_programs(settings, pool_bytes)
    compiled = time.perf_counter() - began
    says("copying")
    from sparse_decode.bench_floor import copy_bandwidth

    bandwidth = copy_bandwidth()
    document = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit or commit_here(),
        "method": {
            "sets": SETS,
            "pool_bytes": pool_bytes,
            "replays": replays,
            "jax": why_not
            or "attention: a jitted program over all sets minus one without the attention; "
            "excess: over the direct launch in a CUDA graph",
        },
        "copy_bandwidth": bandwidth,
        "peers": {peer.name: peer.absent() or "measured" for peer in PEERS},
        "seconds": {"compiling": compiled},
        "results": [],
    }
    tools = gpu_tools(replays, inside_jax)

    def measure(workload: Workload) -> dict[str, Any]:
        says(workload.setting.name)
        return measure_setting(workload, bandwidth, tools)

    for result in with_each_workload(settings, pool_bytes, measure):
        document["results"].append(result)
        document["seconds"]["all"] = time.perf_counter() - began
        yield document


def with_each_workload(
    settings: Iterable[Setting], pool_bytes: int, act: Callable[[Workload], T]
) -> Iterator[T]:
    """What `act` makes of the workload of each setting.

    One pool is held at a time, and drawn anew where the dtype of the cache changes: `act` must not
    keep the workload.
    """
    pool, holds = torch.empty(0), None
    for setting in settings:
        if setting.cache != holds:
            del pool
            torch.cuda.empty_cache()
            pool, holds = random_pool(setting.cache, pool_bytes), setting.cache
        yield act(Workload(setting, pool))


def check_memory(pool_bytes: int) -> None:
    """Raises ValueError if the current GPU's free memory does not hold the pool."""
    free = torch.cuda.mem_get_info()[0] / 2**30 - 4
    if pool_bytes / 2**30 > free:
        raise ValueError(
            f"pool: expected at most {max(free, 0):.1f} GiB, what the GPU has free less 4 GiB, "
            f"got {pool_bytes / 2**30:g}"
        )


def _jax_programs(
    settings: Sequence[Setting], pool_bytes: int
) -> tuple[Callable[[Workload], Any], str | None]:
    """Times a workload inside JAX where there is a program for it; or why there is none."""
    # Compiling costs seconds for each; the headline shows what there is to see.
    chosen = [setting for setting in settings if setting in SUITES["headline"]]
    if not chosen:
        return lambda _: None, "absent: measured for the headline settings only"
    import jax

    if jax.default_backend() != "gpu":
        return lambda _: None, f"absent: JAX runs on {jax.default_backend()}"
    from sparse_decode import bench_jax

    programs = bench_jax.compile_all(chosen, pool_bytes)

    def inside(workload: Workload) -> dict[str, Time] | None:
        mine = programs.get(workload.setting)
        return mine and bench_jax.microseconds(mine, workload)

    return inside, None


def machine() -> dict[str, Any]:
    """The current GPU and its driver."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
    }


def commit_here() -> str | None:
    """The commit that this file belongs to; None where it is part of no Git work tree."""
    file = Path(__file__).resolve()
    git = ("git", "-C", str(file.parent))
    if _first_line(*git, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _first_line(*git, "rev-parse", "HEAD")
    changed = _first_line(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}, changed" if commit and changed else commit


def _first_line(*command: str) -> str | None:
    """First line of what a program says; None if it says nothing, fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return next(iter(done.stdout.splitlines()), None) if done.returncode == 0 else None
