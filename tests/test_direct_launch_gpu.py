"""Toy kernels launched from PyTorch: results, streams, graphs, threads and errors."""

import functools
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import toy_kernels as toys

from sparse_decode.bridge import compile as compiling
from sparse_decode.bridge.launch import DirectProgram
from sparse_decode.bridge.lowering import Buffer, lower

pytestmark = pytest.mark.gpu

ROWS = 128


def arch():
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def build(function, *specs, launch_pdl=False):
    """A program that is not yet loaded."""
    buffers = [Buffer(shape, dtype, 0) for shape, dtype in specs]
    program = lower(function, *buffers, arch=arch())
    jobs = [compiling.Job(call, arch(), launch_pdl) for call in program.calls]
    return DirectProgram(
        compiling.Executable(program, tuple(compiling.compile_many(jobs, processes=1)))
    )


def new_normalise():
    return build(toys.normalise, ((ROWS, 64), "float32"), ((), "float32"), ((64,), "float32"))


@pytest.fixture(scope="module")
def normalise():
    return new_normalise()


def inputs(seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, device="cuda")
    return draw(ROWS, 64), draw(()), draw(64)


def expected(x, scale, bias):
    scaled = (x * scale).double()
    return (scaled / scaled.norm(dim=1, keepdim=True) + bias).flatten()


def check(found, *arguments):
    torch.testing.assert_close(found.double(), expected(*arguments).double(), atol=1e-5, rtol=1e-5)


def test_two_kernels(normalise):
    for seed in range(3):
        arguments = inputs(seed)
        [out] = normalise(*arguments)
        check(out, *arguments)


def test_given_output_and_poisoned_scratch(normalise):
    poison = torch.full((1 << 20,), float("nan"), device="cuda")
    del poison
    arguments = inputs()
    out = torch.full((ROWS * 64,), float("nan"), device="cuda")
    assert normalise(*arguments, outputs=[out])[0] is out
    check(out, *arguments)


def test_two_runs_are_equal(normalise):
    arguments = inputs()
    assert torch.equal(normalise(*arguments)[0], normalise(*arguments)[0])


def test_side_stream_is_ordered_after_its_own_work(normalise):
    stream = torch.cuda.Stream()
    source = inputs()
    arguments = tuple(torch.empty_like(item) for item in source)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for item, value in zip(arguments, source, strict=True):
            item.copy_(value)
        [out] = normalise(*arguments)
        doubled = 2 * out
    stream.synchronize()
    check(doubled / 2, *source)


