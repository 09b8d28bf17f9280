"""Decode attention over selected regions of a paged KV cache, as Pallas kernels for JAX."""

from sparse_decode._require import require_supported

require_supported("jax", needed_by=__name__)

from sparse_decode.pallas_kernels.op import (  # noqa: E402
    PackedCache,
    sparse_decode_attention,
)
from sparse_decode.plan import Config, default_config  # noqa: E402

__all__ = ["Config", "PackedCache", "default_config", "sparse_decode_attention"]
