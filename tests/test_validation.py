"""What validation finds in index arrays, in each framework and through each operation."""

import dataclasses
import functools
import itertools
import re
import subprocess
import sys

import numpy as np
import pytest

from sparse_decode import cases
from sparse_decode.plan import Config
from sparse_decode.validation import check_indices

INDICES = ("regions", "block_table", "positions", "active")


def without_dead_ids(call):
    """The call with -1 in the slots before the live ones, where the cases hold garbage."""
    regions, slots = call.regions.copy(), call.regions.shape[1]
    for row, position in enumerate(call.positions.tolist()):
        live = min(position // 8 + 1, slots) if position >= 0 else 0
        regions[row, : slots - live] = -1
    return dataclasses.replace(call, regions=regions)


# 8 query tokens of 2 groups: request 1 is rows 4 to 7, of which 6 and 7 are inactive and hold
# garbage; rows 4 and 5 are at position 75 and read slots 7 to 16. The table has 14 pages of 16
# tokens, which is 28 regions, and the cache 31 pages.
CASE = cases.Case(
    "validation", (200, 77, 9, 130), heads=1, groups=2, query_len=2, page_size=16, splits=1,
    inactive=(3,),
)  # fmt: skip
CALL = without_dead_ids(cases.build(CASE))
NARROW = without_dead_ids(cases.build(dataclasses.replace(CASE, index="int32")))
LIVE = (5, slice(7, 17))


def changed(call, *changes):
    """The call with other values in places of its index arrays: (array, place, value)."""
    arrays = {name: getattr(call, name).copy() for name in INDICES}
    for name, place, value in changes:
        arrays[name][place] = value
    return dataclasses.replace(call, **arrays)


# --- frameworks


def in_numpy(array):
    return array


def in_torch(array, device="cpu"):
    pytest.importorskip("torch")
    from sparse_decode import torch_arrays

    return torch_arrays.from_numpy(array, device)


def in_jax(array):
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        return jax.numpy.asarray(array)


def in_jax_and_numpy(array):
    return in_jax(array) if array.ndim == 2 else array


CONVERT = [
    in_numpy,
    in_torch,
    in_jax,
    in_jax_and_numpy,
    pytest.param(functools.partial(in_torch, device="cuda"), marks=pytest.mark.gpu, id="in_cuda"),
]
frameworks = pytest.mark.parametrize("convert", CONVERT)


def check(call, convert=in_numpy):
    arrays = {name: convert(getattr(call, name)) for name in INDICES}
    check_indices(cache=call.cache, query_len=call.query_len, **arrays)


def complaint(call, convert=in_numpy):
    try:
        check(call, convert)
    except ValueError as error:
        return str(error)
    return None


# --- offences

POSITIONS = "positions: row 5: expected -1 to 223, got "
OFFENCES = [
    ([("positions", 5, -2)], POSITIONS + "-2"),
    ([("positions", 5, 224)], POSITIONS + "224"),
    ([("positions", 5, 2**31 - 1)], POSITIONS + "2147483647"),
    ([("positions", 5, -(2**31))], POSITIONS + "-2147483648"),
    ([("regions", (5, 16), -2)], "regions: row 5, slot 16: expected -1 or an id below 28, got -2"),
    ([("regions", (5, 7), 28)], "regions: row 5, slot 7: expected -1 or an id below 28, got 28"),
    (
        [("regions", (5, 8), 2**31 - 1)],
        "regions: row 5, slot 8: expected -1 or an id below 28, got 2147483647",
    ),
    (
        [("regions", (5, 16), 10)],
        "regions: row 5, slot 16: expected -1 or an id up to 9, as position is 75, got 10",
    ),
    (
        [("regions", (5, 16), 27)],
        "regions: row 5, slot 16: expected -1 or an id up to 9, as position is 75, got 27",
    ),
    (
        [("regions", (5, 6), 0)],
        "regions: row 5, slot 6: expected -1 before slot 7, as position is 75, got 0",
    ),
    (
        [("regions", (5, 0), 28)],
        "regions: row 5, slot 0: expected -1 before slot 7, as position is 75, got 28",
    ),
    (
        [("positions", 5, -1), ("regions", LIVE, -1), ("regions", (5, 16), 0)],
        "regions: row 5, slot 16: expected -1 before slot 17, as position is -1, got 0",
    ),
    *(
        (
            [("block_table", (1, 4), page), ("regions", 4, -1), ("regions", LIVE, range(10))],
            "block_table: request 1, logical page 4 (row 5, slot 15): "
            f"expected a page of 0 to 30, got {page}",
        )
        for page in (-1, 31, 2**31 - 1, -(2**31))
    ),
    # The order: positions, regions, block table; then rows; then slots.
    (
        [("positions", 5, -2), ("regions", (0, 0), 99), ("block_table", (0, 0), -1)],
        POSITIONS + "-2",
    ),
    (
        [("regions", (5, 16), 28), ("block_table", (0, 0), -1)],
        "regions: row 5, slot 16: expected -1 or an id below 28, got 28",
    ),
    ([("positions", 5, -2), ("positions", 8, 224)], POSITIONS + "-2"),
    (
        [("regions", (8, 0), 1), ("regions", (5, 16), 10), ("regions", (5, 15), 28)],
        "regions: row 5, slot 15: expected -1 or an id below 28, got 28",
    ),
]
WIDE_OFFENCES = [
    *(
        ([("positions", 5, p)], POSITIONS + str(p))
        for p in (2**40, 2**32 + 75, -(2**63), 2**63 - 1)
    ),
    *(
        (
            [("regions", (5, 16), region)],
            f"regions: row 5, slot 16: expected -1 or an id below 28, got {region}",
        )
        for region in (2**32, 2**40 - 1, -(2**32), 2**63 - 1, -(2**63))
    ),
    (
        [("regions", (5, 6), 2**32)],
        "regions: row 5, slot 6: expected -1 before slot 7, as position is 75, got 4294967296",
    ),
]


@frameworks
@pytest.mark.parametrize(("changes", "message"), [*OFFENCES, *WIDE_OFFENCES])
def test_offence(convert, changes, message):
    assert complaint(changed(CALL, *changes), convert) == message


@frameworks
@pytest.mark.parametrize(("changes", "message"), OFFENCES)
def test_offence_in_int32(convert, changes, message):
    assert complaint(changed(NARROW, *changes), convert) == message


@frameworks
@pytest.mark.parametrize(
    "changes",
    [
        [],
        [("regions", (slice(None), slice(3, None, 2)), -1)],
        [("regions", LIVE, 9)],
        [("regions", (5, 0), -7)],
        [("positions", 5, -1), ("regions", 5, -1)],
        [("positions", 0, 223)],
        [("positions", slice(6, 8), -(2**31)), ("regions", slice(6, 8), -9)],
        [("positions", slice(6, 8), 2**31 - 1), ("regions", slice(6, 8), 3)],
        [("block_table", (1, slice(5, None)), 10**9)],
        [("block_table", 1, 3)],
        [("active", slice(None), False), ("regions", slice(None), 77)],
    ],
    ids=str,
)
@pytest.mark.parametrize("call", [CALL, NARROW], ids=["int64", "int32"])
def test_no_offence(convert, call, changes):
    check(changed(call, *changes), convert)


def plainly(call):
    """Where the first offence is, one index after the other."""
    geometry = call.geometry()
    rows = [row for row in range(geometry.rows) if call.active[row]]
    for row in rows:
        if not -1 <= call.positions[row] < geometry.max_pages * geometry.page_size:
            return "positions", row
    table_offence = None
    for row, slot in itertools.product(rows, range(geometry.slots)):
        position, region = int(call.positions[row]), int(call.regions[row, slot])
        live = 0 if position < 0 else min(position // 8 + 1, geometry.slots)
        if slot < geometry.slots - live:
            if region >= 0:
                return "regions", row, slot
        elif region < -1 or region >= geometry.max_regions or 8 * region > position:
            return "regions", row, slot
        elif region >= 0 and table_offence is None:
            request, logical = row // geometry.rows_per_request, 8 * region // geometry.page_size
            if not 0 <= call.block_table[request, logical] < geometry.pages:
                table_offence = "block_table", request, logical, row, slot
    return table_offence


def place(message):
    if message is None:
        return None
    name, *numbers = re.findall(r"^\w+|\d+", message.partition(": expected")[0])
    return name, *map(int, numbers)


@frameworks
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_shared_case(case, convert):
    call = cases.build(case)
    assert place(complaint(call, convert)) == plainly(call)
    found = complaint(without_dead_ids(call), convert)
    assert (found is not None) == case.outside, found


@frameworks
@pytest.mark.parametrize("seed", range(12))
def test_random_indices_as_found_plainly(seed, convert):
    rng = np.random.default_rng(seed)
    index = ("int32", "int64")[seed % 2]
    case = cases.Case(f"random {seed}", (60, 33, 9), heads=1, groups=2, slots=5, page_size=16,
                      index=index, inactive=(seed % 3,))  # fmt: skip
    call = without_dead_ids(cases.build(case))
    found = set()
    for _ in range(10):
        changes = []
        for _ in range(rng.integers(3)):
            name = rng.choice(["positions", "regions", "block_table"])
            spot = tuple(rng.integers(0, getattr(call, name).shape))
            changes.append((name, spot, rng.choice([-2, -1, 0, 1, 4, 8, 9, 10, 80, 2**31 - 1])))
        this = changed(call, *changes)
        expected = plainly(this)
        assert place(complaint(this, convert)) == expected, changes
        found.add(expected and expected[0])
    assert len(found) > 1


# --- arguments


@frameworks
def test_wrong_arguments_are_named(convert):
    arrays = {name: convert(getattr(CALL, name)) for name in INDICES}
    good = {**arrays, "cache": CALL.cache.shape, "query_len": 2}
    check_indices(**good)
    wrong = [
        ({"cache": None}, TypeError, "cache: expected an array or its shape, got NoneType"),
        ({"cache": (31, 2, 16)}, ValueError, r"cache: .*\[31, 2, 16\]"),
        ({"cache": (31, 2, 12, 384)}, ValueError, "cache: .*multiple of 8, got 12"),
        ({"regions": arrays["regions"][:, 0]}, ValueError, r"regions: .*\[rows, slots\], got"),
        ({"regions": arrays["positions"][:1].reshape(())}, ValueError, "regions: .*got shape"),
        ({"regions": None}, TypeError, "regions: expected an? .*got NoneType"),
        ({"block_table": arrays["block_table"][1:]}, ValueError, r"block_table: .*\[4, max_pages"),
        ({"positions": arrays["positions"][1:]}, ValueError, r"positions: .*\[16\], got"),
        ({"positions": [0] * 16}, TypeError, "positions: expected an? .*got list"),
        ({"active": arrays["positions"]}, TypeError, "active: .*bool, got int64"),
        ({"query_len": 1.0}, TypeError, "query_len: .*got float"),
    ]
    for change, error, message in wrong:
        with pytest.raises(error, match=f"^{message}"):
            check_indices(**{**good, **change})


def test_tensors_are_not_mixed_with_other_arrays():
    arrays = {name: getattr(CALL, name) for name in INDICES}
    arrays["positions"] = in_torch(arrays["positions"])
    with pytest.raises(TypeError, match=r"^regions: expected a torch\.Tensor, got ndarray"):
        check_indices(**arrays, cache=CALL.cache, query_len=2)


def test_tensors_without_values():
    torch = pytest.importorskip("torch")
    from torch._subclasses import FakeTensorMode

    tensors = {name: in_torch(getattr(CALL, name)) for name in INDICES}
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
    for valueless in (fake, {name: torch.empty_like(x, device="meta") for name, x in fake.items()}):
        with pytest.raises(TypeError, match="regions: expected a tensor with values, got a meta"):
            check_indices(**valueless, cache=CALL.cache, query_len=2)


def test_it_loads_no_framework():
    script = """
import sys
import numpy as np
from sparse_decode.validation import check_indices
check_indices(cache=(3, 1, 8, 384), regions=np.array([[0]]), positions=np.array([5]),
              block_table=np.array([[1]], np.int32), active=np.array([True]))
assert not {"jax", "torch"} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-P", "-c", script], stderr=subprocess.PIPE, text=True)
    assert run.returncode == 0, run.stderr


# --- operations

SMALL = cases.Case("validation_op", (20, 9), slots=5, heads=2, page_size=8, splits=1)
QUICK = Config(splits=1, tile=16)  # to compile
GOOD = without_dead_ids(cases.build(SMALL))
BAD = changed(GOOD, ("regions", (1, 3), 2**32 + 1))
MESSAGE = "^regions: row 1, slot 3: expected -1 or an id below 4, got 4294967297"
NO_BOOL = "^validate: expected a bool, got "


@pytest.fixture
def pallas():
    pytest.importorskip("jax")
    from sparse_decode import pallas_kernels

    return pallas_kernels


def jax_arguments(call, **options):
    arrays = {name: in_jax(array) for name, array in call.arrays().items()}
    return {**arrays, **call.options(), "config": QUICK, **options}


def test_pallas(pallas):
    attend = pallas.sparse_decode_attention
    expected = attend(**jax_arguments(GOOD))
    found = attend(**jax_arguments(GOOD, validate=True))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    with pytest.raises(ValueError, match=MESSAGE):
        attend(**jax_arguments(BAD, validate=True))
    attend(**jax_arguments(BAD))
    with pytest.raises(TypeError, match=NO_BOOL + "int"):
        attend(**jax_arguments(GOOD, validate=1))


def test_pallas_sees_all_of_a_wide_numpy_array(pallas):
    given = jax_arguments(GOOD, validate=True)
    with pytest.raises(ValueError, match=MESSAGE):
        pallas.sparse_decode_attention(**{**given, "regions": BAD.regions})


def test_pallas_packed_cache(pallas):
    pages, groups, page_size, _ = GOOD.cache.shape
    storage = in_jax(GOOD.cache).reshape(pages, -1)
    cache = pallas.PackedCache(storage, 0, groups=groups, page_size=page_size)
    assert (cache.shape, cache.dtype) == (GOOD.cache.shape, storage.dtype)
    pallas.sparse_decode_attention(**jax_arguments(GOOD, validate=True) | {"cache": cache})
    with pytest.raises(ValueError, match=MESSAGE):
        pallas.sparse_decode_attention(**jax_arguments(BAD, validate=True) | {"cache": cache})


def test_pallas_empty_batch(pallas):
    given = jax_arguments(cases.build(cases.Case("empty", ())), validate=True)
    assert pallas.sparse_decode_attention(**given).shape[0] == 0


TRACED = "^regions: .*got a traced one; .*check_indices outside of jax.jit"


def test_traced_indices_are_refused(pallas):
    import jax

    given = jax_arguments(GOOD, validate=True)
    regions = given.pop("regions")

    def attend(regions):
        return pallas.sparse_decode_attention(regions=regions, **given)

    for run in (
        lambda: jax.jit(attend)(regions),
        lambda: jax.vmap(attend)(regions[None]),
        lambda: jax.lax.map(attend, regions[None]),
        lambda: jax.eval_shape(attend, regions),
    ):
        with pytest.raises(TypeError, match=TRACED):
            run()
    with pytest.raises(TypeError, match=TRACED):
        jax.jit(lambda regions: check_indices(
            regions=regions, cache=GOOD.cache, **{name: given[name] for name in INDICES[1:]}
        ))(regions)  # fmt: skip


def test_indices_that_a_traced_function_holds_are_looked_at(pallas):
    import jax

    def attention_to(call):
        given = jax_arguments(call, validate=True)
        given.pop("query")
        return functools.partial(pallas.sparse_decode_attention, **given)

    query = in_jax(GOOD.query)
    for transform, given in ((jax.jit, query), (jax.vmap, query[None])):
        found = transform(attention_to(GOOD))(given)
        assert np.isfinite(np.asarray(found, np.float32)).all()
        with pytest.raises(ValueError, match=MESSAGE):
            transform(attention_to(BAD))(given)


def test_strict_promotion(pallas):
    import jax

    mixed = dataclasses.replace(BAD, positions=BAD.positions.astype(np.int32))
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match=MESSAGE):
        pallas.sparse_decode_attention(**jax_arguments(mixed, validate=True))


def test_sharded_over_groups_is_traced(pallas):
    import jax

    mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
    attend, options = pallas.shard_over_groups(mesh, "model"), {**GOOD.options(), "validate": True}
    given = {name: in_jax(array) for name, array in GOOD.arrays().items()}
    for name in ("query", "regions", "positions", "active", "output"):
        given[name] = given[name][:, None]
    with pytest.raises(TypeError, match=TRACED):
        jax.jit(lambda arrays: attend(**arrays, **options))(given)


@pytest.fixture
def bridge():
    for module in ("jax", "torch", "triton"):
        pytest.importorskip(module)
    from sparse_decode import bridge

    return bridge


def torch_arguments(call, device="cpu", **options):
    tensors = {name: in_torch(array, device) for name, array in call.arrays().items()}
    route = "direct" if device == "cuda" else "dlpack"
    return {**tensors, **call.options(), "route": route, "config": QUICK, **options}


def test_bridge(bridge):
    given = torch_arguments(GOOD)
    bridge.sparse_decode_attention(**given)
    expected = given["output"].clone()
    assert expected.isfinite().all()
    given["output"].fill_(float("nan"))
    bridge.sparse_decode_attention(**given, validate=True)
    assert given["output"].equal(expected)

    given = torch_arguments(BAD, validate=True)
    with pytest.raises(ValueError, match=MESSAGE):
        bridge.sparse_decode_attention(**given)
    assert given["output"].isnan().all()
    with pytest.raises(ValueError, match="query: expected shape"):
        bridge.sparse_decode_attention(**{**given, "query": given["query"][0]})


@pytest.mark.parametrize("validate", [None, 0, 1, "yes", np.True_])
def test_bridge_takes_bools_alone(bridge, validate):
    with pytest.raises(TypeError, match=NO_BOOL + type(validate).__name__):
        bridge.sparse_decode_attention(**torch_arguments(GOOD), validate=validate)


def test_bridge_explains_a_call_with_the_option(bridge):
    given = torch_arguments(BAD)
    assert bridge.explain_route(**given, validate=True) == bridge.explain_route(**given)


@pytest.mark.filterwarnings(r"ignore:`torch.jit:DeprecationWarning")
def test_compiled_whole(bridge):
    import torch

    torch.compiler.reset()
    attend = bridge.sparse_decode_attention
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    given = torch_arguments(GOOD)
    with pytest.raises(Exception, match="validate: expected False in a compiled function"):
        compiled(**given, validate=True)
    assert given["output"].isnan().all()


def test_triton_on_jax(bridge):
    attend, options = bridge.triton_sparse_decode_attention, GOOD.options()
    options.pop("clear_inactive")

    def arrays(call):
        return {name: in_jax(array) for name, array in call.arrays().items() if name != "output"}

    expected = attend(**arrays(GOOD), **options)
    found = attend(**arrays(GOOD), **options, validate=True)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    with pytest.raises(ValueError, match=MESSAGE):
        attend(**arrays(BAD), **options, validate=True)
    with pytest.raises(TypeError, match=NO_BOOL + "str"):
        attend(**arrays(GOOD), **options, validate="yes")


# --- on a GPU


@pytest.fixture
def gpu_bridge(bridge, monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE_DECODE_CACHE_DIR", str(tmp_path))
    return bridge


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["direct", "dlpack"])
def test_bridge_on_a_gpu(gpu_bridge, route):
    given = torch_arguments(GOOD, "cuda", route=route)
    gpu_bridge.sparse_decode_attention(**given)
    expected = given["output"].clone()
    assert expected.isfinite().all()
    given["output"].fill_(float("nan"))
    gpu_bridge.sparse_decode_attention(**given, validate=True)
    assert given["output"].equal(expected)

    given = torch_arguments(BAD, "cuda", route=route)
    with pytest.raises(ValueError, match=MESSAGE):
        gpu_bridge.sparse_decode_attention(**given, validate=True)
    assert given["output"].isnan().all()


@pytest.mark.gpu
def test_indices_are_looked_at_after_earlier_work_on_the_stream(gpu_bridge):
    import torch

    given, bad = torch_arguments(GOOD, "cuda"), in_torch(BAD.regions, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        given["regions"].copy_(bad)
        with pytest.raises(ValueError, match=MESSAGE):
            gpu_bridge.sparse_decode_attention(**given, validate=True)


@pytest.mark.gpu
def test_capture_is_refused_and_goes_on(gpu_bridge):
    import torch

    given = torch_arguments(GOOD, "cuda")
    given.pop("route")
    indices = {name: given[name] for name in ("cache", *INDICES)}
    gpu_bridge.warmup([{**given, "validate": True}])
    refused = pytest.raises(RuntimeError, match="graph is being captured, in which indices cannot")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with refused:
            gpu_bridge.sparse_decode_attention(**given, validate=True)
        with refused:
            check_indices(**indices)
        gpu_bridge.sparse_decode_attention(**given)
    assert given["output"].isnan().all()
    graph.replay()
    replayed = given["output"].clone()
    gpu_bridge.sparse_decode_attention(**given, validate=True)
    assert replayed.equal(given["output"])
