"""The public operation: checks a call, remembers how such a call is launched, and launches it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
import triton

from sparse_decode import contract, torch_arrays
from sparse_decode.torch_arrays import Key
from sparse_decode.triton_kernels import kernels

# The first architecture with programmatic dependent launch.
PDL_CAPABILITY = (9, 0)


def sparse_decode_splits(rows: int) -> int:
    """Splits a row that give about 256 programs, at most 32.

    Args:
        rows: (token, group) pairs of the call.

    Raises:
        TypeError: `rows` is no integer.
        ValueError: `rows` is negative.
    """
    if not isinstance(rows, Integral) or isinstance(rows, bool):
        raise TypeError(f"rows: expected an integer, got {type(rows).__name__}")
    if rows < 0:
        raise ValueError(f"rows: expected at least 0, got {rows}")
    return contract.default_splits(rows)


def sparse_decode_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    regions: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    active: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    query_len: int = 1,
    splits: int,
    clear_inactive: bool = True,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> None:
    """Attention of each (token, group) row over its selected regions, written into `output`.

    Rows of one request are `groups * query_len` consecutive rows that share a row of the block
    table. Nothing is read or written outside the tensors, whatever the index tensors hold.

    Args:
        query: `[rows, heads, 192]`, bfloat16 or float16; last stride 1.
        cache: `[pages, groups, page_size, 384]`, K then V; dtype of `query`, or FP8 as
            float8_e4m3fn or uint8. Last stride 1, the others free.
        regions: `[rows, slots]`, int32 or int64; ids of eight tokens each, -1 if unused. Live ids
            sit in the trailing slots.
        block_table: `[requests, max_pages]`, int32; logical page to physical page.
        positions: `[rows]`, int32 or int64; a row attends to tokens up to its position.
        active: `[rows]`, bool; false for padding.
        output: `[rows, heads, 192]`, bfloat16 or float16; last stride 1.
        scale: Multiplies q.k.
        query_len: Query tokens a request.
        splits: Shares of a row's live slots, 1 to 256, that are worked side by side and merged.
        clear_inactive: Zero the inactive rows of `output`; otherwise they are left untouched.
        k_scale: One float32 on the device, needed with an FP8 cache: `k = k_fp8 * k_scale`.
        v_scale: The same for v.
        gate: `[tokens, groups * heads]`, bfloat16, float16 or float32; the output is multiplied by
            its sigmoid.

    Raises:
        TypeError: An argument is no tensor, or a dtype or the type of an option is wrong.
        ValueError: A shape, stride, device or option is wrong, an FP8 scale is missing, or a tensor
            requires a gradient.
        NotImplementedError: The device cannot run the kernels.
    """
    key, optional_key = torch_arrays.key, torch_arrays.optional_key
    launch = _launch(
        key("query", query),
        key("cache", cache),
        key("regions", regions),
        key("block_table", block_table),
        key("positions", positions),
        key("active", active),
        key("output", output),
        optional_key("k_scale", k_scale),
        optional_key("v_scale", v_scale),
        optional_key("gate", gate),
        scale,
        query_len,
        splits,
        clear_inactive,
    )
    if torch.is_grad_enabled():
        torch_arrays.refuse_gradients(
            query=query, cache=cache, output=output, k_scale=k_scale, v_scale=v_scale, gate=gate
        )
    if not launch.rows:
        return
    if launch.uint8:
        cache = cache.view(torch.float8_e4m3fn)
    if not launch.fp8:
        k_scale = v_scale = None
    with _on(query.device):
        partial = lse = None
        if launch.splits > 1:
            partial = _scratch(launch.partial_shape, query.device)
            lse = _scratch(launch.partial_shape[:-1], query.device)
        kernels._split[launch.rows, launch.splits](
            query_ptr=query,
            cache_ptr=cache,
            regions_ptr=regions,
            block_table_ptr=block_table,
            positions_ptr=positions,
            active_ptr=active,
            output_ptr=output,
            partial_ptr=partial,
            lse_ptr=lse,
            k_scale_ptr=k_scale,
            v_scale_ptr=v_scale,
            gate_ptr=gate,
            **launch.split,
        )
        if launch.splits > 1:
            kernels._combine[launch.rows, launch.heads](
                partial_ptr=partial,
                lse_ptr=lse,
                active_ptr=active,
                output_ptr=output,
                gate_ptr=gate,
                **launch.combine,
            )


@dataclass(frozen=True)
class _Launch:
    """How calls of one kind are launched.

    Attributes:
        rows, heads, splits: As in the contract; the extents of the grids.
        fp8: Whether the cache is FP8, and the scales are used.
        uint8: Whether it is held as uint8.
        partial_shape: Shape of the partials.
        split: Keyword arguments of `_split` besides its tensors.
        combine: The same of `_combine`.
    """

    rows: int
    heads: int
    splits: int
    fp8: bool
    uint8: bool
    partial_shape: tuple[int, ...]
    split: dict[str, Any]
    combine: dict[str, Any]


@torch_arrays.remembered
def _launch(
    query: Key,
    cache: Key,
    regions: Key,
    block_table: Key,
    positions: Key,
    active: Key,
    output: Key,
    k_scale: Key | None,
    v_scale: Key | None,
    gate: Key | None,
    scale: float,
    query_len: int,
    splits: int,
    clear_inactive: bool,
) -> _Launch:
    """Checks a call, seen as the keys of its tensors, and lays its launches out."""
    keys = {
        "query": query,
        "cache": cache,
        "regions": regions,
        "block_table": block_table,
        "positions": positions,
        "active": active,
        "output": output,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "gate": gate,
    }
    geometry = contract.check_call(
        **{name: torch_arrays.spec_of(key) for name, key in keys.items() if key is not None},
        scale=scale,
        query_len=query_len,
        splits=splits,
        clear_inactive=clear_inactive,
    )
    pdl = _check_device(query[3], geometry.fp8)
    strides = {name: key[1] for name, key in keys.items() if key is not None}
    gate_strides = strides.get("gate", (0, 0))
    both = {
        "output_row_stride": strides["output"][0],
        "output_head_stride": strides["output"][1],
        "gate_token_stride": gate_strides[0],
        "gate_head_stride": gate_strides[1],
        "HEADS": geometry.heads,
        "GROUPS": geometry.groups,
        "SPLITS": int(splits),
        "GATED": gate is not None,
        "CLEAR_INACTIVE": clear_inactive,
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    split = {
        "scale": float(scale),
        "max_regions": geometry.max_regions,
        "pages": geometry.pages,
        "query_row_stride": strides["query"][0],
        "query_head_stride": strides["query"][1],
        "cache_page_stride": strides["cache"][0],
        "cache_group_stride": strides["cache"][1],
        "cache_token_stride": strides["cache"][2],
        "regions_row_stride": strides["regions"][0],
        "table_row_stride": strides["block_table"][0],
        "ROWS_PER_REQUEST": int(geometry.rows_per_request),
        "SLOTS": geometry.slots,
        "PAGE_SIZE": geometry.page_size,
        "FP8": geometry.fp8,
        **both,
        **kernels.SPLIT_OPTIONS,
    }
    splits_padded = triton.next_power_of_2(int(splits))
    combine = {
        "SPLITS_PADDED": splits_padded,
        **both,
        **kernels.combine_options(splits_padded),
    }
    return _Launch(
        rows=geometry.rows,
        heads=geometry.heads,
        splits=int(splits),
        fp8=geometry.fp8,
        uint8=cache[2] == torch.uint8,
        partial_shape=(geometry.rows, int(splits), geometry.heads, contract.HEAD_DIM),
        split=split,
        combine=combine,
    )


def _check_device(device: torch.device, fp8: bool) -> bool:
    """Whether there is programmatic dependent launch; raises if the kernels cannot run at all."""
    if kernels.INTERPRETED:
        if device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"query: expected a tensor in memory that Triton's interpreter reads, got {device}"
            )
        return False
    if device.type == "cpu":
        raise NotImplementedError(
            "query: expected a CUDA device, got cpu. To run in Triton's interpreter instead, set "
            "TRITON_INTERPRET=1 in the environment before triton is imported"
        )
    if device.type != "cuda" or torch.version.cuda is None:
        raise NotImplementedError(f"query: expected an NVIDIA GPU, got {device}")
    capability = torch.cuda.get_device_capability(device)
    contract.check_capability(capability, fp8, lambda: torch.cuda.get_device_name(device))
    return capability >= PDL_CAPABILITY


def _on(device: torch.device) -> nullcontext | torch.cuda.device:
    """Makes a GPU current if it is not: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _scratch(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)
