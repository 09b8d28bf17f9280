"""The public operation for JAX arrays."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.fuser  # JAX 0.11's interpreter does; so late that it would retrace
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_decode.contract import (
    CACHE_DIM,
    ArraySpec,
    Geometry,
    check_call,
    check_capability,
    check_count,
)
from sparse_decode.pallas_kernels.kernels import attend
from sparse_decode.pallas_kernels.promotion import usual_promotion
from sparse_decode.plan import Config, Plan, check_offset, make_plan
from sparse_decode.validation import check_indices, check_option


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedCache:
    """A cache that is part of larger pages, as serving stacks keep it.

    Attributes:
        storage: `[pages, page stride]`, dense, in the cache's dtype: whole pages, with whatever
            else they hold.
        offset: int32 scalar, where the first group of each page begins, in elements. It may be
            traced, so one compiled program serves every layer of a cache. A traced value that is no
            multiple of `offset_unit` is rounded down to one, and one that leads outside the page,
            or further than 32 bits reach, is moved inside.
        groups: KV heads.
        page_size: Tokens a page.
        group_stride: Elements between groups; None is `page_size * 384`.
        token_stride: Elements between tokens; None is 384.
        offset_unit: Number of elements that every offset is a multiple of; wide loads need 16
            bytes.
    """

    storage: jax.Array
    offset: jax.Array | int
    groups: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    group_stride: int | None = dataclasses.field(default=None, metadata={"static": True})
    token_stride: int | None = dataclasses.field(default=None, metadata={"static": True})
    offset_unit: int = dataclasses.field(default=16, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(pages, groups, page_size, 384)`, as of a cache that is an array."""
        return self.storage.shape[0], self.groups, self.page_size, CACHE_DIM

    @property
    def dtype(self) -> Any:
        """Dtype of `storage`."""
        return self.storage.dtype

    def strides(self) -> tuple[int, int, int, int]:
        """Elements between pages, groups, tokens and dims."""
        token = CACHE_DIM if self.token_stride is None else self.token_stride
        group = self.page_size * token if self.group_stride is None else self.group_stride
        return self.storage.shape[1], group, token, 1


