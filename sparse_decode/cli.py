"""The command line: `python -m sparse_decode`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparse_decode import __version__, captures
from sparse_decode._require import require
from sparse_decode.bench_suites import CACHES, SUITES, Setting, settings_of
from sparse_decode.call import Call
from sparse_decode.cases import CASES, WIDE_CASES, build
from sparse_decode.devices import gpu_count, use_interpreters_without_gpu
from sparse_decode.parity import check_all, runnable, versions

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
    parity.add_argument(
        "--processes", type=int, default=1, metavar="N", help="cases side by side (default: 1)"
    )
    _add_bench(commands)
    _add_tune(commands)
    options = parser.parse_args(arguments)
    try:
        require("rich", extra="cli", needed_by="the command line")
        use_interpreters_without_gpu()
        run = {"info": _info, "parity": _parity, "bench": _bench, "tune": _tune}
        return run[options.command](options)
    except (ImportError, NotImplementedError, OSError, TypeError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time the Triton and the Pallas kernels on this machine's GPU",
        description="Times both paths and two floors over named suites of settings: "
        f"{', '.join(SUITES)}.",
    )
    bench.add_argument(
        "--suite",
        nargs="+",
        default=["headline"],
        metavar="NAME",
        help="settings to time (default: headline)",
    )
    bench.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    bench.add_argument(
        "--plot", metavar="STEM", type=Path, help="draw time against rows to STEM.png and STEM.svg"
    )
    bench.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        type=Path,
        help="show results that --json wrote instead of measuring; needs no GPU",
    )
    bench.add_argument("--commit", help="what is measured, where there is no Git work tree")
    _add_method(bench)


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="search the best launch settings of the Pallas kernels for your shapes and GPU",
        description="Sweeps Config and writes the best ones; sparse_decode.tune.load_config "
        "reads them.",
    )
    tune.add_argument("--out", metavar="FILE", type=Path, required=True, help="the file to write")
    tune.add_argument("--cache", choices=CACHES, default="fp8")
    tune.add_argument(
        "--rows", nargs="+", type=int, default=[64], metavar="N", help="(token, group) pairs"
    )
    usual = Setting(CACHES["fp8"], 1)
    for name in ("heads", "groups", "query_len", "slots", "page_size", "context"):
        value = getattr(usual, name)
        flag = f"--{name.replace('_', '-')}"
        tune.add_argument(flag, type=int, default=value, metavar="N", help=f"default: {value}")
    _add_method(tune)


def _add_method(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pool-gib", type=float, default=24, metavar="GIB", help="size of the cache (default: 24)"
    )
    parser.add_argument(
        "--replays", type=int, default=30, metavar="N", help="timed replays (default: 30)"
    )


def _info(_: argparse.Namespace) -> int:
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
    _check_folder("--json", options.json)
    # Several frameworks, and perhaps processes, share the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    subjects = list(_subjects(options))
    results = []
    console = Console(width=None if sys.stdout.isatty() else 160)
    for found in track(
        check_all(subjects, options.processes),
        "parity",
        total=len(subjects),
        console=Console(stderr=True),
        transient=True,
    ):
        results += found
    console.print(parity_table(results))
    if options.json:
        write_json(options.json, results)
    failed = sum(not result.verdict.ok for result in results)
    can_run = bool(runnable())
    if not can_run:
        console.print("[bold red]no path can run here[/]; see: python -m sparse_decode info")
    elif failed:
        console.print(f"[bold red]{failed} of {len(results)} results are out of tolerance[/]")
    else:
        console.print(f"{len(results)} results, all within tolerance")
    return 1 if failed or not can_run else 0


def _subjects(options: argparse.Namespace) -> Iterator[tuple[str, Call, Any]]:
    if options.captures:
        for path in options.captures:
            capture = captures.load(path)
            yield path.stem, capture.call, capture.output
        return
    cases = CASES if options.all else [case for case in CASES if case.name in SHORT]
    for case in (*cases, *(WIDE_CASES if options.wide else ())):
        yield case.name, build(case), None


def _bench(options: argparse.Namespace) -> int:
    from rich.console import Console

    from sparse_decode import bench_report

    console = Console(width=None if sys.stdout.isatty() else 220)
    _check_folder("--json", options.json)
    _check_folder("--plot", options.plot)
    if options.plot:
        require("matplotlib", extra="plot", needed_by="--plot")
    if options.source:
        document = bench_report.read_json(options.source)
    else:
        document = _measure(options, console)
    console.print(bench_report.table(document))
    if options.plot:
        bench_report.plot(document, options.plot)
    faults = bench_report.faults(document)
    for fault in faults:
        console.print(f"out of tolerance: {fault}", style="bold red", markup=False)
    return 1 if faults else 0


def _measure(options: argparse.Namespace, console: Any) -> dict[str, Any]:
    """Measures the suites, with the table so far and a progress bar on a terminal."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import Progress

    from sparse_decode import bench_report

    settings = settings_of(options.suite)
    if options.plot and not bench_report.families([vars(setting) for setting in settings]):
        raise ValueError(
            "--plot: expected a suite whose settings differ in the number of requests alone, got "
            f"{' '.join(options.suite)}"
        )
    _check_method(options)
    _check_gpu("bench")
    from sparse_decode import bench_run

    progress = Progress(console=console, auto_refresh=False)
    log = Console(stderr=True, width=220)
    task = progress.add_task("", total=len(settings))

    def says(what: str) -> None:
        progress.update(task, description=what)
        live.refresh()
        if not console.is_terminal:
            log.print(what, markup=False, highlight=False)

    document: dict[str, Any] = {}
    # No refreshing thread: it would disturb what is measured on the host.
    with Live(progress, console=console, transient=True, auto_refresh=False) as live:
        for document in bench_run.run(
            settings,
            pool_bytes=int(options.pool_gib * 2**30),
            replays=options.replays,
            commit=options.commit,
            says=says,
        ):
            progress.advance(task)
            live.update(Group(bench_report.table(document), progress), refresh=True)
            if not console.is_terminal:
                log.print(bench_report.line(document["results"][-1]), markup=False)
            if options.json:
                bench_report.write_json(options.json, document)
    return document


