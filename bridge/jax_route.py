"""The DLPack route: torch tensors lent to JAX for the Pallas kernels, and JAX arrays to Triton."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import torch

from sparse_decode.bridge import _jax_dlpack
from sparse_decode.bridge.dlpack import (
    PALLAS_TRITON_ALIGNMENT,
    XLA_ALIGNMENT,
    ImportCache,
    Layout,
    ZeroCopyError,
    address_of,
    check_tensor,
    keeps_device,
    packed_view,
    settle,
    to_jax,
    to_torch,
)
from sparse_decode.contract import ArraySpec
from sparse_decode.pallas_kernels import PackedCache
from sparse_decode.pallas_kernels.kernels import attend
from sparse_decode.pallas_kernels.op import describe_cache
from sparse_decode.plan import Plan, check_offset, extent, plan_again
from sparse_decode.validation import check_indices, check_option

if TYPE_CHECKING:
    from sparse_decode.bridge.op import _Call

_IMPORTS = ImportCache(1024, int64_as_int32=True)


@dataclass(frozen=True)
class _Input:
    """How a tensor is lent. What is only another shape is left to the program.

    Attributes:
        name: Its name in the call.
        lines: Shape `[lines, line stride]` of the memory that it spans; None if it is dense.
        dtype: The dtype that the kernels read instead; None if it is the tensor's own.
    """

    name: str
    lines: tuple[int, int] | None
    dtype: torch.dtype | None

    def view(self, tensor: torch.Tensor, way_out: str) -> torch.Tensor:
        """The tensor's memory as it is lent."""
        tensor = tensor.detach()
        if self.lines is not None:
            try:
                tensor = tensor.as_strided(self.lines, (self.lines[1], 1))
            except RuntimeError as error:
                raise ZeroCopyError(
                    f"{self.name}: its last line ends past its storage, so that JAX cannot take it "
                    f"as whole lines of {self.lines[1]} elements; {way_out}"
                ) from error
        return tensor if self.dtype is None else tensor.view(self.dtype)


@dataclass(frozen=True)
class _Program:
    """The jitted kernels for calls of one kind and one layout of the cache.

    Attributes:
        function: Takes the buffers, first `output`, which is donated; and last an offset where the
            cache is inside larger pages.
        pick: Puts what is listed in the order of the call's names into that of the buffers.
        last_offset: Largest offset of a cache inside larger pages.
        layouts: How the buffers are lent.
        checked: Those that are looked at in each call, with their index among the call's names:
            `output`, and what is not dense.
    """

    function: Callable[..., jax.Array]
    pick: Callable[[Sequence[int]], tuple[int, ...]]
    last_offset: int
    layouts: tuple[Layout, ...]
    checked: tuple[tuple[int, _Input], ...]


@keeps_device
def run(call: _Call, tensors: Sequence[torch.Tensor]) -> None:
    """Runs a checked call in JAX and writes its result into `output`.

    On a GPU the result is written in place, by donation; on the CPU JAX cannot do that, and the
    result is copied into `output`.

    Args:
        call: The call, with at least one row.
        tensors: Its tensors, in the order of `call.names`.

    Raises:
        ZeroCopyError: JAX cannot take a tensor as it is: the message says which and why.
        RuntimeError: A CUDA graph is being captured.
    """
    on_cpu = call.device < 0
    if not on_cpu and _is_capturing(call.device):
        raise RuntimeError(
            'route: "dlpack" runs in JAX, which a CUDA graph cannot capture; use route="direct"'
        )
    offset, unit, shape = 0, 0, None
    cache, output = call.names.index("cache"), call.names.index("output")
    if not tensors[cache].is_contiguous():
        pages, offset = _pages(tensors[cache], call.plan.geometry.fp8)
        tensors = (*tensors[:cache], pages, *tensors[cache + 1 :])
        unit, shape = math.gcd(offset, 16), pages.shape
    addresses = _addresses(call, tensors)
    program = call.jitted.get((unit, shape))
    if program is None:
        program = call.jitted.setdefault((unit, shape), _program(call, tensors, unit))
    check_offset(offset, program.last_offset)
    for index, it in program.checked:
        # Whether its storage holds all of its last line is not known from the layout.
        address_of(it.view(tensors[index], _way_out(call)))
    # Imports own nothing, so that all are kept but the one that is donated; it carries the fence.
    arrays = _IMPORTS.lend(program.layouts, program.pick(addresses), 1)
    if unit:
        arrays.append(_offset(offset, call.device))
    result = program.function(*arrays)
    written = tensors[output]
    settle(result, written.device)
    if on_cpu:
        written.copy_(to_torch(result).as_strided(written.shape, written.stride()))
    elif result.unsafe_buffer_pointer() != addresses[output]:
        raise RuntimeError("output: JAX did not write the result in place")


