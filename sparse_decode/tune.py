"""Launch settings of the Pallas kernels for your own GPU and shapes: searched, saved, looked up.

`python -m sparse_decode tune --rows 1 16 64 --out configs.json` searches; a program then says:

    table = load_config("configs.json")
    sparse_decode_attention(..., config=table.lookup(query, cache, regions))
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparse_decode import plan
from sparse_decode._files import replace_file
from sparse_decode.bench_suites import Setting
from sparse_decode.contract import MAX_SPLITS, REGION_TOKENS
from sparse_decode.plan import Config, Shape

if TYPE_CHECKING:
    from rich.table import Table

    from sparse_decode.bench import Time, Workload

FORMAT = "sparse_decode configs 1"

# Shapes and shares of the default's splits that are tried first ...
SHAPES = (
    Shape(64, 4, 3, 3),
    Shape(64, 2, 2, 3),
    *(shape for name, shape in plan.SHAPES.items() if name != "large tile"),
)
SPLITS = (0.5, 0.75, 1, 1.5, 2)
# ... then, with the best of these, stages, and last (combine_warps, combine_width).
STAGES = (2, 3, 4)
COMBINES = ((1, 32), (4, 32), (1, 64), (2, 64), (4, 64), (1, 192), (4, 192))
SHOWN = 5


class Shaped(Protocol):
    """A tensor or an array."""

    @property
    def shape(self) -> Any:
        """Extent of each dimension."""
        ...

    @property
    def dtype(self) -> Any:
        """Element type, which names itself as a string."""
        ...


# --- the table


@dataclass(frozen=True)
class Entry:
    """The settings that are best for one kind of call.

    Attributes:
        cache: Dtype name of the cache.
        rows, heads, slots, page_size: As in the contract.
        config: The settings.
    """

    cache: str
    rows: int
    heads: int
    slots: int
    page_size: int
    config: Config


@dataclass(frozen=True)
class ConfigTable:
    """Settings found by `tune`.

    Attributes:
        gpu: Name of the GPU that they were found on.
        entries: The settings.
    """

    gpu: str
    entries: tuple[Entry, ...]

    def lookup(self, query: Shaped, cache: Shaped, regions: Shaped) -> Config | None:
        """The settings for a call, for the `config` argument of the operation.

        Args:
            query: As in the call. Of this and the others only shape and dtype count.
            cache: As in the call; uint8 counts as FP8.
            regions: As in the call.

        Returns:
            The settings found for the same cache dtype, heads, slots and page size, and for the
            nearest number of rows, at most twice or half as many; None, which leaves the choice to
            the operation, where there are none.
        """
        dtype = str(cache.dtype).removeprefix("torch.").replace("uint8", "float8_e4m3fn")
        rows, heads = query.shape[:2]
        wanted = (dtype, heads, regions.shape[1], cache.shape[2])

        def distance(entry: Entry) -> float:
            return max(entry.rows / rows, rows / entry.rows)

        near = [
            entry
            for entry in self.entries
            if rows
            and (entry.cache, entry.heads, entry.slots, entry.page_size) == wanted
            and distance(entry) <= 2
        ]
        return min(near, key=distance).config if near else None


def load_config(path: str | os.PathLike[str]) -> ConfigTable:
    """Reads a file that `tune` wrote.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no such file, or its content is wrong; the message says where.
    """
    try:
        document = json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f'{path}: expected a file of format "{FORMAT}", as tune writes it')
    listed = document.get("entries", [])
    if not isinstance(listed, list):
        raise ValueError(f"{path}: entries: expected a list, got {type(listed).__name__}")
    entries = []
    for place, fields in enumerate(listed):
        try:
            key = {name: fields[name] for name in ("cache", "rows", "heads", "slots", "page_size")}
            _check_key(key)
            entries.append(Entry(**key, config=Config(**fields["config"])))
        except KeyError as error:
            raise ValueError(f"{path}: entry {place} lacks {error}") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: entry {place}: {error}") from error
    return ConfigTable(str(document.get("gpu")), tuple(entries))


def _check_key(key: dict[str, Any]) -> None:
    for name, value in key.items():
        kind = str if name == "cache" else int
        if type(value) is not kind or (value == "" if kind is str else value < 1):
            raise ValueError(f"{name}: expected a positive {kind.__name__}, got {value!r}")


# --- the search


@dataclass(frozen=True)
class Sweep:
    """What a search found for one setting.

    Attributes:
        setting: What was timed.
        gpu: The GPU.
        default: What the operation chooses by itself.
        times: Time of each candidate in microseconds, the default among them, best first.
        failed: Candidates that do not run here or are out of tolerance, and why.
    """

    setting: Setting
    gpu: str
    default: Config
    times: dict[Config, Time]
    failed: dict[Config, str]

    @property
    def best(self) -> Config:
        """The fastest candidate."""
        return next(iter(self.times))

    @property
    def excess(self) -> float:
        """How much longer the default takes than the best, as a share."""
        return self.times[self.default].median / self.times[self.best].median - 1


def splits_near(default: Config, share: float, most: int) -> int:
    """A share of the default's splits, from 1 to `most`."""
    return min(max(1, round(default.splits * share)), most)


