"""Timing and tuning: settings, workloads, results and their files; on a GPU also the whole run."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("torch")

import torch
from rich.console import Console

from sparse_decode import bench, bench_report, bench_suites, cli, tune
from sparse_decode.bench import Time, Workload, blueprint, random_pool
from sparse_decode.bench_suites import HEADLINE_ROWS, SUITES, Setting, settings_of
from sparse_decode.oracle import evaluate
from sparse_decode.plan import Config
from sparse_decode.torch_arrays import from_numpy, geometry

FP8 = "float8_e4m3fn"
SMALL = Setting(FP8, 3, heads=4, slots=9, page_size=16, context=120)
SETTINGS = [
    SMALL,
    dataclasses.replace(SMALL, cache="bfloat16", groups=2, query_len=4),
    dataclasses.replace(SMALL, cache="float16", context=30),
    dataclasses.replace(SMALL, requests=4, inactive=0.75),
]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(cli, "gpu_count", lambda: 0)


# --- settings and suites


def test_rows_and_bytes():
    setting = Setting(FP8, 16)
    assert setting.rows == 16
    assert setting.bytes == 16 * 513 * 8 * 384
    assert dataclasses.replace(setting, cache="bfloat16").bytes == 2 * setting.bytes
    assert dataclasses.replace(setting, groups=8, query_len=4).rows == 512
    assert dataclasses.replace(setting, groups=8, query_len=4).bytes == 32 * setting.bytes


def test_only_live_slots_of_active_rows_count():
    assert Setting(FP8, 1, context=200).live_slots == 25
    assert Setting(FP8, 1, context=201).live_slots == 26
    assert Setting(FP8, 1, context=1).bytes == 8 * 384
    assert Setting(FP8, 64, inactive=0.75).active_requests == 16
    assert Setting(FP8, 64, inactive=0.75).bytes == Setting(FP8, 16).bytes
    assert Setting(FP8, 1, inactive=0.75).active_requests == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": "fp8"}, r"cache: expected one of .*, got 'fp8'"),
        ({"requests": 0}, "requests: expected at least 1, got 0"),
        ({"page_size": -8}, "page_size: expected at least 1, got -8"),
        ({"query_len": 4, "context": 3}, "context: expected at least query_len = 4, got 3"),
        ({"inactive": 1.0}, "inactive: expected 0 to less than 1, got 1.0"),
    ],
)
def test_a_setting_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        Setting(**{"cache": FP8, "requests": 1, **changes})


def test_names_say_what_is_unusual():
    assert Setting(FP8, 16).name == "fp8 16 rows"
    unusual = Setting("bfloat16", 8, heads=4, groups=8, page_size=16, context=200, inactive=0.75)
    assert unusual.name == (
        "bf16 64 rows, 4 heads, 8 groups, page 16, context 200, 75% inactive"
    )  # fmt: skip
    names = [setting.name for setting in SUITES["full"]]
    assert len(names) == len(set(names))


def test_headline_is_what_the_targets_name():
    caches = (FP8, "bfloat16")
    assert SUITES["headline"] == tuple(Setting(c, r) for c in caches for r in HEADLINE_ROWS)
    assert HEADLINE_ROWS == (1, 16, 64, 256)


def test_full_has_every_kind_of_setting():
    full = SUITES["full"]
    assert set(SUITES["headline"]) < set(full)
    for name, values in {
        "cache": {FP8, "bfloat16", "float16"},
        "heads": {4, 8, 16},
        "groups": {1, 8},
        "query_len": {1, 4},
        "page_size": {16, 64},
        "slots": {513, 1025},
        "inactive": {0, 0.75},
    }.items():
        assert {getattr(setting, name) for setting in full} == values
    assert any(setting.live_slots < setting.slots // 16 for setting in full)
    assert next(s for s in full if s.groups == 8).requests == 8


def test_every_setting_keeps_the_contract():
    for setting in SUITES["full"] + SUITES["smoke"]:
        described = blueprint(setting)
        tensors = {name: x for name, x in described.items() if isinstance(x, torch.Tensor)}
        options = {"scale": described["scale"], "query_len": described["query_len"], "splits": 1}
        assert geometry(tensors, options).rows == setting.rows


def test_suites_together_name_each_setting_once_by_cache():
    settings = settings_of(["verify", "headline", "verify", "fp16"])
    assert len(settings) == len(set(settings)) == 2 + 8 + 1
    caches = [setting.cache for setting in settings]
    assert caches == sorted(caches, key=[FP8, "bfloat16", "float16"].index)
    with pytest.raises(ValueError, match=r"expected one of headline, .*, got 'nosuch'"):
        settings_of(["headline", "nosuch"])


# --- workloads


@pytest.fixture(params=SETTINGS, ids=lambda setting: setting.name)
def workload(request):
    return Workload(request.param, random_pool(request.param.cache, 1 << 20, "cpu"), sets=2)


def naive(workload):
    """The plain oracle as a path: it computes the request that `output` is checked for."""

    def run(output, **_):
        for request in range(workload.setting.requests):
            call, rows = workload.sample(0, request)
            output[rows] = from_numpy(evaluate(call, plain=True).output)

    return run


def test_a_workload_is_as_described(workload):
    call = workload.call(1, workload.output())
    described = blueprint(workload.setting, 1 << 20)
    assert list(call) == [*workload.arguments(1), "output", "scale", "query_len"]
    assert set(call) == set(described)
    for name, value in described.items():
        if isinstance(value, torch.Tensor):
            found = call[name]
            assert (found.shape, found.stride(), found.dtype) == (
                value.shape, value.stride(), value.dtype
            ), name  # fmt: skip
        else:
            assert call[name] == value
    tensors = {name: x for name, x in call.items() if isinstance(x, torch.Tensor)}
    found = geometry(tensors, {"scale": 1.0, "query_len": workload.setting.query_len, "splits": 1})
    assert found.rows == workload.setting.rows


def test_rows_select_distinct_regions_and_the_current_one(workload):
    setting = workload.setting
    for _, regions, table in workload.sets:
        assert table.min() >= 0
        assert table.max() < len(workload.cache)
        for row, position in zip(regions.tolist(), workload.positions.tolist(), strict=True):
            live = row[setting.slots - setting.live_slots :]
            assert row[: setting.slots - setting.live_slots] == [-1] * (
                setting.slots - setting.live_slots
            )
            assert len(set(live)) == len(live)
            assert min(live) >= 0
            assert max(live) == (setting.context - setting.query_len) // 8 <= position // 8
    assert int(workload.active.sum()) * setting.requests == (
        setting.active_requests * setting.rows
    )  # fmt: skip


def test_sets_differ_and_repeat_with_the_seed(workload):
    first, second = workload.sets
    again = Workload(workload.setting, random_pool(workload.setting.cache, 1 << 20, "cpu"), sets=2)
    for one, other, same in zip(first, second, again.sets[0], strict=True):
        assert torch.equal(one, same)
        assert one.numel() < 10 or not torch.equal(one, other)


def test_a_right_path_has_no_fault(workload):
    assert workload.fault(naive(workload)) is None


def test_a_wrong_path_has_one(workload):
    def wrong(output, **_):
        naive(workload)(output)
        output[-1, 0, 5] += 1

    assert "off by" in str(workload.fault(wrong))
    assert workload.fault(lambda output, **_: None) == "the output is not finite everywhere"


def test_a_pool_holds_a_page():
    with pytest.raises(ValueError, match="pool: expected at least 6144 bytes, got 6000"):
        Workload(SMALL, random_pool(FP8, 6000, "cpu"))


@pytest.mark.parametrize("cache", [FP8, "bfloat16", "float16"])
def test_the_pool_holds_numbers(cache):
    pool = random_pool(cache, 100000, "cpu")
    assert pool.numel() == 100000
    values = pool.view(getattr(torch, cache)).float()
    assert values.isfinite().all()
    assert values.std() > 0.5


def test_time_of():
    time = bench.time_of([10.0, 20, 30, 40, 50], 10)
    assert time == pytest.approx(Time(3, 2))


# --- measuring


def tools(**changes):
    from sparse_decode.bench_run import Tools

    times = iter(np.arange(100.0, 0, -10))

    def measure(launch):
        launch(1)
        return Time(float(next(times)), 0.5)

    def path(workload):
        right = workload.output()
        naive(workload)(right)
        return lambda **call: call["output"].copy_(right)

    return Tools(**{"measure": measure, "triton": path, "pallas": path, **changes})


def test_a_measurement(workload):
    pytest.importorskip("jax")
    from sparse_decode.bench_floor import Gather
    from sparse_decode.bench_run import measure_setting

    launched = []
    result = measure_setting(
        workload,
        1e9,
        tools(
            gather=lambda _: Gather(45, 1, 4, 16, 2, 3),
            split=lambda *_: launched.append,
            inside_jax=lambda _: {"attention": Time(99, 2)},
        ),
    )
    assert result["name"] == workload.setting.name
    assert result["streaming"] == pytest.approx(workload.setting.bytes / 1000)
    assert result["paths"]["triton"]["median"] == 100
    assert result["paths"]["pallas"]["median"] == 90
    assert result["paths"]["pallas"]["host"]["median"] > 0
    assert all(result["paths"][name]["absent"] for name in ("vllm", "flashinfer"))
    assert result["ratio"] == pytest.approx(100 / 90)
    assert result["gather_share"] == 0.5
    assert result["split"] == {"median": 80, "spread": 0.5}
    assert result["rest"] == 10
    assert launched == [1]
    assert result["jax"] == {
        "attention": {"median": 99, "spread": 2},
        "excess": pytest.approx(0.1),
    }
    assert Config(**result["config"]).splits >= 1
    assert json.loads(json.dumps(result)) == result


def test_nothing_is_timed_that_is_wrong(workload):
    pytest.importorskip("jax")
    from sparse_decode.bench_run import measure_setting

    def zeros(_):
        return lambda **call: call["output"].zero_()

    result = measure_setting(workload, 1e9, tools(pallas=zeros))
    assert "median" in result["paths"]["triton"]
    assert set(result["paths"]["pallas"]) == {"fault"}
    assert "ratio" not in result
    document = {**canned(), "results": [result]}
    assert bench_report.faults(document) == [
        f"{result['name']}, pallas: {result['paths']['pallas']['fault']}"
    ]
    assert "off by" in render(document)


@pytest.mark.parametrize("behaviour", ["right", "wrong", "raises", "unable"])
def test_a_peer_never_stops_the_run(behaviour, monkeypatch):
    pytest.importorskip("jax")
    from sparse_decode import bench_run
    from sparse_decode.bench_peers import Peer

    def prepare(workload):
        if behaviour == "raises":
            raise RuntimeError("no such head dim")
        if behaviour == "unable":
            return None
        scale = 1 if behaviour == "right" else 2
        return lambda _, output: output.copy_(naive(workload)(output) or output * scale)

    monkeypatch.setattr(bench_run, "PEERS", (Peer("other", "json", prepare),))
    work = Workload(SMALL, random_pool(FP8, 1 << 20, "cpu"), sets=2)
    result = bench_run.measure_setting(work, 1e9, tools())
    found = result["paths"]["other"]
    assert result["ratio"] > 1
    if behaviour == "right":
        assert found["median"] == 80
    elif behaviour == "wrong":
        assert "off by" in found["fault"]
    else:
        assert (
            found["absent"]
            == {
                "raises": "failed: RuntimeError: no such head dim",
                "unable": "does not compute this setting",
            }[behaviour]
        )
    assert not bench_report.faults({"results": [result]})


def test_the_time_inside_jax():
    pytest.importorskip("jax")
    from sparse_decode import bench_jax

    setting = dataclasses.replace(SMALL, requests=1, slots=2, context=16)
    work = Workload(setting, random_pool(FP8, 1 << 14, "cpu"), sets=2)
    programs = bench_jax.compile_all([setting], work.cache.nbytes, sets=2)[setting]
    given = bench_jax.arrays(work)
    ticket = np.zeros(1, np.int32)
    *outputs, stamp = programs[0](ticket, *given)
    assert [output.shape for output in outputs] == [work.output().shape] * 2
    assert stamp == 1
    assert programs[1](ticket, *given) == [1]
    for (query, _, _), output in zip(given[0], outputs, strict=True):
        assert np.isfinite(np.asarray(output, np.float32)).all()
        assert not np.array_equal(np.asarray(output), np.asarray(query))


def test_gather_candidates_cover_few_and_many_programs():
    pytest.importorskip("triton")
    from sparse_decode.bench_floor import PROGRAMS, SHAPES, candidates

    for rows in HEADLINE_ROWS:
        found = candidates(Setting(FP8, rows))
        assert len(found) == len(set(found)) <= len(SHAPES) * len(PROGRAMS)
        assert {shape for shape, _ in found} == set(SHAPES)
        assert all(1 <= splits <= 513 for _, splits in found)
    assert {splits for _, splits in candidates(Setting(FP8, 256))} == {1, 4, 8, 16, 32}
    assert max(splits for _, splits in candidates(Setting(FP8, 1, context=200))) == 25


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_the_gather_reads_every_line(setting):
    """Through Triton's interpreter; on a GPU natively."""
    pytest.importorskip("triton")
    from sparse_decode.bench_floor import _gather, launcher

    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = Workload(setting, random_pool(setting.cache, 1 << 20, device), sets=1)
    caught = []
    launch = launcher(work, (8, 1, 1), 2)
    original = type(_gather).__getitem__

    class Spy:
        def __getitem__(self, grid):
            def call(**arguments):
                caught.append(arguments["output_ptr"])
                return original(_gather, grid)(**arguments)

            return call

    launch.__globals__["_gather"] = Spy()
    try:
        launch(0)
    finally:
        launch.__globals__["_gather"] = _gather
    sums = caught[0].cpu().view(setting.rows, 2).sum(dim=1, dtype=torch.int32)
    lines = work.cache.view(torch.uint8).view(torch.int32).cpu()
    _, regions, table = (x.cpu() for x in work.sets[0])
    for row in np.flatnonzero(work.active.cpu().numpy()):
        live = regions[row][setting.slots - setting.live_slots :]
        token = (live[:, None] * 8 + torch.arange(8)).flatten()
        page = table[row // (setting.rows // setting.requests)][token // setting.page_size]
        picked = lines[page.long(), row % setting.groups, token % setting.page_size]
        assert sums[row] == picked.sum(dtype=torch.int32)


# --- results


def canned(settings=SUITES["headline"]):
    """A document as a run writes it, with times that are made up."""
    results = []
    for setting in settings:
        streaming = setting.bytes / 4.3e6
        gather, pallas, triton = (streaming + x for x in (2.5, 8.0, 20.0))
        results.append(
            {
                "name": setting.name,
                "setting": {
                    **dataclasses.asdict(setting), "rows": setting.rows, "bytes": setting.bytes
                },
                "config": dataclasses.asdict(Config(4)),
                "streaming": streaming,
                "gather": {
                    "median": gather, "spread": 0.1, "splits": 4, "tile": 8, "warps": 1, "stages": 1
                },
                "paths": {
                    "triton": time_fields(triton),
                    "pallas": time_fields(pallas),
                    "vllm": {"absent": "absent: no module named vllm"},
                    "flashinfer": {"fault": None, "median": 77.7, "spread": 0.2},
                },
                "ratio": triton / pallas,
                "streaming_share": streaming / pallas,
                "gather_share": gather / pallas,
                "split": {"median": pallas - 3, "spread": 0.1},
                "rest": 3.0,
                "jax": {"attention": {"median": pallas * 1.02, "spread": 0.4}, "excess": 0.02},
            }
        )  # fmt: skip
    return {
        "machine": {"gpu": "NVIDIA [H200]", "driver": "580.1", "cuda": "13.0"},
        "versions": {"jax": "0.11.2", "torch": "2.11.0"},
        "commit": "0123abc",
        "method": {"sets": 16, "pool_bytes": 24 << 30, "replays": 30, "jax": "loop"},
        "copy_bandwidth": 4.3e12,
        "peers": {"vllm": "absent: no module named vllm", "flashinfer": "measured"},
        "seconds": {"compiling": 30.0, "all": 90.0},
        "results": results,
    }


def time_fields(median):
    return {
        "fault": None, "median": median, "spread": 0.1, "host": {"median": 25.0, "spread": 1.0}
    }  # fmt: skip


def render(document):
    console = Console(width=240, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(bench_report.table(document))
        return console.export_text()


def test_table():
    text = render(canned())
    for setting in SUITES["headline"]:
        assert setting.name in text
    for words in (
        "NVIDIA [H200], driver 580.1", "commit 0123abc", "pool 24 GiB", "4.30 TB/s", "77.7",
        "vllm absent: no module named vllm", "of gather", "host Pallas", "8.4 ± 0.1", "2.43",
        "8.5 ± 0.4, +2%",
    ):  # fmt: skip
        assert words in text, words


def test_table_with_holes():
    document = canned(SUITES["smoke"])
    for result in document["results"]:
        result.update(gather=None, jax=None)
        for name in ("split", "rest", "gather_share"):
            del result[name]
    assert "fp8 2 rows" in render(document)


def test_line():
    line = bench_report.line(canned()["results"][0])
    assert line.startswith("fp8 1 rows: floors 0.4 and 2.9, triton 20.4, pallas 8.4")
    assert line.endswith("ratio 2.43")


def test_json_round_trip(tmp_path):
    file = tmp_path / "results.json"
    bench_report.write_json(file, canned())
    assert bench_report.read_json(file) == canned()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        '{"results": []}',
        '{"results": [{}]}',
        '{"results": [{"paths": {}}]}',
        "\xff",
    ],
)
def test_something_else_as_results(content, tmp_path):
    file = tmp_path / "results.json"
    file.write_bytes(content.encode("latin1"))
    with pytest.raises(ValueError, match=r"results.json: expected results of a bench run"):
        bench_report.read_json(file)


