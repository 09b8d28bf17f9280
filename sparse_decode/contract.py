"""The paged layout contract: what a call of `sparse_decode_attention` must look like.

Every path describes its arrays as `ArraySpec`s and hands them to `check_call`, which either raises
an error that names the argument or returns the `Geometry` that launches are made from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple, NoReturn

HEAD_DIM = 192
CACHE_DIM = 2 * HEAD_DIM
REGION_TOKENS = 8
MAX_HEADS = 16
MAX_SPLITS = 256

# With an FP8 cache the query is an operand in float16: elements beyond its largest finite value are
# taken as that value, and NaN stays NaN.
FP8_QUERY_MAX = 65504.0
FLOAT32_MAX = (2 - 2**-23) * 2.0**127

# Compute capabilities of the oldest GPUs that Triton supports, and of the first that convert FP8.
OLDEST_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)

FLOAT16_DTYPES = ("bfloat16", "float16")
FP8_DTYPES = ("float8_e4m3fn", "uint8")
INDEX_DTYPES = ("int32", "int64")
GATE_DTYPES = (*FLOAT16_DTYPES, "float32")

ARRAY_NAMES = (
    "query",
    "cache",
    "regions",
    "block_table",
    "positions",
    "active",
    "output",
    "k_scale",
    "v_scale",
    "gate",
)


class ArraySpec(NamedTuple):
    """One array argument, seen without its framework.

    Attributes:
        shape: Extent of each dimension.
        dtype: NumPy-style name, such as "bfloat16", "float8_e4m3fn" or "int64".
        strides: Elements between neighbours of each dimension; None means dense row-major.
        device: Any name that is equal for arrays on one device; None is not compared.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    device: str | None = None

    def stride(self, dim: int) -> int:
        """Elements between neighbours of dimension `dim`."""
        if self.strides is not None:
            return self.strides[dim]
        return math.prod(self.shape[dim % len(self.shape) + 1 :])


@dataclass(frozen=True)
class Geometry:
    """The sizes of a checked call, in the contract's terms.

    Attributes:
        rows: (token, group) pairs; `tokens * groups`.
        heads: Query heads per group, 1 to 16.
        groups: KV heads.
        query_len: Query tokens per request.
        slots: Columns of `regions`.
        pages: Physical pages of the cache.
        page_size: Tokens a page.
        max_pages: Columns of `block_table`.
        splits: Shares of a row's live slots.
        query_dtype: Dtype name of `query`.
        cache_dtype: "float8_e4m3fn" for every FP8 cache, else the dtype name of `query`.
        output_dtype: Dtype name of the output.
        gate_dtype: Dtype name of `gate`, or None.
    """

    rows: int
    heads: int
    groups: int
    query_len: int
    slots: int
    pages: int
    page_size: int
    max_pages: int
    splits: int
    query_dtype: str
    cache_dtype: str
    output_dtype: str
    gate_dtype: str | None

    @property
    def fp8(self) -> bool:
        """Whether the cache holds FP8."""
        return self.cache_dtype == "float8_e4m3fn"

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return self.rows // self.groups

    @property
    def rows_per_request(self) -> int:
        """Consecutive rows that share a row of the block table."""
        return self.groups * self.query_len

    @property
    def requests(self) -> int:
        """Requests, which is the number of rows of the block table."""
        return self.rows // self.rows_per_request

    @property
    def max_regions(self) -> int:
        """Region ids at or above this point outside the block table."""
        return self.max_pages * self.page_size // REGION_TOKENS


def default_splits(rows: int) -> int:
    """Splits a row that give about 256 programs, at most 32, as the reference chooses them."""
    splits = 1
    while splits < 32 and rows * splits * 2 <= 256:
        splits *= 2
    return splits


def check_capability(capability: tuple[int, ...], fp8: bool, gpu: Callable[[], str]) -> None:
    """Raises NotImplementedError for an NVIDIA GPU that is too old for the kernels.

    Args:
        capability: Its compute capability, major and minor.
        fp8: Whether the cache is FP8.
        gpu: Tells its name, for the message.
    """
    oldest = FP8_CAPABILITY if fp8 else OLDEST_CAPABILITY
    if capability < oldest:
        use = "cache: an FP8 cache" if fp8 else "query: Triton"
        raise NotImplementedError(
            f"{use} needs compute capability {oldest[0]}.{oldest[1]} or newer, "
            f"got {capability[0]}.{capability[1]} ({gpu()})"
        )


