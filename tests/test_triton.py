"""The Triton path against the oracle: natively on a GPU, through Triton's interpreter elsewhere."""

# The cases used here have an output, and a gate where one is looked at.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false

import dataclasses
import inspect
import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from sparse_decode import cases, torch_arrays
from sparse_decode.call import Call
from sparse_decode.oracle import evaluate
from sparse_decode.tolerance import judge, limits
from sparse_decode.triton_kernels import op, sparse_decode_attention, sparse_decode_splits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_NAME = {case.name: case for case in cases.CASES}


def names(listed):
    return [pytest.param(case, id=case.name) for case in listed]


def to_tensors(call: Call) -> dict[str, Any]:
    return {name: torch_arrays.from_numpy(a, DEVICE) for name, a in call.arrays().items()}


def run(call: Call, **changes: object) -> np.ndarray:
    """The output of a call; `changes` replace its arguments."""
    tensors, options = to_tensors(call), call.options()
    if options["splits"] is None:
        options["splits"] = sparse_decode_splits(len(call.query))
    arguments: dict[str, Any] = {**tensors, **options, **changes}
    assert sparse_decode_attention(**arguments) is None
    return torch_arrays.to_numpy(arguments["output"])


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def check(call: Call) -> np.ndarray:
    output = run(call)
    verdict = judge(limits(call), output, None, call.output)
    assert verdict.ok, verdict.fault
    return output


