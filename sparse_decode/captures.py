"""Captures: one call's inputs, options and output as a safetensors file.

Tensors stand under the contract's names, options as string metadata, so that a call recorded in one
serving stack can be checked in another.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from sparse_decode._files import replace_file
from sparse_decode.call import Call
from sparse_decode.contract import ARRAY_NAMES

_DTYPES = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_REQUIRED = ("query", "cache", "regions", "block_table", "positions", "active")
_OPTIONS = {"scale": float, "query_len": int, "splits": int, "clear_inactive": bool}


@dataclass(frozen=True)
class Capture:
    """A recorded call.

    Attributes:
        call: The inputs and options. Its `output` is None: a capture holds the output after the
            call.
        output: `[rows, heads, 192]` as recorded, or None.
        source: Where it was recorded, in words.
    """

    call: Call
    output: np.ndarray | None = None
    source: str = ""


def save(path: str | os.PathLike[str], capture: Capture) -> None:
    """Writes a capture; an existing file is replaced only once the new one is complete.

    Strided arrays are written densely.

    Raises:
        TypeError, ValueError: The call breaks the contract, or the output does not fit it.
        OSError: The file cannot be written.
    """
    _check(capture)
    unneeded = {"output"} if capture.call.geometry().fp8 else {"output", "k_scale", "v_scale"}
    arrays = {name: a for name, a in capture.call.arrays().items() if name not in unneeded}
    if capture.output is not None:
        arrays["output"] = capture.output
    dense = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=array.dtype.name,
            shape=list(arrays[name].shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in dense.items()
    }
    metadata = {
        name: repr(_OPTIONS[name](value))
        for name, value in capture.call.options().items()
        if value is not None
    }
    if capture.source:
        metadata["source"] = capture.source
    replace_file(path, safetensors.serialize(specs, metadata))


def load(path: str | os.PathLike[str]) -> Capture:
    """Reads a capture.

    Raises:
        OSError: The file cannot be read.
        TypeError, ValueError: The file is no capture, or its call breaks the contract.
    """
    path = Path(path)
    content = path.read_bytes()
    try:
        tensors = dict(safetensors.deserialize(content))
        with safetensors.safe_open(path, "np") as file:
            metadata = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path}: expected a safetensors file, got one that says: {error}"
        ) from error
    unknown = sorted(set(tensors) - set(ARRAY_NAMES))
    missing = [name for name in _REQUIRED if name not in tensors]
    missing += [] if "scale" in metadata else ["scale (metadata)"]
    if unknown or missing:
        raise ValueError(
            f"{path}: expected the tensors of one call, got a file "
            + " and ".join(
                f"{what} {', '.join(names)}"
                for what, names in (("without", missing), ("with unknown", unknown))
                if names
            )
        )
    arrays = {name: _array(path, name, tensor) for name, tensor in tensors.items()}
    options = {
        name: _option(path, name, metadata[name], kind)
        for name, kind in _OPTIONS.items()
        if name in metadata
    }
    output = arrays.pop("output", None)
    capture = Capture(Call(**arrays, **options), output, metadata.get("source", ""))
    try:
        _check(capture)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from error
    return capture


def _check(capture: Capture) -> None:
    """Holds the call, and the output against it, to the contract."""
    call = capture.call
    if capture.output is not None:
        call = dataclasses.replace(call, output=capture.output)
    call.geometry()


def _array(path: Path, name: str, tensor: dict) -> np.ndarray:
    dtype = _DTYPES.get(tensor["dtype"])
    if dtype is None:
        raise TypeError(
            f"{path}: {name}: expected dtype {' or '.join(_DTYPES)}, got {tensor['dtype']}"
        )
    return np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])


def _option(path: Path, name: str, text: str, kind: type) -> object:
    try:
        value = ast.literal_eval(text)
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        value = None
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{path}: {name}: expected {kind.__name__} as text, got {text!r}")
    return value
