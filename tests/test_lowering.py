"""Extraction, compilation and storage of Pallas kernels, none of which needs a GPU."""

import dataclasses
import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("triton")

import jax
import jax.numpy as jnp
import toy_kernels as toys
from jax._src import xla_bridge

import sparse_decode
from sparse_decode.bridge import compile as compiling
from sparse_decode.bridge import lowering
from sparse_decode.bridge.lowering import Buffer, Program, lower

ARCHITECTURES = list(lowering.DEVICE_KINDS)
OTHER_PYTHONS = [
    python
    for python in os.environ.get("SPARSE_DECODE_OTHER_PYTHONS", "").split(os.pathsep)
    if python
]


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


NORMALISE = (spec(4, 64), spec(), spec(64))
FUNCTIONS = {
    "normalise": (toys.normalise, NORMALISE),
    "add_into": (toys.add_into, (spec(32), spec(32))),
    "masked": (
        toys.masked,
        (spec(100, dtype="bfloat16"), spec(1, dtype="bool"), spec(1, dtype="int32")),
    ),
    "product": (
        toys.product,
        (spec(64, 128, dtype="bfloat16"), spec(128, 64, dtype="bfloat16"), spec(1, dtype="int32")),
    ),
}


# --- extraction


def test_two_kernels_with_scratch_between_them():
    program = lower(toys.normalise, *NORMALISE, arch=90)
    first, second = program.calls
    assert (first.name, first.grid) == ("_scale_and_square", (4, 1, 1))
    assert (first.num_warps, first.num_stages) == (2, 1)
    assert (second.name, second.grid) == ("_divide", (4, 1, 1))
    assert (second.num_warps, second.num_stages) == (1, 3)
    assert (first.arguments, second.arguments) == ((0, 1, 3, 4), (3, 4, 2, 5))
    assert (program.outputs, program.results, program.scratch) == ((5,), (5,), (3, 4))
    assert [buffer.shape for buffer in program.buffers] == [
        (4, 64),
        (),
        (64,),
        (4, 64),
        (4,),
        (256,),
    ]
    assert {buffer.alignment for buffer in program.buffers} == {32}
    assert [buffer.nbytes for buffer in program.inputs] == [1024, 4, 256]
    assert "tt.func public @_divide(" in second.ttir


def test_in_place_update_uses_the_argument_for_both():
    program = lower(toys.add_into, spec(32), spec(32), arch=90)
    [call] = program.calls
    assert (call.arguments, call.aliases) == ((0, 1, 1), ((1, 0),))
    assert (program.outputs, program.results, len(program.buffers)) == ((1,), (), 2)


def test_repeated_in_place_updates_follow_each_other():
    def twice(x, total):
        return toys.add_into(x, toys.add_into(x, total))

    program = lower(twice, spec(32), spec(32), arch=90)
    assert [call.arguments for call in program.calls] == [(0, 1, 1), (0, 1, 1)]
    assert program.outputs == (1,)


def test_dtypes_and_unused_arguments():
    function, specs = FUNCTIONS["masked"]
    program = lower(lambda unused, *rest: function(*rest), spec(3), *specs, arch=90)
    assert [buffer.dtype for buffer in program.buffers] == [
        "float32",
        "bfloat16",
        "bool",
        "int32",
        "bfloat16",
    ]
    assert program.inputs[0].alignment == 1
    assert program.calls[0].arguments == (1, 2, 3, 4)


def test_bitcast_is_a_view():
    def as_words(cache):
        words = jax.lax.bitcast_convert_type(cache.reshape(4, 64, 4), jnp.uint32)
        return toys.copy(words)

    program = lower(as_words, spec(4, 256, dtype="float8_e4m3fn"), arch=90)
    assert program.calls[0].arguments == (0, 1)
    assert [(buffer.dtype, buffer.nbytes) for buffer in program.buffers] == [
        ("float8_e4m3fn", 1024),
        ("uint32", 1024),
    ]


