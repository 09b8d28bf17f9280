"""Hands tensors between PyTorch and JAX: the same memory, or an error that says why not.

What holds for every hand-over, in both directions:

- Address. The receiver reads the very memory that the sender wrote; the addresses are compared.
- Order. What the sender had queued before the hand-over happens before what the receiver queues
  after it: on CUDA through events between torch's current stream, whichever it is, and JAX's
  streams, and the host does not wait. A CPU has no streams: `to_torch` waits for the array.
- Device. On a host with several GPUs torch's current device stays what it was.
- Lifetime. Either side may drop its object at any time. Memory that torch owns returns to torch
  when JAX has dropped the array and finished the work that reads it. Memory that JAX owns returns
  to JAX when torch has dropped the last tensor on it, views of views included, and everything that
  torch had queued by then, on any stream that torch made, is over.

What does not:

- Mutation. A JAX array is immutable to JAX alone. Whoever writes through torch while JAX may still
  read sees the write arrive before, after or in between. Hand a result of the JAX work back first:
  torch's current stream then runs after it. `to_torch` marks nothing read-only.
- Streams that torch did not make (`torch.cuda.ExternalStream`). Before dropping a JAX array's last
  tensor, make a stream of torch's wait for them.
- Captured graphs. A hand-over inside a capture is refused, and a captured graph does not keep a
  tensor alive that it reads.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import operator
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer

from sparse_decode.bridge import _jax_dlpack
from sparse_decode.bridge._jax_dlpack import DLManagedTensor, DLTensor
from sparse_decode.bridge.launch import current_stream, device_index

# Bytes that XLA wants an address to be a multiple of. It reports a violation late, or copies.
XLA_ALIGNMENT = {"cpu": 64, "cuda": 16}

# Bytes that kernels from Pallas through Triton take for granted, without any check.
PALLAS_TRITON_ALIGNMENT = 32

_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
}
_TORCH_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in _DTYPES.items()}

# From cuda.h.
_CAPTURE_MODE_RELAXED = 2
_EVENT_DISABLE_TIMING = 2
_NOT_READY = 600
_CAPTURE_ERRORS = range(900, 909)
_CAPTURED_EVENT = 907

# The helper thread gathers drops for this long, then looks this often whether they may go back.
_GATHER_SECONDS = 0.002
_POLL_SECONDS = 0.001

_NO_MEMORY = "the tensor has a size but no memory; its storage was freed or is fake"

# A subclass that overrides this stands for something else than its own memory.
_DISPATCH = "__torch_dispatch__"

_logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def keeps_device(function: Callable[P, R]) -> Callable[P, R]:
    """Leaves torch's current device as it was; XLA leaves that on which it has worked last."""

    @functools.wraps(function)
    def kept(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.cuda.is_initialized() or torch.cuda.device_count() < 2:
            return function(*args, **kwargs)
        device = torch.cuda.current_device()
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_device(device)

    return kept


class ZeroCopyError(ValueError):
    """The memory cannot be handed over as it is; the message says why and what to do."""


@keeps_device
def to_jax(
    tensor: torch.Tensor, *, int64_as_int32: bool = False, for_kernels: bool = True
) -> jax.Array:
    """A JAX array over a torch tensor's memory.

    Order, lifetime and what is not guaranteed: see the module. The array keeps the tensor's whole
    storage allocated.

    Args:
        tensor: Any shape, on a CPU or a CUDA device that JAX sees too. Compact, or a transposition
            of a compact tensor; strides of dimensions of size 1 do not matter. A transposed tensor
            arrives with its layout, and XLA may copy it later into the layout that a program wants.
            dtypes: bool, 8- to 32-bit integers, float16, bfloat16, float32, complex64, the FP8
            formats, and the 64-bit ones where JAX runs with `jax_enable_x64`.
        int64_as_int32: Hand an int64 tensor over as its int32 words, whatever `jax_enable_x64`
            says: the last dimension is twice as long, low words stand at even places on a
            little-endian machine.
        for_kernels: Whether the array may reach a kernel from Pallas through Triton, which takes an
            address that is a multiple of 32 bytes for granted. If not, 16 are enough on a GPU.

    Returns:
        An array of the same shape and dtype at the same address. An empty tensor, which has no
        address, gives a new empty array.

    Raises:
        TypeError: `tensor` is no torch tensor.
        ZeroCopyError: It cannot be handed over without a copy or without losing what it stands for:
            dtype, strides, alignment, device, gradient, conjugate or negative bit, sparse or
            quantized storage, a subclass without memory of its own, a graph capture in progress.
    """
    check_tensor(tensor)
    _refuse_capture(tensor.device)
    source = _words(tensor) if int64_as_int32 and tensor.dtype is torch.int64 else tensor
    dtype = _jax_dtype(source)
    device = _jax_device(source)
    if not source.numel():
        return jax.device_put(np.empty(source.shape, dtype), device)
    source = _regular(source)
    _check_address(source.data_ptr(), source.device, for_kernels)
    [array] = _jax_dlpack.import_capsules([_export(source)], device, _fence(source.device))
    return _same_address(array, source.data_ptr(), array.unsafe_buffer_pointer())


@keeps_device
def to_torch(array: jax.Array) -> torch.Tensor:
    """A torch tensor over a JAX array's memory.

    Order, lifetime and what is not guaranteed: see the module. Writing through the tensor changes
    an array that JAX takes for constant. While a tensor views the array, it cannot be donated.

    Args:
        array: An array on one device, which torch sees too. dtypes as for `to_jax`.

    Returns:
        A tensor of the same shape and dtype at the same address, with the strides of the array's
        layout. An empty array gives a new empty tensor.

    Raises:
        TypeError: `array` is no JAX array.
        ZeroCopyError: It cannot be handed over: a traced value, deleted or donated, spread over
            several devices, in host memory of a GPU, a PRNG key, a dtype that torch lacks, a graph
            capture in progress.
    """
    _check_array(array)
    dtype = _torch_dtype(array)
    device = _torch_device(array)
    _refuse_capture(device)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device=device)
    tensor = _loans.lend(array, _ordered_export(array, device), dtype, device)
    return _same_address(tensor, tensor.data_ptr(), array.unsafe_buffer_pointer())


