"""The operation as `torch.ops.sparse_decode.attention`, so that `torch.compile` sees one operator.

Importing this module registers the operator. `sparse_decode.bridge.sparse_decode_attention` does so
when it is compiled, and runs without the operator otherwise, as its dispatch costs more than the
launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_decode.bridge import op
from sparse_decode.plan import Config

SCHEMA = (
    "attention(Tensor query, Tensor cache, Tensor regions, Tensor block_table, Tensor positions, "
    "Tensor active, Tensor(a!) output, float scale, int query_len=1, int? splits=None, "
    "bool clear_inactive=True, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? gate=None, "
    'str route="direct", int[]? config=None) -> ()'
)

_LIBRARY = torch.library.Library("sparse_decode", "DEF")


def _run(
    query: torch.Tensor,
    cache: torch.Tensor,
    regions: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    active: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    query_len: int = 1,
    splits: int | None = None,
    clear_inactive: bool = True,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    route: op.Route = "direct",
    config: Sequence[int] | None = None,
) -> None:
    op._attend(
        (query, cache, regions, block_table, positions, active, output, k_scale, v_scale, gate),
        scale,
        query_len,
        splits,
        clear_inactive,
        route,
        None if config is None else Config(*config),
    )


def _trace(
    query: torch.Tensor,
    cache: torch.Tensor,
    regions: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    active: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    query_len: int = 1,
    splits: int | None = None,
    clear_inactive: bool = True,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    route: op.Route = "direct",
    config: Sequence[int] | None = None,
) -> None:
    """Checks a call as far as its sizes are known; the rest is checked when it runs."""
    tensors = (
        query, cache, regions, block_table, positions, active, output, k_scale, v_scale, gate
    )  # fmt: skip
    op._trace(
        tensors,
        scale,
        query_len,
        splits,
        clear_inactive,
        route,
        None if config is None else Config(*config),
    )


_LIBRARY.define(SCHEMA)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention", _run, _key)
_LIBRARY._register_fake("attention", _trace)

attention = torch.ops.sparse_decode.attention.default
