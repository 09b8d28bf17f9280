"""One call of the operation as NumPy arrays, shared by oracle, cases, captures and every path."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparse_decode.contract import ARRAY_NAMES, ArraySpec, Geometry, check_call, default_splits
from sparse_decode.plan import Config


@dataclass(frozen=True)
class Call:
    """Inputs and options of one `sparse_decode_attention` call.

    Arrays are NumPy arrays under the contract's names, 16-bit floats and FP8 in the dtypes of
    `ml_dtypes`. `output` is the buffer's content before the call (shape, dtype and strides count;
    paths copy it), or None for a new array. `splits` of None leaves the choice to the path, and so
    does `config`, which the Pallas kernels alone take.
    """

    query: np.ndarray
    cache: np.ndarray
    regions: np.ndarray
    block_table: np.ndarray
    positions: np.ndarray
    active: np.ndarray
    output: np.ndarray | None = None
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None
    gate: np.ndarray | None = None
    scale: float = 192**-0.5
    query_len: int = 1
    splits: int | None = None
    clear_inactive: bool = True
    config: Config | None = None

    def arrays(self) -> dict[str, Any]:
        """The arrays that are present, by name."""
        named = {name: getattr(self, name) for name in ARRAY_NAMES}
        return {name: array for name, array in named.items() if array is not None}

    def options(self) -> dict[str, Any]:
        """The options of the contract, by name."""
        others = (*ARRAY_NAMES, "config")
        names = (f.name for f in dataclasses.fields(self) if f.name not in others)
        return {name: getattr(self, name) for name in names}

    def geometry(self) -> Geometry:
        """Checks the call against the contract; see `contract.check_call`."""
        options = self.options()
        if self.splits is None:
            options["splits"] = default_splits(len(self.query))
        return check_call(
            **{name: describe(array) for name, array in self.arrays().items()}, **options
        )


def describe(array: np.ndarray) -> ArraySpec:
    """Describes a NumPy array.

    Raises:
        ValueError: A stride is no multiple of the item size.
        TypeError: The bytes of its elements are in another order than this machine's.
    """
    if not array.dtype.isnative:
        raise TypeError(
            f"expected elements in the byte order of this machine, got {array.dtype.str}"
        )
    if any(stride % array.itemsize for stride in array.strides):
        raise ValueError(f"expected strides in whole elements, got {array.strides} bytes")
    return ArraySpec(
        array.shape, array.dtype.name, tuple(stride // array.itemsize for stride in array.strides)
    )


def page_storage(cache: np.ndarray) -> tuple[np.ndarray, int, tuple[int, ...]]:
    """The dense memory that a cache view lies in.

    Args:
        cache: `[pages, groups, page_size, 384]`, a view of a larger dense array or an array of its
            own.

    Returns:
        `(storage, offset, strides)`: `[pages, page stride]`, where in each page the view begins,
        and the view's strides, all in elements.

    Raises:
        ValueError: The last page of the view ends past the memory that it is a view of.
    """
    root = cache
    while isinstance(root.base, np.ndarray):
        root = root.base
    low, high = np.lib.array_utils.byte_bounds(root)
    count = (high - low) // cache.itemsize
    flat = np.lib.stride_tricks.as_strided(
        _at_lowest_address(root).view(cache.dtype), (count,), (cache.itemsize,)
    )
    begin = (cache.ctypes.data - low) // cache.itemsize
    strides = describe(cache).strides
    first = begin - begin % strides[0]
    end = first + cache.shape[0] * strides[0]
    if end > flat.size:
        raise ValueError(
            f"cache: expected whole pages up to element {end}, got {flat.size} elements"
        )
    return flat[first:end].reshape(-1, strides[0]), begin - first, strides


def _at_lowest_address(array: np.ndarray) -> np.ndarray:
    """One element of an array, as a vector: the one that comes first in memory."""
    first = tuple(slice(-1, None) if stride < 0 else slice(1) for stride in array.strides)
    return array[first].reshape(-1)