def flush(timeout: float | None = None) -> bool:
    """Waits until memory that torch has dropped so far is back with JAX.

    Nothing needs this for correctness: it is for measurements, and for a program that is about to
    need the memory.

    Args:
        timeout: Seconds to wait at most; None waits as long as torch's queued work takes.

    Returns:
        Whether everything is back.
    """
    return _loans.flush(timeout)


def packed_view(
    tensor: torch.Tensor, *, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, int]:
    """The storage around a padded paged tensor, as whole pages.

    All layers of a cache whose pages hold several layers give the same view, and differ in the
    offset alone, wherever the storage begins with a page.

    Args:
        tensor: `[pages, ...]`; element `(p, i, ...)` lies at `p * tensor.stride(0)` plus what the
            other strides say, and a page's elements lie within one page stride.
        dtype: Reinterpret the storage as this dtype, for example FP8 as `torch.uint16` words.

    Returns:
        A compact view `[pages, page stride]` of the storage, and the offset of element
        `(0, 0, ...)` in its first row, both counted in elements of `dtype`.

    Raises:
        TypeError: `tensor` is no torch tensor.
        ZeroCopyError: Pages are interleaved, the storage does not hold a whole stride for every
            page at an address that XLA takes, or the view does not consist of whole `dtype`
            elements.
    """
    check_tensor(tensor)
    dtype = dtype or tensor.dtype
    unit = dtype.itemsize
    if not tensor.numel():
        stride = tensor.stride(0) * tensor.itemsize // unit if tensor.dim() else 0
        return torch.empty((0, stride), dtype=dtype, device=tensor.device), 0
    if not tensor.dim():
        raise ZeroCopyError("a packed tensor needs a page dimension, and this one has none")
    span = _span(tensor)
    if any(part % unit for part in (span.begin, span.stride, span.offset)):
        raise ZeroCopyError(
            f"the storage from byte {span.begin}, page stride {span.stride} bytes, offset "
            f"{span.offset} bytes does not consist of whole {dtype} elements; use a smaller dtype"
        )
    shape = (tensor.shape[0], span.stride // unit)
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    view.set_(tensor.untyped_storage(), span.begin // unit, shape, (shape[1], 1))
    return view, span.offset // unit


def packed_to_jax(
    tensor: torch.Tensor, *, dtype: torch.dtype | None = None
) -> tuple[jax.Array, int]:
    """The storage around a padded paged tensor, as a dense JAX array without a copy.

    This is the way for a cache `[pages, groups, page_size, 384]` whose page stride is larger than
    the page, which `to_jax` must refuse: the kernel takes the storage and the layout inside a page.

    Args:
        tensor: As for `packed_view`.
        dtype: As for `packed_view`.

    Returns:
        The array `[pages, page stride]` and the offset of the tensor's first element in it, in
        elements. Layers of one cache share shape and address, so a program that takes the offset as
        an argument serves them all.

    Raises:
        TypeError: `tensor` is no torch tensor.
        ZeroCopyError: As for `packed_view` and `to_jax`.
    """
    view, offset = packed_view(tensor, dtype=dtype)
    return to_jax(view), offset


class ImportCache:
    """Lends torch tensors to JAX for the length of one call, at little host cost.

    The arrays own nothing: each is an address with a shape. So an import that is kept from call to
    call holds no memory, and it is right for every live tensor that is found again at that address
    with that layout. In exchange the caller promises, as for a kernel on torch's current stream:

    1. Programs get at least one of the fresh arrays among the arguments they use, or run after one
       that did. JAX waits through it for all that torch's current stream had queued.
    2. The tensors live until `settle` has been called on a result of the last program.
    3. Borrowed arrays are not read on the host and go nowhere else. A fresh one may be donated.

    Methods may be called from several threads.

    Args:
        max_entries: How many kept imports to remember; the least recently used one goes.
        int64_as_int32: Lend int64 tensors as their int32 words, as in `to_jax`.
    """

    def __init__(self, max_entries: int = 256, *, int64_as_int32: bool = False) -> None:
        self._max_entries = max_entries
        self._int64_as_int32 = int64_as_int32
        self._layouts: OrderedDict[tuple[Any, ...], Layout] = OrderedDict()
        self._arrays: OrderedDict[tuple[Layout, int], jax.Array] = OrderedDict()
        self._fences: dict[torch.device, _Fence | None] = {}
        self._lock = threading.Lock()
        # Every array that is lent will call the deleter in here, also after this object has gone.
        self._slot = DLManagedTensor(deleter=_jax_dlpack.NO_DELETER)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._slot))

    def borrow(
        self, fresh: Sequence[torch.Tensor], kept: Sequence[torch.Tensor] = ()
    ) -> list[jax.Array]:
        """Arrays over tensors of one device, valid until `settle`.

        Args:
            fresh: Tensors to import for this call, with one fence for all of them. Empty ones
                carry no fence, so at least one must have elements.
            kept: Tensors that come again, such as a cache or a block table. Their content may have
                changed in between. Where `fresh` is empty they are imported anew.

        Returns:
            The arrays, in the order of `(*fresh, *kept)`.

        Raises:
            TypeError: As for `to_jax`.
            ZeroCopyError: As for `to_jax`, or the tensors lie on several devices.
        """
        if not fresh:
            fresh, kept = kept, ()
        tensors = (*fresh, *kept)
        if not tensors:
            return []
        layouts = self.layouts(tensors)
        _refuse_capture(layouts[0].place)
        return self.lend(layouts, [address_of(tensor) for tensor in tensors], len(fresh))

    def layouts(self, tensors: Sequence[torch.Tensor]) -> tuple[Layout, ...]:
        """How tensors of one device are lent: all that `borrow` asks about them but the address.

        Args:
            tensors: The tensors; each layout also holds for others of the same type, shape,
                strides, dtype and device on which nothing is pending, such as a negation.

        Raises:
            TypeError, ZeroCopyError: As for `borrow`.
        """
        keys = [_key(tensor) for tensor in tensors]
        if any(tensor.device != tensors[0].device for tensor in tensors):
            raise ZeroCopyError("the tensors lie on several devices; bring them to one")
        with self._lock:
            return tuple(map(self._layout, keys, tensors))

    def lend(
        self, layouts: Sequence[Layout], addresses: Sequence[int], fresh: int
    ) -> list[jax.Array]:
        """What `borrow` returns, for tensors that are known by layout and address.

        The caller answers for the rest: tensors with memory at these addresses that reaches to
        their ends, nothing pending on them, and no graph capture in progress.

        Args:
            layouts: From `layouts`.
            addresses: Where the tensors lie, in the same order.
            fresh: How many of them, from the first on and at least one, are imported for this call.

        Raises:
            ValueError: There are not as many addresses as layouts, or `fresh` is out of range. As
                `ZeroCopyError`: XLA does not take an address.
        """
        if len(addresses) != len(layouts) or not 1 <= fresh <= len(layouts):
            raise ValueError(
                f"expected an address for each layout and one or more that are fresh, got "
                f"{len(layouts)} layouts, {len(addresses)} addresses and fresh={fresh}"
            )
        place = layouts[0].place
        common = functools.reduce(operator.or_, addresses)
        if common % XLA_ALIGNMENT[place.type] or not all(addresses):
            for layout, address in zip(layouts, addresses, strict=True):
                if layout.empty is None:
                    _check_address(address, place)
        with self._lock:
            if place not in self._fences:
                self._fences[place] = _fence(place)
            arrays = _lend(self._slot, layouts[:fresh], addresses[:fresh], self._fences[place])
            arrays += map(self._keep, layouts[fresh:], addresses[fresh:])
            return arrays

    def _layout(self, key: tuple[Any, ...], tensor: torch.Tensor) -> Layout:
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = Layout.of(tensor, self._int64_as_int32)
            if len(self._layouts) > self._max_entries:
                self._layouts.popitem(last=False)
        return layout

    def _keep(self, layout: Layout, address: int) -> jax.Array:
        key = (layout, address)
        array = self._arrays.get(key)
        if array is None or array.is_deleted():
            [array] = _lend(self._slot, [layout], [address], None)
            self._arrays[key] = array
            if len(self._arrays) > self._max_entries:
                self._arrays.popitem(last=False)
        else:
            self._arrays.move_to_end(key)
        return array


