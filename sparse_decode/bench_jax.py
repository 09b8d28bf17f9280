"""The time of the operation inside a jitted JAX program.

The program loops over all sets of a workload. What the loop itself costs, slices of the sets
included, is measured with the same loop that only carries its inputs, and subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import torch
from jax import lax

from sparse_decode.bench import SCALE, SETS, Time, Workload, blueprint, time_of
from sparse_decode.bench_suites import Setting
from sparse_decode.bridge import to_jax
from sparse_decode.pallas_kernels import sparse_decode_attention

ROUNDS = 20
REPEATS = 12
STACKED = ("query", "regions", "block_table")

Programs = tuple[Callable[..., Any], Callable[..., Any]]


def _loop(setting: Setting, sets: int, attend: bool) -> Callable[..., Any]:
    """The loop over all sets, with or without the attention."""

    def run(stacked: tuple[jax.Array, ...], shared: dict[str, jax.Array]) -> Any:
        def body(turn, _):
            query, regions, table = (
                lax.dynamic_index_in_dim(array, turn % sets, keepdims=False) for array in stacked
            )
            if attend:
                query = sparse_decode_attention(
                    query=query,
                    regions=regions,
                    block_table=table,
                    **shared,  # type: ignore[arg-type]
                    scale=SCALE,
                    query_len=setting.query_len,
                )
            return query, regions, table

        return lax.fori_loop(0, ROUNDS * sets, body, tuple(array[0] for array in stacked))

    return run


def arrays(workload: Workload) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """The sets, stacked, and what they share, lent to JAX; indices as int32."""
    queries, regions, tables = zip(*workload.sets, strict=True)
    stacked = (torch.stack(queries), torch.stack(regions).int(), torch.stack(tables))
    shared = {**workload.arguments(0), "positions": workload.positions.int()}
    for name in STACKED:
        del shared[name]
    lent = {name: to_jax(tensor) for name, tensor in shared.items() if tensor is not None}
    return tuple(to_jax(tensor) for tensor in stacked), lent


def compile_all(
    settings: Iterable[Setting], pool_bytes: int, sets: int = SETS
) -> dict[Setting, Programs]:
    """Compiles the programs of several settings, side by side."""

    def one(job: tuple[Setting, bool]) -> Callable[..., Any]:
        setting, attend = job
        shapes = _shapes(setting, pool_bytes, sets)
        return jax.jit(_loop(setting, sets, attend)).lower(*shapes).compile()

    settings = list(settings)
    jobs = [(setting, attend) for setting in settings for attend in (True, False)]
    with ThreadPoolExecutor() as threads:
        compiled = list(threads.map(one, jobs))
    return {
        setting: (compiled[2 * place], compiled[2 * place + 1])
        for place, setting in enumerate(settings)
    }


def _shapes(setting: Setting, pool_bytes: int, sets: int) -> tuple[Any, dict[str, Any]]:
    """Shapes and dtypes of what `arrays` returns."""
    described = {
        name: jax.ShapeDtypeStruct(tensor.shape, _dtype(tensor))
        for name, tensor in blueprint(setting, pool_bytes).items()
        if isinstance(tensor, torch.Tensor) and name != "output"
    }
    stacked = tuple(
        jax.ShapeDtypeStruct((sets, *one.shape), one.dtype)
        for one in (described.pop(name) for name in STACKED)
    )
    return stacked, described


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.").replace("int64", "int32")


def microseconds(programs: Programs, workload: Workload) -> Mapping[str, Time]:
    """Times a workload's programs.

    Returns:
        "loop", with the attention; "empty", without; and "attention", their difference. All are
        microseconds for each set.
    """
    if workload.cache.is_cuda:
        torch.cuda.synchronize()
    given = arrays(workload)
    each = ROUNDS * len(workload.sets)
    taken: list[list[float]] = [[], []]
    for program in programs:
        jax.block_until_ready(program(*given))
    for _ in range(REPEATS):
        for times, program in zip(taken, programs, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(program(*given))
            times.append((time.perf_counter() - began) * 1e6)
    differences = [loop - empty for loop, empty in zip(*taken, strict=True)]
    return {
        "loop": time_of(taken[0], each),
        "empty": time_of(taken[1], each),
        "attention": time_of(differences, each),
    }
