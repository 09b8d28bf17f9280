"""Missing and unsupported dependencies are reported by name, with the way out."""

import json
import subprocess
import sys

import pytest

from sparse_decode._require import (
    SUPPORTED,
    MissingDependency,
    check_version,
    require,
    require_supported,
)


def test_require_returns_the_module():
    assert require("json", extra="torch") is json
    assert require("json.decoder", extra="torch") is sys.modules["json.decoder"]


@pytest.mark.parametrize("module", ["no_such_framework", "no_such_framework.sub.module"])
def test_missing_module_names_module_user_and_extra(module):
    with pytest.raises(MissingDependency) as caught:
        require(module, extra="jax-cpu", needed_by="sparse_decode.pallas_kernels")
    message = str(caught.value)
    assert "no_such_framework is not installed" in message
    assert "sparse_decode.pallas_kernels needs it" in message
    assert "pip install 'sparse-decode[jax-cpu]'" in message
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "no_such_framework"


def test_missing_module_names_the_part_by_its_extra():
    with pytest.raises(MissingDependency, match="the 'torch' part of sparse_decode needs it"):
        require("no_such_framework", extra="torch")


def test_a_module_set_to_none_counts_as_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "hidden_framework", None)
    with pytest.raises(MissingDependency, match="hidden_framework is not installed"):
        require("hidden_framework", extra="torch")


def test_a_fault_inside_an_installed_package_is_not_disguised(tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import no_such_dependency\n")
    (tmp_path / "fails.py").write_text("raise ImportError('libcuda.so.1: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as caught:
        require("needs_another", extra="torch")
    assert not isinstance(caught.value, MissingDependency)
    with pytest.raises(ImportError, match=r"libcuda\.so\.1") as caught:
        require("fails", extra="torch")
    assert not isinstance(caught.value, MissingDependency)


@pytest.mark.parametrize(
    ("found", "minimum", "below"),
    [
        ("0.10.2", "0.10.2", "0.13"),
        ("0.12.0.1", "0.10.2", "0.13"),
        ("0.12.99", "0.10.2", "0.13"),
        ("2.11.0a0+git1234", "2.11", None),
        ("2.13.0+cpu", "2.11", None),
        ("3.6", "3.6.0", None),
        ("3.10.0", "3.6", None),
        ("10.0", "9.9", None),
    ],
)
def test_supported_versions_pass(found, minimum, below):
    check_version("jax", found, minimum, below)


@pytest.mark.parametrize(
    ("found", "minimum", "below", "supported"),
    [
        ("0.10.1", "0.10.2", "0.13", ">=0.10.2,<0.13"),
        ("0.9.9", "0.10.2", "0.13", ">=0.10.2,<0.13"),
        ("0.13.0", "0.10.2", "0.13", ">=0.10.2,<0.13"),
        ("0.13.0.dev20270101", "0.10.2", "0.13", ">=0.10.2,<0.13"),
        ("1.0", "0.10.2", "0.13", ">=0.10.2,<0.13"),
        ("2.9.1+cu130", "2.11", None, ">=2.11"),
    ],
)
def test_unsupported_version_names_found_and_supported(found, minimum, below, supported):
    with pytest.raises(NotImplementedError) as caught:
        check_version("jax", found, minimum, below)
    message = str(caught.value)
    assert f"jax {found} is not supported" in message
    assert message.endswith(f"needs jax {supported}")


def test_a_version_without_digits_is_refused():
    with pytest.raises(ValueError, match=r"expected digits first.*got 'unknown'"):
        check_version("jax", "unknown", "0.10.2")


# Imports a module in a process where one module is hidden, and prints what that raises.
IMPORT = """
import importlib, sys
module, hidden = sys.argv[1:]
import jax
sys.modules[hidden] = None
try:
    importlib.import_module(module)
except NotImplementedError as error:
    print(f"{jax.__version__}|{error}")
"""


@pytest.mark.parametrize(
    "hidden",
    ["jax.experimental.pallas.triton", "jax._src.pallas.triton", "jax.experimental.pallas"],
)
def test_jax_without_the_triton_backend_of_pallas(hidden):
    """JAX will lose it: what is installed and what is needed are then told at import."""
    pytest.importorskip("jax")
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT, "sparse_decode.pallas_kernels", hidden],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    version, message = done.stdout.strip().split("|")
    oldest, below, _ = SUPPORTED["jax"]
    assert message.startswith(f"jax {version} has no Triton backend for Pallas (")
    assert hidden in message
    assert message.endswith(f"sparse_decode needs jax >={oldest},<{below}")


@pytest.mark.parametrize("version", ["0.10.1", "0.13.0"])
def test_unsupported_jax_is_refused_by_version(version, monkeypatch):
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(jax, "__version__", version)
    with pytest.raises(NotImplementedError, match=rf"jax {version} is not supported.*>=0\.10\.2"):
        require_supported("jax")