@pytest.mark.parametrize("case", names(cases.CASES))
def test_case_matches_the_oracle(case):
    check(cases.build(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", names(cases.WIDE_CASES))
def test_wide_case_matches_the_oracle(case):
    check(cases.build(case))


def test_signature_is_that_of_the_reference():
    parameters = inspect.signature(sparse_decode_attention).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert " ".join(positional) == "query cache regions block_table positions active output"
    assert list(keyword.items()) == [
        ("scale", inspect.Parameter.empty),
        ("query_len", 1),
        ("splits", inspect.Parameter.empty),
        ("clear_inactive", True),
        ("k_scale", None),
        ("v_scale", None),
        ("gate", None),
    ]


@pytest.mark.parametrize(
    ("rows", "splits"),
    [(0, 32), (1, 32), (4, 32), (8, 32), (9, 16), (64, 4), (65, 2), (128, 2), (129, 1), (4096, 1)],
)
def test_splits_fill_256_programs(rows, splits):
    assert sparse_decode_splits(rows) == splits


@pytest.mark.parametrize("name", ["fp8_split2_gate", "bf16_split32", "fp16_heads4_gate"])
def test_two_runs_are_bit_equal(name):
    call = cases.build(BY_NAME[name])
    np.testing.assert_array_equal(bits(run(call)), bits(run(call)))


@pytest.mark.parametrize(
    "name", ["fp8_packed", "fp8_token_major_strided", "fp8_strided_gate", "bf16_packed_strided"]
)
def test_strides_change_no_bit(name):
    call = cases.build(BY_NAME[name])
    dense = {name: np.ascontiguousarray(array) for name, array in call.arrays().items()}
    assert any(dense[name].strides != array.strides for name, array in call.arrays().items())
    np.testing.assert_array_equal(bits(run(call)), bits(run(dataclasses.replace(call, **dense))))


def test_uint8_cache_is_the_fp8_cache():
    call = cases.build(BY_NAME["fp8_split2_gate"])
    words = dataclasses.replace(call, cache=call.cache.view(np.uint8))
    np.testing.assert_array_equal(bits(run(call)), bits(run(words)))


def test_scales_are_not_looked_at_without_an_fp8_cache():
    call = cases.build(BY_NAME["bf16_split1_gate"])
    scales = {"k_scale": torch.tensor(torch.nan), "v_scale": torch.zeros(3)}
    np.testing.assert_array_equal(bits(run(call)), bits(run(call, **scales)))


def test_index_width_changes_no_bit():
    call = cases.build(BY_NAME["fp8_int32_indices"])
    wide = dataclasses.replace(
        call, regions=call.regions.astype(np.int64), positions=call.positions.astype(np.int64)
    )
    np.testing.assert_array_equal(bits(run(call)), bits(run(wide)))


@pytest.mark.parametrize("name", ["fp8_split2_gate", "bf16_split1_gate"])
def test_a_row_does_not_depend_on_its_batch(name):
    call = cases.build(BY_NAME[name])
    alone = {
        name: array[1:2] if array.ndim and name != "cache" else array
        for name, array in call.arrays().items()
    }
    np.testing.assert_array_equal(
        bits(run(call)[1:2]), bits(run(dataclasses.replace(call, **alone)))
    )


@pytest.mark.parametrize("splits", [1, 2, 3, 32, 256])
@pytest.mark.parametrize("cache", ["float8_e4m3fn", "bfloat16"])
def test_any_number_of_splits_gives_the_result(cache, splits):
    case = cases.Case("any_splits", (300,), cache=cache, slots=33, gate="float32", splits=splits)
    check(cases.build(case))


@pytest.mark.parametrize("splits", [1, 5])
def test_nothing_is_written_around_output_and_scratch(monkeypatch, splits):
    guard = 4096
    guarded = []

    def inside(shape, device, dtype=torch.float32):
        size = int(np.prod(shape))
        buffer = torch.full((size + 2 * guard,), torch.nan, dtype=dtype, device=device)
        guarded.append(buffer)
        return buffer[guard : guard + size].view(shape)

    monkeypatch.setattr(op, "_scratch", inside)
    call = dataclasses.replace(cases.build(BY_NAME["fp8_heads5"]), splits=splits)
    output = inside(call.output.shape, DEVICE, torch.bfloat16)
    result = run(call, output=output)
    assert len(guarded) == (1 if splits == 1 else 3)
    for buffer in guarded:
        assert buffer[:guard].isnan().all()
        assert buffer[-guard:].isnan().all()
    assert judge(limits(call), result, None, call.output).ok


def test_nothing_is_written_between_the_elements_of_a_padded_output():
    call = cases.build(BY_NAME["fp8_strided_gate"])
    output = torch_arrays.from_numpy(call.output, DEVICE)
    whole = output.as_strided((output.untyped_storage().nbytes() // output.itemsize,), (1,), 0)
    before = whole.clone()
    run(call, output=output)
    untouched = torch.ones_like(whole, dtype=torch.bool)
    untouched.as_strided(output.shape, output.stride(), output.storage_offset()).fill_(False)
    assert untouched.any()
    assert torch.equal(whole[untouched], before[untouched])
    assert not output.isnan().any()


@pytest.mark.parametrize("splits", [1, 4])
def test_inactive_rows_are_positive_zeros_whatever_they_hold(splits):
    call = cases.build(BY_NAME["fp8_inactive"])
    positions = call.positions.copy()
    positions[~call.active] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    call = dataclasses.replace(call, positions=positions, splits=splits)
    assert np.isnan(call.gate[~call.active].astype(np.float32)).all()
    assert not bits(run(call)[~call.active]).any()


@pytest.mark.parametrize("splits", [1, 4])
def test_gate_that_is_not_finite_follows_the_oracle(splits):
    call = cases.build(BY_NAME["fp8_blank_rows"])
    gate = call.gate.copy()
    gate[0, :4] = np.nan, np.inf, -np.inf, -1000
    gate[1, :4] = np.nan, np.inf, -np.inf, -1000
    call = dataclasses.replace(call, gate=gate, splits=splits)
    output = check(call)
    assert np.isnan(output[:2, 0].astype(np.float32)).all()
    assert not output[:2, 2:4].any()


@pytest.mark.parametrize("splits", [1, 4])
def test_attended_nan_reaches_the_output(splits):
    call = cases.build(BY_NAME["bf16"])
    query = call.query.copy()
    query[0, 3, 5] = np.nan
    query[1, 2, 7] = np.inf
    check(dataclasses.replace(call, query=query, splits=splits))


@pytest.mark.parametrize("splits", [1, 2])
def test_positions_beyond_int32(splits):
    call = cases.build(cases.Case("whole_regions", (128, 136), slots=17, splits=splits))
    far = dataclasses.replace(call, positions=np.array([2**62, 2**31], np.int64))
    full = dataclasses.replace(call, positions=np.array([135, 135], np.int64))
    np.testing.assert_array_equal(bits(run(far)), bits(run(full)))
    past = dataclasses.replace(call, positions=np.array([-(2**62), -(2**31) - 1], np.int64))
    assert not bits(run(past)).any()


def test_rounding_points():
    """A row that attends to one token twice gives v exactly, so the roundings alone remain."""
    case = cases.Case("one_token", (1,), cache="bfloat16", gate="bfloat16", slots=1, splits=2)
    call = cases.build(case)
    np.testing.assert_array_equal(run(call), evaluate(call).output)


def test_empty_batch_launches_nothing(monkeypatch):
    monkeypatch.setattr(op.kernels, "_split", None)
    monkeypatch.setattr(op.kernels, "_combine", None)
    assert run(cases.build(BY_NAME["empty"])).shape[0] == 0


def run_python(code: str, **environment: str) -> str:
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**variables, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_import_brings_no_jax_and_no_torch_before_use():
    run_python(
        "import sys\n"
        "import sparse_decode.triton_kernels as kernels\n"
        "assert not {'torch', 'triton', 'jax'} & set(sys.modules)\n"
        "kernels.sparse_decode_attention\n"
        "assert 'torch' in sys.modules and 'jax' not in sys.modules\n"
    )


def test_missing_torch_names_the_extra():
    output = run_python(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "try:\n"
        "    from sparse_decode.triton_kernels import sparse_decode_attention\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert "torch is not installed" in output
    assert "sparse-decode[torch]" in output


def test_unknown_attribute():
    import sparse_decode.triton_kernels as package

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_cpu_tensors_without_the_interpreter_say_how_to_enable_it(monkeypatch):
    monkeypatch.setattr(op.kernels, "INTERPRETED", False)
    with pytest.raises(NotImplementedError, match=r"query: .* got cpu.*TRITON_INTERPRET=1"):
        op._check_device(torch.device("cpu"), fp8=False)


@pytest.mark.parametrize(
    ("capability", "fp8", "expected"),
    [
        ((8, 0), False, False),
        ((8, 9), True, False),
        ((9, 0), True, True),
        ((10, 0), True, True),
        ((7, 5), False, r"query: Triton needs compute capability 8.0 or newer, got 7.5 \(A card\)"),
        ((8, 6), True, r"cache: an FP8 cache needs compute capability 8.9 or newer, got 8.6"),
    ],
)
def test_what_a_gpu_can_do(monkeypatch, capability, fp8, expected):
    monkeypatch.setattr(op.kernels, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    device = torch.device("cuda", 0)
    if isinstance(expected, bool):
        assert op._check_device(device, fp8) is expected
    else:
        with pytest.raises(NotImplementedError, match=expected):
            op._check_device(device, fp8)


def test_other_devices_are_not_implemented():
    call = cases.build(BY_NAME["fp8_split1"])
    options: dict[str, Any] = call.options()
    meta = {name: tensor.to("meta") for name, tensor in to_tensors(call).items()}
    with pytest.raises(NotImplementedError, match=r"query: .*got meta"):
        sparse_decode_attention(**meta, **options)


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8", "bool", "int32", "int64"],
)
def test_arrays_keep_bits_strides_and_offset(dtype):
    root = np.random.default_rng(0).integers(0, 2, (6, 8, 10)).astype(dtype)
    view = root[1:5, ::2, 3:9].swapaxes(0, 1)
    tensor = torch_arrays.from_numpy(view, DEVICE)
    assert tensor.shape == view.shape
    assert [s * view.itemsize for s in tensor.stride()] == list(view.strides)
    assert tensor.storage_offset() == 83
    assert tensor.untyped_storage().nbytes() == root.nbytes
    back = torch_arrays.to_numpy(tensor)
    assert back.dtype == view.dtype
    np.testing.assert_array_equal(bits(back), bits(view))


def test_arrays_over_foreign_memory_and_odd_offsets():
    root = np.frombuffer(bytes(range(64)), np.uint8)
    view = root[3:43].view(np.int32)[1::3]
    tensor = torch_arrays.from_numpy(view, DEVICE)
    assert tensor.stride() == (3,)
    np.testing.assert_array_equal(torch_arrays.to_numpy(tensor), view)
    window = np.lib.stride_tricks.as_strided(np.arange(9), (3, 4), (16, 8))
    np.testing.assert_array_equal(
        torch_arrays.to_numpy(torch_arrays.from_numpy(window, DEVICE)), window
    )
    assert torch_arrays.from_numpy(np.empty((0, 3), ml_dtypes.bfloat16), DEVICE).shape == (0, 3)


def test_arrays_that_torch_cannot_hold():
    with pytest.raises(ValueError, match=r"array: expected strides of at least 0.*got \[-8\]"):
        torch_arrays.from_numpy(np.arange(4)[::-1])
    with pytest.raises(
        TypeError, match=r"array: expected a dtype that PyTorch has, got float8_e4m3$"
    ):
        torch_arrays.from_numpy(np.zeros(4, ml_dtypes.float8_e4m3))


def test_geometry_of_tensors():
    call = cases.build(BY_NAME["fp8_groups3"])
    assert torch_arrays.geometry(to_tensors(call), call.options()) == call.geometry()
