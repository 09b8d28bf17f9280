"""What a user sees of JAX's deprecation of the Triton backend of Pallas.

Each test runs a program that lowers many calls for a GPU, in JAX and for the direct launch, under
the warning filters of its command line. No GPU is needed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

from sparse_decode._require import _release  # noqa: E402

TEXT = "The Pallas Triton backend is deprecated"
WARNS = _release(jax.__version__) >= (0, 11)
IGNORE = f"ignore:{TEXT}:DeprecationWarning"  # as docs/compatibility.md has it

IN_JAX = """
import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from sparse_decode.pallas_kernels import sparse_decode_attention

gpu = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=gpu)


def in_jax(rows, splits):
    shapes = {
        "query": ((rows, 8, 192), jnp.bfloat16),
        "cache": ((32, 1, 64, 384), jnp.bfloat16),
        "regions": ((rows, 4), jnp.int32),
        "block_table": ((rows, 16), jnp.int32),
        "positions": ((rows,), jnp.int32),
        "active": ((rows,), jnp.bool_),
    }
    arrays = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    attend = jax.jit(lambda arrays: sparse_decode_attention(**arrays, scale=0.07, splits=splits))
    with use_abstract_mesh(mesh):
        text = attend.trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == splits
"""
DIRECT = """
import toy_kernels
from sparse_decode.bridge.lowering import Buffer, lower


def directly(rows):
    assert len(lower(toy_kernels.copy, Buffer((4, 64 * rows), "float32", 4), arch=90).calls) == 1
"""
BOTH = f"""{IN_JAX}{DIRECT}
for rows in (1, 2, 3):
    in_jax(rows, splits=1)
    directly(rows)
    in_jax(rows, splits=2)
"""
DIRECT_ALONE = f"""{DIRECT}
directly(1)
directly(2)
"""


def shown(program, *filters):
    """Runs a program; returns how often it showed the warning, which is all that it may show."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    rules = [part for rule in filters for part in ("-W", rule)]
    done = subprocess.run(
        [sys.executable, "-P", *rules, "-c", program],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("  ")]
    assert all(TEXT in line for line in lines), done.stderr
    return len(lines)


def test_python_shows_nothing():
    """It hides what is not raised by the main program itself."""
    assert shown(BOTH) == 0


def test_once_where_deprecations_are_shown():
    """The direct launch must not make Python forget that it has shown the warning."""
    assert shown(BOTH, f"default:{TEXT}") == WARNS


def test_nothing_comes_of_the_direct_launch():
    assert shown(DIRECT_ALONE, f"always:{TEXT}") == 0
    assert shown(DIRECT_ALONE, f"error:{TEXT}") == 0


def test_the_documented_filter_lets_warnings_be_errors():
    assert shown(BOTH, f"error:{TEXT}", IGNORE) == 0
    if WARNS:
        with pytest.raises(AssertionError, match=TEXT):
            shown(BOTH, f"error:{TEXT}")
    documentation = (Path(__file__).parents[1] / "docs" / "compatibility.md").read_text()
    assert IGNORE in documentation
