"""How far the default settings are from the best of a sweep, for each setting of the suites.

Varies the shape of a program, the splits and the combine kernel around the default, with the method
of `python -m sparse_decode bench`. The default and the best are then timed again, in turns. The
exit status is 1 if a default takes longer than the best by more than `--limit`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from sparse_decode import bench, bench_report, bench_run, plan, tune
from sparse_decode.bench_suites import Setting, settings_of
from sparse_decode.bridge import warmup
from sparse_decode.contract import MAX_SPLITS, REGION_TOKENS
from sparse_decode.parity import versions
from sparse_decode.plan import Config, Shape

# Shapes, and shares of the default's splits: those that came within 7 % of the best in some setting
# of a wider sweep
SHAPES = (
    (Shape(64, 4, 3, 3), (0.5, 1)),
    (Shape(64, 2, 2, 3), (1,)),
    (plan.SHAPES["lone tile"], (1,)),
    (plan.SHAPES["usual"], (0.5, 1)),
    (plan.SHAPES["two pieces"], (0.75, 1, 1.5)),
    (Shape(32, 2, 2, 3), (1,)),
    (plan.SHAPES["one warp"], (1,)),
    (plan.SHAPES["small tiles"], (0.75, 1, 1.5, 2)),
    (plan.SHAPES["two pieces in parts"], (0.5, 1)),
    (plan.SHAPES["small tiles in parts"], (0.75, 1)),
    (plan.SHAPES["usual"]._replace(parts=4), (0.5, 1)),
)
SPLITS = (0.5, 0.75, 1.5, 2)  # shares of the default's
COMBINES = ((1, 32), (4, 32), (1, 64), (4, 64), (1, 192), (2, 192))  # combine_warps, combine_width
FINALISTS, ROUNDS = 3, 5


def candidates(setting: Setting, default: Config) -> list[Config]:
    """The default and what is tried around it, each once."""
    tokens = min(setting.slots * REGION_TOKENS, setting.context)
    most = min(MAX_SPLITS, -(-tokens // 16))

    def with_splits(config: Config, shares: tuple[float, ...]) -> list[Config]:
        near = (tune.splits_near(default, share, most) for share in shares)
        return [dataclasses.replace(config, splits=splits) for splits in near]

    found = [default]
    for shape, shares in SHAPES:
        configs = with_splits(dataclasses.replace(default, **shape._asdict()), shares)
        if shape.parts > 1:  # only where these can be lent and are a tile at least
            limit = tokens // (shape.tile * shape.parts)
            configs = [c for c in configs if not setting.rows % shape.parts and c.splits <= limit]
        found += configs
    found += with_splits(default, SPLITS)
    found += [
        dataclasses.replace(default, combine_warps=warps, combine_width=width)
        for warps, width in COMBINES
    ]
    return [*dict.fromkeys(found)]


def sweep(workload: bench.Workload, default: Config, replays: int) -> dict[str, Any]:
    """Times all candidates of a setting, then the best and the default again, in turns."""
    failed: dict[Config, str] = {}
    tried = candidates(workload.setting, default)
    first = tune.time_configs(tried, workload, replays, failed)
    if default not in first:
        raise RuntimeError(f"{workload.setting.name}: the default fails: {failed.get(default)}")
    finalists = [*dict.fromkeys([default, *tune.best_first(first)[:FINALISTS]])]
    rounds = [tune.time_configs(finalists, workload, 2 * replays, failed) for _ in range(ROUNDS)]
    times = {
        config: statistics.median(times[config].median for times in rounds) for config in finalists
    }
    best = min(times, key=lambda config: times[config])
    return {
        "name": workload.setting.name,
        "setting": dataclasses.asdict(workload.setting),
        "default": {**dataclasses.asdict(default), "microseconds": times[default]},
        "best": {**dataclasses.asdict(best), "microseconds": times[best]},
        "excess": times[default] / times[best] - 1,
        "first": [
            {**dataclasses.asdict(config), "microseconds": time.median}
            for config, time in first.items()
        ],
        "failed": [
            {**dataclasses.asdict(config), "fault": fault} for config, fault in failed.items()
        ],
    }


def table(results: list[dict[str, Any]]) -> Table:
    """One line for each setting."""
    view = Table("setting", "candidates", "default", "us", "best", "us", "excess")
    for result in results:
        cells = []
        for name in ("default", "best"):
            config = dict(result[name])
            microseconds = config.pop("microseconds")
            cells += ["/".join(map(str, config.values())), f"{microseconds:.1f}"]
        view.add_row(result["name"], str(len(result["first"])), *cells, f"{result['excess']:.1%}")
    view.caption = "splits/tile/warps/stages/combine_warps/combine_width/pieces/parts"
    return view


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", nargs="+", default=["full", "rows"], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--pool-gib", type=float, default=12, metavar="GIB")
    parser.add_argument("--replays", type=int, default=8, metavar="N")
    parser.add_argument("--limit", type=float, default=0.03, metavar="SHARE")
    parser.add_argument("--commit", help="what is measured, where there is no Git work tree")
    options = parser.parse_args()

    pool_bytes = int(options.pool_gib * 2**30)
    settings = settings_of(options.suite)
    bench_run.check_memory(pool_bytes)
    defaults = {setting: bench_run.default_config(setting, pool_bytes) for setting in settings}
    console = Console()
    console.print("compiling")
    warmup(
        {**bench.blueprint(setting, pool_bytes), "config": config}
        for setting, default in defaults.items()
        for config in candidates(setting, default)
    )
    document: dict[str, Any] = {
        "machine": bench_run.machine(),
        "versions": versions(),
        "commit": options.commit or bench_run.commit_here(),
        "method": {"pool_bytes": pool_bytes, "replays": options.replays, "rounds": ROUNDS},
        "results": [],
    }

    def measure(workload: bench.Workload) -> dict[str, Any]:
        return sweep(workload, defaults[workload.setting], options.replays)

    results = bench_run.with_each_workload(settings, pool_bytes, measure)
    for result in track(results, "timing", total=len(settings), console=console):
        document["results"].append(result)
        if options.json:
            bench_report.write_json(options.json, document)
    console.print(table(document["results"]))
    return any(result["excess"] > options.limit for result in document["results"])


if __name__ == "__main__":
    sys.exit(main())