def test_tree_of_outputs_is_flattened():
    def both(x):
        return {"b": toys.copy(x), "a": (toys.copy(x).reshape(-1),)}

    program = lower(both, spec(4, 64), arch=90)
    assert [program.buffers[index].shape for index in program.outputs] == [(256,), (4, 64)]


def test_empty_grid():
    program = lower(functools.partial(toys.copy, rows=0), spec(4, 64), arch=90)
    assert program.calls[0].grid == (0, 1, 1)


def test_jitted_function_and_shapes_given_as_buffers():
    buffers = [Buffer(item.shape, item.dtype.name, item.dtype.itemsize) for item in NORMALISE]
    assert lower(jax.jit(toys.normalise), *buffers, arch=90) == lower(
        toys.normalise, *NORMALISE, arch=90
    )


def test_program_survives_json_and_pickle():
    program = lower(toys.add_into, spec(32), spec(32), arch=90)
    assert Program.from_json(program.to_json()) == program
    assert pickle.loads(pickle.dumps(program)) == program


def test_no_backend_is_initialised(tmp_path):
    script = (
        "import toy_kernels as toys\n"
        "from sparse_decode.bridge.lowering import Buffer, lower\n"
        "for arch in (80, 90, 100):\n"
        "    lower(toys.copy, Buffer((4, 64), 'float32', 4), arch=arch)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
    )
    run_python(script, tmp_path, JAX_PLATFORMS="")


def test_lowering_leaves_the_process_as_it_was():
    before = jax.jit(lambda x: x + 1)(jnp.ones(4))
    lower(toys.copy, spec(4, 64), arch=90)
    after = jax.jit(lambda x: x + 2)(jnp.ones(4))
    assert before.devices() == after.devices()
    assert jax.local_devices()
    assert xla_bridge._backends


# --- what cannot be launched


@pytest.mark.parametrize(
    ("function", "named"),
    [
        pytest.param(lambda x: toys.copy(x) + 1, "stablehlo", id="arithmetic"),
        pytest.param(lambda x: toys.copy(x.T.reshape(4, 64)), "stablehlo.transpose", id="layout"),
        pytest.param(lambda x: toys.copy(x[1:]), "stablehlo.slice", id="slice"),
        pytest.param(lambda x: jnp.linalg.cholesky(x[:, :4]), "stablehlo", id="library call"),
        pytest.param(lambda x: x, "output 0: returns argument 0", id="argument returned"),
        pytest.param(lambda x: (toys.copy(x),) * 2, None, id="output twice"),
        pytest.param(
            lambda x: toys.add_into(x, x), "also passed as another operand", id="in place twice"
        ),
        pytest.param(lambda x: toys.copy(x + x), "stablehlo.add", id="arithmetic before"),
    ],
)
def test_anything_else_is_refused_by_name(function, named):
    with pytest.raises(NotImplementedError, match=named):
        lower(function, spec(4, 64), arch=90)


def test_reading_what_was_updated_in_place_is_refused():
    def stale(x, total):
        new = toys.add_into(x, total)
        return new, toys.copy(total)

    with pytest.raises(NotImplementedError, match="after a kernel updated it in place"):
        lower(stale, spec(4, 64), spec(4, 64), arch=90)


def test_narrowed_dtype_is_refused():
    class Wide:
        shape, dtype = (4, 64), "int64"

    with pytest.raises(ValueError, match="argument 0: JAX would narrow int64"):
        lower(toys.copy, Wide(), arch=90)


def test_unknown_architecture():
    with pytest.raises(NotImplementedError, match="arch"):
        lower(toys.copy, spec(4, 64), arch=75)