def _tune(options: argparse.Namespace) -> int:
    from rich.console import Console

    from sparse_decode import tune

    _check_folder("--out", options.out)
    for name in ("groups", "query_len"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}: expected at least 1, got {getattr(options, name)}")
    each = options.groups * options.query_len
    for rows in options.rows:
        if rows < 1 or rows % each:
            raise ValueError(
                f"--rows: expected positive multiples of groups * query_len = {each}, got {rows}"
            )
    names = ("heads", "groups", "query_len", "slots", "page_size", "context")
    shape = {name: getattr(options, name) for name in names}
    settings = [
        Setting(CACHES[options.cache], rows // each, **shape)
        for rows in dict.fromkeys(options.rows)
    ]
    _check_method(options)
    _check_gpu("tune")
    console = Console(width=None if sys.stdout.isatty() else 160)
    sweeps = []
    with console.status("starting") as status:
        pool_bytes = int(options.pool_gib * 2**30)
        for sweep in tune.run(settings, pool_bytes, options.replays, status.update):
            sweeps.append(sweep)
            console.print(tune.table(sweep))
            tune.save(options.out, sweeps)
    return 0


def _check_folder(flag: str, path: Path | None) -> None:
    if path and not path.parent.is_dir():
        raise ValueError(f"{flag}: expected a file in a folder that exists, got {path}")
    if path and path.is_dir():
        raise ValueError(f"{flag}: expected a file, got the folder {path}")


def _check_method(options: argparse.Namespace) -> None:
    if options.replays < 1:
        raise ValueError(f"--replays: expected at least 1, got {options.replays}")
    if not options.pool_gib > 0:
        raise ValueError(f"--pool-gib: expected more than 0, got {options.pool_gib}")
    if not options.pool_gib < 2**20:
        raise ValueError(f"--pool-gib: expected less than 2**20, got {options.pool_gib}")


def _check_gpu(command: str) -> None:
    if not gpu_count():
        raise NotImplementedError(f"{command}: expected a visible CUDA GPU, found none")
    require("torch", extra="torch", needed_by=command)
