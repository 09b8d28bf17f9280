"""PyTorch tensors in the contract's terms, and NumPy arrays as tensors of the same layout."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import torch

from sparse_decode.contract import ArraySpec, Geometry, check_call

Key: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# dtypes that NumPy lacks; each is carried over as an integer of its size.
_EXTENDED = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
}


def key(name: str, tensor: torch.Tensor) -> Key:
    """Everything about a tensor that a launch depends on, hashable.

    Args:
        name: Name of the argument, for the message.
        tensor: The argument.

    Raises:
        TypeError: The argument is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def optional_key(name: str, tensor: torch.Tensor | None) -> Key | None:
    """The `key` of a tensor, or None for None."""
    return None if tensor is None else key(name, tensor)


def spec_of(key: Key) -> ArraySpec:
    """The contract's description of a tensor with this key."""
    shape, strides, dtype, device = key
    return ArraySpec(tuple(shape), str(dtype).removeprefix("torch."), strides, str(device))


def spec(name: str, tensor: torch.Tensor) -> ArraySpec:
    """The contract's description of a tensor; TypeError if it is none."""
    return spec_of(key(name, tensor))


def geometry(tensors: Mapping[str, torch.Tensor | None], options: Mapping[str, object]) -> Geometry:
    """Checks a call against the contract.

    Args:
        tensors: Array arguments by the contract's names; None for those left out.
        options: The other arguments of `contract.check_call`.

    Raises:
        TypeError, ValueError: As `contract.check_call`.
    """
    specs = {name: spec(name, value) for name, value in tensors.items() if value is not None}
    return check_call(**specs, **options)  # type: ignore[arg-type]


def refuse_gradients(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError for the first tensor, by name, that requires a gradient."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name}: expected a tensor without gradient, as there is no backward pass, got "
                "requires_grad=True; detach it or call under torch.no_grad()"
            )


def remembered(
    function: Callable[_Arguments, _Result], maxsize: int = 4096
) -> Callable[_Arguments, _Result]:
    """Keeps the results of a function of keys and options, apart for arguments of unequal type."""
    cached = functools.lru_cache(maxsize, typed=True)(function)

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return cached(*args, **kwargs)  # type: ignore[arg-type]
        except TypeError:
            pass
        # Either the function's own error, or an option that cannot be hashed and has to be named.
        return function(*args, **kwargs)

    return call


def from_numpy(array: np.ndarray, device: torch.device | str = "cpu") -> torch.Tensor:
    """Copies an array to a device as it lies in memory.

    The tensor has the array's shape, dtype and strides, and views a copy of the whole buffer that
    the array is a view of, at the same offset.

    Args:
        array: Any array of a dtype that PyTorch has; bfloat16 and float8_e4m3fn of `ml_dtypes`.
        device: Where the tensor shall be.

    Raises:
        TypeError: PyTorch has no such dtype.
        ValueError: A stride is negative or no multiple of the item size, which PyTorch cannot say.
    """
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"array: expected a dtype that PyTorch has, got {array.dtype.name}")
    itemsize = array.itemsize
    if any(stride < 0 or stride % itemsize for stride in array.strides):
        raise ValueError(
            f"array: expected strides of at least 0 in whole elements of {itemsize} bytes, "
            f"got {list(array.strides)} bytes"
        )
    strides = [stride // itemsize for stride in array.strides]
    if not array.size:
        return torch.empty_strided(array.shape, strides, dtype=dtype, device=device)
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    begin, end = np.lib.array_utils.byte_bounds(root)
    first, last = np.lib.array_utils.byte_bounds(array)
    begin, end = min(begin, first), max(end, last)
    begin += (first - begin) % itemsize
    storage = torch.empty((end - begin) // itemsize, dtype=dtype)
    ctypes.memmove(storage.data_ptr(), begin, storage.nbytes)
    return storage.to(device).as_strided(array.shape, strides, (first - begin) // itemsize)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Copies a tensor into a dense array, with the dtypes of `ml_dtypes` where NumPy has none."""
    host = tensor.detach().to("cpu", copy=True).contiguous()
    if host.dtype in _EXTENDED:
        carrier, dtype = _EXTENDED[host.dtype]
        return host.view(carrier).numpy().view(dtype)
    return host.numpy()
