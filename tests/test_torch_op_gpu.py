"""The operator under `torch.compile` on CUDA, by the direct route: bit for bit as eager."""

from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from sparse_decode import cases, torch_arrays
from sparse_decode.bridge import op, sparse_decode_attention, torch_op, warmup

pytestmark = [
    pytest.mark.gpu,
    # What Inductor says about itself and about settings that do not matter here.
    *(
        pytest.mark.filterwarnings(f"ignore::{category}")
        for category in ("DeprecationWarning", "FutureWarning", "UserWarning")
    ),
]

SOME = (
    cases.Case("gpu_fp8", (200, 77), gate="bfloat16", inactive=(1,)),
    cases.Case("gpu_uint8_verify", (70, 33), cache="uint8", query_len=4, groups=2, splits=1),
    cases.Case("gpu_fp8_strided", (200, 77), layout="packed", groups=2, strided=True),
    cases.Case("gpu_bf16_kept", (90, 50), inactive=(0,), clear_inactive=False, **cases.BF16),
)
some = pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
modes = pytest.mark.parametrize("mode", ["default", "reduce-overhead"])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.fixture(scope="module", autouse=True)
def compiled_before():
    warmup(arguments(case) for case in SOME)


@pytest.fixture
def runs(monkeypatch):
    """Counts how often the operator runs Python; a replayed graph runs none."""
    counted = []
    attend = op._attend

    def watched(tensors, *options):
        counted.append(torch.cuda.is_current_stream_capturing())
        attend(tensors, *options)

    monkeypatch.setattr(op, "_attend", watched)
    return counted


def arguments(case, **changed) -> dict[str, Any]:
    call = cases.build(case)
    tensors = {name: torch_arrays.from_numpy(a, "cuda") for name, a in call.arrays().items()}
    return {**tensors, **call.options(), **changed}


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.int16)


def eager(given):
    """The bits of an eager call's output, which is NaN before and afterwards."""
    given["output"].fill_(torch.nan)
    sparse_decode_attention(**given)
    result = bits(given["output"])
    given["output"].fill_(torch.nan)
    return result


@some
def test_opcheck(case):
    given = arguments(case)
    given["output"].zero_()
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if given["cache"].dtype != torch.float8_e4m3fn:
        # It multiplies all that it is given, which PyTorch cannot with that dtype.
        checks.append("test_schema")
    results = torch.library.opcheck(torch_op.attention, (), given, test_utils=checks)
    assert results == dict.fromkeys(checks, "SUCCESS")


@some
@modes
def test_output_given_from_outside(case, mode):
    given = arguments(case)
    expected = eager(given)
    compiled = torch.compile(sparse_decode_attention, fullgraph=True, mode=mode)
    for _ in range(4):
        given["output"].fill_(torch.nan)
        compiled(**given)
        assert torch.equal(bits(given["output"]), expected)


def stack(query, caches, **others):
    """Layers that each attend to a cache of their own, from the sum of those before."""
    for cache in caches:
        output = torch.full_like(query, torch.nan)
        sparse_decode_attention(query, cache, output=output, **others)
        query = query + output
    return query


@modes
@pytest.mark.parametrize("cache", ["uint8", "float8_e4m3fn", "bfloat16"])
def test_layers(mode, cache, runs):
    given = arguments(cases.Case(f"gpu_layers_{cache}", (200, 77, 130), cache=cache, groups=2))
    given.pop("output")
    assert given["regions"].dtype == given["positions"].dtype == torch.int64
    pages = given.pop("cache")
    caches = [pages, pages.flip(2), pages.flip(1)]
    # What is not attended is NaN, and a flip moves it.
    for pages in caches:
        values = pages.view(torch.float8_e4m3fn) if cache == "uint8" else pages
        values.copy_(values.float().nan_to_num(0.5).to(values.dtype))
    compiled = torch.compile(stack, fullgraph=True, mode=mode)
    generator = torch.Generator("cuda").manual_seed(0)
    for run in range(12):
        given["query"].normal_(generator=generator)
        given["positions"].copy_(given["positions"].roll(1))
        expected = stack(caches=caches, **given)
        before = len(runs)
        found = compiled(caches=caches, **given)
        assert torch.isfinite(expected).all()
        assert torch.equal(bits(found), bits(expected))
        if run > 5 and mode == "reduce-overhead":
            assert len(runs) == before, "the graph was not replayed"
    assert any(runs) == (mode == "reduce-overhead")


def test_other_batches(runs):
    compiled = torch.compile(sparse_decode_attention, fullgraph=True)
    for requests in (2, 3, 5):
        given = arguments(cases.Case(f"gpu_{requests}", (90, 40, 77, 8, 1)[:requests]))
        expected = eager(given)
        compiled(**given)
        assert torch.equal(bits(given["output"]), expected)
    assert len(runs) == 6


def test_compiled_function_inside_a_captured_graph():
    given = arguments(SOME[0])
    expected = eager(given)
    compiled = torch.compile(sparse_decode_attention, fullgraph=True)
    compiled(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled(**given)
    for factor in (1, -2, 0.5):
        given["query"].mul_(factor)
        expected = eager(given)
        graph.replay()
        assert torch.equal(bits(given["output"]), expected)


def test_host_time_of_the_operator_is_not_paid_by_eager_calls(runs):
    given = arguments(SOME[0])
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_op, "attention", lambda *_: calls.append(1))
        sparse_decode_attention(**given)
    assert not calls
    assert runs == [False]
