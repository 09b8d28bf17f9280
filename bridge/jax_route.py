"""The DLPack route: torch tensors lent to JAX for one call of the Pallas kernels; and the way back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import torch

from sparse_decode.bridge.dlpack import (
    PALLAS_TRITON_ALIGNMENT,
    ImportCache,
    ZeroCopyError,
    packed_view,
    settle,
    to_jax,
    to_torch,
)
from sparse_decode.contract import CACHE_DIM
from sparse_decode.pallas_kernels import PackedCache
from sparse_decode.pallas_kernels.kernels import attend
from sparse_decode.plan import Plan, make_plan

if TYPE_CHECKING:
    from sparse_decode.bridge.op import _Call

# What stays from call to call, in most stacks: imported once.
_KEPT = ("cache", "block_table", "k_scale", "v_scale")


@functools.lru_cache(maxsize=1)
def _imports() -> ImportCache:
    return ImportCache(1024)


@dataclass(frozen=True)
class _Program:
    """The jitted kernels for calls of one kind and one layout of the cache.

    Attributes:
        plan: How the kernels are launched.
        fresh, kept: The names of the buffers that are imported for each call, and once.
        function: Takes the buffers in this order, and last an offset where the plan has one.
    """

    plan: Plan
    fresh: tuple[str, ...]
    kept: tuple[str, ...]
    function: Callable[..., jax.Array]


def run(call: _Call, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Runs a checked call in JAX and writes its result into `output`.

    On a GPU the result is written in place, by donation; on the CPU JAX cannot do that, and the result
    is copied into `output`.

    Args:
        call: The call, with at least one row.
        tensors: Its tensors by name.

    Raises:
        ZeroCopyError: JAX cannot take a tensor as it is: the message says which and why.
        RuntimeError: A CUDA graph is being captured.
    """
    on_cpu, output = call.device < 0, tensors["output"]
    if not on_cpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            'route: "dlpack" runs in JAX, which a CUDA graph cannot capture; use route="direct"'
        )
    cache, offset, unit = tensors["cache"], 0, 0
    if not cache.is_contiguous():
        cache, offset = packed_view(cache.view(torch.uint8) if call.plan.geometry.fp8 else cache)
        unit = math.gcd(offset, 16)
    kind = (unit, cache.shape if unit else None)
    program = call.jitted.get(kind)
    if program is None:
        program = call.jitted.setdefault(kind, _jit(call, unit, cache.shape))
    views = {
        name: _view(program.plan, name, cache if name == "cache" else tensors[name], on_cpu)
        for name in call.names
    }
    arrays = _imports().borrow(
        [views[name] for name in program.fresh], [views[name] for name in program.kept]
    )
    if unit:
        arrays.append(_offset(offset, call.device))
    result = program.function(*arrays)
    settle(result)
    if on_cpu:
        lines = output.as_strided(result.shape, (result.shape[1], 1))
        lines.copy_(to_torch(result))
    elif result.unsafe_buffer_pointer() != output.data_ptr():
        raise RuntimeError("output: JAX did not write the result in place")


def _jit(call: _Call, unit: int, shape: tuple[int, ...]) -> _Program:
    """The program of a call; with a `unit`, for a cache inside storage of this shape."""
    plan = call.plan
    if unit:
        cache = call.specs["cache"]
        plan = make_plan(
            plan.geometry,
            {**call.specs, "cache": cache._replace(strides=(shape[1], *cache.strides[1:]))},
            scale=plan.scale,
            clear_inactive=plan.clear_inactive,
            config=plan.config,
            cache_unit=unit,
            cache_page=shape[1],
        )
    plan = replace(plan, interpret=call.device < 0)
    kept = tuple(name for name in call.names if name in _KEPT)
    fresh = tuple(name for name in call.names if name not in _KEPT)
    names = (*fresh, *kept, *(("offset",) if unit else ()))

    def sparse_decode_attention(*buffers: jax.Array) -> jax.Array:
        return attend(plan, dict(zip(names, buffers, strict=True)))["output"]

    donated = () if plan.interpret else (names.index("output"),)
    return _Program(plan, fresh, kept, jax.jit(sparse_decode_attention, donate_argnums=donated))


