"""Programs that outlive the process: `jax.export`, and compilation ahead of time."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh  # noqa: E402

from sparse_decode.cases import Case, build  # noqa: E402
from sparse_decode.pallas_kernels import sparse_decode_attention  # noqa: E402
from sparse_decode.tolerance import judge, limits  # noqa: E402

if jax.default_backend() == "cpu":
    jax.config.update("jax_disable_most_optimizations", True)

TRITON = "__gpu$xla.gpu.triton"
ALLOWED = [export.DisabledSafetyCheck.custom_call(TRITON)]
CASE = Case("export", (40, 9), heads=2, slots=4, page_size=8, splits=2, gate="float32")
CALL = dataclasses.replace(build(dataclasses.replace(CASE, index="int32")), output=None)
STRUCTS = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in CALL.arrays().items()}

# Runs an exported program: the program, its arguments and its results are files.
LOADER = """
import sys
import ml_dtypes
import numpy as np
import jax
from jax import export

program, arguments, results = sys.argv[1:]
with open(program, "rb") as file:
    exported = export.deserialize(bytearray(file.read()))
stored = np.load(arguments)
arrays = {}
for name in stored.files:
    name, dtype = name.split(":")
    arrays[name] = jax.numpy.asarray(stored[f"{name}:{dtype}"].view(dtype))
output, lse = exported.call(arrays)
assert not any(name.startswith("sparse_decode") for name in sys.modules)
np.savez(results, output=np.asarray(output).view(np.uint16), lse=np.asarray(lse))
"""


@jax.jit
def attend(arrays):
    return sparse_decode_attention(**arrays, **CALL.options(), return_lse=True)


def targeting_h200():
    """Stands in for the GPU that lowering asks about."""
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    return use_abstract_mesh(
        AbstractMesh((1,), ("device",), (AxisType.Explicit,), abstract_device=device)
    )


def check(output, lse):
    verdict = judge(limits(CALL), np.asarray(output), np.asarray(lse), None)
    assert verdict.ok, verdict.fault


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_round_trip_to_a_new_process(platform, tmp_path):
    """The process that runs the program needs JAX alone."""
    pytest.importorskip("flatbuffers")
    exported = export.export(attend, platforms=[platform], disabled_checks=ALLOWED)(STRUCTS)
    (tmp_path / "program").write_bytes(exported.serialize())
    raw = {
        f"{name}:{array.dtype.name}": array.view(f"u{array.dtype.itemsize}")
        for name, array in CALL.arrays().items()
    }
    np.savez(tmp_path / "arguments.npz", **raw)
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADER, "program", "arguments.npz", "results.npz"],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": platform},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = np.load(tmp_path / "results.npz")
    check(results["output"].view(CALL.query.dtype), results["lse"])


def test_ahead_of_time():
    program = attend.lower(STRUCTS).compile()
    check(*program({name: jnp.asarray(array) for name, array in CALL.arrays().items()}))


def test_export_for_cuda_without_a_gpu():
    pytest.importorskip("flatbuffers")
    with targeting_h200():
        exported = export.export(attend, platforms=["cuda"], disabled_checks=ALLOWED)(STRUCTS)
    loaded = export.deserialize(exported.serialize())
    assert loaded.platforms == ("cuda",)
    assert loaded.nr_devices == 1
    assert loaded.mlir_module().count(f"@{TRITON}") == 2
    assert [aval.shape for aval in loaded.out_avals] == [(2, 2, 192), (2, 2)]


def test_the_kernels_must_be_allowed():
    with targeting_h200(), pytest.raises(ValueError, match="no compatibility guarantees"):
        export.export(attend, platforms=["cuda"])(STRUCTS)
