"""The command line: `python -m sparse_decode`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparse_decode import __version__, captures
from sparse_decode._require import require
from sparse_decode.call import Call
from sparse_decode.cases import CASES, WIDE_CASES, build
from sparse_decode.devices import gpu_count, use_interpreters_without_gpu
from sparse_decode.parity import check, runnable, versions

SHORT = (
    "fp8",
    "fp8_split1",
    "uint8_verify4_groups2",
    "fp8_inactive",
    "fp8_outside",
    "fp8_packed",
    "bf16",
    "fp16_heads4_gate",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 if all is well, 1 if a path is out of tolerance or none can run, 2 for bad arguments or
        files.
    """
    parser = argparse.ArgumentParser(prog="python -m sparse_decode", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, and what can run here and why not")
    parity = commands.add_parser(
        "parity",
        help="run every path that can run here and compare it with the float64 oracle",
        description="Runs captures (files written by sparse_decode.captures.save), or without any "
        f"a short list of built-in cases: {', '.join(SHORT)}.",
    )
    parity.add_argument("captures", nargs="*", metavar="CAPTURE", type=Path)
    parity.add_argument("--all", action="store_true", help="all built-in cases, not the short list")
    parity.add_argument(
        "--wide", action="store_true", help="also the large built-in cases, which want a GPU"
    )
    parity.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    options = parser.parse_args(arguments)
    try:
        require("rich", extra="cli", needed_by="the command line")
        use_interpreters_without_gpu()
        return _info() if options.command == "info" else _parity(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _info() -> int:
    from rich.console import Console

    from sparse_decode.report import status_table

    console = Console()
    for name, version in versions().items():
        console.print(f"{name} {version}", highlight=False)
    console.print(f"CUDA GPUs visible: {gpu_count()}", highlight=False)
    console.print(status_table())
    return 0


def _parity(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import track

    from sparse_decode.report import parity_table, write_json

    if options.captures and (options.all or options.wide):
        raise ValueError("--all and --wide choose built-in cases and do not go with captures")
    if options.json and not options.json.parent.is_dir():
        raise ValueError(f"--json: expected a file in a folder that exists, got {options.json}")
    paths = runnable()
    subjects = list(_subjects(options))
    results = []
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name, call, recorded in track(
        subjects, "parity", console=Console(stderr=True), transient=True
    ):
        results += check(name, call, recorded, paths)
    console.print(parity_table(results))
    if options.json:
        write_json(options.json, results)
    failed = sum(not result.verdict.ok for result in results)
    if not paths:
        console.print("[bold red]no path can run here[/]; see: python -m sparse_decode info")
    elif failed:
        console.print(f"[bold red]{failed} of {len(results)} results are out of tolerance[/]")
    else:
        console.print(f"{len(results)} results, all within tolerance")
    return 1 if failed or not paths else 0


def _subjects(options: argparse.Namespace) -> Iterator[tuple[str, Call, object]]:
    if options.captures:
        for path in options.captures:
            capture = captures.load(path)
            yield path.stem, capture.call, capture.output
        return
    cases = CASES if options.all else [case for case in CASES if case.name in SHORT]
    for case in (*cases, *(WIDE_CASES if options.wide else ())):
        yield case.name, build(case), None