def test_graph_follows_changed_inputs():
    program = new_normalise()
    program.load()
    arguments = inputs()
    out = torch.zeros(ROWS * 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program(*arguments, outputs=[out])
        [again] = program(*arguments)
    for seed in range(20):
        for item, value in zip(arguments, inputs(seed), strict=True):
            item.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        check(out, *arguments)
        assert torch.equal(out, again)


def test_graph_outlives_the_program():
    program = new_normalise()
    program.load("cuda:0")
    arguments = inputs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        [out] = program(*arguments)
    del program
    graph.replay()
    check(out, *arguments)


def test_capture_without_loading_is_refused():
    program = new_normalise()
    arguments = inputs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arguments[0].mul_(1)
        with pytest.raises(RuntimeError, match=r"call load\(\)"):
            program(*arguments)
    check(program(*arguments)[0], *arguments)


def test_misaligned_address_is_refused(normalise):
    x, scale, bias = inputs()
    for shift in (1, 4):
        shifted = torch.empty(64 + shift, device="cuda")[shift:]
        with pytest.raises(ValueError, match=r"argument 2: .* multiple of 32"):
            normalise(x, scale, shifted)
    shifted = torch.empty(72, device="cuda")[8:].copy_(bias)
    check(normalise(x, scale, shifted)[0], x, scale, bias)


def test_host_tensor_is_refused(normalise):
    x, scale, bias = inputs()
    with pytest.raises(ValueError, match="argument 1: expected device cuda:0, got cpu"):
        normalise(x, scale.cpu(), bias)
    with pytest.raises(ValueError, match="expected CUDA tensors"):
        normalise(x.cpu(), scale.cpu(), bias.cpu())


def test_in_place():
    program = build(toys.add_into, ((4096,), "float32"), ((4096,), "float32"))
    x, total = torch.randn(4096, device="cuda"), torch.randn(4096, device="cuda")
    wanted = total + x
    assert program(x, total)[0] is total
    assert torch.equal(total, wanted)


@pytest.mark.parametrize("count", [0, 1, 77, 100])
@pytest.mark.parametrize("active", [True, False])
def test_masked_loads(count, active):
    program = build(toys.masked, ((100,), "bfloat16"), ((1,), "bool"), ((1,), "int32"))
    x = torch.randn(100, device="cuda", dtype=torch.bfloat16)
    out = torch.full((128,), 7.0, device="cuda", dtype=torch.bfloat16)
    program(
        x,
        torch.tensor([active], device="cuda"),
        torch.tensor([count], device="cuda", dtype=torch.int32),
        outputs=[out],
    )
    wanted = torch.full_like(out, 7.0)
    wanted[:100] = 0
    if active:
        wanted[:count] = x[:count]
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_dot_in_a_loop_of_traced_length(steps):
    program = build(toys.product, ((64, 256), "bfloat16"), ((256, 64), "bfloat16"), ((1,), "int32"))
    a = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    [out] = program(a, b, torch.tensor([steps], device="cuda", dtype=torch.int32))
    wanted = a[:, : 32 * steps].double() @ b[: 32 * steps].double()
    torch.testing.assert_close(out.double(), wanted, atol=1e-3, rtol=1e-4)


def test_launch_takes_other_views_of_the_same_bytes():
    program = build(toys.copy, ((ROWS, 64), "uint16"))
    x = torch.randint(0, 255, (ROWS, 128), device="cuda", dtype=torch.uint8)
    out = torch.zeros(ROWS, 128, device="cuda", dtype=torch.uint8)
    program.launch([x.view(torch.float8_e4m3fn), out])
    assert torch.equal(out, x)


def test_empty_grid_launches_nothing():
    program = build(functools.partial(toys.copy, rows=0), ((ROWS, 64), "float32"))
    out = torch.full((ROWS, 64), 7.0, device="cuda")
    program(torch.zeros(ROWS, 64, device="cuda"), outputs=[out])
    assert torch.equal(out, torch.full_like(out, 7.0))


@pytest.mark.parametrize("captured", [False, True])
def test_dependent_launch_waits_for_the_kernel_before_it(captured):
    if arch() < compiling.FIRST_ARCH_WITH_PDL:
        pytest.skip("this GPU has no programmatic dependent launch")
    program = build(
        functools.partial(toys.copy, wait=True), ((ROWS, 64), "float32"), launch_pdl=True
    )
    program.load()
    buffers = [torch.zeros(ROWS, 64, device="cuda") for _ in range(17)]

    def chain():
        for source, target in itertools.pairwise(buffers):
            program(source, outputs=[target])

    run = chain
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        run = graph.replay
    for _ in range(100):
        buffers[0].normal_()
        run()
        assert torch.equal(buffers[0], buffers[-1])


def test_threads_do_not_mix_up_their_tensors(normalise):
    wrong = []

    def work(seed):
        arguments = inputs(seed)
        wanted = expected(*arguments)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(300):
                [out] = normalise(*arguments)
                if not torch.allclose(out.double(), wanted.double(), atol=1e-5, rtol=1e-5):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_first_cuda_work_of_a_thread(normalise):
    arguments = inputs()
    out = torch.zeros(ROWS * 64, device="cuda")
    normalise(*arguments, outputs=[out])
    out.zero_()
    torch.cuda.synchronize()
    thread = threading.Thread(target=normalise, args=arguments, kwargs={"outputs": [out]})
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    check(out, *arguments)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_of_the_tensors_decides(normalise):
    arguments = [item.to("cuda:1") for item in inputs()]
    [out] = normalise(*arguments)
    assert out.device.index == 1
    assert torch.cuda.current_device() == 0
    check(out, *arguments)


@pytest.mark.serial
def test_jax_starts_no_backend_and_reserves_no_memory(tmp_path):
    script = """
import torch
free = torch.cuda.mem_get_info()[0]
import toy_kernels as toys
from sparse_decode.bridge.lowering import Buffer, lower
major, minor = torch.cuda.get_device_capability()
lower(toys.copy, Buffer((4, 64), "float32", 4), arch=10 * major + minor)
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
assert free - torch.cuda.mem_get_info()[0] < 2**20
"""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))
    }
    path = [str(Path(toys.__file__).parent), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**environment, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.serial
def test_host_cost_is_small(normalise):
    """A loose bound that a slow path could not keep; benchmarks measure it properly."""
    arguments = inputs()
    out = torch.zeros(ROWS * 64, device="cuda")
    tensors = [*arguments, out]
    normalise.launch(tensors)
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            normalise.launch(tensors)
        best = min(best, (time.perf_counter() - start) / 50)
    print(f"launch of two kernels: {best * 1e6:.1f} us of host time")
    assert best < 50e-6