def sparse_decode_attention(
    query: jax.Array,
    cache: jax.Array | PackedCache,
    regions: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    output: jax.Array | None = None,
    *,
    scale: float,
    query_len: int = 1,
    splits: int | None = None,
    clear_inactive: bool = True,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    gate: jax.Array | None = None,
    return_lse: bool = False,
    config: Config | None = None,
    validate: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends to selected regions of a paged KV cache.

    Runs on NVIDIA GPUs as Pallas kernels (JAX's Triton backend) and elsewhere in Pallas'
    interpreter, inside and outside `jax.jit`; one jitted function lowers for either. Follows the
    interface of vLLM's Step-5 `sparse_decode_attention`, as a function that returns its result.
    `jax.vmap` over anything but cache and scales folds the calls into one; over those it runs them
    one after the other. There is no derivative.

    Args:
        query: `[rows, heads, 192]`, bfloat16 or float16; `rows = requests * query_len * groups`,
            group fastest; 1 to 16 heads.
        cache: `[pages, groups, page_size, 384]`, keys then values, in the dtype of `query` or FP8
            E4M3 (float8_e4m3fn, or uint8 holding it); page size a multiple of 8. Or a
            `PackedCache`.
        regions: `[rows, slots]`, int32 or int64. Region `i` is tokens `8i` to `8i + 7` of the
            request, negative is unused. Only the trailing `position // 8 + 1` slots are read.
        block_table: `[requests, max_pages]` int32, logical to physical page.
        positions: `[rows]`, int32 or int64, of the query token, which attends to tokens up to its
            own.
        active: `[rows]` bool, false for padding.
        output: `[rows, heads, 192]`, bfloat16 or float16, or None. Gives the dtype of the result
            and, without `clear_inactive`, the inactive rows. Donate it to have it written in place.
        scale: Multiplies q.k.
        query_len: Query tokens a request.
        splits: Programs that share a row, 1 to 256; None leaves it to `config`.
        clear_inactive: Inactive rows are exactly zero. If false they keep what `output` holds, or
            are zero without `output`.
        k_scale: One float32 that multiplies FP8 keys; required with an FP8 cache, otherwise unused.
        v_scale: The same for values.
        gate: `[tokens, groups * heads]`, bfloat16, float16 or float32, before its sigmoid; or None.
        return_lse: Whether to return lse as well.
        config: Launch settings; None takes `default_config`.
        validate: Look for indices that cannot be meant first, and wait for the answer; see
            `sparse_decode.validation.check_indices`. Not where they are traced.

    Returns:
        `[rows, heads, 192]` in the dtype of `output` or `query`; with `return_lse` also the
        natural-log log-sum-exp of the scaled logits, `[rows, heads]` float32, -inf where nothing is
        attended.

    Raises:
        TypeError: A dtype or the type of an argument is wrong, or indices to validate are traced.
        ValueError: A shape or an option is wrong, an FP8 scale is missing, or validation found an
            index.
        NotImplementedError: The GPU cannot run the kernels, the cache has 2**31 tokens, or strides
            or an offset from which 32 bits do not reach its end, an FP8 cache is laid out in odd
            strides and larger than 2 GiB, or the call is differentiated.
    """
    arrays = {
        "query": query,
        "regions": narrow(regions),
        "block_table": block_table,
        "positions": narrow(positions),
        "active": active,
        "output": output,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "gate": gate,
    }
    arrays = {name: array for name, array in arrays.items() if array is not None}
    specs = {name: _describe(name, array) for name, array in arrays.items()}
    specs["cache"] = describe_cache(cache)
    _check_options(splits, config, return_lse)
    check_option(validate)
    geometry = check_call(
        **specs,
        scale=scale,
        query_len=query_len,
        splits=1 if splits is None else splits,
        clear_inactive=clear_inactive,
    )
    check_device(geometry.fp8)
    if validate:
        check_indices(
            cache=cache,
            regions=regions,
            block_table=block_table,
            positions=positions,
            active=active,
            query_len=query_len,
        )
    if geometry.rows == 0:
        empty = jnp.zeros(query.shape, geometry.output_dtype)
        return (empty, jnp.zeros(query.shape[:2], jnp.float32)) if return_lse else empty
    plan = plan_call(
        cache,
        geometry,
        specs,
        scale=scale,
        clear_inactive=clear_inactive,
        return_lse=return_lse,
        config=config,
        splits=splits,
    )
    options = {
        "scale": float(scale),
        "query_len": query_len,
        "splits": splits,
        "clear_inactive": clear_inactive,
        "return_lse": return_lse,
        "config": config,
    }
    return _compiled(plan, tuple(options.items()))({**arrays, "cache": cache})


@functools.lru_cache(maxsize=1024)
def _compiled(plan: Plan, options: tuple[tuple[str, Any], ...]) -> Callable:
    """The function of a plan's arrays, which JAX compiles once for all calls outside of `jit`."""
    again = functools.partial(sparse_decode_attention, **dict(options))
    return jax.jit(_transformable(functools.partial(_run, plan), again))


@usual_promotion
def _run(plan: Plan, arrays: dict[str, Any]) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Brings a checked call's arrays into the kernels' shapes, and launches."""
    cache = arrays["cache"]
    buffers = {
        "query": arrays["query"].reshape(plan.buffer("query")[1]),
        "cache": _cache_buffer(cache, plan),
        "regions": _pairs(arrays["regions"]),
        "block_table": jnp.asarray(arrays["block_table"]),
        "positions": _pairs(arrays["positions"]),
        "active": jnp.asarray(arrays["active"]),
    }
    if plan.geometry.fp8:
        buffers |= {name: arrays[name].reshape(1) for name in ("k_scale", "v_scale")}
    if isinstance(cache, PackedCache):
        buffers["offset"] = jnp.asarray(cache.offset, jnp.int32).reshape(1)
    if "gate" in arrays:
        buffers["gate"] = jnp.asarray(arrays["gate"])
    if "output" in arrays:
        buffers["output"] = arrays["output"].reshape(plan.buffer("output")[1])
    results = lax.platform_dependent(
        buffers,
        cuda=functools.partial(attend, plan),
        default=functools.partial(attend, dataclasses.replace(plan, interpret=True)),
    )
    result = results["output"].reshape(arrays["query"].shape)
    return (result, results["lse"]) if plan.return_lse else result


# --- transformations


_PER_REQUEST = ("query", "regions", "block_table", "positions", "active", "output", "gate")


def _transformable(run: Callable[[dict[str, Any]], Any], again: Callable[..., Any]) -> Callable:
    """What `jax.vmap` and differentiation make of a call.

    Args:
        run: Computes a call from its arrays by name.
        again: The public function, which a batch of calls goes through once more.

    Returns:
        `run` that refuses derivatives. Under `jax.vmap` it becomes one call of more requests where
        only per-request arguments are batched, and a loop over the calls where others are.
    """

    @jax.custom_batching.custom_vmap
    def batchable(arrays):
        return run(arrays)

    @batchable.def_vmap
    def batch(size, flags, arrays):
        (batched,) = flags
        shared = [batched[name] for name in batched if name not in _PER_REQUEST]
        if any(jax.tree.leaves(shared)):
            results = _one_by_one(again, batched, arrays)
        else:
            results = _folded(again, size, batched, arrays)
        return results, jax.tree.map(lambda _: True, results)

    @jax.custom_jvp
    def forward(arrays):
        return batchable(arrays)

    @forward.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            "sparse_decode_attention is forward only: it has no derivative. Where gradients need "
            "not flow through it, wrap its inputs in jax.lax.stop_gradient"
        )

    return forward


@usual_promotion
def _folded(again: Callable[..., Any], size: int, batched: dict, arrays: dict) -> Any:
    """A batch of calls that share cache and scales, as one call of all their requests."""

    def fold(name):
        array = arrays[name]
        if not batched[name]:
            array = jnp.broadcast_to(array, (size, *array.shape))
        return array.reshape(size * array.shape[1], *array.shape[2:])

    per_request = {name: fold(name) for name in _PER_REQUEST if name in arrays}
    results = again(**{**arrays, **per_request})
    rows = arrays["query"].shape[-3]
    return jax.tree.map(lambda x: x.reshape(size, rows, *x.shape[1:]), results)


@usual_promotion
def _one_by_one(again: Callable[..., Any], batched: dict, arrays: dict) -> Any:
    """A batch of calls, one after the other."""
    leaves, tree = jax.tree.flatten(arrays)
    flags = jax.tree.leaves(batched)

    def one(own):
        own = iter(own)
        mixed = (next(own) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True))
        return again(**tree.unflatten(mixed))

    return lax.map(one, [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag])


# --- checks and views


def _describe(name: str, array: object) -> ArraySpec:
    if not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(f"{name}: expected a JAX array, got {type(array).__name__}")
    return ArraySpec(array.shape, array.dtype.name)


def describe_cache(cache: object) -> ArraySpec:
    """The contract's description of a cache; raises TypeError or ValueError for a wrong one."""
    if not isinstance(cache, PackedCache):
        return _describe("cache", cache)
    storage = _describe("cache.storage", cache.storage)
    if len(storage.shape) != 2:
        raise ValueError(
            f"cache.storage: expected shape [pages, page stride], got shape {list(storage.shape)}"
        )
    for name in ("groups", "page_size", "group_stride", "token_stride", "offset_unit"):
        value = getattr(cache, name)
        if value is not None or not name.endswith("stride"):
            check_count(f"cache.{name}", value, 1 if name == "offset_unit" else 0, None)
    page_stride = storage.shape[1]
    _, group_stride, token_stride, _ = strides = cache.strides()
    reach = (cache.groups - 1) * group_stride + (cache.page_size - 1) * token_stride + CACHE_DIM
    if reach > page_stride:
        raise ValueError(
            f"cache: expected groups and tokens inside a page of {page_stride} elements, got "
            f"groups {cache.groups} * stride {group_stride}, "
            f"page size {cache.page_size} * stride {token_stride}"
        )
    _check_offset(cache, page_stride - reach)
    return ArraySpec(cache.shape, storage.dtype, strides)


def _check_offset(cache: PackedCache, last: int) -> None:
    offset = cache.offset
    if isinstance(offset, np.ndarray) and offset.shape == ():
        offset = offset[()]
    if isinstance(offset, jax.Array | np.ndarray):
        if not jnp.issubdtype(offset.dtype, jnp.integer):
            raise TypeError(f"cache.offset: expected an integer dtype, got {offset.dtype}")
        if offset.shape != ():
            raise ValueError(f"cache.offset: expected a scalar, got shape {list(offset.shape)}")
        return
    check_count("cache.offset", offset, 0, last)
    if offset % cache.offset_unit:
        raise ValueError(
            f"cache.offset: expected a multiple of offset_unit = {cache.offset_unit}, got {offset}"
        )


def plan_call(
    cache: jax.Array | PackedCache, geometry: Geometry, specs: dict[str, ArraySpec], **options: Any
) -> Plan:
    """`make_plan` for either kind of cache; refuses a known offset that is out of reach."""
    if isinstance(cache, PackedCache):
        options |= {"cache_unit": cache.offset_unit, "cache_page": specs["cache"].stride(0)}
    plan = make_plan(geometry, specs, **options)
    if isinstance(cache, PackedCache) and not isinstance(cache.offset, jax.Array):
        check_offset(int(cache.offset), plan.last_offset)
    return plan


def check_device(fp8: bool) -> None:
    """Raises NotImplementedError for a GPU on which the kernels cannot run.

    Args:
        fp8: Whether the cache is FP8.
    """
    if jax.default_backend() != "gpu":
        return
    device = jax.devices()[0]
    kind, capability = device.device_kind, device.compute_capability
    if not re.fullmatch(r"\d+\.\d+", capability):
        raise NotImplementedError(f"query: expected an NVIDIA GPU, got {kind} ({capability})")
    check_capability(tuple(int(part) for part in capability.split(".")), fp8, lambda: kind)


def _check_options(splits: object, config: object, return_lse: object) -> None:
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: expected a bool, got {type(return_lse).__name__}")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config: expected a Config or None, got {type(config).__name__}")


def narrow(index: jax.Array) -> jax.Array:
    """A NumPy array of int64 as the nearest int32 (JAX may have no 64 bits); others as they are."""
    if isinstance(index, np.ndarray) and index.dtype == np.int64:
        limits = np.iinfo(np.int32)
        return np.clip(index, limits.min, limits.max).astype(np.int32)
    return index


def _pairs(index: jax.Array) -> jax.Array:
    """int32 as it is, int64 as pairs of int32 (low word first)."""
    if index.dtype == jnp.int32:
        return jnp.asarray(index)
    return lax.bitcast_convert_type(index, jnp.int32).reshape(*index.shape[:-1], -1)


def _cache_buffer(cache: jax.Array | PackedCache, plan: Plan) -> jax.Array:
    """The cache in the shape and dtype in which the kernels read it; no data moves."""
    storage = jnp.asarray(cache.storage if isinstance(cache, PackedCache) else cache)
    if plan.words:
        storage = lax.bitcast_convert_type(storage.reshape(*plan.buffer("cache")[1], 2), jnp.uint16)
    elif plan.geometry.fp8:
        storage = lax.bitcast_convert_type(storage, jnp.float8_e4m3fn)
    return storage.reshape(plan.buffer("cache")[1])