@functools.lru_cache(maxsize=4096)
def _offset(offset: int, device: int) -> jax.Array:
    """A layer's offset on the device, so that it is no part of the program."""
    where = jax.devices("cpu")[0] if device < 0 else jax.devices("gpu")[device]
    return jax.device_put(jax.numpy.full((1,), offset, jax.numpy.int32), where)


def _view(plan: Plan, name: str, tensor: torch.Tensor, on_cpu: bool) -> torch.Tensor:
    """The tensor's memory in the dtype and shape in which the kernels see it."""
    if not on_cpu and tensor.data_ptr() % PALLAS_TRITON_ALIGNMENT:
        raise ZeroCopyError(
            f"{name}: expected an address that is a multiple of {PALLAS_TRITON_ALIGNMENT} bytes, got "
            f'{tensor.data_ptr():#x}; use route="direct", or a copy'
        )
    dtype_name, shape = plan.buffer(name)
    dtype = getattr(torch, dtype_name)
    if tensor.dtype != dtype and tensor.dim():
        tensor = tensor.view(dtype)
    if tensor.is_contiguous():
        return tensor.view(shape)
    try:
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        return tensor.as_strided(shape, strides)
    except RuntimeError as error:
        raise ZeroCopyError(
            f"{name}: its last line ends past its storage, so that JAX cannot take it as whole lines "
            f'of {shape[-1]} elements; use route="direct", or a copy'
        ) from error


def triton_sparse_decode_attention(
    query: jax.Array,
    cache: jax.Array | PackedCache,
    regions: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    *,
    scale: float,
    query_len: int = 1,
    splits: int | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    gate: jax.Array | None = None,
) -> jax.Array:
    """The Triton path on JAX arrays: lends them to PyTorch and returns a JAX array.

    Not for use inside `jax.jit`: the arrays must be concrete. Nothing is copied, and the host does not
    wait on a GPU.

    Args:
        query: `[rows, heads, 192]`, bfloat16 or float16.
        cache: `[pages, groups, page_size, 384]`, or a `PackedCache` with a concrete offset.
        regions: `[rows, slots]`, int32, or int64 where JAX has 64 bits.
        block_table: `[requests, max_pages]` int32.
        positions: `[rows]`, as `regions`.
        active: `[rows]` bool.
        scale: Multiplies q.k.
        query_len: Query tokens a request.
        splits: Programs that share a row; None takes `contract.default_splits`.
        k_scale: One float32, needed with an FP8 cache.
        v_scale: The same for v.
        gate: `[tokens, groups * heads]`, or None.

    Returns:
        `[rows, heads, 192]` in the dtype of `query`; inactive rows are zero.

    Raises:
        TypeError, ValueError, NotImplementedError: As the Triton path's `sparse_decode_attention`.
    """
    from sparse_decode.triton_kernels import sparse_decode_attention, sparse_decode_splits

    if isinstance(cache, PackedCache):
        page, group, token, _ = cache.strides()
        pages = cache.storage.shape[0]
        lent_cache = to_torch(cache.storage).as_strided(
            (pages, cache.groups, cache.page_size, CACHE_DIM),
            (page, group, token, 1),
            int(cache.offset),
        )
    else:
        lent_cache = to_torch(cache)
    lent = [
        None if array is None else to_torch(array)
        for array in (query, regions, block_table, positions, active, k_scale, v_scale, gate)
    ]
    query, regions, block_table, positions, active, k_scale, v_scale, gate = lent
    output = torch.empty_like(query)
    sparse_decode_attention(
        query,
        lent_cache,
        regions,
        block_table,
        positions,
        active,
        output,
        scale=scale,
        query_len=query_len,
        splits=sparse_decode_splits(len(query)) if splits is None else splits,
        k_scale=k_scale,
        v_scale=v_scale,
        gate=gate,
    )
    return to_jax(output)
