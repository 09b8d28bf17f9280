"""What is built is what stands in the tree, and it imports from an empty folder.

The kernel folders stand at the top of the repository and are installed below ``sparse_decode``;
a package forgotten in pyproject.toml would vanish from the wheel without an error.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import sparse_decode

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "sparse_decode": "sparse_decode",
    "bridge": "sparse_decode/bridge",
    "pallas_kernels": "sparse_decode/pallas_kernels",
    "triton_kernels": "sparse_decode/triton_kernels",
}
FRAMEWORK = {"pallas_kernels": "jax", "triton_kernels": "torch"}
SIDES = sorted(FRAMEWORK)

needs_build = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("build", "pip", "setuptools"))),
    reason="build, pip or setuptools is not installed",
)


def _run(*command, cwd, **env):
    """Runs Python with the given arguments and returns its output; a failure shows all of it."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "PIP_NO_INDEX": "1", "PYTHONPATH": "", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _files(tree):
    """Source path -> installed path of every file in the packaged folders of a tree."""
    return {
        file.relative_to(tree).as_posix(): f"{target}/{file.relative_to(tree / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for file in (tree / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def _copy_tree(target):
    ignore = shutil.ignore_patterns(
        ".*", "*.egg-info", "__pycache__", "build", "captures", "dist", "shared"
    )
    return Path(shutil.copytree(ROOT, target, ignore=ignore))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(tree, sdist, wheel): a copy of the tree, and what `make wheel` builds from it."""
    tree = _copy_tree(tmp_path_factory.mktemp("wheel") / "tree")
    _run("-P", "-m", "build", "--no-isolation", "--outdir", tree / "dist", tree, cwd=tree)
    (sdist,), (wheel,) = (tree / "dist").glob("*.tar.gz"), (tree / "dist").glob("*.whl")
    return tree, sdist, wheel


@needs_build
def test_wheel_holds_exactly_the_packaged_folders(built):
    tree, _, wheel = built
    expected = set(_files(tree).values())
    assert "sparse_decode/py.typed" in expected
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected


@needs_build
def test_wheel_metadata(built):
    _, _, wheel = built
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = f"sparse_decode-{sparse_decode.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        licenses = {name for name in archive.namelist() if name.startswith(f"{info}/licenses/")}
        assert archive.read(f"{info}/top_level.txt").split() == [b"sparse_decode"]
    assert metadata["Name"] == "sparse-decode"
    assert metadata["Version"] == sparse_decode.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert licenses == {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"}


@needs_build
def test_sdist_holds_the_sources(built):
    tree, sdist, _ = built
    prefix = f"sparse_decode-{sparse_decode.__version__}/"
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(prefix) for member in archive if member.isfile()}
    packaged = {name for name in names if name.partition("/")[0] in FOLDERS}
    assert packaged == set(_files(tree))
    assert {"LICENSE", "NOTICE", "README.md", "pyproject.toml"} <= names
    assert not {name for name in names if name.startswith(("tests/", "shared/"))}


_IMPORT_FROM = """
import importlib, pathlib, site, sys
site.addsitedir(sys.argv[1])
root = pathlib.Path(sys.argv[2]).resolve()
for name in sys.argv[3:]:
    file = pathlib.Path(importlib.import_module(name).__file__).resolve()
    assert file.is_relative_to(root), f"{name} came from {file}, not from {root}"
"""


def _importable(tree):
    """Names of the packages that a tree holds and whose framework is installed."""
    return [
        target.replace("/", ".")
        for folder, target in FOLDERS.items()
        if (tree / folder / "__init__.py").exists()
        and (folder not in FRAMEWORK or importlib.util.find_spec(FRAMEWORK[folder]))
    ]


def _import_from(site_dir, root, names, cwd):
    """Imports packages that must come from below ``root``.

    -S leaves out the environment's own .pth files, with them an editable install of this
    repository; the frameworks stay reachable.
    """
    installed = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    path = os.pathsep.join([str(site_dir), *installed])
    _run("-S", "-P", "-c", _IMPORT_FROM, site_dir, root, *names, cwd=cwd, PYTHONPATH=path)


@needs_build
def test_wheel_imports_from_an_empty_folder(built, tmp_path):
    tree, _, wheel = built
    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    _run("-m", "pip", "install", "--no-deps", "--target", target, wheel, cwd=empty)
    _import_from(target, target, _importable(tree), empty)


@needs_build
def test_editable_install_imports_and_sees_new_files(tmp_path):
    tree, target, empty = _copy_tree(tmp_path / "tree"), tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    options = ("--no-deps", "--no-build-isolation", "--target", target)
    _run("-m", "pip", "install", *options, "-e", tree, cwd=empty)
    names = _importable(tree)
    for folder, target_path in FOLDERS.items():
        if (name := target_path.replace("/", ".")) in names:
            (tree / folder / "added_later.py").touch()
            names.append(f"{name}.added_later")
    _import_from(target, tree, names, empty)


def test_repository_root_is_off_the_path():
    assert ROOT not in {Path(entry).resolve() for entry in sys.path}


_REPORT_LOADED = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*{name.partition(".")[0] for name in sys.modules})
"""


def _skip_unless_present(folder):
    if not (ROOT / folder / "__init__.py").exists():
        pytest.skip(f"{folder}/ is not there")


def _path():
    return os.environ.get("PYTHONPATH", "")


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("sparse_decode", {"jax", "jaxlib", "torch", "triton"}),
        ("pallas_kernels", {"torch", "triton"}),
        ("triton_kernels", {"jax", "jaxlib"}),
    ],
)
def test_import_leaves_other_frameworks_alone(folder, forbidden, tmp_path):
    _skip_unless_present(folder)
    pytest.importorskip(FRAMEWORK.get(folder, "sparse_decode"))
    name = FOLDERS[folder].replace("/", ".")
    loaded = set(_run("-P", "-c", _REPORT_LOADED, name, cwd=tmp_path, PYTHONPATH=_path()).split())
    assert "sparse_decode" in loaded
    assert not loaded & forbidden


_IMPORT_WITHOUT = """
import importlib, sys
sys.modules[sys.argv[1]] = None
try:
    importlib.import_module(sys.argv[2]).sparse_decode_attention
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("folder", SIDES)
def test_missing_framework_names_the_extra(folder, tmp_path):
    _skip_unless_present(folder)
    framework, name = FRAMEWORK[folder], FOLDERS[folder].replace("/", ".")
    message = _run("-P", "-c", _IMPORT_WITHOUT, framework, name, cwd=tmp_path, PYTHONPATH=_path())
    assert message.startswith(f"MissingDependency {framework} is not installed")
    assert f"pip install 'sparse-decode[{framework}" in message
