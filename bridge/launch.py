"""Launches compiled Pallas kernels on PyTorch's current stream, with PyTorch's memory.

The launch goes straight to the CUDA driver, whose interface is stable: no part of JAX or Triton is
needed, and no C compiler. Everything that a launch needs and that does not change from call to
call is laid out once by :meth:`DirectProgram.load`; a call fills in addresses and the stream.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch

from sparse_decode.bridge.compile import CompiledKernel, Executable
from sparse_decode.bridge.lowering import Buffer, KernelCall, Program

# Applied to all tensors of a call at once, with map: that is faster than a loop.
_SHAPE_AND_DTYPE = operator.attrgetter("shape", "dtype")
_DEVICE = torch.Tensor.get_device
_DENSE = torch.Tensor.is_contiguous
_ADDRESS = torch.Tensor.data_ptr

# Scratch buffers start at multiples of this many bytes inside their common allocation.
_SCRATCH_ALIGNMENT = 256

# Bytes of shared memory that a program may take without asking.
_SHARED_BY_DEFAULT = 48 * 1024

# From cuda.h.
_INVALID_CONTEXT = 201
_CACHE_PREFER_SHARED = 1
_FUNCTION_MAX_DYNAMIC_SHARED = 8
_FUNCTION_NUM_REGISTERS = 4
_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION = 6


def device_index(device: torch.device | str | int | None) -> int:
    """The index of a CUDA device, by default of the current one; ValueError for another kind."""
    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda":
        raise ValueError(f"device: expected a CUDA device, got {chosen}")
    return torch.cuda.current_device() if chosen.index is None else chosen.index


class DirectProgram:
    """A compiled program as a function of torch tensors.

    It may be called from several threads. Loaded kernels stay on the device until the process
    ends, because a captured CUDA graph may launch them at any time.

    Attributes:
        executable: The program and its kernels.
        inputs: What each argument must be.
        results: What each tensor in ``outputs`` must be: the outputs that are not an argument
            updated in place.
    """

    def __init__(self, executable: Executable) -> None:
        program = executable.program
        self.executable = executable
        self.inputs = program.inputs
        self.results = tuple(program.buffers[index] for index in program.results)
        named = (*range(program.num_inputs), *program.results)
        self._wanted = [
            (program.buffers[index].shape, getattr(torch, program.buffers[index].dtype))
            for index in named
        ]
        self._masks = tuple(program.buffers[index].alignment - 1 for index in named)
        # Tensors come as inputs, then results: where among them each output of the program is.
        self._outputs = tuple(named.index(index) for index in program.outputs)
        self._plans: dict[int, _Plan] = {}
        self._loading = threading.Lock()

    def __call__(
        self, *tensors: torch.Tensor, outputs: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Launches the kernels on the current stream of the tensors' device.

        Args:
            *tensors: The arguments: dense row-major CUDA tensors with the shape and dtype of
                ``inputs``. Arguments that the program updates in place are changed.
            outputs: Where to write, like ``results``. By default new tensors.

        Returns:
            The program's outputs, in order.

        Raises:
            TypeError: A wrong number of tensors, or a wrong dtype.
            ValueError: A wrong shape, strides, device or address; the tensor is named.
            NotImplementedError: The device cannot run the kernels.
            RuntimeError: The current stream is being captured and the program was never loaded on
                its device, or the CUDA driver reports an error.
        """
        if len(tensors) != len(self.inputs):
            raise TypeError(f"expected {len(self.inputs)} arguments, got {len(tensors)}")
        device = (tensors or outputs)[0].device if tensors or outputs else None
        if outputs is None:
            outputs = self._empty(device)
        tensors = (*tensors, *outputs)
        if len(tensors) != len(self._wanted):
            raise TypeError(f"outputs: expected {len(self.results)} tensors, got {len(outputs)}")
        if (
            [*map(_SHAPE_AND_DTYPE, tensors)] != self._wanted
            or len({*map(_DEVICE, tensors)}) > 1
            or not all(map(_DENSE, tensors))
        ):
            self._refuse(tensors, device)
        self.launch(tensors)
        return tuple([tensors[position] for position in self._outputs])

    def launch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launches without looking at shapes, dtypes, strides and devices.

        For callers that have checked their tensors, and whose tensors have other types than the
        program but the same bytes: an FP8 cache for 16-bit words, int64 for pairs of int32. Only
        the addresses are checked.

        Args:
            tensors: ``inputs`` and ``results`` in one sequence, all on one CUDA device. Each must
                have all bytes of its buffer, at its address, in row-major order.

        Raises:
            ValueError: An address that is not aligned as the kernels assume.
            NotImplementedError: As in a call.
            RuntimeError: As in a call.
        """
        addresses = [*map(_ADDRESS, tensors)]
        if not self.accepts(addresses):
            self._refuse_address(addresses)
        self.launch_at(tensors[0].get_device(), addresses)

    def accepts(self, addresses: Sequence[int]) -> bool:
        """Whether all addresses, in the order of `launch`, are aligned as the kernels assume."""
        return not any(map(operator.and_, addresses, self._masks))

    def launch_at(self, index: int, addresses: list[int]) -> None:
        """As :meth:`launch`, for addresses that have been checked.

        Args:
            index: Index of the CUDA device.
            addresses: Of ``inputs`` and ``results``. The list is used up.
        """
        plan = self._plans.get(index)
        if plan is None:
            plan = self._load(index)
        if torch.cuda.current_device() == index:
            plan.launch(addresses)
        else:
            with torch.cuda.device(index):
                plan.launch(addresses)

    def load(self, device: torch.device | str | int | None = None) -> None:
        """Puts the kernels on a device, so that later calls may be captured in a CUDA graph.

        A first call outside of a capture does the same.

        Args:
            device: A CUDA device; by default the current one.

        Raises:
            NotImplementedError: The device cannot run the kernels.
            RuntimeError: The current stream is being captured.
            ValueError: It is no CUDA device.
        """
        index = device_index(device)
        if index not in self._plans:
            self._load(index)

    def _load(self, index: int) -> _Plan:
        if index < 0:
            raise ValueError("tensors: expected CUDA tensors, got CPU tensors")
        with self._loading, torch.cuda.device(index):
            if index not in self._plans:
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        f"the kernels are not loaded on cuda:{index}, and a stream capture "
                        "cannot load them: call load(), or the program once, before the capture"
                    )
                _check_device(self.executable.kernels, index)
                self._plans[index] = _Plan(self.executable, index, _driver())
            return self._plans[index]

    def _empty(self, device: torch.device | None) -> list[torch.Tensor]:
        if device is None:
            raise ValueError("outputs: needed by a program without arguments")
        wanted = self._wanted[len(self.inputs) :]
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in wanted]

    def _name(self, position: int) -> str:
        result = position - len(self.inputs)
        return f"argument {position}" if result < 0 else f"outputs[{result}]"

    def _refuse(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Says which tensor is wrong in which way."""
        for position, (tensor, (shape, dtype)) in enumerate(
            zip(tensors, self._wanted, strict=True)
        ):
            name = self._name(position)
            if tensor.dtype is not dtype:
                raise TypeError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
            if tensor.shape != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
            if tensor.device != device:
                raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: expected dense row-major strides, got {tensor.stride()}")

    def _refuse_address(self, addresses: Sequence[int]) -> None:
        for position, (address, mask) in enumerate(zip(addresses, self._masks, strict=True)):
            if address & mask:
                raise ValueError(
                    f"{self._name(position)}: expected an address that is a multiple of "
                    f"{mask + 1} bytes, got {address:#x}"
                )


