"""Holds paths to the oracle and to recorded outputs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from sparse_decode.call import Call
from sparse_decode.paths import PATHS, Path
from sparse_decode.tolerance import Limits, Verdict, judge, limits


@dataclass(frozen=True)
class Result:
    """One path on one call.

    Attributes:
        subject: Name of the case or capture.
        path: Name of the path.
        mode: "native", "interpreter", or "file" for a recorded output.
        verdict: Against the float64 oracle.
        from_recorded: Largest absolute difference from the recorded output; None without one.
        seconds: Time of the run, compilation and copies included.
    """

    subject: str
    path: str
    mode: str
    verdict: Verdict
    from_recorded: float | None
    seconds: float


def runnable() -> list[tuple[Path, str]]:
    """Paths that can run here, each with its mode."""
    statuses = ((path, path.status()) for path in PATHS)
    return [(path, status.mode) for path, status in statuses if status.mode]


def check(
    subject: str,
    call: Call,
    recorded: np.ndarray | None = None,
    paths: Iterable[tuple[Path, str]] | None = None,
) -> Iterator[Result]:
    """Runs a call on every given path and judges each result.

    A path that does not implement something the call needs (`NotImplementedError`) is out of
    tolerance with that as its fault.

    Args:
        subject: Name for the results.
        call: The call.
        recorded: `[rows, heads, 192]`, output of another implementation for the same call; it is
            judged as well, as the path "recorded".
        paths: Paths with their modes; by default `runnable()`.
    """
    if recorded is not None:
        # The buffer that was recorded into: rows that were left alone show what it held.
        before = recorded.copy()
        before[call.active] = np.nan
        call = dataclasses.replace(call, output=before)
    allowed = limits(call)
    if recorded is not None:
        verdict = judge(allowed, recorded, None, call.output)
        yield Result(subject, "recorded", "file", verdict, 0.0, 0.0)
    for path, mode in runnable() if paths is None else paths:
        began = time.perf_counter()
        try:
            outcome = path.run(call)
        except NotImplementedError as error:
            verdict, difference = Verdict(np.inf, np.inf, None, f"not implemented: {error}"), None
        else:
            verdict = judge(allowed, outcome.output, outcome.lse, outcome.before)
            difference = (
                None if recorded is None else _difference(allowed, outcome.output, recorded)
            )
        yield Result(subject, path.name, mode, verdict, difference, time.perf_counter() - began)


def check_all(
    subjects: Iterable[tuple[str, Call, np.ndarray | None]], processes: int = 1
) -> Iterator[list[Result]]:
    """The results of `check` for several calls, in their order.

    Args:
        subjects: Name, call and recorded output (or None) of each.
        processes: Calls that run side by side; 1 runs them in this process.

    Raises:
        ValueError: `processes` is less than 1.
    """
    if processes < 1:
        raise ValueError(f"processes: expected at least 1, got {processes}")
    if processes == 1:
        paths = runnable()
        yield from (list(check(*subject, paths)) for subject in subjects)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_check_one, subjects)


def _check_one(subject: tuple[str, Call, np.ndarray | None]) -> list[Result]:
    return list(check(*subject))


def _difference(allowed: Limits, output: np.ndarray, recorded: np.ndarray) -> float:
    touched = allowed.reference.touched
    distance = np.abs(output[touched].astype(np.float64) - recorded[touched].astype(np.float64))
    return float(np.nan_to_num(distance, nan=0.0).max(initial=0.0))


def versions() -> dict[str, str]:
    """Versions of this package and of what it runs on, of those that are installed."""
    found = {}
    for name in ("sparse-decode", "numpy", "jax", "jaxlib", "torch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
