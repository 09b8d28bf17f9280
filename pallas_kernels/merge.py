"""Attention to a share of a context, in float32, and the exact merge of shares."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from sparse_decode.contract import ArraySpec, Geometry, check_call
from sparse_decode.pallas_kernels.op import (
    PackedCache,
    _check_options,
    _run,
    _transformable,
    check_device,
    describe_cache,
    plan_call,
)
from sparse_decode.pallas_kernels.promotion import usual_promotion
from sparse_decode.plan import Config


@usual_promotion
def partial_attention(
    query: jax.Array,
    cache: jax.Array | PackedCache,
    regions: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    *,
    scale: float,
    query_len: int = 1,
    splits: int | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends to what a cache holds of a context; the result is not rounded.

    Runs the kernels of `sparse_decode_attention`, which says more of the arguments. Regions whose
    pages are elsewhere stay listed: -1 in the block table marks their pages.

    Args:
        query: `[rows, heads, 192]`, bfloat16 or float16.
        cache: `[pages, groups, page_size, 384]`, or a `PackedCache`.
        regions: `[rows, slots]`, int32 or int64.
        block_table: `[requests, max_pages]` int32; a page outside the cache is not attended.
        positions: `[rows]`, int32 or int64.
        active: `[rows]` bool.
        scale: Multiplies q.k.
        query_len: Query tokens a request.
        splits: Programs that share a row; None leaves it to `config`.
        k_scale: One float32, with an FP8 cache.
        v_scale: The same for values.
        config: Launch settings; None takes `default_config`.

    Returns:
        `[rows, heads, 192]` and natural-log lse `[rows, heads]`, both float32, as `merge` takes
        them; 0 and -inf where nothing is attended.

    Raises:
        TypeError, ValueError, NotImplementedError: As `sparse_decode_attention`.
    """
    arrays = {
        "query": query,
        "regions": regions,
        "block_table": block_table,
        "positions": positions,
        "active": active,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    _, output, lse = attend_to_share(
        cache, arrays, scale=scale, query_len=query_len, splits=splits, config=config
    )
    return output, lse


def attend_to_share(
    cache: jax.Array | PackedCache,
    arrays: dict[str, jax.Array | None],
    *,
    scale: float,
    query_len: int = 1,
    splits: int | None = None,
    clear_inactive: bool = True,
    config: Config | None = None,
) -> tuple[Geometry, jax.Array, jax.Array]:
    """Checks a whole call, and computes what `partial_attention` does.

    Args:
        cache: As `partial_attention`.
        arrays: The other arrays by name. `output` and `gate` are checked, no more.
        scale: As `sparse_decode_attention`, as are the options that follow.
        query_len: Query tokens a request.
        splits: Programs that share a row, or None.
        clear_inactive: Checked, no more.
        config: Launch settings, or None.

    Returns:
        The sizes of the call, and output and lse as `partial_attention`.

    Raises:
        TypeError, ValueError, NotImplementedError: As `sparse_decode_attention`.
    """
    present = {name: array for name, array in arrays.items() if array is not None}
    require_jax_arrays(present)
    specs = {name: ArraySpec(array.shape, array.dtype.name) for name, array in present.items()}
    specs["cache"] = describe_cache(cache)
    _check_options(splits, config, return_lse=True)
    geometry = check_call(
        **specs,
        scale=scale,
        query_len=query_len,
        splits=1 if splits is None else splits,
        clear_inactive=clear_inactive,
    )
    check_device(geometry.fp8)
    query = present["query"]
    if geometry.rows == 0:
        nothing = jnp.zeros(query.shape, jnp.float32)
        return geometry, nothing, nothing[..., 0]
    checked_only = ("output", "gate")
    options = {"scale": scale, "splits": splits, "config": config}
    plan = plan_call(
        cache,
        dataclasses.replace(geometry, output_dtype="float32", gate_dtype=None),
        {name: spec for name, spec in specs.items() if name not in checked_only},
        clear_inactive=True,
        return_lse=True,
        **options,
    )
    inputs = {name: array for name, array in present.items() if name not in checked_only}
    again = functools.partial(partial_attention, query_len=query_len, **options)
    share = _transformable(functools.partial(_run, plan), again)({**inputs, "cache": cache})
    return geometry, *share


@usual_promotion
def merge(outputs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges attention to disjoint shares of a context into attention to all of it.

    `sum(w[i] * outputs[i])` with `w[i] = exp(lses[i] - lse)`, in float32. A share that attends to
    nothing has lse -inf: its weight is 0, and its output may hold anything.

    Args:
        outputs: `[shares, rows, heads, 192]`, of any float dtype.
        lses: `[shares, rows, heads]` float32, natural logarithm.

    Returns:
        `[rows, heads, 192]` and `[rows, heads]`, both float32; 0 and -inf where no share attends to
        anything.

    Raises:
        ValueError: The shapes do not belong together, or there is no share.
    """
    outputs, lses = jnp.asarray(outputs), jnp.asarray(lses, jnp.float32)
    if lses.ndim < 1 or not lses.shape[0]:
        raise ValueError(f"lses: expected one share or more, got shape {list(lses.shape)}")
    if outputs.shape[:-1] != lses.shape:
        raise ValueError(
            f"outputs: expected shape {[*lses.shape, 192]}, as lses has shape "
            f"{list(lses.shape)}, got shape {list(outputs.shape)}"
        )
    peak = jnp.max(lses, axis=0)
    pivot = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(lses - pivot)
    total = jnp.sum(weights, axis=0)
    none = total == 0
    total = jnp.where(none, 1.0, total)
    attended = jnp.where((lses == -jnp.inf)[..., None], 0.0, outputs.astype(jnp.float32))
    output = jnp.sum((weights / total)[..., None] * attended, axis=0)
    return output, jnp.where(none, -jnp.inf, pivot + jnp.log(total))


def require_jax_arrays(arrays: Mapping[str, object]) -> None:
    """Raises TypeError, with the argument's name, for what is no JAX array."""
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            raise TypeError(f"{name}: expected a JAX array, got {type(array).__name__}")
