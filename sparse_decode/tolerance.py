"""One rule for every comparison: how far a result may be from the float64 oracle.

A result may err by twice what a plain program of the same arithmetic errs, plus a floor derived
from the rounding points that every program has: its 16-bit probabilities, its float32 logits and
its output. Limits are taken for each (row, head), never over the whole array.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from sparse_decode.call import Call
from sparse_decode.oracle import Reference, evaluate

FLOAT32_EPS = 2.0**-23


@dataclass(frozen=True)
class Limits:
    """The oracle's result for a call, with the error allowed around it.

    Attributes:
        reference: The float64 result.
        output: `[rows, heads]` float64, absolute error allowed in each of the 192 dims.
        lse: `[rows, heads]` float64, absolute error allowed in the natural-log lse.
    """

    reference: Reference
    output: np.ndarray
    lse: np.ndarray


@dataclass(frozen=True)
class Verdict:
    """How a result compares with the oracle.

    Attributes:
        error: Largest absolute error of the output.
        share: Largest share of the allowed output error that was used; within tolerance up to 1.
        lse_share: The same for lse; None where no lse was returned.
        fault: What is wrong, in words; None when all is within tolerance.
    """

    error: float
    share: float
    lse_share: float | None
    fault: str | None

    @property
    def ok(self) -> bool:
        """Whether the result is within tolerance."""
        return self.fault is None


def limits(call: Call) -> Limits:
    """Computes the oracle's result and the error allowed around it."""
    reference, plain = evaluate(call), evaluate(call, plain=True)
    operand = "float16" if call.geometry().fp8 else call.cache.dtype.name
    with np.errstate(all="ignore"):
        plain_error = _largest(np.abs(plain.exact - reference.exact), reference.within)
        probability = _roundoff(operand) * reference.value_size
        logits = 2 * FLOAT32_EPS * reference.logit_size
        roundings = _roundoff(reference.output.dtype.name) * _largest(
            np.abs(reference.exact), reference.within
        )
        if call.gate is not None:
            roundings = 2 * roundings + _roundoff(call.gate.dtype.name) * reference.value_size
        tiny = float(ml_dtypes.finfo(reference.output.dtype).smallest_subnormal)
        output = 2 * plain_error + probability + logits * reference.value_size + roundings + tiny
        plain_lse_error = np.abs(plain.lse - reference.lse)
        lse = (
            2 * _finite(plain_lse_error)
            + logits
            + 4 * FLOAT32_EPS * (1 + np.abs(_finite(reference.lse)))
        )
    return Limits(reference, output, lse)


def judge(
    allowed: Limits, output: np.ndarray, lse: np.ndarray | None, before: np.ndarray | None
) -> Verdict:
    """Compares a result with the oracle.

    Args:
        allowed: From `limits` of the same call.
        output: `[rows, heads, 192]`.
        lse: `[rows, heads]` natural logarithm, or None.
        before: Content of the output buffer before the call, which untouched rows must keep bit for
            bit; None where the result is a new array and such rows are zero.
    """
    reference = allowed.reference
    for name, got, wanted in (("output", output, reference.exact), ("lse", lse, reference.lse)):
        if got is not None and got.shape != wanted.shape:
            fault = f"{name}: shape {got.shape} where {wanted.shape} is expected"
            return Verdict(np.inf, np.inf, None if lse is None else np.inf, fault)
    touched = reference.touched if before is not None else np.ones(len(output), bool)
    faults = []
    if before is not None and not np.array_equal(_bits(output[~touched]), _bits(before[~touched])):
        faults.append("an inactive row of output was written")
    with np.errstate(invalid="ignore"):  # a signalling NaN in a row that was left alone
        output = output.astype(np.float64)
    error, share, fault = _compare(
        output[touched], _expected(allowed, output)[touched], allowed.output[touched][:, :, None]
    )
    faults += [f"output: {fault}"] if fault else []
    lse_share = None
    if lse is not None:
        _, lse_share, fault = _compare(lse.astype(np.float64), reference.lse, allowed.lse)
        faults += [f"lse: {fault}"] if fault else []
    return Verdict(error, share, lse_share, "; ".join(faults) or None)


def _expected(allowed: Limits, output: np.ndarray) -> np.ndarray:
    """What an output is compared with, `[rows, heads, 192]` float64: numbers are not rounded.

    Where a rounding decides whether the output dtype overflows, both answers are right.
    """
    reference = allowed.reference
    exact, rounded = reference.exact, reference.output.astype(np.float64)
    expected = np.where(np.isfinite(rounded), exact, rounded)
    limit, overflow = allowed.output[:, :, None], reference.overflow[:, :, None]
    either = np.abs(np.abs(exact) - overflow) < np.minimum(limit, overflow / 2)
    came = np.where(np.isinf(output), np.copysign(np.inf, exact), exact)
    return np.where(either, came, expected)


def _compare(
    got: np.ndarray, expected: np.ndarray, allowed: np.ndarray
) -> tuple[float, float, str | None]:
    """Largest error, largest share of what is allowed, and the fault in words."""
    if not got.size:
        return 0.0, 0.0, None
    finite = np.isfinite(expected)
    same_kind = np.where(finite, np.isfinite(got), np.isnan(got) & np.isnan(expected))
    same_kind |= got == expected
    if not same_kind.all():
        where = tuple(int(i) for i in np.argwhere(~same_kind)[0])
        return np.inf, np.inf, f"{got[where]} where {expected[where]:.6g} is expected, at {where}"
    allowed = np.broadcast_to(allowed, got.shape)
    with np.errstate(all="ignore"):
        error = np.where(finite, np.abs(got - expected), 0)
        share = np.where(np.isfinite(allowed), error / allowed, np.inf)
    share = np.where(finite, share, 0)
    worst = np.unravel_index(np.argmax(share), share.shape)
    fault = None
    if share[worst] > 1:
        where = tuple(int(i) for i in worst)
        fault = f"off by {error[worst]:.3g} where {allowed[worst]:.3g} is allowed, at {where}"
    return float(error.max()), float(share[worst]), fault


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _roundoff(dtype: str) -> float:
    """Largest relative error of one rounding to `dtype`."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def _largest(array: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Largest finite number over the dims within, 0 if there is none."""
    return np.where(within, _finite(array), 0).max(axis=2)


def _finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0)