def test_families():
    settings = [dataclasses.asdict(setting) for setting in SUITES["full"]]
    found = bench_report.families(settings)
    assert [common["cache"] for common, _ in found][:2] == [FP8, "bfloat16"]
    assert [settings[place]["requests"] for place in found[0][1]] == [1, 16, 64, 256]
    assert not bench_report.families(settings[:1] + settings[4:5])


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    files = bench_report.plot(canned(), tmp_path / "head.line")
    assert [file.name for file in files] == ["head.line.png", "head.line.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert files[0].stat().st_size > 20000
    assert "<svg" in files[1].read_text()


def test_plot_of_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="differ in the number of requests"):
        bench_report.plot(canned(SUITES["heads"]), tmp_path / "x")


def test_the_commit_is_that_of_these_files(monkeypatch, tmp_path):
    pytest.importorskip("jax")
    from sparse_decode import bench_run

    found = bench_run.commit_here()
    assert found is None or len(found.partition(",")[0]) == 40
    monkeypatch.setattr(bench_run, "__file__", str(tmp_path / "bench_run.py"))
    assert bench_run.commit_here() is None
    monkeypatch.setenv("PATH", "")
    assert bench_run.commit_here() is None


# --- command line


@pytest.mark.parametrize("command", [["bench"], ["tune", "--out", "configs.json"]])
def test_without_a_gpu(command, no_gpu, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        f"python -m sparse_decode: {command[0]}: expected a visible CUDA GPU, found none\n"
    )  # fmt: skip
    assert not captured.out
    assert not os.listdir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--suite", "nosuch"], "suite: expected one of headline, heads"),
        (["bench", "--json", "missing/x.json"], "--json: expected a file in a folder that exists"),
        (["bench", "--plot", "missing/x"], "--plot: expected a file in a folder that exists"),
        (["bench", "--suite", "page", "--plot", "x"], "--plot: expected a suite whose settings"),
        (["bench", "--replays", "0"], "--replays: expected at least 1, got 0"),
        (["bench", "--pool-gib", "nan"], "--pool-gib: expected more than 0, got nan"),
        (["bench", "--from", "missing.json"], "missing.json"),
        (["tune", "--out", "missing/x"], "--out: expected a file in a folder that exists"),
        (["tune", "--out", "x", "--heads", "0"], "heads: expected at least 1, got 0"),
        (
            ["tune", "--out", "x", "--rows", "16", "12", "--groups", "8"],
            "--rows: expected positive multiples of groups * query_len = 8, got 12",
        ),
    ],
)
def test_bad_arguments(arguments, message, no_gpu, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not os.listdir()


def test_results_of_an_earlier_run(tmp_path, capsys, no_gpu):
    pytest.importorskip("matplotlib")
    file = tmp_path / "results.json"
    bench_report.write_json(file, canned())
    assert cli.main(["bench", "--from", str(file), "--plot", str(tmp_path / "plot")]) == 0
    assert "fp8 256 rows" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["plot.png", "plot.svg", "results.json"]
    document = canned()
    document["results"][0]["paths"]["pallas"] = {"fault": "off by 1"}
    del document["results"][0]["ratio"]
    bench_report.write_json(file, document)
    assert cli.main(["bench", "--from", str(file)]) == 1
    assert "out of tolerance: fp8 1 rows, pallas: off by 1" in capsys.readouterr().out


def test_a_run(tmp_path, capsys, monkeypatch):
    """The command around a run, with the measuring replaced."""
    pytest.importorskip("jax")
    from sparse_decode import bench_run

    def run(settings, *, pool_bytes, replays, commit, says):
        assert (pool_bytes, replays, commit) == (3 << 29, 7, "abc")
        for count in range(1, len(settings) + 1):
            says(settings[count - 1].name)
            yield canned(settings[:count])

    monkeypatch.setattr(cli, "gpu_count", lambda: 1)
    monkeypatch.setattr(bench_run, "run", run)
    file = tmp_path / "results.json"
    command = ["bench", "--json", str(file), "--pool-gib", "1.5", "--replays", "7"]
    assert cli.main([*command, "--commit", "abc"]) == 0
    captured = capsys.readouterr()
    assert "bf16 256 rows" in captured.out
    assert captured.err.count("ratio") == 8
    assert bench_report.read_json(file) == canned()


# --- tuning


def test_candidates_are_distinct_and_hold_the_default():
    default = Config(8, 64, 2, 2, 1, 64)
    found = tune.candidates(default, 513)
    assert found[0] == default
    assert len(found) == len(set(found)) > 20
    assert {config.tile for config in found} == {16, 32, 64}
    assert {config.splits for config in found} == {4, 6, 8, 12, 16}
    assert max(config.splits for config in tune.candidates(Config(256), 8)[1:]) <= 4
    assert {config.splits for config in tune.candidates(Config(1), 513)} == {1, 2}


def test_refinements():
    assert [config.stages for config in tune.with_stages(Config(8))] == [*tune.STAGES]
    combines = [(c.combine_warps, c.combine_width) for c in tune.with_combines(Config(8))]
    assert combines == [*tune.COMBINES]
    assert not tune.with_combines(Config(1))


def test_a_search_finds_the_best_and_leaves_out_what_fails():
    def time(configs):
        assert len(configs) == len(set(configs))
        seen.extend(configs)
        return {
            config: Time(
                50
                + abs(config.splits - 12)
                + config.tile / 32
                + abs(config.stages - 4)
                + config.combine_warps
                + abs(config.combine_width - 64) / 64,
                0.1,
            )
            for config in configs
            if config.warps != 1
        }

    seen = []
    times = tune.search(Config(8, 64, 2, 2, 4, 64), 513, time)
    assert len(seen) == len(set(seen))
    assert [*times.values()] == sorted(times.values())
    assert next(iter(times)) == Config(12, 16, 2, 4, 1, 64)
    assert not any(config.warps == 1 for config in times)


@pytest.fixture
def sweep():
    default, best = Config(8), Config(12, 32, 2, 6, 1, 64)
    times = {best: Time(40, 0.1), Config(9): Time(41, 0.1), default: Time(44, 0.2)}
    return tune.Sweep(Setting(FP8, 64), "A GPU", default, times, {Config(1): "too large"})


def call_of(rows, cache=torch.float8_e4m3fn, heads=8, slots=513, page_size=64):
    return (
        torch.empty(rows, heads, 192, device="meta"),
        torch.empty(9, 1, page_size, 384, device="meta", dtype=cache),
        torch.empty(rows, slots, device="meta", dtype=torch.int64),
    )


def test_config_file_round_trip(sweep, tmp_path):
    file = tmp_path / "configs.json"
    larger = dataclasses.replace(
        sweep, setting=Setting(FP8, 128), times={sweep.default: Time(9, 0)}
    )
    tune.save(file, [sweep, larger])
    table = tune.load_config(file)
    assert table.gpu == "A GPU"
    assert [entry.rows for entry in table.entries] == [64, 128]
    best = sweep.best
    for rows, config in {31: None, 32: best, 64: best, 90: best, 91: Config(8), 257: None}.items():
        assert table.lookup(*call_of(rows)) == config, rows
    assert table.lookup(*call_of(64, torch.uint8)) == best
    assert table.lookup(*call_of(0)) is None
    others: list[dict[str, Any]] = [
        {"cache": torch.bfloat16}, {"heads": 4}, {"slots": 65}, {"page_size": 16}
    ]  # fmt: skip
    for other in others:
        assert table.lookup(*call_of(64, **other)) is None
    arrays: Any = (
        SimpleNamespace(shape=(64, 8, 192), dtype=np.dtype("float16")),
        SimpleNamespace(shape=(9, 1, 64, 384), dtype=np.dtype("uint8")),
        SimpleNamespace(shape=(64, 513), dtype=np.dtype("int32")),
    )
    assert table.lookup(*arrays) == best


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="other"), "expected a file of format"),
        (lambda d: d["entries"][0].pop("heads"), "entry 0 lacks 'heads'"),
        (lambda d: d["entries"][0].update(rows="64"), "entry 0: rows: expected a positive int"),
        (lambda d: d["entries"][0].update(rows=0), "entry 0: rows: expected a positive int"),
        (lambda d: d["entries"][0].update(rows=-5), "entry 0: rows: expected a positive int"),
        (lambda d: d.update(entries=None), "entries: expected a list, got NoneType"),
        (lambda d: d["entries"][0]["config"].update(tile=48), "entry 0: config.tile: expected"),
        (lambda d: d["entries"][0]["config"].update(warps=2.0), "entry 0: config.warps: expected"),
        (lambda d: d["entries"][0]["config"].update(speed=9), "entry 0: .*unexpected .*'speed'"),
    ],
)
def test_a_wrong_config_file(change, message, sweep, tmp_path):
    file = tmp_path / "configs.json"
    tune.save(file, [sweep])
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=rf"configs.json: {message}"):
        tune.load_config(file)


