"""Results of `python -m sparse_decode bench`: a table, a JSON file and a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from sparse_decode._files import replace_file
from sparse_decode._require import require
from sparse_decode.bench_suites import CACHES, Setting

CURVES = {
    "streaming": ("streaming floor", "#9a9a9a", ":", None),
    "gather": ("gather floor", "#5a5a5a", "--", None),
    "triton": ("Triton", "#d1730f", "-", "s"),
    "pallas": ("Pallas, launched directly", "#1565c0", "-", "o"),
}
# Panels of the plot side by side.
COLUMNS = 3
LEGEND = (
    "Microseconds a launch: median and interquartile distance of replays. 'split' is the first "
    "Pallas kernel\nlaunched alone, 'rest' what both take longer; 'in JAX' is inside a jitted "
    "program, compared with\nthe direct launches; 'host' is an eager call."
)


def table(document: Mapping[str, Any]) -> Table:
    """A table with one line for each setting."""
    peers = [name for name, status in document["peers"].items() if status == "measured"]
    absent = [f"{name} {why}" for name, why in document["peers"].items() if name not in peers]
    caption = escape("\n".join([LEGEND, *absent, _where(document)]))
    view = Table(caption=caption, caption_justify="left", title_justify="left")
    view.add_column("setting", overflow="fold")
    headings = ["streaming", "gather", "Triton", "Pallas", "ratio", "of streaming", "of gather"]
    headings += ["split", "rest", "in JAX", "host Triton", "host Pallas", *peers]
    for heading in headings:
        view.add_column(heading, justify="right", overflow="fold")
    for result in document["results"]:
        paths, inside = result["paths"], result.get("jax")
        view.add_row(
            escape(result["name"]),
            _number(result["streaming"]),
            _number((result["gather"] or {}).get("median")),
            _path(paths["triton"]),
            _path(paths["pallas"]),
            f"[bold]{result['ratio']:.2f}[/]" if "ratio" in result else "",
            _percent(result.get("streaming_share")),
            _percent(result.get("gather_share")),
            _number(result.get("split", {}).get("median")),
            _number(result.get("rest")),
            f"{_time(inside['attention'])}, {inside['excess']:+.0%}" if inside else "",
            _number(paths["triton"].get("host", {}).get("median")),
            _number(paths["pallas"].get("host", {}).get("median")),
            *(_path(paths[name]) for name in peers),
        )
    return view


def line(result: Mapping[str, Any]) -> str:
    """One setting in one line, for a log."""
    paths = ", ".join(
        f"{name} {path['fault'] or _number(path['median'])}"
        for name, path in result["paths"].items()
        if "absent" not in path
    )
    floors = _number(result["streaming"]), _number((result["gather"] or {}).get("median"))
    ratio = f", ratio {result['ratio']:.2f}" if "ratio" in result else ""
    return f"{result['name']}: floors {' and '.join(floors)}, {paths}{ratio}"


def faults(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with the results of this package's paths, in words."""
    return [
        f"{result['name']}, {name}: {result['paths'][name]['fault']}"
        for result in document["results"]
        for name in ("triton", "pallas")
        if result["paths"][name]["fault"]
    ]


def _where(document: Mapping[str, Any]) -> str:
    found, method = document["machine"], document["method"]
    packages = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return (
        f"{found['gpu']}, driver {found['driver']}; {packages}; commit {document['commit']}; "
        f"pool {method['pool_bytes'] / 2**30:g} GiB; "
        f"a copy moves {document['copy_bandwidth'] / 1e12:.2f} TB/s"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _time(time: Mapping[str, float] | None) -> str:
    return f"{time['median']:.1f} ± {time['spread']:.1f}" if time else ""


def _path(path: Mapping[str, Any]) -> str:
    if "absent" in path:
        return escape(path["absent"])
    return f"[bold red]{escape(path['fault'])}[/]" if path["fault"] else _time(path)


# --- files


def write_json(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Writes a document in one piece."""
    replace_file(path, json.dumps(document, indent=1, allow_nan=False).encode() + b"\n")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what `write_json` wrote.

    Raises:
        ValueError: The file is something else.
    """
    try:
        document = json.loads(Path(path).read_text())
        for name in ("machine", "versions", "method", "peers"):
            document[name]
        if not document["results"] or not all("paths" in one for one in document["results"]):
            raise KeyError("results")
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected results of a bench run, got {error!r}") from error
    return document


def families(settings: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], list[int]]]:
    """What can be drawn: settings that differ in the number of requests alone.

    Args:
        settings: Fields of `Setting`, among others.

    Returns:
        For each family what its settings have in common, and their places in order of requests.
    """
    names = [name for name in Setting.__dataclass_fields__ if name != "requests"]
    found: dict[tuple, list[int]] = {}
    for place, setting in enumerate(settings):
        found.setdefault(tuple(setting[name] for name in names), []).append(place)
    return [
        (
            dict(zip(names, key, strict=True)),
            sorted(places, key=lambda place: settings[place]["requests"]),
        )
        for key, places in found.items()
        if len(places) > 1
    ]


def plot(document: Mapping[str, Any], stem: str | os.PathLike[str]) -> list[Path]:
    """Draws time against rows, one panel for each family of settings, as PNG and SVG.

    Args:
        document: From `bench_run.run`.
        stem: The files' path without their endings.

    Returns:
        The files.

    Raises:
        MissingDependency: matplotlib is not installed.
        ValueError: No two settings differ in the number of requests alone.
    """
    require("matplotlib", extra="plot", needed_by="the plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results = [result for result in document["results"] if "ratio" in result]
    panels = families([result["setting"] for result in results])
    if not panels:
        raise ValueError("plot: expected settings that differ in the number of requests, got none")
    columns = min(len(panels), COLUMNS)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.0 * lines + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (common, places) in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, place)
        _panel(axes, common, [results[place] for place in places])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(CURVES), frameon=False)
    figure.suptitle(f"One launch on {document['machine']['gpu']}; numbers: Triton / Pallas")
    files = [Path(f"{os.fspath(stem)}{ending}") for ending in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def _panel(axes: Any, common: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    rows = [result["setting"]["rows"] for result in results]
    for name, (label, colour, style, marker) in CURVES.items():
        times = [_of(result, name) for result in results]
        axes.plot(rows, times, style, color=colour, marker=marker, label=label)
    for result in results:
        axes.annotate(
            f"{result['ratio']:.2f}",
            (result["setting"]["rows"], _of(result, "triton")),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color=CURVES["pallas"][1],
            fontsize="small",
        )
    short = {dtype: name for name, dtype in CACHES.items()}[common["cache"]]
    changed = Setting(**common, requests=1).name.partition(", ")[2]
    axes.set_title(f"{short} cache" + (f", {changed}" if changed else ""))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.margins(x=0.1, y=0.1)
    axes.set_xlabel("rows")
    axes.set_ylabel("microseconds")
    axes.grid(which="both", alpha=0.2)


def _of(result: Mapping[str, Any], curve: str) -> float:
    """A curve's value; not a number where it was not measured."""
    if curve == "streaming":
        return result["streaming"]
    entry = result["gather"] if curve == "gather" else result["paths"][curve]
    return entry["median"] if entry else float("nan")
