"""The operation as the operator `torch.ops.sparse_decode.attention`, for `torch.compile`.

Importing this module registers the operator. `sparse_decode.bridge.sparse_decode_attention` does so
where it is compiled; elsewhere it goes without, as the dispatch of an operator costs host time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparse_decode.bridge import op
from sparse_decode.bridge.op import Route
from sparse_decode.plan import Config

_NAME = "sparse_decode::attention"

torch.library.define(
    _NAME,
    "(Tensor query, Tensor cache, Tensor regions, Tensor block_table, Tensor positions, "
    "Tensor active, Tensor(a!) output, float scale, int query_len=1, int? splits=None, "
    "bool clear_inactive=True, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? gate=None, "
    'str route="direct", int[]? config=None) -> ()',
    # The strides that a compiler saw are those that a call was checked for.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
attention = torch.ops.sparse_decode.attention.default


def _arguments(
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
    route: Route = "direct",
    config: Sequence[int] | None = None,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[Any, ...]]:
    """The operator's arguments as `op` takes them: tensors, then options."""
    tensors = (
        query, cache, regions, block_table, positions, active, output, k_scale, v_scale, gate
    )  # fmt: skip
    packed = None if config is None else Config(*config)
    return tensors, (scale, query_len, splits, clear_inactive, route, packed)


@torch.library.impl(_NAME, ("cpu", "cuda"))
def _run(*args: Any, **kwargs: Any) -> None:
    tensors, options = _arguments(*args, **kwargs)
    op._attend(tensors, *options)


@torch.library.register_fake(_NAME)
def _trace(*args: Any, **kwargs: Any) -> None:
    """Checks a call while it is compiled; one with symbols for sizes is checked only as it runs."""
    tensors, options = _arguments(*args, **kwargs)
    op._refuse_gradients(tensors)
    keys = op._keys(tensors)
    numbers = [number for key in keys if key for number in (*key[0], *key[1])]
    if all(isinstance(number, int) for number in numbers):
        op._check(keys, *options)
    device = tensors[0].device  # type: ignore[union-attr]
    if device.type == "cpu":
        op._check_device(device, options[4], fp8=False)
