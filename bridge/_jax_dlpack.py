"""DLPack capsules, and how JAX takes and gives them. No other module knows jaxlib's private names.

Capsules here carry the unversioned `DLManagedTensor`, which every supported JAX and PyTorch speaks.
Where jaxlib's own entry points are missing, the public calls take their place: the same result,
several times the host time. `uses_private_entry_points` says which it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import dlpack as jax_dlpack

try:
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    _import_capsule = _jax.dlpack_managed_tensor_to_buffer
    _export_array = _jax.buffer_to_dlpack_managed_tensor
except (ImportError, AttributeError):
    _import_capsule = None
    _export_array = None

# From dlpack.h.
CPU = 1
CUDA = 2

# DLPack's name for CUDA's legacy default stream, whose handle is 0.
LEGACY_STREAM = 1


class DLTensor(ctypes.Structure):
    """`DLTensor` of dlpack.h, with the members of its inner structures side by side."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # NULL: compact, row-major
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """`DLManagedTensor` of dlpack.h."""

    _fields_ = (
        ("tensor", DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_NAME = b"dltensor"
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

# A deleter that does nothing, needs no GIL and outlives the interpreter: it ignores its argument
# and reads one flag. XLA calls whatever stands in the field, NULL included.
NO_DELETER = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value


def uses_private_entry_points() -> bool:
    """Whether jaxlib's own DLPack functions are used, and not the slower public calls."""
    return _import_capsule is not None


def new_capsule(managed: DLManagedTensor) -> Any:
    """A capsule around a structure, which must live until its deleter has been called."""
    return _new_capsule(ctypes.addressof(managed), _NAME, None)


def managed_tensor(capsule: Any) -> DLManagedTensor:
    """The structure in a capsule that nobody has consumed, valid as long as the capsule."""
    return DLManagedTensor.from_address(_capsule_pointer(capsule, _NAME))


def find_device(kind: str, index: int) -> Any | None:
    """JAX's device for a DLPack device of this process, or None.

    Args:
        kind: `cpu` or `cuda`.
        index: Number of the device as the process sees it; 0 for the CPU.
    """
    try:
        devices = jax.local_devices(backend=kind)
    except RuntimeError:
        return None
    return next((device for device in devices if device.local_hardware_id == index), None)


def import_capsules(
    capsules: Iterable[Any], device: Any, order: Callable[[int], None] | None
) -> list[jax.Array]:
    """Arrays over the memory of unconsumed capsules, which this call consumes.

    Args:
        capsules: Capsules of `device`'s memory, consumed one by one. The structure in each must
            live as long as its array, for the sake of its deleter; JAX copies the rest.
        device: As `find_device` returned it.
        order: Makes the stream with a given handle wait for what the arrays' content depends on. It
            is called before the arrays exist, and JAX waits for that stream before it reads them.
            None, and always None on a CPU: the content is ready now.

    Returns:
        One array per capsule, never copied.
    """
    if _import_capsule is None:
        return [jax_dlpack.from_dlpack(_Carrier(it, device, order), copy=False) for it in capsules]
    stream = None
    if order is not None:
        stream = device.get_stream_for_external_ready_events()
        order(stream)
    return [_import_capsule(capsule, device, stream, False) for capsule in capsules]


def export_array(array: jax.Array, stream: int | None) -> Any:
    """A capsule of an array's memory, which JAX neither frees nor donates while the capsule lives.

    Args:
        array: An array on a single device.
        stream: Handle of the stream that must wait until the array has been computed. None on a
            CPU, where the caller waits.
    """
    if _export_array is None:
        return array.__dlpack__(stream=stream)  # pyright: ignore[reportCallIssue]
    # Not the array itself: deleting that while its capsule lives would end the process.
    return _export_array(array.addressable_data(0), stream)


def make_wait(stream: int, array: jax.Array) -> None:
    """Makes a stream wait until an array on a single device has been computed.

    Args:
        stream: Handle of the stream.
        array: The array, which nobody deletes meanwhile.
    """
    if _export_array is None:
        array.__dlpack__(stream=stream)  # pyright: ignore[reportCallIssue]
    else:
        _export_array(array, stream)


class _Carrier:
    """A capsule in the form that the public import asks for."""

    def __init__(self, capsule: Any, device: Any, order: Callable[[int], None] | None) -> None:
        self._capsule = capsule
        self._device = device
        self._order = order

    def __dlpack_device__(self) -> tuple[int, int]:
        if self._device.platform == "cpu":
            return CPU, 0
        return CUDA, self._device.local_hardware_id

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        if self._order is not None and stream is not None:
            self._order(stream)
        return self._capsule
