"""Decode attention over selected regions of a paged KV cache, as Pallas kernels for JAX."""

from sparse_decode._require import require

require("jax", extra="jax-cuda13")

from sparse_decode.pallas_kernels.op import PackedCache, sparse_decode_attention
from sparse_decode.plan import Config, default_config

__all__ = ["Config", "PackedCache", "default_config", "sparse_decode_attention"]
