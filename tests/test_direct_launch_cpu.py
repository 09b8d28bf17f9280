"""What the direct launch prepares and refuses, seen without a GPU through a stand-in driver."""

import ctypes
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from sparse_decode.bridge import launch
from sparse_decode.bridge.compile import CompiledKernel, Executable
from sparse_decode.bridge.launch import DirectProgram
from sparse_decode.bridge.lowering import Buffer, KernelCall, Program


def executable(*, grid=(4, 2, 1), pdl=False):
    """Arguments 0 and 1; 1 is updated in place, 2 and 3 are scratch, 4 is a result."""
    buffers = (
        Buffer((4, 8), "float32", 4, alignment=32),
        Buffer((4,), "int32", 4, alignment=32),
        Buffer((3,), "float16", 2, alignment=32),
        Buffer((300,), "uint8", 1, alignment=32),
        Buffer((8,), "bfloat16", 2, alignment=32),
    )
    calls = (
        KernelCall("first", "", grid, 2, 1, (0, 2, 3)),
        KernelCall("second", "", (1, 1, 1), 2, 1, (2, 3, 1, 1, 4), ((2, 0),)),
    )
    kernels = (
        CompiledKernel("first", b"", 90, 2, shared=64, num_parameters=5),
        CompiledKernel("second", b"", 90, 1, shared=0, num_parameters=7, launch_pdl=pdl),
    )
    return Executable(Program(90, buffers, 2, (1, 4), calls), kernels)


class Driver:
    """Reads back what CUDA would read."""

    def __init__(self, statuses=()):
        self.launches = []
        self.contexts = []
        self._functions = {}
        self._statuses = list(statuses)

    def use_primary_context(self, index):
        return 77

    def set_context(self, context):
        self.contexts.append(context)

    def describe(self, status):
        return f"status {status}"

    def load(self, kernel):
        self._functions[len(self._functions) + 1] = kernel
        return len(self._functions)

    def launch(self, config_ref, function, pointers, extra):
        config = config_ref._obj
        kernel = self._functions[function.value]
        addresses = [ctypes.cast(p, ctypes.POINTER(ctypes.c_uint64))[0] for p in pointers]
        pdl = [
            (config.attributes[i].id, config.attributes[i].value[0])
            for i in range(config.num_attributes)
        ]
        self.launches.append(
            SimpleNamespace(
                name=kernel.name,
                grid=tuple(config.grid),
                block=tuple(config.block),
                shared=config.shared,
                stream=config.stream,
                addresses=addresses,
                pdl=pdl,
            )
        )
        return self._statuses.pop(0) if self._statuses else 0


