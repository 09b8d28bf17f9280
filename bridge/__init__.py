"""Hand-over between JAX and PyTorch.

Names load on first use, so that importing this package loads neither framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_decode.bridge.dlpack import ZeroCopyError, packed_to_jax, to_jax, to_torch

# Public name -> submodule that defines it.
_EXPORTS = {
    "ZeroCopyError": "dlpack",
    "packed_to_jax": "dlpack",
    "to_jax": "dlpack",
    "to_torch": "dlpack",
}

__all__ = ["ZeroCopyError", "packed_to_jax", "to_jax", "to_torch"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
