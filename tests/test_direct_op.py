"""The operation on PyTorch tensors, as far as it can be seen without a GPU.

What each wrong argument is told; which route a call takes; and what is built for it.
"""

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch._subclasses import FakeTensorMode

from sparse_decode import cases, torch_arrays
from sparse_decode.bridge import compile as compiling
from sparse_decode.bridge import explain_route, lowering, op, sparse_decode_attention
from sparse_decode.plan import Config

CASE = cases.Case("bad_input", (40, 20), heads=4, groups=2, gate="bfloat16", slots=6)
CALL = cases.build(CASE)  # 4 rows, 2 requests, pages of 64 tokens
CUDA = torch.device("cuda", 0)


def arguments(call=CALL, **changed) -> dict[str, Any]:
    tensors = {name: torch_arrays.from_numpy(array) for name, array in call.arrays().items()}
    return {**tensors, **call.options(), **changed}


# What is said about a wrong argument.


def shaped(*shape):
    return lambda tensor: torch.zeros(shape).to(tensor.dtype)


def cast(dtype):
    return lambda tensor: tensor.float().to(dtype)


def apart(tensor):
    """The same bytes with last stride 2."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def elsewhere(tensor):
    return tensor.to("meta")


def constant(value):
    return lambda _: value


def overlapping(tensor):
    return tensor.as_strided(tensor.shape, (0, 192, 1))


WRONG = [
    ("query", shaped(4, 192), ValueError, "[rows, heads, 192]", "[4, 192]"),
    ("query", shaped(4, 4, 128), ValueError, "[rows, heads, 192]", "[4, 4, 128]"),
    ("query", shaped(4, 17, 192), ValueError, "1 to 16 heads", "17"),
    ("query", shaped(3, 4, 192), ValueError, "multiples of groups * query_len = 2 * 1", "3 rows"),
    ("query", cast(torch.float32), TypeError, "bfloat16 or float16", "float32"),
    ("query", apart, ValueError, "last stride 1", "strides [1536, 384, 2]"),
    ("query", torch_arrays.to_numpy, TypeError, "torch.Tensor", "ndarray"),
    ("query", constant(None), TypeError, "torch.Tensor", "NoneType"),
    ("query", elsewhere, ValueError, "device meta", "device cpu"),
    ("cache", shaped(5, 64, 384), ValueError, "page_size, 384]", "[5, 64, 384]"),
    ("cache", shaped(5, 2, 12, 384), ValueError, "multiple of 8", "12"),
    ("cache", shaped(0, 2, 64, 384), ValueError, "at least one page", "[0, 2, 64, 384]"),
    ("cache", cast(torch.float16), TypeError, "bfloat16 or float8_e4m3fn or uint8", "float16"),
    ("cache", cast(torch.float8_e5m2), TypeError, "float8_e4m3fn", "float8_e5m2"),
    ("cache", lambda t: apart(t.view(torch.uint8)), ValueError, "last stride 1", "strides ["),
    ("cache", elsewhere, ValueError, "device cpu", "device meta"),
    ("cache", constant(None), TypeError, "torch.Tensor", "NoneType"),
    ("regions", shaped(5, 6), ValueError, "[4, slots]", "[5, 6]"),
    ("regions", shaped(4, 0), ValueError, "slots >= 1", "[4, 0]"),
    ("regions", cast(torch.int16), TypeError, "int32 or int64", "int16"),
    ("regions", apart, ValueError, "last stride 1", "strides [12, 2]"),
    ("regions", elsewhere, ValueError, "device cpu", "device meta"),
    ("regions", constant([[0]]), TypeError, "torch.Tensor", "list"),
    ("block_table", shaped(4, 2), ValueError, "[2, max_pages]", "[4, 2]"),
    ("block_table", cast(torch.int64), TypeError, "int32", "int64"),
    ("block_table", apart, ValueError, "last stride 1", "strides ["),
    ("block_table", elsewhere, ValueError, "device cpu", "device meta"),
    ("block_table", constant(np.zeros((2, 2))), TypeError, "torch.Tensor", "ndarray"),
    ("positions", shaped(4, 1), ValueError, "[4]", "[4, 1]"),
    ("positions", cast(torch.float32), TypeError, "int32 or int64", "float32"),
    ("positions", apart, ValueError, "last stride 1", "strides [2]"),
    ("positions", elsewhere, ValueError, "device cpu", "device meta"),
    ("positions", constant(3), TypeError, "torch.Tensor", "int"),
    ("active", shaped(3), ValueError, "[4]", "[3]"),
    ("active", cast(torch.uint8), TypeError, "bool", "uint8"),
    ("active", apart, ValueError, "last stride 1", "strides [2]"),
    ("active", elsewhere, ValueError, "device cpu", "device meta"),
    ("active", constant(True), TypeError, "torch.Tensor", "bool"),
    ("output", shaped(4, 4, 191), ValueError, "[4, 4, 192]", "[4, 4, 191]"),
    ("output", cast(torch.float32), TypeError, "bfloat16 or float16", "float32"),
    ("output", apart, ValueError, "last stride 1", "strides [1536, 384, 2]"),
    ("output", overlapping, ValueError, "keep elements apart", "strides [0, 192, 1]"),
    ("output", elsewhere, ValueError, "device cpu", "device meta"),
    ("output", constant(None), TypeError, "torch.Tensor", "NoneType"),
    ("k_scale", constant(None), ValueError, "one float32", "None"),
    ("k_scale", shaped(2), ValueError, "one element", "[2]"),
    ("k_scale", cast(torch.float16), TypeError, "float32", "float16"),
    ("k_scale", constant(0.5), TypeError, "torch.Tensor", "float"),
    ("k_scale", elsewhere, ValueError, "device cpu", "device meta"),
    ("v_scale", constant(None), ValueError, "one float32", "None"),
    ("v_scale", shaped(0), ValueError, "one element", "[0]"),
    ("v_scale", cast(torch.float64), TypeError, "float32", "float64"),
    ("v_scale", constant(np.float32(1)), TypeError, "torch.Tensor", "float32"),
    ("gate", shaped(4, 4), ValueError, "[2, 8]", "[4, 4]"),
    ("gate", cast(torch.int32), TypeError, "bfloat16 or float16 or float32", "int32"),
    ("gate", elsewhere, ValueError, "device cpu", "device meta"),
    ("gate", constant([0.0]), TypeError, "torch.Tensor", "list"),
    ("scale", constant(float("inf")), ValueError, "a finite number", "inf"),
    ("scale", constant("1"), TypeError, "a real number", "str"),
    ("scale", constant(True), TypeError, "a real number", "bool"),
    ("query_len", constant(0), ValueError, "at least 1", "0"),
    ("query_len", constant(1.0), TypeError, "an integer", "float"),
    ("splits", constant(257), ValueError, "1 to 256", "257"),
    ("splits", constant("4"), TypeError, "an integer", "str"),
    ("splits", constant([4]), TypeError, "an integer", "list"),
    ("clear_inactive", constant(1), TypeError, "a bool", "int"),
    ("config", constant({"splits": 4}), TypeError, "a Config or None", "dict"),
    ("config", constant(4), TypeError, "a Config or None", "int"),
]


@pytest.mark.parametrize(("name", "change", "error", "expected", "got"), WRONG)
@pytest.mark.parametrize("route", ["direct", "dlpack"])
def test_wrong_argument(route, name, change, error, expected, got):
    given = arguments(route=route)
    given[name] = change(given.get(name))
    named = "regions|cache" if name == "query" and change is elsewhere else name
    pattern = rf"^({named}): expected .*{re.escape(expected)}.*, got .*{re.escape(got)}"
    with pytest.raises(error, match=pattern):
        sparse_decode_attention(**given)
    explanation = explain_route(**given)
    assert explanation.route is None
    assert re.match(pattern, explanation.reason)


@pytest.mark.parametrize("name", ["query", "cache", "output", "k_scale", "v_scale", "gate"])
def test_gradient(name):
    given = arguments(route="dlpack")
    given[name] = given[name].float().to(given[name].dtype).requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor without gradient"):
        sparse_decode_attention(**given)
    with torch.no_grad():
        sparse_decode_attention(**given)


def test_the_call_is_good_otherwise():
    given = arguments(route="dlpack")
    given["output"].fill_(torch.nan)
    sparse_decode_attention(**given)
    assert torch.isfinite(given["output"]).all()


@pytest.mark.parametrize("route", ["fast", None, 1, ["direct"]])
def test_unknown_route(route):
    with pytest.raises(ValueError, match=r'^route: expected "direct" or "dlpack", got'):
        sparse_decode_attention(**arguments(route=route))


def test_cpu_tensors_are_sent_to_the_other_route():
    with pytest.raises(NotImplementedError, match=r'NVIDIA GPU, got cpu; .*route="dlpack"'):
        sparse_decode_attention(**arguments())


@pytest.mark.parametrize("route", ["direct", "dlpack"])
def test_meta_tensors_run_nowhere(route):
    given = arguments(route=route)
    moved: dict[str, Any] = {
        n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in given.items()
    }
    with pytest.raises(NotImplementedError, match=r"^query: .*got meta$"):
        sparse_decode_attention(**moved)


def test_a_scale_that_is_not_needed_is_not_looked_at():
    call = cases.build(cases.Case("op_bf16", (9,), slots=2, heads=2, **cases.BF16))
    scale = torch.ones(7, dtype=torch.float16, requires_grad=True)
    given = arguments(call, route="dlpack", k_scale=scale)
    sparse_decode_attention(**given)
    assert torch.isfinite(given["output"]).all()


# Which route a call takes.


@pytest.fixture
def gpu(monkeypatch):
    """Lets PyTorch speak of a GPU that is not there; the capability can be set."""
    found = {"capability": (9, 0)}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, answer in {
        "get_device_capability": lambda device: found["capability"],
        "get_device_name": lambda device: "stand-in",
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return found


def on_gpu(given) -> dict[str, Any]:
    """The call with tensors that have no memory and say that they are on a GPU."""
    with FakeTensorMode():
        return {
            name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)
            if isinstance(x, torch.Tensor)
            else x
            for name, x in given.items()
        }


def test_explained_on_the_cpu():
    assert explain_route(**arguments(route="dlpack")) == op.Explanation(
        "dlpack", "asked for; runs in Pallas' interpreter on the CPU"
    )
    refused = explain_route(**arguments())
    assert refused.route is None
    assert 'ask for route="dlpack"' in refused.reason
    empty = arguments(cases.build(cases.Case("empty", ())), route="dlpack")
    assert explain_route(**empty) == op.Explanation(
        "dlpack", "there are no rows; nothing is launched"
    )


def test_explained_on_a_gpu(gpu):
    given = on_gpu(arguments())
    assert explain_route(**given) == op.Explanation(
        "direct", "compiled for sm_90, launched on torch's current stream"
    )
    assert explain_route("dlpack", **given) == op.Explanation(
        "dlpack", "asked for; runs in JAX on the GPU"
    )


# scale tells the calls apart: what is known of a call is remembered
@pytest.mark.parametrize(
    ("scale", "capability", "cache", "message"),
    [
        (0.1, (8, 6), "float8_e4m3fn", "^cache: an FP8 cache needs .* 8.9 or newer, got 8.6"),
        (0.2, (7, 5), "bfloat16", r"^query: expected a GPU .*\{80, .*\}, got sm_75 \(stand-in\)"),
        (0.3, (12, 0), "float8_e4m3fn", "^query: expected a GPU .*, got sm_120"),
    ],
)
def test_a_gpu_that_cannot(gpu, scale, capability, cache, message):
    gpu["capability"] = capability
    call = cases.build(cases.Case("gpu", (9,), slots=2, heads=2, cache=cache))
    given = on_gpu(arguments(call, scale=scale))
    with pytest.raises(NotImplementedError, match=message):
        sparse_decode_attention(**given)
    explanation = explain_route(**given)
    assert explanation.route is None
    assert re.match(message, explanation.reason)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"splitz": 1}, r"unknown \['splitz'\]"), ({"query": 3}, "^query: .*got int")],
)
def test_explanation_of_no_call(changed, message):
    explanation = explain_route(**arguments(**changed))
    assert explanation.route is None
    assert re.search(message, explanation.reason)


# What is built for a call.


def request_of(call, alignments=(), **changed):
    """What the direct route builds for a call, and the names of the arrays."""
    found = op._describe(arguments(call, **changed), "direct", CUDA)
    return op._request(found, alignments), found.names


def lowered(request):
    return lowering.lower(
        request.make(), *request.specs, arch=request.arch, alignments=request.alignments
    )


def divisibility(kernel_call):
    """What a kernel's IR says of each pointer; 1 where it says nothing."""
    [signature] = re.findall(r"tt\.func .*", kernel_call.ttir)
    arguments = re.findall(r"!tt\.ptr<\w+>(?: \{tt\.divisibility = (\d+) : i32\})?", signature)
    assert len(arguments) == len(kernel_call.arguments)
    return [int(number or 1) for number in arguments]