def _addresses(call: _Call, tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where the tensors lie; refuses what is more than memory, or not aligned for the kernels."""
    alignment = XLA_ALIGNMENT["cpu"] if call.device < 0 else PALLAS_TRITON_ALIGNMENT
    addresses = []
    for name, tensor in zip(call.names, tensors, strict=True):
        try:
            if type(tensor) is not torch.Tensor or tensor.is_neg():
                check_tensor(tensor, may_require_grad=True)
            addresses.append(address_of(tensor))
        except ZeroCopyError as error:
            raise ZeroCopyError(f"{name}: {error}") from None
        if addresses[-1] % alignment:
            raise ZeroCopyError(
                f"{name}: expected an address that is a multiple of {alignment} bytes, got "
                f"{addresses[-1]:#x}; {_way_out(call)}"
            )
    return addresses


def _way_out(call: _Call) -> str:
    return "use a copy" if call.device < 0 else 'use route="direct", or a copy'


def _is_capturing(device: int) -> bool:
    if device == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _pages(cache: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, int]:
    """The whole pages around a cache that is not dense, and its offset inside them."""
    try:
        return packed_view(cache.view(torch.uint8) if fp8 else cache)
    except ZeroCopyError as error:
        raise ZeroCopyError(f"cache: {error}") from None


def _program(call: _Call, tensors: Sequence[torch.Tensor], unit: int) -> _Program:
    """The program of a call; with a `unit`, for a cache inside storage as it is given here."""
    plan = call.plan
    if unit:
        page = tensors[call.names.index("cache")].shape[1]
        cache = call.specs["cache"]
        specs = {**call.specs, "cache": cache._replace(strides=(page, *cache.strides[1:]))}
        plan = plan_again(plan, specs, cache_unit=unit, cache_page=page)
    plan = replace(plan, interpret=call.device < 0)
    if plan.interpret:
        _refuse_reaching_lines(call.specs)
    names = ("output", *(name for name in call.names if name != "output"))
    shapes = {name: plan.buffer(name)[1] for name in names}

    def sparse_decode_attention(*arrays: jax.Array) -> jax.Array:
        buffers = {name: it.reshape(shapes[name]) for name, it in zip(names, arrays, strict=False)}
        if unit:
            buffers["offset"] = arrays[-1]
        return attend(plan, buffers)["output"]

    indices = [call.names.index(name) for name in names]
    inputs = [(index, _input(plan, call.names[index], tensors[index])) for index in indices]
    lent = [it.view(tensors[index], _way_out(call)) for index, it in inputs]
    donated = () if plan.interpret else (0,)
    return _Program(
        function=jax.jit(sparse_decode_attention, donate_argnums=donated),
        pick=operator.itemgetter(*indices),
        last_offset=plan.last_offset,
        layouts=_IMPORTS.layouts(lent),
        checked=tuple(pair for pair in inputs if pair[1].lines is not None),
    )


def _refuse_reaching_lines(specs: Mapping[str, ArraySpec]) -> None:
    """Refuses what the interpreter cannot address: lines that reach into the next ones."""
    for name in ("query", "regions", "block_table", "gate", "output"):
        spec = specs.get(name)
        if spec is None or spec.shape[0] == 1:
            continue
        if extent(spec) > spec.stride(0) > 0:
            raise NotImplementedError(
                f"{name}: expected what shares the first index to end before the next begins, got "
                f"strides {list(spec.strides or ())}; Pallas' interpreter does not address other "
                "layouts, use a copy"
            )


def _input(plan: Plan, name: str, tensor: torch.Tensor) -> _Input:
    dtype_name, shape = plan.buffer(name)
    lines = None
    if name == "output" or not tensor.is_contiguous():
        # int64 indices are planned as pairs of int32, and stay int64 in torch.
        words = 2 if tensor.dtype is torch.int64 else 1
        lines = (shape[0], shape[1] // words)
    dtype = getattr(torch, dtype_name)
    return _Input(name, lines, None if tensor.dtype in (dtype, torch.int64) else dtype)


@functools.lru_cache(maxsize=4096)
def _offset(offset: int, device: int) -> jax.Array:
    """A layer's offset on the device, so that it is no part of the program."""
    kind, index = ("cpu", 0) if device < 0 else ("cuda", device)
    with jax.ensure_compile_time_eval():
        where = _jax_dlpack.find_device(kind, index)
        return jax.device_put(np.full((1,), offset, np.int32), where)


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
    dtype: jnp.dtype | type | str | None = None,
    validate: bool = False,
) -> jax.Array:
    """The Triton path on JAX arrays: lends them to PyTorch and returns a JAX array.

    Not for use inside `jax.jit`: the arrays must be concrete. Nothing is copied, and on a GPU the
    host waits for nothing but a `PackedCache.offset` that is an array: there, prefer an integer.

    Args:
        query: `[rows, heads, 192]`, bfloat16 or float16.
        cache: `[pages, groups, page_size, 384]`, or a `PackedCache`.
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
        dtype: bfloat16 or float16, of the result; None takes the dtype of `query`.
        validate: Look for indices that cannot be meant first, and wait for the answer; see
            `sparse_decode.validation.check_indices`.

    Returns:
        `[rows, heads, 192]` in that dtype; inactive rows are zero.

    Raises:
        TypeError, ValueError, NotImplementedError: As the Triton path's `sparse_decode_attention`.
            Also ValueError where validation found an index. As `ZeroCopyError`: an array is traced,
            deleted or donated, or PyTorch cannot take it.
    """
    from sparse_decode.triton_kernels import sparse_decode_attention, sparse_decode_splits

    check_option(validate)
    needed = {
        "query": query,
        "regions": regions,
        "block_table": block_table,
        "positions": positions,
        "active": active,
    }
    optional = {"k_scale": k_scale, "v_scale": v_scale, "gate": gate}
    present = {name: array for name, array in optional.items() if array is not None}
    lent: dict[str, torch.Tensor] = {}
    for name, array in (needed | present).items():
        lent[name] = _lent(name, array)
    lent["cache"] = _lent_pages(cache) if isinstance(cache, PackedCache) else _lent("cache", cache)
    if validate:
        indices = ("cache", "regions", "block_table", "positions", "active")
        check_indices(**{name: lent[name] for name in indices}, query_len=query_len)
    made_of = getattr(torch, jnp.dtype(query.dtype if dtype is None else dtype).name)
    lent["output"] = output = torch.empty_like(lent["query"], dtype=made_of)
    sparse_decode_attention(
        **lent,
        scale=scale,
        query_len=query_len,
        splits=sparse_decode_splits(len(output)) if splits is None else splits,
    )
    return to_jax(output)


def _lent(name: str, array: jax.Array) -> torch.Tensor:
    try:
        return to_torch(array)
    except (TypeError, ZeroCopyError) as error:
        raise type(error)(f"{name}: {error}") from None


def _lent_pages(cache: PackedCache) -> torch.Tensor:
    storage = _lent("cache.storage", cache.storage)
    describe_cache(cache)
    offset = int(cache.offset)
    spec = describe_cache(replace(cache, offset=offset))
    if not storage.is_contiguous():
        raise ZeroCopyError("cache.storage: expected a row-major layout, got a transposed one")
    return storage.as_strided(spec.shape, spec.strides, offset)
