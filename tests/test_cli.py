"""The command line: what it prints, what it writes, and its exit status."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("rich")

from sparse_decode import __version__, captures, cli, parity, paths, report
from sparse_decode.captures import Capture
from sparse_decode.cases import CASES, build
from sparse_decode.oracle import evaluate
from sparse_decode.paths import Outcome, Path, Status

CASE = {case.name: case for case in CASES}


def exact(call):
    reference = evaluate(call, plain=True)
    output = reference.output.copy()
    if call.output is not None:
        output[~reference.touched] = call.output[~reference.touched]
    return Outcome(output, reference.lse.astype(np.float32), call.output)


def wrong(call):
    outcome = exact(call)
    return dataclasses.replace(outcome, output=outcome.output * outcome.output.dtype.type(1.1))


def refuses(call):
    raise NotImplementedError("no such cache here")


@pytest.fixture
def use_paths(monkeypatch):
    """Replaces the paths by functions of a call, so that no framework has to compile."""

    def use(**functions):
        new = tuple(
            Path(name, f"{name} in words", lambda: Status("interpreter", "a test"), run)
            for name, run in functions.items()
        )
        monkeypatch.setattr(parity, "PATHS", new)
        monkeypatch.setattr(report, "PATHS", new)

    monkeypatch.setenv("COLUMNS", "160")
    use(exact=exact)
    return use


@pytest.fixture
def write(tmp_path):
    def write(name="fp8_one_slot", file="one.safetensors", **changes):
        call = build(CASE[name])
        capture = Capture(dataclasses.replace(call, output=None), evaluate(call).output, "a test")
        captures.save(tmp_path / file, dataclasses.replace(capture, **changes))
        return str(tmp_path / file)

    return write


# --- parity


def test_everything_within_tolerance(use_paths, write, capsys):
    first, second = write(), write("bf16_head1_page8", "two.safetensors")
    assert cli.main(["parity", first, second]) == 0
    out = capsys.readouterr().out
    for text in (
        "one",
        "two",
        "recorded",
        "exact",
        "4 results, all within tolerance",
        "tolerance:",
    ):
        assert text in out
    assert out.count(" ok ") == 4


def test_a_tampered_recording_is_out_of_tolerance(use_paths, write, capsys):
    output = evaluate(build(CASE["fp8_one_slot"])).output.copy()
    output[1, 3, 7] += 1
    assert cli.main(["parity", write(output=output)]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 results are out of tolerance" in out
    assert "off by 1 where" in out
    assert "(1, 3, 7)" in out


def test_a_wrong_path_is_out_of_tolerance(use_paths, write, capsys):
    use_paths(exact=exact, wrong=wrong)
    assert cli.main(["parity", write()]) == 1
    assert "1 of 3 results are out of tolerance" in capsys.readouterr().out


def test_a_path_that_cannot_is_out_of_tolerance(use_paths, write, capsys):
    use_paths(refuses=refuses)
    assert cli.main(["parity", write()]) == 1
    assert "not implemented: no such cache here" in capsys.readouterr().out


def test_no_path_can_run(use_paths, write, capsys):
    use_paths()
    assert cli.main(["parity", write()]) == 1
    out = capsys.readouterr().out
    assert "no path can run here; see: python -m sparse_decode info" in out


def test_without_captures_the_short_list(use_paths, capsys):
    assert cli.main(["parity"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.SHORT)
    assert f"{len(cli.SHORT)} results, all within tolerance" in out


def test_all_cases(use_paths, capsys):
    assert cli.main(["parity", "--all"]) == 0
    assert f"{len(CASES)} results, all within tolerance" in capsys.readouterr().out


def test_recording_without_output(use_paths, write, capsys):
    assert cli.main(["parity", write(output=None)]) == 0
    out = capsys.readouterr().out
    assert "1 results, all within tolerance" in out
    assert "recorded " not in out.partition("tolerance:")[0].replace("vs recorded", "")


def test_recording_that_keeps_inactive_rows(use_paths, write):
    call = build(CASE["fp8_inactive_kept"])
    kept = evaluate(call).output.copy()
    kept[~call.active] = call.output[~call.active]
    assert cli.main(["parity", write("fp8_inactive_kept", output=kept)]) == 0


def test_paths_write_the_dtype_that_was_recorded(use_paths, write):
    seen = []

    def looks(call):
        outcome = exact(call)
        seen.append(outcome.output.dtype.name)
        return outcome

    use_paths(looks=looks)
    assert cli.main(["parity", write("fp8_output_fp16")]) == 0
    assert seen == ["float16"]


def test_json(use_paths, write, tmp_path):
    use_paths(exact=exact, refuses=refuses)
    file = tmp_path / "results.json"
    file.write_text("an old one")
    assert cli.main(["parity", write(), "--json", str(file)]) == 1

    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    document = json.loads(file.read_text(), parse_constant=no_constant)
    assert set(document) == {"versions", "paths", "tolerance", "results"}
    assert document["versions"]["sparse-decode"] == __version__
    assert document["versions"]["numpy"] == np.__version__
    assert document["paths"]["exact"] == {"mode": "interpreter", "reason": "a test"}
    recorded, passed, refused = document["results"]
    assert [result["subject"] for result in document["results"]] == ["one"] * 3
    assert (recorded["path"], recorded["mode"], recorded["ok"]) == ("recorded", "file", True)
    assert recorded["verdict"]["lse_share"] is None
    assert (passed["path"], passed["mode"], passed["ok"]) == ("exact", "interpreter", True)
    assert 0 < passed["verdict"]["error"] < 0.1
    assert 0 < passed["verdict"]["share"] <= 1
    assert 0 <= passed["verdict"]["lse_share"] <= 1
    assert passed["verdict"]["fault"] is None
    assert 0 <= passed["from_recorded"] < 0.1
    assert passed["seconds"] >= 0
    assert not refused["ok"]
    assert refused["verdict"]["fault"] == "not implemented: no such cache here"
    assert refused["verdict"]["error"] is refused["verdict"]["share"] is None  # infinite
    assert refused["from_recorded"] is None
    assert sorted(os.listdir(tmp_path)) == ["one.safetensors", "results.json"]


# --- bad files and arguments


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"", "expected a safetensors file"),
        (b"no capture at all", "expected a safetensors file"),
    ],
)
def test_bad_file(content, message, use_paths, write, tmp_path, capsys):
    bad = tmp_path / "bad.safetensors"
    if content is not None:
        bad.write_bytes(content)
    results = tmp_path / "results.json"
    assert cli.main(["parity", write(), str(bad), "--json", str(results)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("python -m sparse_decode: ")
    assert message in captured.err
    assert str(bad) in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not results.exists()


def test_truncated_capture(use_paths, write, capsys):
    path = write()
    os.truncate(path, os.path.getsize(path) - 100)
    assert cli.main(["parity", path]) == 2
    assert "expected a safetensors file, got one that says" in capsys.readouterr().err


def test_folder_as_capture(use_paths, tmp_path, capsys):
    assert cli.main(["parity", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--all", "--wide"])
def test_captures_and_built_in_cases_exclude_each_other(flag, use_paths, write, capsys):
    assert cli.main(["parity", write(), flag]) == 2
    assert "--all and --wide choose built-in cases" in capsys.readouterr().err


def test_json_into_a_folder_that_is_not_there(use_paths, write, tmp_path, capsys):
    target = tmp_path / "missing" / "results.json"
    assert cli.main(["parity", write(), "--json", str(target)]) == 2
    err = capsys.readouterr().err
    assert "--json: expected a file in a folder that exists, got" in err
    assert str(target) in err


def test_no_processes(use_paths, write, capsys):
    assert cli.main(["parity", write(), "--processes", "0"]) == 2
    assert "processes: expected at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["perform"], "invalid choice: 'perform'"),
        (["parity", "--bogus"], "unrecognized arguments: --bogus"),
        (["parity", "--json"], "expected one argument"),
        (["info", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# --- info, version, help


def test_info(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"sparse-decode {__version__}" in out
    assert f"numpy {np.__version__}" in out
    assert "CUDA GPUs visible: " in out
    for path in paths.PATHS:
        assert path.name in out
        assert path.summary in out
        assert path.status().reason in out


def status_of(name):
    return {path.name: path.status for path in paths.PATHS}[name]()


@pytest.mark.parametrize("name", ["pallas", "direct", "dlpack", "triton-on-jax"])
def test_a_jax_without_the_triton_backend_of_pallas(name, monkeypatch):
    pytest.importorskip("jax")
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    assert status_of(name).mode is None
    assert "has no Triton backend for Pallas" in status_of(name).reason


@pytest.mark.parametrize(
    ("kind", "capability", "mode", "reason"),
    [
        ("NVIDIA H200", "9.0", "native", "NVIDIA H200"),
        ("NVIDIA A10", "8.6", "native", "NVIDIA A10"),
        ("Tesla T4", "7.5", None, "8.0 or newer, got 7.5 (Tesla T4)"),
        ("AMD Instinct MI250X", "gfx90a", None, "an NVIDIA GPU, got AMD Instinct MI250X (gfx90a)"),
    ],
)
def test_what_jax_has_of_a_gpu(kind, capability, mode, reason, monkeypatch):
    jax = pytest.importorskip("jax")
    pytest.importorskip("triton")
    device = SimpleNamespace(device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert status_of("pallas").mode == mode
    assert status_of("pallas").reason.endswith(reason)


def test_info_says_what_to_install(capsys, monkeypatch):
    message = "To install it: pip install 'sparse-decode[torch]'"
    missing = Path("triton", "Triton kernels", lambda: Status(None, message), exact)
    monkeypatch.setattr(report, "PATHS", (missing,))
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["info"]) == 0
    assert message in capsys.readouterr().out


def test_brackets_in_a_file_name(use_paths, write, capsys):
    assert cli.main(["parity", write(file="step[x].safetensors")]) == 0
    assert "step[x]" in capsys.readouterr().out


def test_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["info"]) == 2
    err = capsys.readouterr().err
    assert "rich" in err


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([flag])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert (__version__ if flag == "--version" else "parity") in out


# --- the whole thing, in a process of its own


def test_as_a_program(write, tmp_path):
    pytest.importorskip("jax")
    pytest.importorskip("triton")
    file = tmp_path / "results.json"
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    command = [sys.executable, "-P", "-m", "sparse_decode", "parity", write("fp16_heads4_gate")]
    done = subprocess.run(
        [*command, "--json", str(file), "--processes", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())["results"]
    assert [result["path"] for result in results] == [
        "recorded", "pallas", "triton", "dlpack", "triton-on-jax"
    ]  # fmt: skip
    assert all(result["ok"] for result in results)
    assert results[1]["verdict"]["lse_share"] is not None
    assert "5 results, all within tolerance" in done.stdout
    assert "Traceback" not in done.stderr


def test_as_a_program_with_a_bad_file(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sparse_decode", "parity", "missing.safetensors"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "missing.safetensors" in done.stderr
    assert "Traceback" not in done.stderr