TINY = cases.Case("tiny", (40, 20), heads=4, slots=6, splits=2, gate="bfloat16")


def test_aligned_call_is_built_for_aligned_addresses(gpu):
    request, names = request_of(cases.build(TINY))
    program = lowered(request)
    assert dict(zip(names, request.specs, strict=True))["cache"].dtype == "uint16"
    for kernel_call in program.calls:
        assert set(divisibility(kernel_call)) == {32}
    assert program.outputs == (names.index("output"),)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"active": 2, "positions": 8}, True),
        ({"query": 2, "output": 4}, True),
        ({"cache": 1}, False),
    ],
)
def test_misaligned_call_is_built_for_its_addresses(gpu, changed, words):
    call = cases.build(TINY)
    _, names = request_of(call)
    alignments = tuple(changed.get(name, 32) for name in names)
    request, _ = request_of(call, alignments)
    specs = dict(zip(names, request.specs, strict=True))
    assert specs["cache"].dtype == ("uint16" if words else "float8_e4m3fn")
    program = lowered(request)
    assert [buffer.alignment for buffer in program.inputs] == list(alignments)
    for kernel_call in program.calls:
        for buffer, number in zip(kernel_call.arguments, divisibility(kernel_call), strict=True):
            assert number == (alignments[buffer] if buffer < len(names) else 32)
    kernels = compiling.compile_many(
        [compiling.Job(kernel_call, 90, request.launch_pdl) for kernel_call in program.calls],
        processes=1,
    )
    assert [kernel.arch for kernel in kernels] == [90, 90]
    assert all(kernel.cubin and kernel.launch_pdl for kernel in kernels)