def settle(array: jax.Array, device: torch.device | None = None) -> None:
    """Makes torch's current stream wait for an array; on a CPU, the caller waits.

    Args:
        array: A result of the work that must come first, on one device. Nobody may delete it
            meanwhile.
        device: Torch's name for that device; None finds it out, which takes longer.
    """
    device = device or _torch_device(array)
    if device.type == "cpu":
        array.block_until_ready()
    else:
        _jax_dlpack.make_wait(_stream(device), array)


# What may be handed over.


def check_tensor(tensor: torch.Tensor, *, may_require_grad: bool = False) -> None:
    """Refuses what is no tensor, or does not stand for its memory alone.

    Args:
        tensor: What is to be handed over.
        may_require_grad: Whether it may require a gradient.

    Raises:
        TypeError: `tensor` is no torch tensor.
        ZeroCopyError: It has no plain memory that JAX could use, or more to it than memory says.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    kind = type(tensor)
    if getattr(kind, _DISPATCH) is not getattr(torch.Tensor, _DISPATCH):
        raise ZeroCopyError(
            f"a {kind.__name__} has no memory of its own; hand over the tensors inside it, "
            "and wrap code that is traced or compiled in a custom op"
        )
    if torch._is_functional_tensor(tensor):  # pyright: ignore[reportPrivateImportUsage]
        raise ZeroCopyError("a functionalized tensor has no memory; wrap the code in a custom op")
    if tensor.device.type not in XLA_ALIGNMENT:
        raise ZeroCopyError(
            f"device {tensor.device} holds no memory that JAX can use; "
            "create the tensor on, or move it to, cpu or cuda"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ZeroCopyError(
            f"layout {tensor.layout} is not plain memory; hand over its parts, "
            "for example values() and indices(), or to_dense()"
        )
    if tensor.is_quantized:
        raise ZeroCopyError("a quantized tensor has scales; hand over int_repr() and the scales")
    if tensor.requires_grad and not may_require_grad:
        raise ZeroCopyError("the tensor requires grad, and JAX would not see it; detach() it")
    if tensor.is_conj():
        raise ZeroCopyError("the conjugation is still pending; call resolve_conj()")
    if tensor.is_neg():
        raise ZeroCopyError("the negation is still pending; call resolve_neg()")
    address_of(tensor)
    if tensor.device.type == "cpu" and torch.cuda.is_initialized() and tensor.is_pinned():
        raise ZeroCopyError("JAX takes pinned host memory for GPU memory; use unpinned memory")


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; ZeroCopyError if it has none."""
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise ZeroCopyError(
            "the tensor has no memory, as under torch.func transforms; call the bridge outside them"
        ) from error
    if not address and tensor.numel():
        raise ZeroCopyError(_NO_MEMORY)
    return address


