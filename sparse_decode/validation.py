"""Checks what the index arrays of a call hold, for development.

An index that points outside counts as unused, and a slot before a row's live slots is never read:
a mistake in a selector or in a block table gives a result, only not the one that was meant. The
`validate` option of the operations looks for such mistakes through `check_indices`, which can also
be called before any operation.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from sparse_decode.contract import HEAD_DIM, REGION_TOKENS, ArraySpec, Geometry, check_call

_ELSEWHERE = "call sparse_decode.validation.check_indices"


def check_indices(
    *,
    cache: Any,
    regions: Any,
    block_table: Any,
    positions: Any,
    active: Any,
    query_len: int = 1,
) -> None:
    """Raises for the first index of a call that cannot be meant.

    It is stricter than the operations, which give each of these a meaning. In active rows, it
    refuses, in this order:

    1. a position below -1, or past the tokens of the block table;
    2. in a live slot, a region below -1, past the block table, or that begins after the position;
       before the live slots, any region, as it is never read (a selection padded on the right);
    3. a block table entry outside the cache, where an attended token needs it.

    Each is searched for in all rows before the next, row by row and slot by slot. A region or page
    that is listed twice is fine, and inactive rows may hold anything.

    The arrays are NumPy arrays, PyTorch tensors or JAX arrays; JAX arrays may be mixed with NumPy
    arrays. The work is done where they are, in PyTorch on its current stream, and the host waits
    for the answer.

    Args:
        cache: `[pages, groups, page_size, 384]`, of which only the shape counts: an array, a
            `PackedCache`, or the shape itself.
        regions: `[rows, slots]`, int32 or int64.
        block_table: `[requests, max_pages]` int32.
        positions: `[rows]`, int32 or int64.
        active: `[rows]` bool.
        query_len: Query tokens a request.

    Raises:
        ValueError: An index cannot be meant: the message says where it is, what was expected and
            what is there. Or a shape, stride or device is wrong.
        TypeError: A dtype or the type of an argument is wrong, or an array has no values: it is
            traced, as inside `jax.jit`, or a meta or fake tensor.
        RuntimeError: A CUDA graph is being captured.
    """
    shape = getattr(cache, "shape", cache)
    if not isinstance(shape, tuple | list):
        raise TypeError(f"cache: expected an array or its shape, got {type(cache).__name__}")
    arrays = {
        "regions": regions,
        "block_table": block_table,
        "positions": positions,
        "active": active,
    }
    if _has_any(arrays, "torch", "Tensor"):
        _check_tensors(tuple(shape), arrays, query_len)
    elif _has_any(arrays, "jax", "Array"):
        _check_jax_arrays(tuple(shape), arrays, query_len)
    else:
        specs = _describe(arrays, np.ndarray, "an array")
        _check(np, _geometry(tuple(shape), specs, query_len), **arrays)


def check_option(validate: object) -> None:
    """Raises TypeError unless `validate` is a bool."""
    if not isinstance(validate, bool):
        raise TypeError(f"validate: expected a bool, got {type(validate).__name__}")


# --- frameworks


def _has_any(arrays: dict[str, Any], framework: str, kind: str) -> bool:
    """Whether there is an array of a framework, which is then loaded already."""
    module = sys.modules.get(framework)
    return module is not None and any(
        isinstance(array, getattr(module, kind)) for array in arrays.values()
    )


def _check_tensors(shape: tuple[int, ...], arrays: dict[str, Any], query_len: int) -> None:
    import torch

    from sparse_decode import torch_arrays

    specs = {name: torch_arrays.spec(name, tensor) for name, tensor in arrays.items()}
    geometry = _geometry(shape, specs, query_len)
    for name, tensor in arrays.items():
        if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
            raise TypeError(f"{name}: expected a tensor with values, got a meta or fake one")
    device = arrays["regions"].device
    if device.type == "cuda":
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a CUDA graph is being captured, in which indices cannot be checked; in place "
                    f"of validate=True, {_ELSEWHERE} before the capture"
                )
    _check(torch, geometry, **arrays)


def _check_jax_arrays(shape: tuple[int, ...], arrays: dict[str, Any], query_len: int) -> None:
    import jax

    specs = _describe(arrays, (jax.Array, np.ndarray), "a JAX array")
    geometry = _geometry(shape, specs, query_len)
    for name, array in arrays.items():
        if isinstance(array, jax.core.Tracer):
            raise TypeError(
                f"{name}: expected an array with values, got a traced one; in place of "
                f"validate=True, {_ELSEWHERE} outside of jax.jit and other transformations"
            )
    # A function that is being traced may hold arrays with values, some of 64 bits and some of 32.
    with (
        jax.ensure_compile_time_eval(),
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
    ):
        concrete = {name: jax.numpy.asarray(array) for name, array in arrays.items()}
        _check(jax.numpy, geometry, **concrete)


def _describe(arrays: dict[str, Any], kinds: Any, expected: str) -> dict[str, ArraySpec]:
    for name, array in arrays.items():
        if not isinstance(array, kinds):
            raise TypeError(f"{name}: expected {expected}, got {type(array).__name__}")
    return {name: ArraySpec(array.shape, array.dtype.name) for name, array in arrays.items()}


def _geometry(shape: tuple[int, ...], specs: dict[str, ArraySpec], query_len: int) -> Geometry:
    """Checks the arrays against the contract, with a query that fits them."""
    regions = specs["regions"]
    rows = regions.shape[0] if regions.shape else 0
    return check_call(
        query=ArraySpec((rows, 1, HEAD_DIM), "bfloat16", device=regions.device),
        cache=ArraySpec(shape, "bfloat16"),
        **specs,
        scale=1.0,
        query_len=query_len,
        splits=1,
    )


# --- the check, in functions and methods that NumPy, PyTorch and JAX share


def _check(
    xp: ModuleType, geometry: Geometry, regions: Any, block_table: Any, positions: Any, active: Any
) -> None:
    slots, max_tokens = geometry.slots, geometry.max_pages * geometry.page_size
    positions, active = positions[:, None], active[:, None]
    if place := _first(active & ((positions < -1) | (positions >= max_tokens))):
        _wrong(f"positions: row {place[0]}", f"-1 to {max_tokens - 1}", positions[place])

    current = positions // REGION_TOKENS
    live = _count(xp, regions, 1) >= slots - 1 - current
    last = xp.where(live, current, -1)
    if place := _first(active & ((regions > last) | (live & (regions < -1)))):
        row, slot = place
        position, got = int(positions[row, 0]), int(regions[place])
        first_live = max(slots - 1 - position // REGION_TOKENS, 0)
        if slot < first_live:
            expected = f"-1 before slot {first_live}, as position is {position}"
        elif -1 <= got < geometry.max_regions:
            expected = f"-1 or an id up to {position // REGION_TOKENS}, as position is {position}"
        else:
            expected = f"-1 or an id below {geometry.max_regions}"
        _wrong(f"regions: row {row}, slot {slot}", expected, got)

    attended = active & live & (regions >= 0)
    logical = xp.where(attended, regions, 0) // (geometry.page_size // REGION_TOKENS)
    request = _count(xp, positions, 0) // geometry.rows_per_request
    physical = block_table[request, logical]
    if place := _first(attended & ((physical < 0) | (physical >= geometry.pages))):
        row, slot = place
        where = f"request {int(request[row, 0])}, logical page {int(logical[place])}"
        _wrong(
            f"block_table: {where} (row {row}, slot {slot})",
            f"a page of 0 to {geometry.pages - 1}",
            physical[place],
        )


def _count(xp: ModuleType, array: Any, axis: int) -> Any:
    """The place of each element along an axis."""
    return xp.cumsum(xp.ones_like(array), axis) - 1


def _first(wrong: Any) -> tuple[int, int] | None:
    """Where the first true element of an array of two dimensions is, if there is any."""
    if not wrong.any():
        return None
    row = wrong.any(1).tolist().index(True)
    return row, wrong[row].tolist().index(True)


def _wrong(where: str, expected: str, got: Any) -> None:
    raise ValueError(f"{where}: expected {expected}, got {int(got)}")
