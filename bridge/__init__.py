"""Hand-over between JAX and PyTorch.

Names load on first use, so that importing this package loads neither framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_decode.bridge.dlpack import ZeroCopyError, packed_to_jax, to_jax, to_torch
    from sparse_decode.bridge.jax_route import triton_sparse_decode_attention
    from sparse_decode.bridge.op import (
        Explanation,
        explain_route,
        sparse_decode_attention,
        warmup,
    )

# Public name -> submodule that defines it.
_EXPORTS = {
    "Explanation": "op",
    "ZeroCopyError": "dlpack",
    "explain_route": "op",
    "packed_to_jax": "dlpack",
    "sparse_decode_attention": "op",
    "to_jax": "dlpack",
    "to_torch": "dlpack",
    "triton_sparse_decode_attention": "jax_route",
    "warmup": "op",
}

__all__ = [
    "Explanation",
    "ZeroCopyError",
    "explain_route",
    "packed_to_jax",
    "sparse_decode_attention",
    "to_jax",
    "to_torch",
    "triton_sparse_decode_attention",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
