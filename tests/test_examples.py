"""Every example and every Python snippet of the README runs, as a user would run it.

Each runs in a process of its own, in an empty folder. On a CPU nothing but its output may appear.
"""

import importlib.util
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_decode.devices import gpu_count

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)

TENSOR_PARALLEL = (
    r"have the bits of one device: yes",
    r"stays sharded over groups: yes",
    r"collectives in the compiled program: none",
)
# What each example prints on a CPU, as patterns.
EXAMPLES = {
    "quickstart.py": (
        r"No GPU is visible: the kernels run through the interpreters of Pallas and Triton\.",
        r"direct .* no .* no CUDA GPU is visible",
        r"JAX, jitted: +largest error \d",
        r"PyTorch, in place: +largest error \d",
        *(rf"{path} +│ interpreter .* ok " for path in ("pallas", "triton", "dlpack")),
        r"triton-on-jax +│ interpreter .* ok ",
        r"All 4 paths that can run here are within tolerance\.",
    ),
    "shared_cache.py": (
        r"to_jax refuses a view with gaps: .*packed_to_jax",
        *(rf"step {step}, layer 2: .* within tolerance" for step in range(3)),
        r"JAX traced 1 program for 3 layers and 3 steps",
    ),
    "torch_drop_in.py": (
        r"route: None; query: expected a tensor on an NVIDIA GPU, got cpu",
        r"The direct route needs a GPU\.",
        r"route: dlpack; .*interpreter",
        r"original algorithm, Triton kernels: .* within tolerance",
        r"drop-in, Pallas kernels: .* within tolerance",
    ),
    "cuda_graph.py": (r"needs a CUDA GPU .* Nothing was run\.",),
    "tensor_parallel.py": TENSOR_PARALLEL,
    "context_parallel.py": (r" 7 +8 +2 +64\n", r"within rounding"),
}
# What each prints on a GPU.
ON_A_GPU = {
    "quickstart.py": (r"direct +│ native .* ok ", r"All 5 paths that can run here are within"),
    "shared_cache.py": (r"JAX traced 1 program for 3 layers and 3 steps",),
    "torch_drop_in.py": (r"route: direct; compiled for sm_", r"drop-in.* within tolerance"),
    "tensor_parallel.py": (*TENSOR_PARALLEL, r"256 rows", r"GPUs: [\d.]+ us, [\d.]+ x"),
    "context_parallel.py": (r"within rounding", r"GPUs: [\d.]+ us, [\d.]+ x"),
    "cuda_graph.py": (r"captured 3 layers", r"replay 9, .* layer 2: .* both within tolerance"),
}
# `make demo` may take this long on two cores, imports included. Held against processor time, which
# other work on the machine does not change.
DEMO_SECONDS = 180

frameworks = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("jax", "torch", "triton", "rich"))),
    reason="jax, torch, triton or rich is not installed",
)


def run(folder, *program, **env):
    """Runs a program with this environment, less what the tests set; returns what it did."""
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-P", *map(str, program)],
        cwd=folder,
        env=kept | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.iterdir())
    return done


def seconds_of_children():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def finds(patterns, text):
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"


@frameworks
@pytest.mark.timeout(3 * DEMO_SECONDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_on_a_cpu(name, tmp_path):
    began = seconds_of_children()
    done = run(tmp_path, ROOT / "examples" / name, CUDA_VISIBLE_DEVICES="")
    assert seconds_of_children() - began < DEMO_SECONDS
    finds(EXAMPLES[name], done.stdout)
    assert not done.stderr


@frameworks
@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_example_on_a_gpu(name, tmp_path):
    done = run(tmp_path, ROOT / "examples" / name)
    finds(ON_A_GPU[name], done.stdout)


@frameworks
def test_number_of_devices(tmp_path):
    example = ROOT / "examples" / "tensor_parallel.py"
    done = run(tmp_path, example, "--devices", "2", CUDA_VISIBLE_DEVICES="")
    finds([r", 2 x cpu\n"], done.stdout)


@frameworks
@pytest.mark.gpu
@pytest.mark.serial
@pytest.mark.skipif(gpu_count() < 2, reason="needs several GPUs")
def test_two_gpus_are_faster(tmp_path):
    """With 256 rows of 8 groups, nothing communicated and little of a step fixed."""
    done = run(tmp_path, ROOT / "examples" / "tensor_parallel.py", "--devices", "2")
    [factor] = re.findall(r"2 GPUs: [\d.]+ us, ([\d.]+) x", done.stdout)
    assert float(factor) >= 1.8, done.stdout


@frameworks
@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippet_of_the_readme(index, tmp_path):
    done = run(tmp_path, "-c", SNIPPETS[index], CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    finds([r"[\[(]2, 8, 192[\])]"], done.stdout)
    assert not done.stderr


@frameworks
@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippet_of_the_readme_on_a_gpu(index, tmp_path):
    done = run(tmp_path, "-c", SNIPPETS[index], XLA_PYTHON_CLIENT_PREALLOCATE="false")
    finds([r"[\[(]2, 8, 192[\])]"], done.stdout)


@frameworks
def test_quickstart_fails_when_a_path_is_wrong(tmp_path):
    program = f"""
import runpy, sys
import numpy as np
from sparse_decode import parity
from sparse_decode.paths import Outcome, Path, Status

def wrong(call):
    return Outcome(np.ones_like(call.query), None, None)

parity.PATHS = (Path("wrong", "always 1", lambda: Status("interpreter", ""), wrong),)
sys.argv = ["quickstart.py"]
try:
    runpy.run_path({str(ROOT / "examples" / "quickstart.py")!r}, run_name="__main__")
except SystemExit as error:
    print("status", error.code)
"""
    done = run(tmp_path, "-c", program, CUDA_VISIBLE_DEVICES="")
    finds([r"1 of 1 results are out of tolerance", r"status 1"], done.stdout)


def test_there_is_a_test_for_each_example():
    names = {file.name for file in (ROOT / "examples").glob("*.py")}
    assert names - {"jax_decode_loop.py"} == set(EXAMPLES) == set(ON_A_GPU)
    assert "jax_decode_loop.py" in (ROOT / "tests" / "test_transformations.py").read_text()
    assert len(SNIPPETS) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert links
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_readme_names_every_path():
    from sparse_decode.paths import PATHS

    table = README.partition("\n## Paths\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE) == [path.name for path in PATHS]