@pytest.mark.parametrize("content", [b"", b"no JSON", b"\xff\xfe", b"[1]"])
def test_no_config_file(content, tmp_path):
    file = tmp_path / "configs.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"configs.json: expected"):
        tune.load_config(file)
    with pytest.raises(FileNotFoundError):
        tune.load_config(tmp_path / "missing.json")


def test_tune(sweep, tmp_path, capsys, monkeypatch):
    """The command around a search, with the measuring replaced."""

    def run(settings, pool_bytes, replays, says):
        assert (pool_bytes, replays) == (24 << 30, 30)
        assert [setting.rows for setting in settings] == [64, 16]
        assert all(s.groups == 8 and s.cache == "bfloat16" for s in settings)
        for setting in settings:
            says(setting.name)
            yield dataclasses.replace(sweep, setting=setting)

    monkeypatch.setattr(cli, "gpu_count", lambda: 1)
    monkeypatch.setattr(tune, "run", run)
    file = tmp_path / "configs.json"
    rows = ["--rows", "64", "16", "--cache", "bf16", "--groups", "8"]
    assert cli.main(["tune", "--out", str(file), *rows]) == 0
    out = capsys.readouterr().out
    for words in ("bf16 64 rows, 8 groups on A GPU", "+10.0%", "default", "3 candidates timed, 1"):
        assert words in out, words
    assert [entry.rows for entry in tune.load_config(file).entries] == [64, 16]


