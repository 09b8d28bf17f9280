"""Nothing in the index arrays, the padding, the content or the sizes of a call can hurt.

Every hazard goes through every path: natively where there is a GPU, elsewhere through the
interpreters.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
import jax.numpy as jnp  # noqa: E402
from shapes import in_turn  # noqa: E402

from sparse_decode.call import Call  # noqa: E402
from sparse_decode.hazards import HAZARDS, Trial, attended_lines, build, faults  # noqa: E402
from sparse_decode.oracle import evaluate  # noqa: E402
from sparse_decode.paths import PATHS, Outcome  # noqa: E402

GPU = torch.cuda.is_available()
if jax.default_backend() == "cpu":
    # Nearly all the time would be the compilation of interpreted kernels.
    jax.config.update("jax_disable_most_optimizations", True)


def compiled(hazard) -> str:
    """What is compiled for it: neighbours in this order share it."""
    return repr(dataclasses.replace(hazard.base, inactive=(), masked=(0, 0)))


HAZARD = {hazard.name: hazard for hazard in sorted(HAZARDS, key=compiled)}
COMPILED = list(dict.fromkeys(map(compiled, HAZARD.values())))
# Their shapes would be compiled in the interpreters for them alone.
GPU_ONLY = (
    *("query_1e6_fp8", "query_1e38_fp8", "overflow_bf16_to_fp16"),
    *("inactive_kept_bf16_split3", "splits_above_slots_fp8_split3"),
)
INTERPRETED = [name for name in HAZARD if name not in GPU_ONLY]
# Triton's interpreter takes the NaN of FP8 for 480, and its time for each of many programs.
IN_TRITONS = [
    name for name in INTERPRETED if not name.startswith(("nan_attended_fp8", "splits_256"))
]
FEW = ("bits_fp8_views", "ids_wrapping_fp8_int32")
# A request alone is launched with the settings of the whole batch.
ALONE = (
    *("bits_fp8", "ids_wrapping_fp8_int32", "inactive_fp8_split3", "bits_fp8_views"),
    *("table_repeated_bf16", "positions_low_words_bf16_split3", "nan_attended_fp16_split3"),
)


def on_every_path(hazards: Iterable[str], **interpreted: Iterable[str]):
    """Parameters of each path and hazard.

    Args:
        hazards: Names of those that run on a GPU.
        **interpreted: By path, names of those that run without one too.
    """
    return pytest.mark.parametrize(
        ("path", "hazard"),
        [
            pytest.param(
                path,
                HAZARD[name],
                id=f"{path.name}-{name}",
                marks=[] if name in interpreted.get(path.name, ()) else pytest.mark.gpu,
            )
            for path in PATHS
            for name in hazards
        ],
    )


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()


def assert_same_result(call: Call, first: Outcome, second: Outcome) -> None:
    assert same_bits(first.output, second.output)
    if first.lse is not None:
        assert same_bits(first.lse, second.lse)


def built(path, hazard) -> Trial:
    """A hazard's calls, which take turns with the shapes of a program.

    Directly each hazard has its turn; on other paths those that are compiled once have one.
    """
    call, twin, same_lse = build(hazard)
    direct = path.name == "direct"
    turn = [*HAZARD].index(hazard.name) if direct else COMPILED.index(compiled(hazard))
    return Trial(in_turn(call, turn), twin and in_turn(twin, turn), same_lse)


# --- every path


@on_every_path(
    HAZARD,
    **{"pallas": INTERPRETED, "triton": IN_TRITONS, "dlpack": FEW[:1], "triton-on-jax": FEW[:1]},
)
def test_hazard(path, hazard):
    found = faults(built(path, hazard), path.run)
    assert not found, found


def fill_free_memory() -> None:
    """Leaves bytes of 0xFF, which are NaN, in the GPU memory that scratch will be taken from."""
    if not GPU:
        return
    torch.cuda.empty_cache()
    reserved, held = torch.cuda.memory_reserved(), []
    while torch.cuda.memory_reserved() == reserved:  # what is free between live tensors
        held.append(torch.full((512,), 0xFF, dtype=torch.uint8, device="cuda"))
    held += [torch.full_like(held[0], 0xFF) for _ in range(2**21 // 512 - 1)]  # a new block, 2 MiB
    del held
    assert (torch.empty(2**16, dtype=torch.uint8, device="cuda") == 0xFF).all()
    held = [jnp.full(2**size // 4, jnp.nan) for size in range(8, 21) for _ in range(8)]
    for array in held:
        array.block_until_ready().delete()


@on_every_path(HAZARD, pallas=FEW, triton=FEW)
def test_two_runs_give_the_same_bits(path, hazard):
    """On a GPU with NaN in all memory that the second run may take for scratch."""
    call = built(path, hazard).call
    first = path.run(call)
    fill_free_memory()
    assert_same_result(call, first, path.run(call))


def test_calls_of_one_shape_are_compiled_once(caplog):
    first, second = (build(HAZARD[name]).call for name in ("bits_fp8", "inf_fp8"))
    PATHS[0].run(first)
    with jax.log_compiles():
        jax.jit(lambda: jnp.zeros(3))()
        assert "Compiling" in caplog.text
        caplog.clear()
        PATHS[0].run(second)
    assert PATHS[0].name == "pallas"
    assert "Compiling" not in caplog.text


def one_request(call: Call, request: int) -> tuple[Call, slice]:
    """The call of one request, and its rows; the arrays stay as they lie."""
    count = call.geometry().rows_per_request
    rows = slice(request * count, (request + 1) * count)
    tokens = slice(request * call.query_len, (request + 1) * call.query_len)
    own = dict.fromkeys(("query", "regions", "positions", "active", "output"), rows)
    own |= {"block_table": slice(request, request + 1), "gate": tokens}
    arrays = {name: array[own[name]] for name, array in call.arrays().items() if name in own}
    return dataclasses.replace(call, **arrays), rows


@on_every_path(ALONE, pallas=ALONE[:1], triton=ALONE[:2])
def test_a_request_does_not_depend_on_its_batch(path, hazard):
    # In the interpreter XLA fuses multiplications with additions or not, as sizes go, and in some
    # shapes that shows.
    call = (built(path, hazard) if GPU else build(hazard)).call
    batch = path.run(call)
    for request in range(len(call.block_table)):
        part, rows = one_request(call, request)
        if path.name == "dlpack":  # refuses addresses in the middle
            arrays = part.arrays().items()
            part = dataclasses.replace(part, **{n: a.copy() for n, a in arrays if n != "cache"})
        alone = path.run(part)
        of_batch = Outcome(batch.output[rows], None if batch.lse is None else batch.lse[rows], None)
        assert_same_result(part, alone, of_batch)


# --- the list itself


def oracle(call: Call, seen: Call | None = None) -> Outcome:
    """What the oracle makes of a call; `seen` is how a faulty program would see it."""
    reference = evaluate(seen or call)
    output, before = reference.output, call.output
    output[~reference.touched] = before[~reference.touched]
    return Outcome(output, reference.lse.astype(np.float32), before)


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.name)
def test_the_oracle_and_the_twin_agree(hazard):
    assert not faults(build(hazard), oracle)


def test_a_hazard_is_what_its_name_draws():
    assert len(HAZARD) == len(HAZARDS)
    for name in ("bits_fp8_views", "inactive_fp8", "query_inf_fp8_split3"):
        for first, second in zip(build(HAZARD[name])[:2], build(HAZARD[name])[:2], strict=True):
            assert first.options() == second.options()
            for array, other in zip(first.arrays().values(), second.arrays().values(), strict=True):
                assert same_bits(array, other)


@pytest.mark.parametrize("name", ["nan_bf16", "inf_fp8", "negative_inf_bf16", "bits_fp8_views"])
def test_all_else_is_poison(name):
    call, twin, _ = build(HAZARD[name])
    attended = attended_lines(call)
    lines, twin_lines = (x.cache.astype(np.float32) for x in (call, twin))
    np.testing.assert_array_equal(lines[attended], twin_lines[attended])
    assert not twin_lines[~attended].any()
    poison = {"nan_bf16": np.nan, "inf_fp8": 448, "negative_inf_bf16": -np.inf}.get(name)
    if poison is None:
        assert np.isnan(lines[~attended]).any()
        assert (call.query.base[..., 192:].view(np.uint16) != 0).any()
    else:
        np.testing.assert_array_equal(lines[~attended], poison)
    assert not same_bits(call.output, twin.output)
    assert (call.regions != twin.regions).any()
    assert (call.block_table != twin.block_table).any()


def low_words(name: str):
    return lambda call: {name: getattr(call, name).astype(np.int32)}


FAULTY = {
    "ids_wrapping_fp8_split3": low_words("regions"),
    "ids_wrapping_fp8_int32": lambda call: {
        "regions": np.where(call.regions < 0, -1, call.regions & (2**29 - 1))
    },
    "ids_past_fp8": lambda call: {
        "regions": np.minimum(call.regions, call.geometry().max_regions - 1)
    },
    "ids_below_bf16_split3": lambda call: {"regions": np.maximum(call.regions, 0)},
    "table_outside_fp8": lambda call: {
        "block_table": np.clip(call.block_table, 0, len(call.cache) - 1)
    },
    "positions_low_words_fp8": low_words("positions"),
    "positions_negative_bf16_split3": lambda call: {"positions": np.abs(call.positions)},
    "right_padded_bf16": lambda call: {"regions": np.sort(call.regions, axis=1)},
    "inactive_fp8": lambda call: {"active": np.ones_like(call.active)},
    "overflow_fp8_to_fp16": lambda call: {"v_scale": np.float32(1)},
    "query_1e6_fp8": lambda call: {
        "query": np.clip(call.query, -448, 448).astype(call.query.dtype)
    },
    "nan_attended_fp8": lambda call: {
        "query": np.where(call.query == call.query, call.query, np.zeros_like(call.query))
    },
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_program_is_found(name):
    def run(call: Call) -> Outcome:
        return oracle(call, dataclasses.replace(call, **FAULTY[name](call)))

    assert faults(build(HAZARD[name]), run)