def _jax_dtype(tensor: torch.Tensor) -> np.dtype:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ZeroCopyError(f"JAX has no dtype for {tensor.dtype}; view the tensor as another")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        way = "pass int64_as_int32=True" if dtype == np.int64 else "convert the tensor in torch"
        raise ZeroCopyError(
            f"JAX would narrow {dtype} silently; {way}, or set jax_enable_x64 in JAX"
        )
    return dtype


def _jax_device(tensor: torch.Tensor) -> Any:
    device = _jax_dlpack.find_device(tensor.device.type, tensor.device.index or 0)
    if device is None:
        raise ZeroCopyError(
            f"JAX has no device for {tensor.device}; install JAX for it, "
            "or allow it in JAX_PLATFORMS and CUDA_VISIBLE_DEVICES"
        )
    return device


def _check_address(address: int, device: torch.device, kernels: bool = False) -> None:
    if not address:
        raise ZeroCopyError(_NO_MEMORY)
    alignment, needed_by = XLA_ALIGNMENT[device.type], "XLA needs"
    if kernels and device.type == "cuda":
        alignment, needed_by = PALLAS_TRITON_ALIGNMENT, "kernels from Pallas through Triton need"
    if address % alignment:
        raise ZeroCopyError(
            f"address {address:#x} is not a multiple of {alignment} bytes, which {needed_by} on "
            f"{device.type}; let the view start elsewhere in its storage, or clone() it"
        )


