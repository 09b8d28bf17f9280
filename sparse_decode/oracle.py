"""The float64 oracle: what a call must compute, slowly and plainly, in NumPy.

`evaluate` follows the contract in float64; `evaluate(..., plain=True)` is the same walk as a plain
program of the cache's arithmetic would do it (float32 sums over 16-bit operands), whose error sets
the scale of the tolerances.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ml_dtypes import finfo, float8_e4m3fn

from sparse_decode.call import Call
from sparse_decode.contract import FP8_QUERY_MAX, HEAD_DIM, REGION_TOKENS


@dataclass(frozen=True)
class Reference:
    """What a call must give.

    Attributes:
        exact: `[rows, heads, 192]` float64, gated, nothing rounded.
        output: `exact` with the contract's rounding points, in the output dtype; rows that are not
            `touched` hold zeros.
        lse: `[rows, heads]` float64, natural logarithm; -inf where nothing is attended.
        touched: `[rows]` bool, false where an output buffer keeps its content.
        overflow: `[rows, heads]` float64, size of `exact` at which the output overflows: the
            largest number of its dtype * gate.
        within: `[rows, heads, 192]` bool, false where `exact` is twice as large or no number.
        value_size: `[rows, heads]` float64, largest of sum(p * |v|) * gate over the dims `within`.
        logit_size: `[rows, heads]` float64, largest of |scale| * sum(|q| * |k|) over the tokens
            with a finite logit.
    """

    exact: np.ndarray
    output: np.ndarray
    lse: np.ndarray
    touched: np.ndarray
    overflow: np.ndarray
    within: np.ndarray
    value_size: np.ndarray
    logit_size: np.ndarray


def attended(call: Call, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Physical places that `row` attends to.

    Returns:
        `(pages, offsets)`, two int64 vectors with one entry for each attended token.
    """
    geometry = call.geometry()
    position = int(call.positions[row])
    if not call.active[row] or position < 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    live = min(position // REGION_TOKENS + 1, geometry.slots)
    ids = call.regions[row, geometry.slots - live :].astype(np.int64)
    ids = ids[(ids >= 0) & (ids < geometry.max_regions)]
    tokens = (ids[:, None] * REGION_TOKENS + np.arange(REGION_TOKENS)).ravel()
    tokens = tokens[tokens <= position]
    table = call.block_table[row // geometry.rows_per_request].astype(np.int64)
    pages = table[tokens // geometry.page_size]
    inside = (pages >= 0) & (pages < geometry.pages)
    return pages[inside], tokens[inside] % geometry.page_size


def evaluate(call: Call, *, plain: bool = False) -> Reference:
    """Computes a call.

    Args:
        call: The inputs; checked against the contract.
        plain: Use the arithmetic of a plain 16-bit program in place of float64.

    Raises:
        TypeError, ValueError: As `contract.check_call`.
    """
    geometry = call.geometry()
    work = np.float32 if plain else np.float64
    output_dtype = call.query.dtype if call.output is None else call.output.dtype
    operand = np.dtype(np.float16) if geometry.fp8 else call.cache.dtype
    cache = call.cache.view(float8_e4m3fn) if geometry.fp8 else call.cache
    k_scale = work(call.k_scale.item()) if geometry.fp8 else work(1)
    v_scale = work(call.v_scale.item()) if geometry.fp8 else work(1)

    shape = (geometry.rows, geometry.heads)
    attention = np.zeros((*shape, HEAD_DIM), work)
    lse = np.full(shape, -np.inf, work)
    value_size = np.zeros(attention.shape)
    logit_size = np.zeros(shape)
    with np.errstate(all="ignore"):
        for row in range(geometry.rows):
            pages, offsets = attended(call, row)
            if not len(pages):
                continue
            lines = cache[pages, row % geometry.groups, offsets].astype(work)
            keys, values = lines[:, :HEAD_DIM], lines[:, HEAD_DIM:]
            query = call.query[row].astype(work)
            if geometry.fp8:
                query = np.clip(query, -FP8_QUERY_MAX, FP8_QUERY_MAX)
            query = query.astype(operand).astype(work) if plain else query
            factor = work(call.scale) * k_scale
            logits = (query @ keys.T) * factor
            pivot = logits.max(axis=1, keepdims=True)
            weights = np.exp(logits - pivot)
            total = weights.sum(axis=1, keepdims=True)
            rounded = weights.astype(operand).astype(work) if plain else weights
            attention[row] = (rounded @ values) * (v_scale / total)
            lse[row] = (pivot + np.log(total))[:, 0]
            value_size[row] = (weights @ np.abs(values)) * (abs(v_scale) / total)
            products = (np.abs(query) @ np.abs(keys).T) * abs(factor)
            logit_size[row] = np.where(np.isfinite(logits), products, 0).max(axis=1)

        gate = _gate(call, work)
        rounded = attention.astype(output_dtype)
        overflow = np.full((*shape, 1), float(finfo(output_dtype).max))
        if gate is None:
            exact, output = attention, rounded
        else:
            cleared = ~call.active
            gate[cleared] = 0
            exact = attention * gate
            value_size = value_size * gate
            overflow = overflow * gate
            output = (
                rounded.astype(np.float32)
                * gate.astype(np.float32).astype(call.gate.dtype).astype(np.float32)
            ).astype(output_dtype)
        within = np.abs(exact) < 2 * overflow
    touched = np.ones(geometry.rows, bool)
    if call.output is not None and not call.clear_inactive:
        touched = call.active.copy()
    return Reference(
        exact=(output if plain else exact).astype(np.float64),
        output=output,
        lse=lse.astype(np.float64),
        touched=touched,
        overflow=overflow[:, :, 0],
        within=within,
        value_size=np.where(within, value_size, 0).max(axis=2),
        logit_size=logit_size,
    )


def _gate(call: Call, work: type) -> np.ndarray | None:
    """`sigmoid(gate)` laid out as `[rows, heads, 1]`, or None."""
    if call.gate is None:
        return None
    rows, heads, _ = call.query.shape
    return 1 / (1 + np.exp(-call.gate.astype(work).reshape(rows, heads, 1)))