@pytest.mark.parametrize("version", ["0.9.1", "0.10.1", "0.13.0", "1.0"])
def test_unsupported_jax(version, monkeypatch):
    monkeypatch.setattr(jax, "__version__", version)
    with pytest.raises(NotImplementedError, match=rf"jax {version}.*>=0\.10\.2,<0\.13"):
        lower(toys.copy, spec(4, 64), arch=90)


def test_jax_without_the_backend(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.pallas.triton.lowering", None)
    with pytest.raises(NotImplementedError, match=rf"jax {jax.__version__} lacks"):
        lower(toys.copy, spec(4, 64), arch=90)


# --- compilation


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_without_spills(arch):
    programs = [lower(function, *specs, arch=arch) for function, specs in FUNCTIONS.values()]
    jobs = [compiling.Job(call, arch) for program in programs for call in program.calls]
    kernels = compiling.compile_many(jobs, processes=2)
    for job, kernel in zip(jobs, kernels, strict=True):
        assert (kernel.name, kernel.arch) == (job.call.name, arch)
        assert kernel.cubin.startswith(b"\x7fELF")
        assert kernel.num_parameters >= len(job.call.arguments)
        found = compiling.resources(kernel)
        assert found.spilled == 0
        assert 0 < found.registers <= 255
        assert found.shared >= kernel.shared
    assert compiling.compile_kernel(jobs[0].call, arch) == kernels[0]


def test_dependent_launch_needs_a_kernel_that_waits():
    waiting = lower(functools.partial(toys.copy, wait=True), spec(4, 64), arch=90).calls[0]
    assert compiling.compile_kernel(waiting, 90, launch_pdl=True).launch_pdl
    with pytest.raises(ValueError, match="never executes"):
        compiling.compile_kernel(
            lower(toys.copy, spec(4, 64), arch=90).calls[0], 90, launch_pdl=True
        )
    with pytest.raises(NotImplementedError, match="launch_pdl"):
        compiling.compile_kernel(waiting, 80, launch_pdl=True)


def test_failure_in_a_compiling_process_is_told():
    [call] = lower(toys.copy, spec(4, 64), arch=90).calls
    broken = dataclasses.replace(call, ttir="nonsense")
    with pytest.raises(RuntimeError, match="in a process of its own"):
        compiling.compile_many([compiling.Job(broken, 90)] * 2, processes=2)


# --- storage

# Builds normalise for sm_90 and prints what it imported on the way.
BUILD = """
import json, sys
from sparse_decode.bridge import compile as compiling
from sparse_decode.bridge.lowering import Buffer

def make():
    import toy_kernels
    return toy_kernels.normalise

specs = tuple(Buffer(shape, "float32", 4) for shape in ((4, 64), (), (64,)))
request = compiling.Request(make, "normalise", specs, 90)
[executable] = compiling.build([request], processes=1)
cubins = [kernel.cubin.hex() for kernel in executable.kernels]
loaded = sorted({"jax", "torch", "triton"} & set(sys.modules))
print(json.dumps([loaded, executable.program.to_json(), cubins]))
"""


def environment(folder, **variables):
    """For a process that sees this package, the tests' helpers, and a store of its own."""
    path = [str(Path(toys.__file__).parent), *filter(None, sys.path)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "SPARSE_DECODE_CACHE_DIR": str(folder / "store"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        **variables,
    }


def run_python(script, folder, **variables):
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def request(arch=90, key="copy", **options):
    return compiling.Request(
        make=lambda: toys.copy,
        key=key,
        specs=(Buffer((4, 64), "float32", 4),),
        arch=arch,
        **options,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"jax_default_matmul_precision": "BF16_BF16_F32"},
        {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"},
    ],
    ids=["precision", "promotion"],
)
def test_settings_of_the_program_do_not_matter(settings, jax_settings):
    function, specs = FUNCTIONS["product"]
    product = functools.partial(lower, function, *specs, arch=90)
    expected = product()
    with jax_settings(settings):
        assert product() == expected


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_DECODE_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("place", ["a file", "no home"])
def test_no_place_to_keep_kernels(place, tmp_path, monkeypatch):
    if place == "a file":
        file = tmp_path / "file"
        file.touch()
        monkeypatch.setenv("SPARSE_DECODE_CACHE_DIR", str(file / "folder"))
    else:
        for name in ("SPARSE_DECODE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept"):
        [executable] = compiling.build([request()], processes=1)
    assert executable.kernels


def must_not_lower():
    raise AssertionError("lowered, although it is stored")


def test_second_process_neither_traces_nor_compiles(tmp_path):
    first = json.loads(run_python(BUILD, tmp_path))
    second = json.loads(run_python(BUILD, tmp_path))
    assert first[0] == ["jax", "triton"]
    assert second[0] == []
    assert second[1:] == first[1:]


def test_two_processes_at_once(tmp_path):
    racing = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", BUILD],
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = [json.loads(process.communicate()[0]) for process in racing]
    assert answers[0][1:] == answers[1][1:]
    assert [path.suffix for path in (tmp_path / "store").iterdir()] == [".kernels"]


def test_stored_entry_is_used(store):
    [first] = compiling.build([request()])
    again = dataclasses.replace(request(), make=must_not_lower)
    assert compiling.build([again, again]) == [first, first]


@pytest.mark.parametrize("damage", ["cut", "bytes", "empty"])
def test_damaged_entry_is_replaced(store, damage):
    [first] = compiling.build([request()])
    [path] = store.iterdir()
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-100], "bytes": b"\xff\xfe" + whole[2:], "empty": b""}[damage])
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert compiling.build([request()]) == [first]
    assert path.read_bytes() == whole


