"""The soak test: that it finds what it looks for, and on a GPU the soak itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import soak  # noqa: E402

from sparse_decode import cases, torch_arrays  # noqa: E402
from sparse_decode.oracle import evaluate  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PALLAS = "direct" if DEVICE == "cuda" else "dlpack"
CASES = {case.name: case for case in cases.CASES}
TINY = soak.Kind(2, heads=2, groups=2, slots=5, page_size=8, pages=6, max_pages=4, splits=1)


def arguments_of(call):
    tensors = {name: torch_arrays.from_numpy(a, DEVICE) for name, a in call.arrays().items()}
    return {**tensors, **call.options()}


@pytest.fixture
def generator():
    return torch.Generator(DEVICE).manual_seed(3)


@pytest.fixture
def one_place(monkeypatch):
    """As little as can be soaked."""
    for name in ("LAYERS", "PLACES_A_KIND", "PLACES_A_ROUND", "STREAMS"):
        monkeypatch.setattr(soak, name, 1)


# Sampled rows.


@pytest.mark.parametrize(
    "name",
    [
        *("fp8", "uint8_verify4_groups2", "fp8_inactive", "fp8_blank_rows", "fp8_outside"),
        *("fp8_holes_repeated", "fp8_token_major_strided", "fp8_strided_gate", "fp8_output_fp16"),
        *("bf16_packed_strided", "bf16_heads16_groups2", "bf16_edges", "fp16_heads4_gate"),
    ],
)
def test_sampled_rows_are_the_rows_of_the_call(name):
    call = cases.build(CASES[name])
    rows = np.random.default_rng(0).permutation(len(call.query)).tolist()
    small = soak.sampled(arguments_of(call), rows)
    assert small.cache.shape[2] == 8
    found, expected = evaluate(small), evaluate(call)
    np.testing.assert_array_equal(found.exact, expected.exact[rows])
    np.testing.assert_array_equal(found.lse, expected.lse[rows])
    assert found.output.dtype == expected.output.dtype


def test_sampled_rows_take_no_more_than_their_regions():
    call = cases.build(CASES["fp8_groups3"])
    small = soak.sampled(arguments_of(call), [4])
    ids = call.regions[4]
    assert len(small.cache) <= 1 + len(np.unique(ids[ids >= 0]))
    assert (len(small.query), small.cache.shape[1]) == (1, 1)


# Judgement.


def test_what_is_drawn_holds_every_kind_of_row(generator):
    kind = soak.Kind(200, slots=9, pages=8, max_pages=2, groups=2)
    (call,) = soak.draw(kind, DEVICE, generator)
    positions, regions, active = (call[name] for name in ("positions", "regions", "active"))
    assert positions.min() == -1
    assert positions.max() > 100
    assert 0 < active.sum() < len(active)
    assert (regions == -1).any()
    assert (regions > 2**32).any()
    assert (call["block_table"] == 8).any()
    assert call["output"].isnan().all()
    before = regions.clone()
    soak.refill([call], generator)
    assert call["regions"] is regions
    assert not torch.equal(before, regions)


@pytest.mark.parametrize("kind", soak.SMALL_KINDS, ids=lambda kind: kind.cache)
def test_a_wrong_row_is_found(kind, generator):
    (call,) = soak.draw(kind, DEVICE, generator)
    call["active"].fill_(True)
    call["positions"].fill_(20)
    soak.attend(PALLAS, call)
    other = soak.result("triton", call)
    rows = range(len(other))
    assert soak.fault_between(call, call["output"], other, "triton") is None
    assert soak.fault_of_rows(call, rows) is None
    right = call["output"].clone()
    for wrong in (
        right * 1.1,
        right.roll(1, 0),
        torch.where(right == right[-1, -1, -1], torch.nan, right),
    ):
        call["output"].copy_(wrong)
        assert "rows differ" in soak.fault_between(call, call["output"], other, "triton")
        assert soak.fault_of_rows(call, rows)


def test_growth_is_named():
    before = {"host": 100, "torch allocated": 10}
    assert soak.grown(before, before) == []
    assert soak.grown(before, {"host": 101, "torch allocated": 0}) == []
    (line,) = soak.grown(before, {"host": 101, "torch allocated": 11})
    assert line == "torch allocated: 10 to 11 bytes, 0 allowed"


# The soak.


def test_a_short_soak(one_place, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(soak, "SMALL_KINDS", (TINY,))
    monkeypatch.setattr(soak, "KINDS", (TINY,))
    file = tmp_path / "soak.json"
    assert soak.main(["--minutes", "0.001", "--seed", "5", "--json", str(file)]) == 0
    assert capsys.readouterr().out.endswith("wrong results: 0\nok\n")
    report = json.loads(file.read_text())
    assert report["ok"]
    assert report["rounds"] >= 2
    assert set(report["calls"]) >= {"triton", "dlpack"}
    assert report["checks"]["rows, oracle"] > 0
    assert report["memory"]["before"].keys() == report["memory"]["after"].keys() >= {"host"}
    assert report["memory"]["allowed growth"] == soak.ALLOWED_GROWTH


def test_a_wrong_path_fails_the_soak(one_place, monkeypatch, capsys):
    monkeypatch.setattr(soak, "SMALL_KINDS", (TINY,))
    monkeypatch.setattr(soak, "KINDS", (TINY,))
    attend = soak.attend

    def wrong(path, arguments):
        attend(path, arguments)
        if path == "dlpack":
            arguments["output"].mul_(1.1)

    monkeypatch.setattr(soak, "attend", wrong)
    assert soak.main(["--minutes", "0.001"]) == 1
    printed = capsys.readouterr().out
    assert "against triton: " in printed
    assert printed.endswith("failed\n")


def test_growth_fails_the_soak(one_place, monkeypatch, capsys):
    held = iter([{"host": 0}, {"host": 1 << 30}])
    monkeypatch.setattr(soak, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(soak, "memory", lambda: next(held))
    monkeypatch.setattr(soak, "SMALL_KINDS", (TINY,))
    monkeypatch.setattr(soak, "KINDS", (TINY,))
    assert soak.main(["--minutes", "0.001"]) == 1
    assert "grown: host: 0 to 1073741824 bytes" in capsys.readouterr().out


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "soon"])
def test_bad_minutes(minutes, capsys):
    with pytest.raises(SystemExit, match="2"):
        soak.main(["--minutes", minutes])
    assert "--minutes" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.long
def test_soak(tmp_path):
    """For `SPARSE_DECODE_SOAK_MINUTES`, in a process whose memory is the soak's alone."""
    minutes = float(os.environ.get("SPARSE_DECODE_SOAK_MINUTES", "0.2"))
    file = tmp_path / "soak.json"
    script = Path(soak.__file__)
    done = subprocess.run(
        [sys.executable, "-P", str(script), "--minutes", str(minutes), "--json", str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=60 * minutes + 900,
    )
    print(done.stdout, file.read_text() if file.exists() else "")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert set(report["calls"]) == {"replay", "direct", "triton", "dlpack"}
    assert report["wrong"] == 0