def candidates(default: Config, slots: int) -> list[Config]:
    """The settings that are tried first: shapes of a program, and splits around the default's."""
    found = {default: None}
    for shape in SHAPES:
        most = min(MAX_SPLITS, -(-slots * REGION_TOKENS // shape.tile))
        for share in SPLITS:
            splits = splits_near(default, share, most)
            found[dataclasses.replace(default, splits=splits, **shape._asdict())] = None
    return [*found]


def with_stages(config: Config) -> list[Config]:
    """The pipeline depths that are tried for a good candidate."""
    return [dataclasses.replace(config, stages=stages) for stages in STAGES]


def with_combines(config: Config) -> list[Config]:
    """The ways to combine that are tried for a good candidate."""
    return [
        dataclasses.replace(config, combine_warps=warps, combine_width=width)
        for warps, width in COMBINES
        if config.combines
    ]


def search(
    default: Config, slots: int, time: Callable[[Sequence[Config]], dict[Config, Time]]
) -> dict[Config, Time]:
    """Times the candidates, then other stages for the best three and other combines.

    Args:
        default: The settings to start from.
        slots: As in the contract.
        time: Times settings; leaves out those that fail.

    Returns:
        Time of all settings that were tried and did not fail, best first.
    """
    times = time(candidates(default, slots))
    for vary in (with_stages, with_combines):
        near = [varied for config in best_first(times)[:3] for varied in vary(config)]
        times |= time([config for config in dict.fromkeys(near) if config not in times])
    return {config: times[config] for config in best_first(times)}


def best_first(times: dict[Config, Time]) -> list[Config]:
    """The settings in the order of their times."""
    return sorted(times, key=lambda config: times[config].median)


def run(
    settings: Sequence[Setting],
    pool_bytes: int,
    replays: int,
    says: Callable[[str], object] = lambda _: None,
) -> Iterator[Sweep]:
    """Searches on the current GPU, for one setting after the other.

    Args:
        settings: All with one cache dtype.
        pool_bytes: Size of the pool of pages.
        replays: Timed replays of each CUDA graph.
        says: Is told what is being done.

    Raises:
        ValueError: The GPU has too little memory for the pool, or the default fails.
    """
    import torch

    from sparse_decode import bench, bench_run

    bench_run.check_memory(pool_bytes)
    pool = bench.random_pool(settings[0].cache, pool_bytes)
    for setting in settings:
        workload = bench.Workload(setting, pool)
        failed: dict[Config, str] = {}

        def time(
            configs: Sequence[Config],
            workload: Workload = workload,
            failed: dict[Config, str] = failed,
        ) -> dict[Config, Time]:
            says(f"{workload.setting.name}: compiling {len(configs)} candidates")
            fit = _warm_up(configs, workload.call(0, workload.output()), failed)
            says(f"{workload.setting.name}: timing {len(fit)} candidates")
            return time_configs(fit, workload, replays, failed)

        default = bench_run.default_config(setting, pool_bytes)
        times = search(default, setting.slots, time)
        if default not in times:
            raise ValueError(f"the default {default} cannot be timed: {failed.get(default)}")
        yield Sweep(setting, torch.cuda.get_device_name(), default, times, failed)


def _warm_up(
    configs: Sequence[Config], call: dict[str, Any], failed: dict[Config, str]
) -> list[Config]:
    """Compiles candidates in parallel; returns those that fit the GPU."""
    from sparse_decode.bridge import warmup

    try:
        warmup([{**call, "config": config} for config in configs])
        return [*configs]
    except NotImplementedError:
        # One that does not fit; all are compiled by now, so that each is only loaded.
        pass
    fit = []
    for config in configs:
        try:
            warmup([{**call, "config": config}])
            fit.append(config)
        except NotImplementedError as error:
            failed[config] = str(error)
    return fit


def time_configs(
    configs: Sequence[Config], workload: Workload, replays: int, failed: dict[Config, str]
) -> dict[Config, Time]:
    """Times candidates whose results are right."""
    from sparse_decode.bench import graph_microseconds
    from sparse_decode.bridge import sparse_decode_attention

    output, times = workload.output(), {}
    calls = [workload.call(index, output) for index in range(len(workload.sets))]
    for config in configs:

        def attend(output: Any, config: Config = config, **_: Any) -> None:
            sparse_decode_attention(**workload.call(0, output), config=config)

        def launch(index: int, config: Config = config) -> None:
            sparse_decode_attention(**calls[index], config=config)

        if fault := workload.fault(attend):
            failed[config] = fault
        else:
            times[config] = graph_microseconds(launch, replays)
    return times


# --- results


def table(sweep: Sweep) -> Table:
    """The best settings of a search, and the default."""
    from rich.table import Table

    view = Table(
        title=f"{sweep.setting.name} on {sweep.gpu}",
        title_justify="left",
        caption=f"{len(sweep.times)} candidates timed, {len(sweep.failed)} left out; "
        f"the default takes {sweep.excess:.1%} longer than the best",
        caption_justify="left",
    )
    names = [field.name for field in dataclasses.fields(Config)]
    for heading in ("", "microseconds", "to the best", *names):
        view.add_column(heading, justify="right")
    best = sweep.times[sweep.best].median
    for place, (config, time) in enumerate(sweep.times.items()):
        if place < SHOWN or config == sweep.default:
            view.add_row(
                "default" if config == sweep.default else f"{place + 1}",
                f"{time.median:.1f} ± {time.spread:.1f}",
                f"+{time.median / best - 1:.1%}",
                *(str(getattr(config, name)) for name in names),
            )
    return view


def save(path: str | os.PathLike[str], sweeps: Sequence[Sweep]) -> None:
    """Writes the best settings to a file for `load_config`."""
    from sparse_decode.parity import versions

    document = {
        "format": FORMAT,
        "gpu": sweeps[0].gpu,
        "versions": versions(),
        "entries": [
            {
                "cache": sweep.setting.cache,
                "rows": sweep.setting.rows,
                "heads": sweep.setting.heads,
                "slots": sweep.setting.slots,
                "page_size": sweep.setting.page_size,
                "config": dataclasses.asdict(sweep.best),
                "setting": dataclasses.asdict(sweep.setting),
                "microseconds": sweep.times[sweep.best].median,
                "default": dataclasses.asdict(sweep.default),
                "default_microseconds": sweep.times[sweep.default].median,
            }
            for sweep in sweeps
        ],
    }
    replace_file(path, json.dumps(document, indent=1).encode() + b"\n")
