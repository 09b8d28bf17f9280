"""Sparse decode attention for PyTorch, written in Triton; never imports jax."""

import importlib
from typing import TYPE_CHECKING

from sparse_decode._require import require_supported

if TYPE_CHECKING:
    from sparse_decode.triton_kernels.op import sparse_decode_attention, sparse_decode_splits

__all__ = ["sparse_decode_attention", "sparse_decode_splits"]


def __getattr__(name: str) -> object:
    """Imports the operation at its first use, once torch and triton are known to be there."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in ("torch", "triton"):
        require_supported(module, needed_by=__name__)
    value = getattr(importlib.import_module(f"{__name__}.op"), name)
    globals()[name] = value
    return value