def _check_device(kernels: Sequence[CompiledKernel], index: int) -> None:
    properties = torch.cuda.get_device_properties(index)
    found = properties.major * 10 + properties.minor
    for kernel in kernels:
        # Code for 8.0 runs on 8.9 as well; from 9.0 on Triton compiles for one architecture only.
        if found != kernel.arch and not (80 <= kernel.arch < found < 90):
            raise NotImplementedError(
                f"kernel {kernel.name} was compiled for sm_{kernel.arch}, and cuda:{index} "
                f"({properties.name}) is sm_{found}"
            )
        if kernel.shared > properties.shared_memory_per_block_optin:
            raise NotImplementedError(
                f"kernel {kernel.name} needs {kernel.shared} bytes of shared memory, and "
                f"cuda:{index} ({properties.name}) has {properties.shared_memory_per_block_optin}"
            )


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``; its value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class _Plan:
    """Everything that the launches on one device need, laid out in memory as CUDA reads it.

    The addresses of all buffers lie in one table, with a null at its end. The parameter list of
    each kernel points into it, so that filling the table fills in the parameters of all kernels.
    """

    def __init__(self, executable: Executable, index: int, driver: _Driver) -> None:
        program = executable.program
        self._index = index
        self._driver = driver
        self._context = driver.use_primary_context(index)
        self._offsets, self._scratch_bytes = _scratch_layout(program)
        self._device = torch.device("cuda", index)
        order = (*range(program.num_inputs), *program.results, *program.scratch)
        self._table = (ctypes.c_uint64 * (len(order) + 1))()
        self._pack = struct.Struct(f"{len(order)}Q").pack_into
        slots = {buffer: slot for slot, buffer in enumerate(order)}
        self._launches = [
            self._prepare(call, kernel, slots)
            for call, kernel in zip(program.calls, executable.kernels, strict=True)
            if 0 not in call.grid
        ]
        self._lock = threading.Lock()

    def _prepare(
        self, call: KernelCall, kernel: CompiledKernel, slots: dict[int, int]
    ) -> tuple[str, _Config, Any, Any, Any]:
        """A kernel's name, launch configuration and the arguments of ``cuLaunchKernelEx``."""
        nulls = kernel.num_parameters - len(call.arguments)
        parameters = [*(slots[buffer] for buffer in call.arguments), *[len(slots)] * nulls]
        start = ctypes.addressof(self._table)
        pointers = (ctypes.c_void_p * len(parameters))(*(start + 8 * slot for slot in parameters))
        config = _Config(grid=call.grid, block=(32 * kernel.num_warps, 1, 1), shared=kernel.shared)
        if kernel.launch_pdl:
            attribute = _Attribute(id=_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION)
            attribute.value[0] = 1
            config.attributes = ctypes.pointer(attribute)
            config.num_attributes = 1
        function = ctypes.c_void_p(self._driver.load(kernel))
        return kernel.name, config, ctypes.byref(config), function, pointers

    def launch(self, addresses: list[int]) -> None:
        """Launches all kernels on the current stream of the current device, which is the plan's.

        Args:
            addresses: Of inputs and results. The list is used up.
        """
        if self._scratch_bytes:
            # Freed on return: the allocator hands it out again on this stream only.
            scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._device)
            base = scratch.data_ptr()
            addresses += [base + offset for offset in self._offsets]
        stream = current_stream(self._index)
        launch = self._driver.launch
        with self._lock:
            self._pack(self._table, 0, *addresses)
            for name, config, config_ref, function, pointers in self._launches:
                config.stream = stream
                status = launch(config_ref, function, pointers, None)
                if status == _INVALID_CONTEXT:
                    # The first CUDA work of this thread.
                    self._driver.set_context(self._context)
                    status = launch(config_ref, function, pointers, None)
                if status:
                    raise RuntimeError(f"launch of {name}: {self._driver.describe(status)}")


