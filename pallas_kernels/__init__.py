"""Decode attention over selected regions of a paged KV cache, as Pallas kernels for JAX."""

from sparse_decode._require import require_pallas_triton

require_pallas_triton(needed_by=__name__)

from sparse_decode.pallas_kernels.merge import merge, partial_attention  # noqa: E402
from sparse_decode.pallas_kernels.op import (  # noqa: E402
    PackedCache,
    sparse_decode_attention,
)
from sparse_decode.pallas_kernels.sharding import (  # noqa: E402
    context_attention,
    context_specs,
    group_specs,
    shard_over_context,
    shard_over_groups,
    split_block_table,
)
from sparse_decode.pallas_kernels.stack import (  # noqa: E402
    build_block_table,
    pack_selection,
    select_regions,
    write_kv,
)
from sparse_decode.plan import Config, default_config  # noqa: E402

__all__ = [
    "Config",
    "PackedCache",
    "build_block_table",
    "context_attention",
    "context_specs",
    "default_config",
    "group_specs",
    "merge",
    "pack_selection",
    "partial_attention",
    "select_regions",
    "shard_over_context",
    "shard_over_groups",
    "sparse_decode_attention",
    "split_block_table",
    "write_kv",
]
