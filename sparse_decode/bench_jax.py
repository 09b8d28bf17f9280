"""The time of the operation inside a jitted JAX program.

The program attends to all sets of a workload, one after the other. It is timed on the GPU, between
two of torch's events: the bridge makes the program wait for the first, and the second wait for the
program's results. The first event stands behind other work, which lasts until the whole program is
launched, so that launching is not part of the time. What is left of a program without attention is
subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import torch

from sparse_decode.bench import FLUSH_BYTES, SCALE, SETS, Time, Workload, blueprint, time_of
from sparse_decode.bench_suites import Setting
from sparse_decode.bridge import to_jax, to_torch
from sparse_decode.pallas_kernels import sparse_decode_attention

REPEATS = 20
# Steps of the work in front, and how often they are doubled before that is given up.
STEPS = 2
DOUBLINGS = 6
EACH = ("query", "regions", "block_table")

Programs = tuple[Callable[..., Any], Callable[..., Any]]


def _program(setting: Setting, attend: bool) -> Callable[..., Any]:
    """Attention over all sets, or nothing; either way one number more than `ticket` is last."""

    def run(
        ticket: jax.Array, sets: list[tuple[jax.Array, ...]], shared: dict[str, jax.Array]
    ) -> list[jax.Array]:
        results = []
        for query, regions, table in sets if attend else ():
            result = sparse_decode_attention(
                query=query,
                regions=regions,
                block_table=table,
                **shared,  # type: ignore[arg-type]
                scale=SCALE,
                query_len=setting.query_len,
            )
            results.append(result)
        return [*results, ticket + 1]

    return run


def arrays(workload: Workload) -> tuple[list[tuple[jax.Array, ...]], dict[str, jax.Array]]:
    """The sets, and what they share, lent to JAX; indices as int32."""
    shared = {**workload.arguments(0), "positions": workload.positions.int()}
    for name in EACH:
        del shared[name]
    lent = {name: to_jax(tensor) for name, tensor in shared.items() if tensor is not None}
    sets = [
        (to_jax(query), to_jax(regions.int()), to_jax(table))
        for query, regions, table in workload.sets
    ]
    return sets, lent


def compile_all(
    settings: Iterable[Setting], pool_bytes: int, sets: int = SETS
) -> dict[Setting, Programs]:
    """Compiles the programs of several settings, side by side."""

    def one(job: tuple[Setting, bool]) -> Callable[..., Any]:
        setting, attend = job
        shapes = _shapes(setting, pool_bytes, sets)
        return jax.jit(_program(setting, attend)).lower(*shapes).compile()

    settings = list(settings)
    jobs = [(setting, attend) for setting in settings for attend in (True, False)]
    with ThreadPoolExecutor() as threads:
        compiled = list(threads.map(one, jobs))
    return {
        setting: (compiled[2 * place], compiled[2 * place + 1])
        for place, setting in enumerate(settings)
    }


def _shapes(setting: Setting, pool_bytes: int, sets: int) -> tuple[Any, ...]:
    """Shapes and dtypes of what the programs take."""
    described = {
        name: jax.ShapeDtypeStruct(tensor.shape, _dtype(tensor))
        for name, tensor in blueprint(setting, pool_bytes).items()
        if isinstance(tensor, torch.Tensor) and name != "output"
    }
    each = tuple(described.pop(name) for name in EACH)
    return jax.ShapeDtypeStruct((1,), "int32"), [each] * sets, described


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.").replace("int64", "int32")


def microseconds(programs: Programs, workload: Workload, repeats: int = REPEATS) -> dict[str, Time]:
    """Times a workload's programs, with a cold L2.

    Returns:
        "program", with the attention; "empty", without; and "attention", their difference. All are
        microseconds for each set.

    Raises:
        RuntimeError: Launching takes longer than any work that can be put in front of it.
    """
    given = arrays(workload)
    ticket = torch.zeros(1, dtype=torch.int32, device=workload.cache.device)
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=ticket.device)
    factor = torch.ones(4096, 4096, device=ticket.device)
    steps = STEPS

    def behind_work(program: Callable[..., Any]) -> tuple[float, bool]:
        """Microseconds of a program, and whether it was launched before the work was over."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(steps):
            factor @ factor
        flush.sum()
        begin.record()
        last = program(to_jax(ticket), *given)[-1]
        last = to_torch(last)
        in_time = not begin.query()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000, in_time

    for program in programs:
        behind_work(program)
    for _ in range(DOUBLINGS):
        taken = [[behind_work(program) for program in programs] for _ in range(repeats)]
        if all(in_time for pair in taken for _, in_time in pair):
            break
        steps *= 2
    else:
        raise RuntimeError("the programs were never launched before the work in front was over")
    whole, empty = ([pair[place][0] for pair in taken] for place in (0, 1))
    sets = len(workload.sets)
    return {
        "program": time_of(whole, sets),
        "empty": time_of(empty, sets),
        "attention": time_of([a - b for a, b in zip(whole, empty, strict=True)], sets),
    }
