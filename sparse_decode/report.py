"""Parity results for a person (a table) and for a program (JSON)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from sparse_decode._files import replace_file
from sparse_decode.parity import Result, versions
from sparse_decode.paths import PATHS

TOLERANCE_RULE = (
    "tolerance: for each row and head, twice the error of a plain program of the same arithmetic "
    "plus its rounding floor; 'share' is the largest part of it that was used"
)


def parity_table(results: Sequence[Result]) -> Table:
    """A table with one line for each result."""
    table = Table(caption=TOLERANCE_RULE, caption_justify="left")
    table.add_column("call", overflow="fold")
    for heading in ("path", "mode"):
        table.add_column(heading)
    for heading in ("error vs float64", "share", "lse share", "vs recorded", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("verdict", overflow="fold")
    previous = None
    for result in results:
        verdict = result.verdict
        table.add_row(
            "" if result.subject == previous else escape(result.subject),
            result.path,
            result.mode,
            f"{verdict.error:.2e}",
            f"{verdict.share:.2f}",
            "" if verdict.lse_share is None else f"{verdict.lse_share:.2f}",
            "" if result.from_recorded is None else f"{result.from_recorded:.2e}",
            f"{result.seconds:.1f}",
            "[green]ok[/]" if verdict.ok else f"[bold red]{escape(str(verdict.fault))}[/]",
        )
        previous = result.subject
    return table


def status_table() -> Table:
    """A table of the paths: which run here and how, and why the others do not."""
    table = Table()
    table.add_column("path")
    table.add_column("what it is")
    table.add_column("runs here")
    table.add_column("on, or why not", overflow="fold")
    for path in PATHS:
        status = path.status()
        table.add_row(
            path.name, path.summary, status.mode or "[bold red]no[/]", escape(status.reason)
        )
    return table


def write_json(path: str | os.PathLike[str], results: Sequence[Result]) -> None:
    """Writes results, versions and path statuses; infinities are written as null."""
    document = {
        "versions": versions(),
        "paths": {path.name: dataclasses.asdict(path.status()) for path in PATHS},
        "tolerance": TOLERANCE_RULE,
        "results": [{**dataclasses.asdict(result), "ok": result.verdict.ok} for result in results],
    }
    replace_file(path, json.dumps(_finite(document), indent=1).encode() + b"\n")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