@pytest.fixture
def on_cpu(monkeypatch):
    """Launches on an imagined device, whose tensors lie in host memory."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(launch, "current_stream", lambda index: 1234)

    def make(built, driver):
        plan = launch._Plan(built, 0, driver)
        monkeypatch.setattr(plan, "_device", torch.device("cpu"))
        program = DirectProgram(built)
        program._plans[-1] = plan
        return program

    return make


def tensors():
    return torch.zeros(4, 8), torch.zeros(4, dtype=torch.int32)


def test_what_cuda_reads(on_cpu):
    driver = Driver()
    program = on_cpu(executable(pdl=True), driver)
    x, y = tensors()
    updated, result = program(x, y)
    first, second = driver.launches
    assert updated is y
    assert (result.shape, result.dtype) == ((8,), torch.bfloat16)
    assert (first.grid, first.block, first.shared) == ((4, 2, 1), (64, 1, 1), 64)
    assert (second.grid, second.block, second.shared) == ((1, 1, 1), (32, 1, 1), 0)
    assert (first.stream, second.stream) == (1234, 1234)
    assert (first.pdl, second.pdl) == ([], [(6, 1)])
    scratch = first.addresses[1]
    assert first.addresses == [x.data_ptr(), scratch, scratch + 256, 0, 0]
    assert second.addresses == [
        scratch,
        scratch + 256,
        y.data_ptr(),
        y.data_ptr(),
        result.data_ptr(),
        0,
        0,
    ]


def test_layout_is_that_of_cuda_h():
    assert ctypes.sizeof(launch._Attribute) == 72
    assert launch._Attribute.value.offset == 8
    assert ctypes.sizeof(launch._Config) == 56
    assert [launch._Config.stream.offset, launch._Config.attributes.offset] == [32, 40]


def test_given_outputs_are_written(on_cpu):
    driver = Driver()
    program = on_cpu(executable(), driver)
    out = torch.zeros(8, dtype=torch.bfloat16)
    assert program(*tensors(), outputs=[out])[1] is out
    assert driver.launches[1].addresses[4] == out.data_ptr()


def test_launch_takes_other_views_of_the_same_bytes(on_cpu):
    driver = Driver()
    program = on_cpu(executable(), driver)
    x = torch.zeros(128, dtype=torch.uint8)
    y = torch.zeros(2, dtype=torch.int64)
    program.launch([x, y, torch.zeros(8, dtype=torch.float16)])
    assert driver.launches[0].addresses[0] == x.data_ptr()


def test_empty_grid_is_not_launched(on_cpu):
    driver = Driver()
    on_cpu(executable(grid=(4, 0, 1)), driver)(*tensors())
    assert [done.name for done in driver.launches] == ["second"]


def test_a_new_thread_gets_the_context(on_cpu):
    driver = Driver(statuses=[201])
    on_cpu(executable(), driver)(*tensors())
    assert driver.contexts == [77]
    assert [done.name for done in driver.launches] == ["first", "first", "second"]


def test_driver_error_names_the_kernel(on_cpu):
    program = on_cpu(executable(), Driver(statuses=[0, 700]))
    with pytest.raises(RuntimeError, match="launch of second: status 700"):
        program(*tensors())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, y: (x,), TypeError, "expected 2 arguments, got 1"),
        (lambda x, y: (x.double(), y), TypeError, "argument 0: expected dtype torch.float32"),
        (lambda x, y: (x, y[:3]), ValueError, r"argument 1: expected shape \(4,\), got \(3,\)"),
        (lambda x, y: (x.view(8, 4).T, y), ValueError, "argument 0: expected dense row-major"),
    ],
)
def test_wrong_arguments_are_named(on_cpu, change, error, message):
    driver = Driver()
    program = on_cpu(executable(), driver)
    with pytest.raises(error, match=message):
        program(*change(*tensors()))
    assert not driver.launches


def test_wrong_outputs_are_named(on_cpu):
    program = on_cpu(executable(), Driver())
    with pytest.raises(TypeError, match="outputs: expected 1 tensors, got 0"):
        program(*tensors(), outputs=[])
    with pytest.raises(ValueError, match=r"outputs\[0\]: expected shape"):
        program(*tensors(), outputs=[torch.zeros(9, dtype=torch.bfloat16)])


def test_misaligned_address_is_named(on_cpu):
    program = on_cpu(executable(), Driver())
    x, _ = tensors()
    shifted = torch.zeros(8, dtype=torch.int32)[1:5]
    with pytest.raises(
        ValueError, match="argument 1: expected an address that is a multiple of 32"
    ):
        program(x, shifted)


def test_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match="expected CUDA tensors"):
        DirectProgram(executable())(*tensors())


@pytest.mark.parametrize(
    ("major", "minor", "arch", "runs"),
    [
        (8, 0, 80, True),
        (8, 9, 80, True),
        (8, 0, 89, False),
        (9, 0, 80, False),
        (9, 0, 90, True),
        (10, 0, 90, False),
        (10, 3, 100, False),
    ],
)
def test_only_code_for_the_device_is_loaded(monkeypatch, major, minor, arch, runs):
    card = SimpleNamespace(
        major=major, minor=minor, name="card", shared_memory_per_block_optin=1000
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    code = CompiledKernel("k", b"", arch, 4, shared=1000, num_parameters=2)
    if runs:
        launch._check_device([code], 0)
        card.shared_memory_per_block_optin = 999
        with pytest.raises(NotImplementedError, match="1000 bytes of shared memory"):
            launch._check_device([code], 0)
    else:
        with pytest.raises(NotImplementedError, match=f"compiled for sm_{arch}"):
            launch._check_device([code], 0)


def test_a_device_that_is_no_gpu_is_refused():
    with pytest.raises(ValueError, match="device: expected a CUDA device, got cpu"):
        DirectProgram(executable()).load("cpu")