def test_alignments_are_those_of_the_addresses():
    assert op._alignments([1 << 20, 96, 48, 8, 6, 4097, 0]) == (32, 32, 16, 8, 2, 1, 32)


def test_requests_that_differ_are_stored_apart(gpu):
    call = cases.build(TINY)
    requests = [
        request_of(call)[0],
        request_of(call, splits=4)[0],
        request_of(call, scale=0.5)[0],
        request_of(call, clear_inactive=False)[0],
        request_of(call, config=Config(splits=2, stages=4))[0],
        request_of(call, config=Config(splits=2, combine_width=64))[0],
        request_of(call, alignments=(16, *[32] * 9))[0],
        request_of(call, gate=None)[0],
        request_of(call, positions=torch.zeros(2, dtype=torch.int32))[0],
        request_of(call, cache=torch.zeros(8, 1, 64, 384, dtype=torch.uint8))[0],
    ]
    assert len({request.digest() for request in requests}) == len(requests)
    assert requests[0].digest() == request_of(cases.build(TINY))[0].digest()


def test_warm_process_needs_neither_jax_nor_triton(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_DECODE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    loaded = []
    monkeypatch.setattr(op.DirectProgram, "load", lambda program, device: loaded.append(device))
    given = arguments(cases.build(TINY), scale=0.25)
    op.warmup([given], processes=1)
    assert loaded == [0]
    stored = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(stored) == 1
    script = """
import sys
import torch
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.version.cuda = "13.0"
torch.cuda.is_current_stream_capturing = lambda: False
from sparse_decode import cases, torch_arrays
from sparse_decode.bridge import op
call = cases.build(cases.Case("tiny", (40, 20), heads=4, slots=6, splits=2, gate="bfloat16"))
tensors = {name: torch_arrays.from_numpy(array) for name, array in call.arrays().items()}
arguments = {**tensors, **call.options(), "scale": 0.25}
found = op._describe(arguments, "direct", torch.device("cuda", 0))
program = op._build(found, (32,) * len(found.names))
names = [kernel.name for kernel in program.executable.kernels]
assert names == ["sparse_decode_split", "sparse_decode_combine"]
assert op._build(found, ()) is program
print(sorted({name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib", "triton"}))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "SPARSE_DECODE_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    assert stored == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_capture_without_warm_up_is_refused(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE_DECODE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    found = op._describe(arguments(cases.build(TINY), scale=0.75), "direct", CUDA)
    with pytest.raises(RuntimeError, match=r"sparse_decode\.bridge\.warmup, before the capture"):
        op._build(found, (32,) * len(found.names))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_warmup_without_a_gpu_says_so():
    with pytest.raises(NotImplementedError, match="device: expected an NVIDIA GPU, and none is"):
        op.warmup([])
