"""The operator that `torch.compile` sees, on CPU tensors by the DLPack route."""

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

import torch
from torch._subclasses import FakeTensorMode

from sparse_decode import cases, torch_arrays
from sparse_decode.bridge import op, sparse_decode_attention, torch_op
from sparse_decode.plan import Config

SMALL = (
    cases.Case("op_fp8", (20, 9), slots=5, heads=4, splits=2, gate="bfloat16"),
    cases.Case("op_uint8", (20, 9), cache="uint8", slots=5, heads=2, splits=1),
    cases.Case("op_bf16_kept", (20, 9), slots=5, heads=4, splits=2, inactive=(0,),
               clear_inactive=False, **cases.BF16),
)  # fmt: skip
STRIDED = cases.Case("op_strided", (20, 9), slots=5, heads=2, splits=1, strided=True)
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
pytestmark = pytest.mark.filterwarnings(
    # Said by the import of Inductor.
    r"ignore:`torch.jit:DeprecationWarning"
)
small = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def arguments(case, **changed) -> dict[str, Any]:
    call = cases.build(case)
    tensors = {name: torch_arrays.from_numpy(array) for name, array in call.arrays().items()}
    return {**tensors, **call.options(), "route": "dlpack", **changed}


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.int16)


def eager(given):
    """The bits of an eager call's output, which is NaN before and afterwards."""
    given["output"].fill_(torch.nan)
    sparse_decode_attention(**given)
    result = bits(given["output"])
    given["output"].fill_(torch.nan)
    return result


@small
def test_opcheck(case):
    given = arguments(case)
    # Comparisons take no NaN for equal to itself.
    given["output"].zero_()
    checks = [*CHECKS]
    if given["cache"].dtype == torch.float8_e4m3fn:
        # It multiplies all that it is given, which PyTorch cannot with this dtype.
        checks.remove("test_schema")
    results = torch.library.opcheck(torch_op.attention, (), given, test_utils=checks)
    assert results == dict.fromkeys(checks, "SUCCESS")


@small
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(case, backend):
    compare(arguments(case), backend)


def test_strided_output_is_written_in_place():
    # aot_eager would work on a copy without the padding, which JAX cannot take.
    compare(arguments(STRIDED), "inductor")


def compare(given, backend):
    expected = eager(given)
    compiled = torch.compile(sparse_decode_attention, fullgraph=True, backend=backend)
    compiled(**given)
    assert torch.equal(bits(given["output"]), expected)


def test_output_inside_a_compiled_function():
    given = arguments(SMALL[0])
    expected = eager(given).view(torch.bfloat16).float()
    given.pop("output")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layers(query, **others):
        first, second = torch.full_like(query, torch.nan), torch.full_like(query, torch.nan)
        sparse_decode_attention(query, output=first, **others)
        sparse_decode_attention(query, output=second, **others)
        return first.float() + second.float()

    assert torch.equal(layers(**given), 2 * expected)


def test_config_reaches_the_kernels(monkeypatch):
    seen = []
    attend = op._attend

    def watched(tensors, *options):
        seen.append(options)
        attend(tensors, *options)

    monkeypatch.setattr(op, "_attend", watched)
    config = Config(splits=2, tile=32, warps=2, stages=1, combine_warps=2, combine_width=64)
    given = arguments(SMALL[0], config=config, splits=None, clear_inactive=False)
    expected = eager(given)
    compiled = torch.compile(sparse_decode_attention, fullgraph=True, backend="aot_eager")
    compiled(**given)
    assert torch.equal(bits(given["output"]), expected)
    assert seen == 2 * [(given["scale"], 1, None, False, "dlpack", config)]


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_batches(dynamic):
    compiled = torch.compile(
        sparse_decode_attention, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for requests in (2, 3, 5):
        contexts = (20, 9, 14, 3, 8)[:requests]
        given = arguments(cases.Case(f"op_{requests}", contexts, slots=4, heads=2))
        expected = eager(given)
        compiled(**given)
        assert torch.equal(bits(given["output"]), expected)


def test_wrong_shape_with_symbols_is_refused_when_it_runs():
    compiled = torch.compile(
        sparse_decode_attention, fullgraph=True, backend="aot_eager", dynamic=True
    )
    given = arguments(SMALL[0])
    with pytest.raises(ValueError, match=r"positions: expected shape \[2\], got shape \[1\]"):
        compiled(**{**given, "positions": given["positions"][1:]})


WRONG = [
    ({"regions": torch.zeros(3, 5, dtype=torch.int32)}, ValueError, r"regions: .*\[3, 5\]"),
    ({"query": torch.zeros(2, 4, 192)}, TypeError, "query: .*float32"),
    ({"k_scale": None}, ValueError, "k_scale: .*None"),
    ({"scale": float("nan")}, ValueError, "scale: .*nan"),
    ({"splits": 257}, ValueError, "splits: expected 1 to 256, got 257"),
    ({"config": [2, 64, 3]}, ValueError, "config.warps: .*, got 3"),
    ({"route": "fast"}, ValueError, "route: .*'fast'"),
    ({"route": "direct"}, NotImplementedError, 'query: .*got cpu.*route="dlpack"'),
]


@pytest.mark.parametrize(("changed", "error", "message"), WRONG)
def test_what_the_operator_refuses(changed, error, message):
    given = arguments(SMALL[0], **changed)
    with pytest.raises(error, match=message):
        torch_op.attention(**given)
    with FakeTensorMode() as mode, pytest.raises(error, match=message):
        torch_op.attention(
            **{
                name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in given.items()
            }
        )


@pytest.mark.parametrize(("changed", "error", "message"), [WRONG[0], WRONG[2], WRONG[7]])
def test_what_a_compiler_says(changed, error, message):
    compiled = torch.compile(sparse_decode_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"(?s){message}"):
        compiled(**arguments(SMALL[0], **changed))


def test_gradients_are_refused():
    given = arguments(SMALL[0])
    given["query"].requires_grad_()
    message = "query: expected a tensor without gradient"
    compiled = torch.compile(sparse_decode_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=message):
        torch_op.attention(**given)
    with pytest.raises(Exception, match=message):
        compiled(**given)
    expected = eager({**given, "query": given["query"].detach()})
    with torch.no_grad():
        compiled(**given)
    assert torch.equal(bits(given["output"]), expected)


def test_vmap_is_refused():
    given = arguments(SMALL[0])
    query = given.pop("query")
    with pytest.raises(RuntimeError, match=r"vmap|[Bb]atching"):
        torch.vmap(lambda query: torch_op.attention(query, **given))(query.expand(2, *query.shape))


def test_only_a_compiled_call_registers_the_operator():
    script = """
import sys
import torch
import sparse_decode.bridge
from sparse_decode.bridge import sparse_decode_attention
assert "sparse_decode.bridge.torch_op" not in sys.modules
assert not hasattr(torch.ops.sparse_decode, "attention")
compiled = torch.compile(sparse_decode_attention, fullgraph=True, backend="aot_eager")
try:
    compiled(*[torch.zeros(1)] * 7, scale=1.0)
except Exception as error:
    assert "query: expected shape" in str(error), error
assert torch.ops.sparse_decode.attention.default is sparse_decode.bridge.torch_op.attention
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
