"""Drawn calls through the kernels, each held to the oracle.

On a GPU more than 2000 calls run natively through the Triton kernels and the direct route, and 300
through the Pallas kernels in JAX. Elsewhere some small ones run through both interpreters. The same
calls are drawn each time.
"""

import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from shapes import in_turn  # noqa: E402
from strategies import GEOMETRIES, Contents, contents, fill  # noqa: E402

from sparse_decode.hazards import call_faults  # noqa: E402
from sparse_decode.paths import PATHS  # noqa: E402
from sparse_decode.tolerance import limits  # noqa: E402

GPU = torch.cuda.is_available()
if jax.default_backend() == "cpu":
    # Nearly all the time would be the compilation of interpreted kernels.
    jax.config.update("jax_disable_most_optimizations", True)

CALLS_EACH = 84
CALLS_EACH_INTERPRETED = 8
CALLS_EACH_IN_JAX = 13

PATH = {path.name: path for path in PATHS}
SMALL = GEOMETRIES[:4]
each_geometry = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case in SMALL else pytest.mark.gpu)
        for case in GEOMETRIES
    ],
)


def hold_to_the_oracle(case, names: list[str], count: int, record_property) -> None:
    """Draws `count` different calls of a geometry and runs each through every named path.

    The geometries take turns with the shapes of a program.
    """
    ran = set()

    @settings(max_examples=count * 3 // 2, derandomize=True, database=None)  # some are drawn twice
    @given(contents=contents)
    def check(contents: Contents) -> None:
        call = in_turn(fill(case, contents), GEOMETRIES.index(case))
        outcomes = {name: PATH[name].run(call) for name in names}
        allowed = limits(call)
        for name, outcome in outcomes.items():
            found = call_faults(call, allowed, outcome)
            assert not found, (name, found)
        ran.add(contents)

    check()
    record_property("calls", len(ran))
    print(f"{len(ran)} calls through {' and '.join(names)}")
    assert len(ran) >= count


def test_enough_calls_are_drawn():
    assert len(GEOMETRIES) * CALLS_EACH >= 2000
    assert len(SMALL) * CALLS_EACH_INTERPRETED >= 30
    assert len(GEOMETRIES) * CALLS_EACH_IN_JAX >= 300
    assert len({case.name for case in GEOMETRIES}) == len(GEOMETRIES)
    rows = [len(case.contexts) * case.query_len * case.groups for case in GEOMETRIES]
    assert max(rows) <= 8  # the oracle takes its time for each


@each_geometry
def test_drawn_calls(case, record_property):
    names, count = ["triton", "direct"], CALLS_EACH
    if not GPU:
        names, count = ["triton", "pallas"], CALLS_EACH_INTERPRETED
    hold_to_the_oracle(case, names, count, record_property)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GEOMETRIES, ids=lambda case: case.name)
def test_drawn_calls_in_jax(case, record_property):
    hold_to_the_oracle(case, ["pallas"], CALLS_EACH_IN_JAX, record_property)