def check_call(
    *,
    query: ArraySpec,
    cache: ArraySpec,
    regions: ArraySpec,
    block_table: ArraySpec,
    positions: ArraySpec,
    active: ArraySpec,
    output: ArraySpec | None = None,
    k_scale: ArraySpec | None = None,
    v_scale: ArraySpec | None = None,
    gate: ArraySpec | None = None,
    scale: float,
    query_len: int = 1,
    splits: int,
    clear_inactive: bool = True,
) -> Geometry:
    """Checks one call against the contract and returns its sizes.

    Args:
        query: `[rows, heads, 192]`, bfloat16 or float16, last stride 1.
        cache: `[pages, groups, page_size, 384]`, dtype of `query` or FP8, last stride 1.
        regions: `[rows, slots]`, int32 or int64, last stride 1.
        block_table: `[requests, max_pages]`, int32, last stride 1.
        positions: `[rows]`, int32 or int64, dense.
        active: `[rows]`, bool, dense.
        output: `[rows, heads, 192]`, bfloat16 or float16, last stride 1, or None.
        k_scale: One float32, required with an FP8 cache and not looked at otherwise.
        v_scale: As `k_scale`.
        gate: `[tokens, groups * heads]`, bfloat16, float16 or float32, or None.
        scale: Finite real number that multiplies q.k.
        query_len: Query tokens a request, at least 1.
        splits: Shares of a row's live slots, 1 to 256.
        clear_inactive: Whether inactive rows are zeroed.

    Raises:
        TypeError: A dtype or the type of an option is wrong.
        ValueError: A shape, stride, device or option value is wrong, or an FP8 scale is missing.
    """
    _check_type("scale", scale, Real, "a real number")
    if not abs(scale) <= FLOAT32_MAX:
        finite = abs(scale) < math.inf
        _wrong("scale", "a number in float32's range" if finite else "a finite number", scale)
    check_count("query_len", query_len, 1, None)
    check_count("splits", splits, 1, MAX_SPLITS)
    _check_type("clear_inactive", clear_inactive, bool, "a bool")

    _check_rank("query", query, "[rows, heads, 192]", 3)
    rows, heads, _ = query.shape
    if query.shape[2] != HEAD_DIM:
        _wrong("query", "shape [rows, heads, 192]", f"shape {list(query.shape)}")
    if not 1 <= heads <= MAX_HEADS:
        _wrong("query", f"1 to {MAX_HEADS} heads in dimension 1", f"{heads}")
    _check_dtype("query", query, FLOAT16_DTYPES)
    _check_unit_stride("query", query)

    _check_rank("cache", cache, "[pages, groups, page_size, 384]", 4)
    pages, groups, page_size, _ = cache.shape
    if cache.shape[3] != CACHE_DIM:
        _wrong("cache", "shape [pages, groups, page_size, 384]", f"shape {list(cache.shape)}")
    if page_size < REGION_TOKENS or page_size % REGION_TOKENS:
        _wrong("cache", f"a page size that is a multiple of {REGION_TOKENS}", f"{page_size}")
    if pages < 1 or groups < 1:
        _wrong("cache", "at least one page and one group", f"shape {list(cache.shape)}")
    _check_dtype("cache", cache, (query.dtype, *FP8_DTYPES), note=" (the dtype of query, or FP8)")
    _check_unit_stride("cache", cache)
    fp8 = cache.dtype in FP8_DTYPES

    rows_per_request = groups * query_len
    if rows % rows_per_request:
        _wrong(
            "query",
            f"rows in multiples of groups * query_len = {groups} * {query_len}",
            f"{rows} rows",
        )
    requests = rows // rows_per_request

    _check_rank("regions", regions, "[rows, slots]", 2)
    if regions.shape[0] != rows or regions.shape[1] < 1:
        _wrong("regions", f"shape [{rows}, slots] with slots >= 1", f"shape {list(regions.shape)}")
    _check_dtype("regions", regions, INDEX_DTYPES)
    _check_unit_stride("regions", regions)

    _check_rank("block_table", block_table, "[requests, max_pages]", 2)
    if block_table.shape[0] != requests or block_table.shape[1] < 1:
        _wrong(
            "block_table",
            f"shape [{requests}, max_pages] with max_pages >= 1 "
            f"({requests} requests = {rows} rows / (groups {groups} * query_len {query_len}))",
            f"shape {list(block_table.shape)}",
        )
    max_pages = block_table.shape[1]
    if max_pages * page_size > 2**31 - 1:
        _wrong(
            "block_table",
            "max_pages * page_size below 2**31",
            f"{max_pages} * {page_size}",
        )
    _check_dtype("block_table", block_table, ("int32",))
    _check_unit_stride("block_table", block_table)

    for name, spec, dtypes in (
        ("positions", positions, INDEX_DTYPES),
        ("active", active, ("bool",)),
    ):
        _check_shape(name, spec, (rows,))
        _check_dtype(name, spec, dtypes)
        _check_unit_stride(name, spec)

    if output is not None:
        _check_shape("output", output, (rows, heads, HEAD_DIM))
        _check_dtype("output", output, FLOAT16_DTYPES)
        _check_unit_stride("output", output)
        _check_disjoint("output", output)

    if fp8:
        for name, spec in (("k_scale", k_scale), ("v_scale", v_scale)):
            if spec is None:
                _wrong(name, "one float32 on the device, as the cache is FP8", "None")
            if math.prod(spec.shape) != 1:
                _wrong(name, "one element", f"shape {list(spec.shape)}")
            _check_dtype(name, spec, ("float32",))

    if gate is not None:
        _check_shape("gate", gate, (rows // groups, groups * heads))
        _check_dtype("gate", gate, GATE_DTYPES)

    described = {
        "cache": cache,
        "regions": regions,
        "block_table": block_table,
        "positions": positions,
        "active": active,
        "output": output,
        "gate": gate,
        "k_scale": k_scale if fp8 else None,
        "v_scale": v_scale if fp8 else None,
    }
    for name, spec in described.items():
        if spec is None or None in (spec.device, query.device):
            continue
        if spec.device != query.device:
            _wrong(name, f"device {query.device}, where query is", f"device {spec.device}")

    return Geometry(
        rows=rows,
        heads=heads,
        groups=groups,
        query_len=int(query_len),
        slots=regions.shape[1],
        pages=pages,
        page_size=page_size,
        max_pages=max_pages,
        splits=int(splits),
        query_dtype=query.dtype,
        cache_dtype="float8_e4m3fn" if fp8 else cache.dtype,
        output_dtype=query.dtype if output is None else output.dtype,
        gate_dtype=None if gate is None else gate.dtype,
    )


def _wrong(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {got}")


def _check_type(name: str, value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def check_count(name: str, value: object, low: int, high: int | None) -> None:
    """Raises TypeError unless `value` is an integer, ValueError unless it is `low` to `high`."""
    _check_type(name, value, Integral, "an integer")
    if value < low or (high is not None and value > high):  # type: ignore[operator]
        _wrong(name, f"at least {low}" if high is None else f"{low} to {high}", value)


def _check_rank(name: str, spec: ArraySpec, expected: str, rank: int) -> None:
    if len(spec.shape) != rank:
        _wrong(name, f"shape {expected}", f"shape {list(spec.shape)}")


def _check_shape(name: str, spec: ArraySpec, shape: tuple[int, ...]) -> None:
    if tuple(spec.shape) != shape:
        _wrong(name, f"shape {list(shape)}", f"shape {list(spec.shape)}")


def _check_dtype(name: str, spec: ArraySpec, dtypes: tuple[str, ...], note: str = "") -> None:
    if spec.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(dtypes)}{note}, got {spec.dtype}")


def _check_unit_stride(name: str, spec: ArraySpec) -> None:
    if spec.shape[-1] > 1 and 0 not in spec.shape and spec.stride(-1) != 1:
        _wrong(name, "last stride 1", f"strides {list(spec.strides or ())}")


def _check_disjoint(name: str, spec: ArraySpec) -> None:
    """Refuses a layout in which two elements may share memory."""
    if 0 in spec.shape:
        return
    reach = 1
    for stride, extent in sorted(
        (spec.stride(dim), extent) for dim, extent in enumerate(spec.shape) if extent > 1
    ):
        if stride < reach:
            _wrong(name, "strides that keep elements apart", f"strides {list(spec.strides or ())}")
        reach = stride * (extent - 1) + reach
