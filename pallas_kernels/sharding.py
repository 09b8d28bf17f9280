"""The operation over several devices: KV groups sharded, or the pages of each context.

Tensor parallel (`shard_over_groups`): each device has some KV groups, with their rows, cache and
gate, and nothing is communicated. `row = token * groups + group`, so a device's rows are not
neighbours: arrays of rows come as `[tokens, groups, ...]`, of which dimension 1 is sharded.

Context parallel (`shard_over_context`): each device has some pages, attends to those, and the
results are merged through lse. Only float32 outputs and lse are communicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from sparse_decode.pallas_kernels.merge import attend_to_share, merge, require_jax_arrays
from sparse_decode.pallas_kernels.op import (
    PackedCache,
    describe_cache,
    sparse_decode_attention,
)
from sparse_decode.pallas_kernels.promotion import usual_promotion

Result = jax.Array | tuple[jax.Array, jax.Array]
ROW_ARRAYS = ("query", "regions", "positions", "active", "output")


def group_specs(axis: str) -> dict[str, P]:
    """How each argument of a `shard_over_groups` function is sharded, by name.

    The result and lse are sharded as `query` is.
    """
    return {
        **dict.fromkeys((*ROW_ARRAYS, "cache", "gate"), P(None, axis)),
        **dict.fromkeys(("block_table", "k_scale", "v_scale"), P()),
    }


def context_specs(axis: str) -> dict[str, P]:
    """How each argument of a `shard_over_context` function is sharded, by name.

    The result and lse are replicated. A block table for each device is sharded as `cache` is.
    """
    return {
        **dict.fromkeys((*ROW_ARRAYS, "gate", "block_table", "k_scale", "v_scale"), P()),
        "cache": P(axis),
    }


# --- tensor parallel


def shard_over_groups(mesh: Mesh | AbstractMesh, axis: str) -> Callable[..., Result]:
    """`sparse_decode_attention` with the KV groups sharded over a mesh axis.

    The function takes what `sparse_decode_attention` takes, with rows as `[tokens, groups]`, and is
    meant for use inside `jax.jit`. Every device attends with its own groups; nothing is
    communicated if the arrays are placed as `group_specs` says.

    - query, output: `[tokens, groups, heads, 192]`
    - regions: `[tokens, groups, slots]`
    - positions, active: `[tokens, groups]`
    - gate: `[tokens, groups * heads]`, as ever
    - cache: `[pages, groups, page_size, 384]`, as ever. Of a `PackedCache`, `groups` counts those
      of all devices, and `storage` is `[pages, devices * page stride]`: in each page, the parts of
      the devices side by side, each with the layout and the offset that the `PackedCache` tells.
    - block_table, k_scale, v_scale: as ever, the same on every device.

    It returns `[tokens, groups, heads, 192]` and, with `return_lse`, `[tokens, groups, heads]`. The
    result has the bits of a call on one device with the same `config`; `default_config` follows the
    rows of a device.

    Args:
        mesh: Its other axes see replicated arrays.
        axis: Name of the mesh axis; its size divides the groups.

    Raises:
        ValueError: The mesh has no such axis. The function raises what `sparse_decode_attention`
            does, with the sizes of one device where it is about sizes.
    """
    devices = _axis_size(mesh, axis)
    specs = group_specs(axis)

    def attend(
        query: jax.Array,
        cache: jax.Array | PackedCache,
        regions: jax.Array,
        block_table: jax.Array,
        positions: jax.Array,
        active: jax.Array,
        output: jax.Array | None = None,
        *,
        k_scale: jax.Array | None = None,
        v_scale: jax.Array | None = None,
        gate: jax.Array | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Result:
        arrays = _present(
            query=query,
            regions=regions,
            block_table=block_table,
            positions=positions,
            active=active,
            output=output,
            k_scale=k_scale,
            v_scale=v_scale,
            gate=gate,
        )
        groups = _cache_shape(cache)[1]
        if groups % devices:
            raise ValueError(
                f"cache: expected groups in multiples of the {devices} devices of mesh axis "
                f"{axis!r}, got {groups} groups"
            )
        _check_rows(arrays, groups)

        def on_device(cache, arrays):
            if isinstance(cache, PackedCache):
                cache = dataclasses.replace(cache, groups=groups // devices)
            lead = arrays["query"].shape[:2]
            flat = {
                name: array.reshape(-1, *array.shape[2:]) if name in ROW_ARRAYS else array
                for name, array in arrays.items()
            }
            results = sparse_decode_attention(cache=cache, return_lse=return_lse, **flat, **options)
            return jax.tree.map(lambda array: array.reshape(*lead, *array.shape[1:]), results)

        return _map(mesh, on_device, cache, arrays, specs, specs["query"])

    return attend


def _check_rows(arrays: dict[str, jax.Array], groups: int) -> None:
    shapes = {"query": ", heads, 192", "output": ", heads, 192", "regions": ", slots"}
    for name in ROW_ARRAYS:
        if name not in arrays:
            continue
        shape, rest = list(arrays[name].shape), shapes.get(name, "")
        if len(shape) != 2 + rest.count(",") or shape[1] != groups:
            raise ValueError(f"{name}: expected shape [tokens, {groups}{rest}], got shape {shape}")


# --- context parallel


def shard_over_context(mesh: Mesh | AbstractMesh, axis: str) -> Callable[..., Result]:
    """`sparse_decode_attention` with the pages of the cache sharded over a mesh axis.

    The function takes what `sparse_decode_attention` takes, in the same shapes, and is meant for
    use inside `jax.jit`. Every device attends to the tokens whose pages it has; shares may be
    uneven or empty. The arrays should be placed as `context_specs` says:

    - cache: `[pages, groups, page_size, 384]`, or a `PackedCache`: the first pages on the first
      device, and so on, equally many on each.
    - block_table: `[requests, max_pages]`, with the numbers of pages in the whole cache. Or
      `[devices, requests, max_pages]`, sharded like the cache: a table for each device with the
      numbers of its own pages, -1 for those elsewhere; see `split_block_table`.
    - all else: the same on every device.

    It returns what `sparse_decode_attention` returns, the same on every device.

    Args:
        mesh: Its other axes see replicated arrays.
        axis: Name of the mesh axis; its size divides the pages of the cache.

    Raises:
        ValueError: The mesh has no such axis. The function raises what `sparse_decode_attention`
            does, with the sizes of one device where it is about sizes.
    """
    devices = _axis_size(mesh, axis)

    def attend(
        query: jax.Array,
        cache: jax.Array | PackedCache,
        regions: jax.Array,
        block_table: jax.Array,
        positions: jax.Array,
        active: jax.Array,
        output: jax.Array | None = None,
        *,
        k_scale: jax.Array | None = None,
        v_scale: jax.Array | None = None,
        gate: jax.Array | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Result:
        arrays = _present(
            query=query,
            regions=regions,
            block_table=block_table,
            positions=positions,
            active=active,
            output=output,
            k_scale=k_scale,
            v_scale=v_scale,
            gate=gate,
        )
        pages = _cache_shape(cache)[0]
        if pages % devices:
            raise ValueError(
                f"cache: expected pages in multiples of the {devices} devices of mesh axis "
                f"{axis!r}, got {pages} pages"
            )
        specs = context_specs(axis)
        own_tables = block_table.ndim == 3
        if own_tables:
            specs["block_table"] = P(axis)
            if block_table.shape[0] != devices:
                raise ValueError(
                    f"block_table: expected shape [requests, max_pages] or [{devices}, requests, "
                    f"max_pages], got shape {list(block_table.shape)}"
                )

        def on_device(cache, arrays):
            table = arrays.pop("block_table")
            # Pages of other devices become numbers outside this device's cache.
            first = lax.axis_index(axis) * (pages // devices)
            table = table[0] if own_tables else table - first
            return context_attention(
                cache=cache,
                block_table=table,
                axis=axis,
                return_lse=return_lse,
                **arrays,
                **options,
            )

        return _map(mesh, on_device, cache, arrays, specs, P())

    return attend


@usual_promotion
def context_attention(
    query: jax.Array,
    cache: jax.Array | PackedCache,
    regions: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    output: jax.Array | None = None,
    *,
    axis: str,
    clear_inactive: bool = True,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    gate: jax.Array | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Result:
    """What `shard_over_context` runs on a device, for use inside a `jax.shard_map` of one's own.

    Args:
        query: As `sparse_decode_attention`, the same on every device of the axis; so are the other
            arrays but for `cache` and `block_table`.
        cache: This device's pages.
        regions: As `sparse_decode_attention`.
        block_table: `[requests, max_pages]` int32, this device's own: the place of each page in
            `cache`, anything outside (as -1) for pages that other devices have.
        positions: As `sparse_decode_attention`.
        active: As `sparse_decode_attention`.
        output: As `sparse_decode_attention`.
        axis: Name of the mesh axis over which contexts are spread.
        clear_inactive: As `sparse_decode_attention`.
        k_scale: As `sparse_decode_attention`.
        v_scale: As `sparse_decode_attention`.
        gate: As `sparse_decode_attention`; applied once, after the merge.
        return_lse: As `sparse_decode_attention`.
        **options: The other options of `sparse_decode_attention`, without `validate`: a page that
            another device has looks like a mistake here.

    Returns:
        As `sparse_decode_attention`, the same on every device of the axis.

    Raises:
        TypeError, ValueError, NotImplementedError: As `sparse_decode_attention`.
    """
    arrays = {
        "query": query,
        "regions": regions,
        "block_table": block_table,
        "positions": positions,
        "active": active,
        "output": output,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "gate": gate,
    }
    geometry, *share = attend_to_share(cache, arrays, clear_inactive=clear_inactive, **options)
    dtype = geometry.output_dtype
    attention, lse = merge(*lax.all_gather(share, axis))
    result = attention.astype(dtype)
    if gate is not None:
        sigmoid = 1 / (1 + jnp.exp(-gate.astype(jnp.float32)))
        sigmoid = sigmoid.astype(gate.dtype).astype(jnp.float32).reshape(*lse.shape, 1)
        result = (result.astype(jnp.float32) * sigmoid).astype(dtype)
    kept = jnp.zeros_like(result) if clear_inactive or output is None else output
    result = jnp.where(active[:, None, None], result, kept)
    return (result, lse) if return_lse else result


@usual_promotion
def split_block_table(block_table: jax.Array, owner: jax.Array, devices: int) -> jax.Array:
    """Splits a block table by the device that has each page.

    Args:
        block_table: `[requests, max_pages]` int32, logical to physical page.
        owner: `[pages]`, integers: the device that has each physical page.
        devices: How many devices there are.

    Returns:
        `[devices, requests, max_pages]` int32: a table for each device. A device numbers its pages
        from 0, in the order that they have in `owner`; pages that it does not have are -1.

    Raises:
        ValueError: A shape is wrong.
    """
    block_table, owner = jnp.asarray(block_table), jnp.asarray(owner)
    if owner.ndim != 1 or not owner.size:
        raise ValueError(f"owner: expected shape [pages], got shape {list(owner.shape)}")
    inside = (block_table >= 0) & (block_table < owner.size)
    page = jnp.where(inside, block_table, 0)

    def table(device):
        held = owner == device
        place = jnp.cumsum(held, dtype=jnp.int32) - 1
        return jnp.where(inside & held[page], place[page], -1)

    return jax.vmap(table)(jnp.arange(devices))


# --- both


def _axis_size(mesh: Mesh | AbstractMesh, axis: str) -> int:
    if axis not in mesh.shape:
        raise ValueError(f"axis: expected one of {list(mesh.shape)}, got {axis!r}")
    return mesh.shape[axis]


def _present(**arrays: jax.Array | None) -> dict[str, jax.Array]:
    present = {name: array for name, array in arrays.items() if array is not None}
    require_jax_arrays(present)
    return present


def _cache_shape(cache: object) -> tuple[int, ...]:
    """`[pages, groups, page_size, 384]` of a cache over all devices."""
    require_jax_arrays({"cache": cache.storage if isinstance(cache, PackedCache) else cache})
    shape = describe_cache(cache).shape
    if len(shape) != 4:
        raise ValueError(
            f"cache: expected shape [pages, groups, page_size, 384], got shape {list(shape)}"
        )
    return shape


def _map(
    mesh: Mesh | AbstractMesh,
    on_device: Callable[..., Result],
    cache: jax.Array | PackedCache,
    arrays: dict[str, jax.Array],
    specs: dict[str, P],
    out_spec: P,
) -> Result:
    """Runs `on_device(cache, arrays)` on every device of the mesh."""
    cache_spec: Any = specs["cache"]
    if isinstance(cache, PackedCache):
        cache_spec = dataclasses.replace(cache, storage=cache_spec, offset=P())
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(cache_spec, {name: specs[name] for name in arrays}),
        out_specs=out_spec,
        check_vma=False,  # Pallas calls do not say over which axes their results vary
    )(cache, arrays)
