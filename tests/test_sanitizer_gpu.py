"""compute-sanitizer over a few calls of every path; see tests/sanitize.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("triton")

import sanitize

from sparse_decode.cases import CASES

SANITIZER = shutil.which("compute-sanitizer")
SECONDS = 1200

CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed",
    "initcheck": "ERROR SUMMARY: 0 errors",
}
# XLA's own kernels are not ours to judge; those of Pallas have this in their names. What the others
# write is not seen then, so that copies to the host must not be judged either.
PALLAS_ONLY = (
    *("--kernel-name", "kernel_substring=sparse_decode"),
    *("--check-api-memory-access", "no"),
)
PATHS = ("direct", "triton", "dlpack", "pallas", "triton-on-jax")

needs_sanitizer = pytest.mark.skipif(
    SANITIZER is None, reason="compute-sanitizer is not on the PATH"
)


@pytest.fixture
def sanitized(tmp_path_factory):
    """Runs tests/sanitize.py, under a tool if one is given; compiled kernels are shared."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "SPARSE_DECODE_CACHE_DIR": str(folder / "sanitized_direct"),
        "TRITON_CACHE_DIR": str(folder / "sanitized_triton"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "sanitized_jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def run(tool: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*tool, sys.executable, "-P", sanitize.__file__, *arguments],
            env=environment,
            cwd=Path(sanitize.__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS,
        )

    return run


def sanitizer(tool: str, *options: str) -> tuple[str, ...]:
    return (str(SANITIZER), "--tool", tool, "--error-exitcode", "9", *options)


@pytest.mark.gpu
@needs_sanitizer
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tool", CLEAN)
def test_nothing_is_found(tool, path, sanitized):
    plain = sanitized((), path)
    assert plain.returncode == 0, plain.stdout
    only = PALLAS_ONLY if tool != "memcheck" and path in ("dlpack", "pallas") else ()
    done = sanitized(sanitizer(tool, *only), path)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert CLEAN[tool] in done.stdout, done.stdout
    assert done.stdout.count(f" {path} ok") == len(sanitize.NAMES)


@pytest.mark.gpu
@needs_sanitizer
@pytest.mark.parametrize("only", [(), PALLAS_ONLY], ids=["all", "ours"])
@pytest.mark.parametrize(
    ("tool", "fault", "message"),
    [
        ("memcheck", "out-of-bounds", "Invalid __global__ read"),
        ("initcheck", "unwritten", "Uninitialized __global__ memory read"),
    ],
)
def test_a_planted_fault_is_found(tool, fault, message, only, sanitized):
    done = sanitized(sanitizer(tool, *only), fault)
    assert done.returncode != 0, done.stdout
    assert message in done.stdout, done.stdout


def test_the_cases_are_there():
    assert set(sanitize.NAMES) <= {case.name for case in CASES}


@pytest.mark.parametrize(
    "wanted", [[], ["nothing"], ["triton", "nothing"], ["out-of-bounds", "triton"]]
)
def test_other_names_are_refused(wanted, capsys):
    assert sanitize.main(wanted) == 2
    assert "expected paths that run natively here, of ['pallas'," in capsys.readouterr().out