def _check_array(array: jax.Array) -> None:
    if isinstance(array, Tracer):
        raise ZeroCopyError(
            "a traced value has no memory; call the bridge outside jit, grad and vmap, on results"
        )
    if not isinstance(array, jax.Array):
        raise TypeError(f"expected a jax.Array, got {type(array).__name__}")
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise ZeroCopyError("torch has no PRNG keys; hand over jax.random.key_data(key)")
    if array.is_deleted():
        raise ZeroCopyError("the array was deleted or donated; hand over the result that took over")
    if len(array.sharding.device_set) != 1:
        raise ZeroCopyError(
            "the array is spread over several devices; hand over its parts: "
            "[shard.data for shard in array.addressable_shards]"
        )
    if not array.is_fully_addressable:
        raise ZeroCopyError("the array lies on another process's device; hand it over there")


def _torch_dtype(array: jax.Array) -> torch.dtype:
    dtype = _TORCH_DTYPES.get(np.dtype(array.dtype))
    if dtype is None:
        raise ZeroCopyError(f"torch has no dtype for {array.dtype}; bitcast the array to another")
    return dtype


def _torch_device(array: jax.Array) -> torch.device:
    [device] = array.sharding.device_set
    memory = array.sharding.memory_kind
    if memory not in (None, device.default_memory().kind):
        raise ZeroCopyError(f"the array lies in {memory} memory; bring it to the device first")
    if device.platform == "cpu":
        return torch.device("cpu")
    if device.platform == "gpu" and torch.cuda.is_available():
        return torch.device("cuda", device.local_hardware_id)
    raise ZeroCopyError(f"torch has no device for {device}; install torch with CUDA")


def _refuse_capture(device: torch.device) -> None:
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise ZeroCopyError(
            "a hand-over to or from JAX would spoil the CUDA graph capture on the current stream; "
            "do it before the capture, and use the direct launch inside"
        )


# Layout.


def _regular_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Strides made regular in dimensions of size 1; None if the tensor is not compact."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(strides, shape, strict=True) if si != 1):
        if stride != expected:
            return None
        expected *= size
    regular = list(strides)
    inner = 1
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            regular[dim] = inner
        inner = regular[dim] * shape[dim]
    return tuple(regular)


def _regular(tensor: torch.Tensor) -> torch.Tensor:
    strides = _regular_strides(tensor.shape, tensor.stride())
    if strides is None:
        raise ZeroCopyError(
            f"shape {tuple(tensor.shape)} with strides {tensor.stride()} is neither compact nor a "
            "transposition of compact memory; hand a paged cache over with packed_to_jax, and any "
            "other view as its compact base, or contiguous()"
        )
    return tensor if strides == tensor.stride() else tensor.as_strided(tensor.shape, strides)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dim():
        raise ZeroCopyError("an int64 scalar has no last dimension to double; reshape it to [1]")
    if not tensor.numel():
        return tensor.new_empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=torch.int32)
    tensor = _regular(tensor)
    if tensor.stride(-1) != 1:
        raise ZeroCopyError(
            f"the last dimension has stride {tensor.stride(-1)}, so the int32 words of this int64 "
            "tensor have no regular layout; transpose it back first"
        )
    return tensor.view(torch.int32)


@dataclass(frozen=True)
class _Span:
    """Whole pages of a storage, in bytes: their begin and stride, and the tensor's offset."""

    begin: int
    stride: int
    offset: int