def test_everything_that_matters_is_in_the_key(monkeypatch):
    digests = [
        request().digest(),
        request(arch=80).digest(),
        request(key="other").digest(),
        request(launch_pdl=True).digest(),
        dataclasses.replace(request(), specs=(Buffer((4, 32), "float32", 4),)).digest(),
        dataclasses.replace(request(), specs=(Buffer((4, 64), "float16", 2),)).digest(),
    ]
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    digests.append(request().digest())
    monkeypatch.delenv("TRITON_F32_DEFAULT")
    monkeypatch.setattr(compiling, "_versions", lambda: (("jax", "0.0"),))
    digests.append(request().digest())
    assert len(set(digests)) == len(digests)


def test_source_hash_sees_changes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "some_package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    file = package / "deep" / "kernel.py"
    file.write_text("one = 1")
    hashes = [compiling.source_hash("some_package")]
    file.write_text("one = 2")
    compiling.source_hash.cache_clear()
    hashes.append(compiling.source_hash("some_package"))
    assert len(set(hashes)) == 2
    with pytest.raises(ModuleNotFoundError):
        compiling.source_hash("no_such_package")


def test_importing_costs_no_framework(tmp_path):
    script = (
        "import sys, sparse_decode.bridge.compile\n"
        "assert not {'jax', 'torch', 'triton'} & set(sys.modules)\n"
    )
    run_python(script, tmp_path)


# --- other versions


@pytest.mark.skipif(not OTHER_PYTHONS, reason="SPARSE_DECODE_OTHER_PYTHONS names no interpreter")
@pytest.mark.parametrize("python", OTHER_PYTHONS)
def test_with_another_interpreter(python, tmp_path):
    """Runs this file with the JAX and the Triton of another interpreter."""
    installed = tmp_path / "sparse_decode"
    installed.mkdir()
    for path in Path(sparse_decode.__file__).parent.iterdir():
        (installed / path.name).symlink_to(path)
    if not (installed / "bridge").exists():
        (installed / "bridge").symlink_to(Path(lowering.__file__).parent)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={
            **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
            "PYTHONPATH": str(tmp_path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SPARSE_DECODE_OTHER_PYTHONS": "",
            "SPARSE_DECODE_GPU_TESTS": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