def _scratch_layout(program: Program) -> tuple[list[int], int]:
    """Offset in bytes of each scratch buffer in the common allocation, and its size."""
    sizes = [_padded(program.buffers[index]) for index in program.scratch]
    ends = list(itertools.accumulate(sizes, initial=0))
    return ends[:-1], ends[-1]


def _padded(buffer: Buffer) -> int:
    return -(-buffer.nbytes // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT


def current_stream(index: int) -> int:
    """Handle of the current stream, without the cost of a ``torch.cuda.Stream``."""
    return torch._C._cuda_getCurrentRawStream(index)


@functools.lru_cache
def _driver() -> _Driver:
    return _Driver(ctypes.CDLL("libcuda.so.1"))


class _Driver:
    """The few functions of the CUDA driver that are needed, with errors as exceptions."""

    def __init__(self, library: Any) -> None:
        self._library = library
        # cuLaunchKernelEx(config, function, parameters, NULL), which returns a status.
        self.launch = library.cuLaunchKernelEx

    def describe(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(name))
        return (name.value or b"unknown error").decode() + f" ({status})"

    def use_primary_context(self, index: int) -> int:
        """Makes a device's primary context, the one PyTorch uses, the current one; returns it."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.set_context(context.value)
        return context.value

    def set_context(self, context: int) -> None:
        self._call("cuCtxSetCurrent", ctypes.c_void_p(context))

    def load(self, kernel: CompiledKernel) -> int:
        """Loads a kernel into the current context; returns its ``CUfunction``."""
        module, function, registers = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        self._call("cuModuleLoadData", ctypes.byref(module), kernel.cubin)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, kernel.name.encode())
        # A question about the function makes a lazy driver load it now rather than at the launch.
        self._call("cuFuncGetAttribute", ctypes.byref(registers), _FUNCTION_NUM_REGISTERS, function)
        self._call("cuFuncSetAttribute", function, _FUNCTION_MAX_DYNAMIC_SHARED, kernel.shared)
        if kernel.shared > _SHARED_BY_DEFAULT:
            self._call("cuFuncSetCacheConfig", function, _CACHE_PREFER_SHARED)
        return function.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: {self.describe(status)}")
