"""Both Pallas kernels, compiled ahead of time for each architecture; no GPU is needed."""

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("triton")

from sparse_decode.bridge import compile as compiling  # noqa: E402
from sparse_decode.bridge.lowering import lower  # noqa: E402
from sparse_decode.contract import CACHE_DIM, ArraySpec, check_call  # noqa: E402
from sparse_decode.pallas_kernels.kernels import attend  # noqa: E402
from sparse_decode.plan import SHAPES, Config, make_plan  # noqa: E402

ROWS, SLOTS, PAGES, PAGE_SIZE, MAX_PAGES = 64, 513, 4096, 64, 1024

COMBINE_SHARED = 4096  # bytes a program, static and dynamic

# arch, cache, heads, splits, dtype of the indices
CALLS = [
    *((80, cache, 8, splits, "int32") for cache in ("bfloat16", "float16") for splits in (1, 4)),
    *((86, cache, 8, 4, "int32") for cache in ("bfloat16", "float16")),
    *((89, cache, 8, 4, "int32") for cache in ("bfloat16", "float16", "float8_e4m3fn")),
    *(
        (arch, cache, 8, splits, "int32")
        for arch in (90, 100)
        for cache in ("bfloat16", "float16", "float8_e4m3fn")
        for splits in (1, 4)
    ),
    (90, "bfloat16", 1, 4, "int64"),
    (90, "bfloat16", 16, 1, "int32"),
    (90, "float8_e4m3fn", 1, 4, "int64"),
    (90, "float8_e4m3fn", 16, 4, "int64"),
]


def split_shared(programs):
    """Bytes that leave room for so many split programs, in 228 KiB, of which each reserves one."""
    return (228 // programs - 1) * 1024


def program_of(arch, cache, heads, splits, index, config=None):
    """The lowered kernels of a typical call, as a launcher without JAX's runtime takes them."""
    fp8 = cache == "float8_e4m3fn"
    query = "bfloat16" if fp8 else cache
    specs = {
        "query": ArraySpec((ROWS, heads, 192), query),
        "cache": ArraySpec((PAGES, 1, PAGE_SIZE, 384), cache),
        "regions": ArraySpec((ROWS, SLOTS), index),
        "block_table": ArraySpec((ROWS, MAX_PAGES), "int32"),
        "positions": ArraySpec((ROWS,), index),
        "active": ArraySpec((ROWS,), "bool"),
        "gate": ArraySpec((ROWS, heads), "bfloat16"),
    }
    if fp8:
        specs |= {name: ArraySpec((1,), "float32") for name in ("k_scale", "v_scale")}
    options = {"scale": 192**-0.5, "clear_inactive": True}
    geometry = check_call(**specs, **options, splits=splits)
    plan = make_plan(geometry, specs, **options, splits=splits, config=config, return_lse=True)
    lines = dict(plan.shapes)

    def buffer(name):
        shape, dtype = lines.get(name, specs[name].shape), specs[name].dtype
        if name == "cache" and plan.words:
            dtype = "uint16"
        if name == "positions" and index == "int64":
            shape = (2 * ROWS,)
        return jax.ShapeDtypeStruct(shape, "int32" if dtype == "int64" else dtype)

    def function(*arrays):
        return attend(plan, dict(zip(specs, arrays, strict=True)))

    return lower(function, *map(buffer, specs), arch=arch)


@pytest.mark.parametrize(("arch", "cache", "heads", "splits", "index"), CALLS)
def test_kernels_compile_without_spills(arch, cache, heads, splits, index):
    program = program_of(arch, cache, heads, splits, index)
    split, *combine = program.calls
    assert split.name == "sparse_decode_split"
    assert split.grid == (ROWS * splits, 1, 1)
    assert [call.name for call in combine] == ["sparse_decode_combine"] * (splits > 1)
    assert all(call.grid[:2] == (ROWS, heads) for call in combine)
    assert ("cvt.rn.f16x2.e4m3x2" in split.ttir) == (cache == "float8_e4m3fn")
    bounds = [split_shared(4), COMBINE_SHARED]
    for call, bound in zip(program.calls, bounds, strict=False):
        kernel = compiling.compile_kernel(call, arch)
        taken = compiling.resources(kernel)
        assert (taken.spilled, kernel.arch) == (0, arch)
        assert taken.shared <= bound
        assert taken.registers <= 255


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_the_default_settings(cache, name, index):
    shape = SHAPES[name]
    config = Config(4, **shape._asdict())
    split, combine = program_of(90, cache, 8, 4, index, config).calls
    assert compiling.resources(compiling.compile_kernel(combine, 90)).spilled == 0
    taken = compiling.resources(compiling.compile_kernel(split, 90))
    assert (split.num_warps, split.num_stages) == (shape.warps, shape.stages)
    assert taken.spilled == 0
    tile = shape.tile * CACHE_DIM * (1 if cache == "float8_e4m3fn" else 2)
    assert taken.shared >= (shape.stages - 1) * tile, "lines are not in flight: no pipeline"
    programs = 2 if shape.warps == 4 else 4
    if cache == "float8_e4m3fn" and name == "two pieces":
        programs = 6
    assert taken.shared <= split_shared(programs)
    assert taken.registers * 32 * shape.warps * programs <= 2**16


@pytest.mark.parametrize("splits", [16, 17, 64, 65, 128, 129, 256])
def test_combine_holds_any_number_of_partials(splits):
    _, combine = program_of(90, "bfloat16", 8, splits, "int32").calls
    taken = compiling.resources(compiling.compile_kernel(combine, 90))
    assert taken.spilled == 0


def test_fp8_needs_hardware_that_converts_it():
    """Before sm_89 there is no such instruction, and the assembler is the first to say so."""
    split, _ = program_of(80, "float8_e4m3fn", 8, 4, "int32").calls
    with pytest.raises(Exception, match=r"e4m3x2|ptxas|sm_89"):
        compiling.compile_kernel(split, 80)