def _span(tensor: torch.Tensor) -> _Span:
    item = tensor.itemsize
    pages = tensor.shape[0]
    stride = int(tensor.stride(0)) * item
    start = int(tensor.storage_offset()) * item
    inner = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    extent = item * (1 + sum((int(size) - 1) * int(step) for size, step in inner))
    storage = tensor.untyped_storage()
    on_gpu = tensor.device.type == "cuda"
    alignment = PALLAS_TRITON_ALIGNMENT if on_gpu else XLA_ALIGNMENT["cpu"]

    def begin(stride: int) -> int | None:
        lowest = max(0, start + extent - stride)
        highest = min(start, storage.nbytes() - pages * stride)
        page_start = start - start % max(stride, 1)
        aligned = lowest + -(storage.data_ptr() + lowest) % alignment
        for candidate in (page_start, aligned):
            if lowest <= candidate <= highest and not (storage.data_ptr() + candidate) % alignment:
                return candidate
        return None

    if extent > stride and pages > 1:
        raise ZeroCopyError(
            f"pages are interleaved: each takes {extent} bytes, the next begins after {stride}; "
            "make the page the outermost dimension of the storage"
        )
    first = begin(stride) if extent <= stride else None
    if first is None and pages == 1:
        # One page has no stride of its own: any number of bytes that reaches its end will do.
        stride = extent + (storage.data_ptr() + start) % alignment
        first = begin(stride)
    if first is None:
        raise ZeroCopyError(
            f"the storage of {storage.nbytes()} bytes does not hold {pages} whole pages of "
            f"{stride} bytes around byte {start}, from a multiple of {alignment} on; begin the "
            "storage with a page, and allocate the last page complete"
        )
    return _Span(first, stride, start - first)


# Exchange.


def _export(tensor: torch.Tensor) -> Any:
    """An unconsumed capsule that owns the tensor; unlike `__dlpack__`, it orders nothing."""
    try:
        capsule = torch.to_dlpack(tensor)
    except (BufferError, RuntimeError) as error:
        raise ZeroCopyError(f"torch does not export the tensor: {error}") from error
    if tensor.is_contiguous():
        # Also with size-1 dimensions, from whose strides XLA would deduce a transposed layout.
        _jax_dlpack.managed_tensor(capsule).tensor.strides = None
    return capsule


class _Fence:
    """Makes streams of a CUDA device wait for torch's current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()
        self._streams: dict[int, torch.cuda.Stream] = {}

    def __call__(self, stream: int) -> None:
        # A stream waits for what the event stood for when it was told to.
        self._event.record(torch.cuda.current_stream(self._device))
        self._stream(stream).wait_event(self._event)

    def _stream(self, handle: int) -> torch.cuda.Stream:
        """Torch's object for one of JAX's few streams."""
        stream = self._streams.get(handle)
        if stream is None:
            stream = torch.cuda.ExternalStream(handle, device=self._device)
            self._streams[handle] = stream
        return stream


def _fence(device: torch.device) -> _Fence | None:
    return None if device.type == "cpu" else _Fence(device)


def _stream(device: torch.device) -> int:
    """Torch's current stream, as DLPack names it."""
    return current_stream(device_index(device)) or _jax_dlpack.LEGACY_STREAM


def _ordered_export(array: jax.Array, device: torch.device) -> Any:
    """A capsule of the array, for use on torch's current stream."""
    if device.type == "cpu":
        return _jax_dlpack.export_array(array.block_until_ready(), None)
    return _jax_dlpack.export_array(array, _stream(device))


def _same_address(result: Any, given: int, received: int) -> Any:
    if given != received:
        raise ZeroCopyError(
            f"the frameworks disagree about the address, {given:#x} and {received:#x}: a copy was "
            "made behind our back; please report the versions of JAX and PyTorch"
        )
    return result


# Imports that own nothing.


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that `Layout.of` depends on. Nothing with a bit set that it refuses is ever stored."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    bits = tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, bits


@dataclass(frozen=True, eq=False)
class Layout:
    """How tensors of one type, shape, strides, dtype and device are lent.

    Attributes:
        tensor: A description to copy, complete but for the address.
        dims: Memory of its shape and strides.
        place: Torch's device.
        device: JAX's device.
        empty: What stands for an empty tensor.
    """

    tensor: DLTensor
    dims: tuple[Any, Any]
    place: torch.device
    device: Any
    empty: jax.Array | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, int64_as_int32: bool) -> Layout:
        """The layout of a tensor; see `ImportCache.layouts`."""
        place = tensor.device
        if not tensor.numel():
            empty = to_jax(tensor, int64_as_int32=int64_as_int32)
            return cls(DLTensor(), (None, None), place, _jax_device(tensor), empty)
        check_tensor(tensor)
        source = _words(tensor) if int64_as_int32 and tensor.dtype is torch.int64 else tensor
        _jax_dtype(source)
        source = _regular(source)
        capsule = _export(source)
        described = DLTensor.from_buffer_copy(_jax_dlpack.managed_tensor(capsule).tensor)
        array_type = ctypes.c_int64 * source.dim()
        dims = array_type(*source.shape), array_type(*source.stride())
        described.shape = dims[0]
        described.strides = None if source.is_contiguous() else dims[1]
        described.byte_offset = 0
        return cls(described, dims, place, _jax_device(source))


