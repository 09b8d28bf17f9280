"""Sparse decode attention for PyTorch, written in Triton; never imports jax."""

import importlib
from typing import TYPE_CHECKING

from sparse_decode._require import check_version, require

if TYPE_CHECKING:
    from sparse_decode.triton_kernels.op import sparse_decode_attention, sparse_decode_splits

__all__ = ["sparse_decode_attention", "sparse_decode_splits"]

_OLDEST = {"torch": "2.11", "triton": "3.6"}


def __getattr__(name: str) -> object:
    """Imports the operation at its first use, once torch and triton are known to be there."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module, oldest in _OLDEST.items():
        found = require(module, extra="torch", needed_by=__name__).__version__
        check_version(module, found, oldest)
    value = getattr(importlib.import_module(f"{__name__}.op"), name)
    globals()[name] = value
    return value