def test_the_names_that_the_core_has():
    assert bench.Setting is Setting is bench_suites.Setting
    assert math.isclose(bench.SCALE, 192**-0.5)


def test_one_pool_at_a_time_for_all_workloads(monkeypatch):
    pytest.importorskip("jax")
    from sparse_decode import bench_run

    pools = []

    def draw(cache, size):
        assert all(pool() is None for pool in pools)
        pool = bench.random_pool(cache, size, "cpu")
        pools.append(weakref.ref(pool))
        return pool

    monkeypatch.setattr(bench_run, "random_pool", draw)
    settings = settings_of(["smoke", "smoke"]) * 2
    names = list(bench_run.with_each_workload(settings, 1 << 22, lambda w: w.setting.name))
    assert names == [setting.name for setting in settings]
    assert len(pools) == len(settings) == 4


# --- natively


@pytest.mark.gpu
@pytest.mark.serial
def test_a_run_on_the_gpu(tmp_path):
    pytest.importorskip("jax")
    file = tmp_path / "results.json"
    command = [sys.executable, "-P", "-m", "sparse_decode", "bench", "--suite", "smoke"]
    done = subprocess.run(
        [*command, "--pool-gib", "1", "--replays", "5", "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = bench_report.read_json(file)
    assert len(document["results"]) == 2
    for result in document["results"]:
        assert 0 < result["streaming"] < result["paths"]["pallas"]["median"] < 1000
        assert 0 < result["gather"]["median"] < 1000
        assert result["paths"]["pallas"]["host"]["median"] > 0


@pytest.mark.gpu
@pytest.mark.serial
def test_a_search_on_the_gpu(monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setattr(tune, "SHAPES", tune.SHAPES[:2])
    monkeypatch.setattr(tune, "SPLITS", (1,))
    monkeypatch.setattr(tune, "STAGES", (3,))
    monkeypatch.setattr(tune, "COMBINES", ((1, 64),))
    [sweep] = tune.run(SUITES["smoke"][:1], 1 << 30, 5)
    assert sweep.excess >= 0
    assert not sweep.failed