def _lend(
    slot: DLManagedTensor,
    layouts: Sequence[Layout],
    addresses: Sequence[int],
    order: Callable[[int], None] | None,
) -> list[jax.Array]:
    """Arrays over tensors, each described in `slot` for as long as its import takes."""
    full = [pair for pair in zip(layouts, addresses, strict=True) if pair[0].empty is None]

    def capsules() -> Iterator[Any]:
        for layout, address in full:
            slot.tensor = layout.tensor
            slot.tensor.data = address
            yield _jax_dlpack.new_capsule(slot)

    device = layouts[0].device
    arrays = iter(_jax_dlpack.import_capsules(capsules(), device, order) if full else ())
    lent = []
    for layout, address in zip(layouts, addresses, strict=True):
        array = layout.empty
        if array is None:
            array = next(arrays)
            _same_address(array, address, array.unsafe_buffer_pointer())
        lent.append(array)
    return lent


# Memory of JAX that torch views.


class _TorchStreams:
    """Waits for what torch has queued on a CUDA device, without spoiling a graph capture.

    Synchronising the device would be illegal while any of its streams is captured, by torch or
    inside XLA, and would invalidate that capture. So every stream that torch can have made gets an
    event, but none while it is captured. The calls release the GIL: a full launch queue may block
    them, and what empties the queue may need the GIL.
    """

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._devices: dict[int, tuple[ctypes.c_void_p, list[tuple[Any, Any]]]] = {}
        self._reported: set[int] = set()

    def enter_thread(self) -> None:
        """Makes calls legal that the calling thread may not issue while another thread captures."""
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._demand("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def wait(self, index: int, stop: Callable[[], bool]) -> bool:
        """Whether all that torch has queued on a device is over; False only if `stop` said so."""
        if index not in self._devices:
            self._devices[index] = self._open(index)
        context, events = self._devices[index]
        self._demand("cuCtxSetCurrent", context)
        steps = [lambda pair=pair: self._record(*pair) for pair in events]
        steps += [lambda pair=pair: self._is_over(*pair) for pair in events]
        for step in steps:
            while not step():
                if stop():
                    return False
                time.sleep(_POLL_SECONDS)
        return True

    def _open(self, index: int) -> tuple[ctypes.c_void_p, list[tuple[Any, Any]]]:
        streams = _torch_streams(index)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._demand("cuDeviceGet", ctypes.byref(device), index)
        self._demand("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._demand("cuCtxSetCurrent", context)
        events = []
        for stream in streams:
            event = ctypes.c_void_p()
            self._demand("cuEventCreate", ctypes.byref(event), _EVENT_DISABLE_TIMING)
            events.append((ctypes.c_void_p(stream), event))
        return context, events

    def _record(self, stream: Any, event: Any) -> bool:
        # Asked twice: an event that a capture just begun has swallowed must not be queried.
        return (
            not self._is_capturing(stream)
            and self._holds("cuEventRecord", event, stream)
            and not self._is_capturing(stream)
        )

    def _is_over(self, stream: Any, event: Any) -> bool:
        code = self._driver.cuEventQuery(event)
        if code == _CAPTURED_EVENT:
            # A capture began and ended between the questions, and has the event to this day.
            self._record(stream, event)
        return self._expected("cuEventQuery", code) and not code

    def _is_capturing(self, stream: Any) -> bool:
        status = ctypes.c_int()
        return not self._holds("cuStreamIsCapturing", stream, ctypes.byref(status)) or bool(
            status.value
        )

    def _holds(self, name: str, *args: Any) -> bool:
        code = getattr(self._driver, name)(*args)
        return self._expected(name, code) and not code

    def _expected(self, name: str, code: int) -> bool:
        expected = code in (0, _NOT_READY) or code in _CAPTURE_ERRORS
        if not expected and code not in self._reported:
            self._reported.add(code)
            _logger.error("%s: CUDA error %d; memory that torch viewed stays held", name, code)
        return expected

    def _demand(self, name: str, *args: Any) -> None:
        code = getattr(self._driver, name)(*args)
        if code:
            raise RuntimeError(f"{name} failed with CUDA error {code}")


def _torch_streams(index: int) -> list[int]:
    """Handles of the streams that torch hands out on a device.

    They come from pools of fixed size, in turn. Every pool is walked round twice, which finds also
    what another thread takes meanwhile, and leaves the turn where it was.
    """
    found = [torch.cuda.default_stream(index).cuda_stream]
    priorities = torch.cuda.Stream.priority_range()  # pyright: ignore[reportCallIssue]
    for priority in range(min(priorities), max(priorities) + 1):
        pool: list[int] = []
        repeats = 0
        while repeats < max(len(pool), 1):
            handle = torch.cuda.Stream(device=index, priority=priority).cuda_stream
            repeats = repeats + 1 if handle in pool else 0
            if not repeats:
                pool.append(handle)
        found += pool
    return list(dict.fromkeys(found))


@dataclass(eq=False)
class _Loan:
    """An array in torch's hands: the capsule holds JAX's buffer."""

    array: jax.Array
    capsule: Any
    device: torch.device

    def never_release(self) -> None:
        """Leaves the memory to the end of the process."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


class _Memory:
    """An array's bytes in the form that torch takes; torch drops this when the storage dies.

    A Python object and no C callback stands for the loan, because a storage can die while an
    exception is under way: `__del__` leaves that alone.
    """

    def __init__(self, address: int, size: int, drop: Callable[[], None]) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
        self._drop = drop

    def __del__(self) -> None:
        self._drop()


class _Loans:
    """Arrays that torch views, from the hand-over until JAX may have the memory back.

    Torch drops an array's memory when the storage dies: on any thread, in the middle of a garbage
    collection, with any lock held. So that takes no lock, and only moves the loan from one
    thread-safe container to another. CUDA loans then wait in a helper thread, which starts with the
    first of them; CPU work is over when torch's calls return.
    """

    def __init__(self) -> None:
        self._live: dict[int, _Loan] = {}
        self._dropped: queue.SimpleQueue[_Loan | Future[bool]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._registered = False
        self._closing = False

    def lend(
        self, array: jax.Array, capsule: Any, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor over an array."""
        self._prepare(device)
        described = _jax_dlpack.managed_tensor(capsule).tensor
        loan = _Loan(array, capsule, device)
        number = id(loan)
        self._live[number] = loan
        address = described.data + described.byte_offset
        memory = _Memory(address, array.nbytes, lambda: self._drop(number))
        if described.device_type == _jax_dlpack.CPU:
            buffer = (ctypes.c_uint8 * array.nbytes).from_address(address)
            buffer.memory = memory
            raw = torch.frombuffer(buffer, dtype=torch.uint8)
        else:
            raw = torch.as_tensor(memory, device=device)
        raw = raw.view(dtype)
        if not described.strides:
            return raw.view(array.shape)
        return raw.as_strided(array.shape, described.strides[: described.ndim])

    def flush(self, timeout: float | None) -> bool:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                return True
        done: Future[bool] = Future()
        self._dropped.put(done)
        try:
            return done.result(timeout)
        except TimeoutError:
            return False

    def _drop(self, number: int) -> None:
        loan = self._live.pop(number)
        if loan.device.type != "cpu":
            self._dropped.put(loan)

    def _prepare(self, device: torch.device) -> None:
        with self._lock:
            if self._closing:
                raise ZeroCopyError("the interpreter is shutting down; hand arrays over earlier")
            if not self._registered:
                atexit.register(self._close)
                self._registered = True
            if device.type == "cpu" or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(
                target=self._run, args=(_TorchStreams(),), name="sparse_decode-bridge", daemon=True
            )
            self._thread.start()

    def _run(self, streams: _TorchStreams) -> None:
        streams.enter_thread()
        while self._release_next(streams):
            pass

    def _release_next(self, streams: _TorchStreams) -> bool:
        batch = [self._dropped.get()]
        time.sleep(_GATHER_SECONDS)
        while not self._dropped.empty():
            batch.append(self._dropped.get())
        loans = [item for item in batch if isinstance(item, _Loan)]
        waiting = [item for item in batch if isinstance(item, Future)]
        batch.clear()
        over = False
        try:
            devices = {loan.device.index for loan in loans}
            over = all(streams.wait(index, lambda: self._closing) for index in devices)
        finally:
            if not over:
                for loan in loans:
                    loan.never_release()
            loans.clear()
            for future in waiting:
                future.set_result(over)
        return over and not self._closing

    def _close(self) -> None:
        """Ends the helper thread; what torch still views is left to the end of the process."""
        with self._lock:
            self._closing = True
        for loan in list(self._live.values()):
            loan.never_release()
        if self._thread is not None and self._thread.is_alive():
            self._dropped.put(Future())
            self._thread.join()


_loans = _Loans()
