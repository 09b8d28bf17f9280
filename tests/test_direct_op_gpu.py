"""The operation by the direct route on CUDA: eager and replayed, held to the oracle."""

import dataclasses
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from shapes import in_turn

from sparse_decode import captures, cases, tolerance, torch_arrays
from sparse_decode.bridge import op, sparse_decode_attention, warmup
from sparse_decode.plan import SHAPES, Config
from sparse_decode.triton_kernels import sparse_decode_attention as triton_attention

pytestmark = pytest.mark.gpu

CAPTURES = {
    f"capture_{path.stem}": path
    for path in sorted((Path(__file__).parent / "captures").glob("*.safetensors"))
}
SHARED = {case.name: case for case in (*cases.CASES, *cases.WIDE_CASES)}

# Shared calls that try the layouts of all shapes of a program.
SHAPED = (
    "fp8_split2_gate",
    "fp8_head1",
    "fp8_heads16_gate",
    "fp8_edges",
    "fp8_inactive",
    "fp8_inactive_split1",
    "fp8_padded",
    "bf16_half_padded",
    "fp8_middle_masked",
    "fp8_holes_repeated",
    "fp8_outside",
    "fp8_packed",
    "fp8_token_major_strided",
    "uint8_verify4_groups2",
    "bf16_heads16_groups2",
    "bf16_split1_gate",
    "bf16_verify4",
    "bf16_outside",
    "bf16_packed_strided",
    "fp16_heads4_gate",
)


def arguments(call, **changed) -> dict[str, Any]:
    """A call's arguments on the GPU, with an output buffer."""
    tensors = {name: torch_arrays.from_numpy(a, "cuda") for name, a in call.arrays().items()}
    if call.output is None:
        tensors["output"] = torch.full_like(tensors["query"], torch.nan)
    return {**tensors, **call.options(), **changed}


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.int16)


def run(given):
    """The bits of an eager call's output, which is NaN before and afterwards."""
    given["output"].fill_(torch.nan)
    sparse_decode_attention(**given)
    result = bits(given["output"])
    given["output"].fill_(torch.nan)
    return result


def capture(given):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_decode_attention(**given)
    return graph


def check(call, given, result, limits=None):
    """Holds the bits of a result to the oracle."""
    output = torch_arrays.to_numpy(result.view(given["output"].dtype))
    limits = limits or tolerance.limits(call)
    verdict = tolerance.judge(limits, output, None, np.full_like(output, np.nan))
    assert verdict.ok, verdict.fault


@pytest.fixture(scope="module", autouse=True)
def own_disk_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSE_DECODE_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture(scope="module")
def shared(own_disk_cache):
    """The shared calls with their limits, all compiled for; the cores work on both at once."""
    calls = {name: cases.build(case) for name, case in SHARED.items()}
    calls |= {name: captures.load(path).call for name, path in CAPTURES.items()}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        limits = {name: pool.submit(tolerance.limits, call) for name, call in calls.items()}
        warmup(arguments(call) for call in calls.values())
        return {name: (call, limits[name].result()) for name, call in calls.items()}


# Results.


@pytest.mark.parametrize("name", [*SHARED, *CAPTURES])
def test_shared_call_eager_and_replayed(name, shared):
    call, limits = shared[name]
    given = arguments(call)
    result = run(given)
    check(call, given, result, limits)
    assert torch.equal(run(given), result)
    if len(call.query):
        graph = capture(given)
        assert torch.isnan(given["output"]).all()
        graph.replay()
        assert torch.equal(bits(given["output"]), result)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SHAPED)
def test_shared_call_in_every_shape_of_the_default_settings(name, shape):
    call = cases.build(SHARED[name])
    config = Config(call.splits or 2, **SHAPES[shape]._asdict())
    given = arguments(call, config=config)
    check(call, given, run(given))


@pytest.mark.parametrize("route", ["direct", "dlpack"])
@pytest.mark.parametrize(
    ("shape", "stored"),
    [("two pieces in parts", "float8_e4m3fn"), ("small tiles in parts", "bfloat16")],
)
def test_who_is_active_changes_no_bit(shape, stored, route):
    """Programs of inactive rows help others, with the same result whoever they are."""
    contexts = tuple(40 * request for request in range(1, 33))
    call = cases.build(cases.Case("padding", contexts, cache=stored, slots=65, splits=2))
    given = arguments(call, config=Config(2, **SHAPES[shape]._asdict()), route=route)
    whole = run(given)
    check(call, given, whole)
    rng, row = np.random.default_rng(0), np.arange(32)
    patterns = [row < 8, row >= 16, row % 4 == 1, row < 24, row < 0]
    patterns += [rng.random(32) < share for share in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)]
    for active in map(torch.from_numpy, patterns):
        given["active"].copy_(active)
        found, expected = run(given), torch.where(active.cuda()[:, None, None], whole, 0)
        assert torch.equal(found, expected)


IN_JAX = (
    cases.Case("jax_fp8", (200, 77, 130), gate="bfloat16"),
    cases.Case("jax_fp8_split1", (200, 77, 130), splits=1),
    cases.Case("jax_fp8_split3", (900, 300), slots=65, splits=3),
    cases.Case("jax_uint8_verify4", (70, 33), cache="uint8", query_len=4, groups=2),
    cases.Case("jax_fp8_padded", (200, 77, 130, 300), inactive=(0, 1, 2), splits=2),
    cases.Case("jax_bf16", (200, 77, 130), gate="float32", **cases.BF16),
    cases.Case("jax_bf16_half_padded", (200, 77, 130, 300), inactive=(2, 3), **cases.BF16),
    cases.Case("jax_fp8_wide", (9000, 5000), slots=513, splits=16),
)


@pytest.mark.parametrize("turn", range(len(SHAPES)), ids=[case.name for case in IN_JAX])
def test_as_in_jax(turn):
    """JAX compiles the same kernels with a Triton of its own, which may round elsewhere."""
    case = IN_JAX[turn]
    call = in_turn(cases.build(case), turn)
    given = arguments(call, config=call.config)
    direct, jax = run(given), run({**given, "route": "dlpack"})
    check(call, given, direct)
    check(call, given, jax)
    direct, jax = (x.view(given["output"].dtype).double().cpu().numpy() for x in (direct, jax))
    distance = np.nan_to_num(np.abs(direct - jax))
    different, largest = np.count_nonzero(distance), distance.max()
    print(f"{case.name}: {different} of {distance.size} differ, by at most {largest:.3g}")
    assert (distance <= tolerance.limits(call).output[:, :, None]).all()


def test_side_stream_is_ordered_after_its_own_work():
    call = cases.build(cases.CASES[0])
    given = arguments(call)
    expected = run(given)
    late: dict[str, Any] = {
        name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()
    }
    late["query"].zero_()
    late["regions"].fill_(-1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for name in ("query", "regions"):
            late[name].copy_(given[name])
        sparse_decode_attention(**late)
        found = bits(late["output"])
        late["output"].fill_(torch.nan)
    stream.synchronize()
    assert torch.equal(found, expected)


def shifted(tensor, elements):
    """The same tensor, dense, this many elements behind an aligned address."""
    moved = tensor.new_empty(tensor.numel() + elements)[elements:].view(tensor.shape)
    return moved.copy_(tensor)


@pytest.mark.parametrize(
    "moved",
    [
        {"positions": 1},
        {"active": 3},
        {"query": 1},
        {"output": 1, "gate": 3},
        {"regions": 1, "block_table": 1, "k_scale": 1, "v_scale": 3},
        {"cache": 2},
        {"cache": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("cache", "splits"), [("float8_e4m3fn", 4), ("float8_e4m3fn", 1), ("bfloat16", 4)]
)
def test_misaligned(moved, cache, splits):
    call = cases.build(
        cases.Case("moved", (200, 77, 130), cache=cache, splits=splits, gate="bfloat16")
    )
    given = arguments(call)
    expected = run(given)
    for name in moved.keys() & given.keys():
        given[name] = shifted(given[name], moved[name])
        assert given[name].data_ptr() % 16
    result = run(given)
    check(call, given, result)
    largest = (expected.view(torch.bfloat16) - result.view(torch.bfloat16)).abs().max()
    print(f"{moved}: differs from aligned tensors by at most {largest:.3g}")
    graph = capture(given)
    graph.replay()
    assert torch.equal(bits(given["output"]), result)


@pytest.mark.parametrize("between", [1, 16, 384])
@pytest.mark.parametrize("groups", [1, 2])
def test_side_data_between_pages(between, groups):
    """Also where an element is half a word, or a page begins in the middle of a line."""
    call = cases.build(cases.Case("between", (200, 77, 130), gate="bfloat16", groups=groups))
    given = arguments(call)
    expected = run(given)
    pages, *inside = given["cache"].shape
    size = given["cache"][0].numel()
    storage = torch.full((pages, size + between), 0x7F, dtype=torch.uint8, device="cuda")
    apart = storage[:, :size].view(torch.float8_e4m3fn).unflatten(1, inside)
    apart.copy_(given["cache"])
    assert apart.stride(0) == size + between
    result = run({**given, "cache": apart})
    check(call, given, result)
    if between % 2 == 0:
        assert torch.equal(result, expected)


def test_aligned_and_misaligned_calls_take_turns():
    call = cases.build(cases.CASES[0])
    given = arguments(call)
    expected = run(given)
    moved = {**given, "active": shifted(given["active"], 1)}
    other = run(moved)
    for _ in range(3):
        assert torch.equal(run(given), expected)
        assert torch.equal(run(moved), other)


def test_index_types_give_the_same_bits():
    given = arguments(cases.build(cases.Case("index", (200, 77, 130), index="int32")))
    expected = run(given)
    for names in (["regions"], ["positions"], ["regions", "positions"]):
        assert torch.equal(run(given | {name: given[name].long() for name in names}), expected)


def test_fp8_types_give_the_same_bits():
    given = arguments(cases.build(cases.CASES[0]))
    assert torch.equal(run({**given, "cache": given["cache"].view(torch.uint8)}), run(given))


# Graphs.


def test_capture_after_warm_up_with_meta_tensors():
    call = cases.build(cases.Case("warm", (200, 77), strided=True, layout="packed"))
    given = arguments(call, scale=0.0625)
    meta = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, torch.Tensor)
        else x
        for name, x in given.items()
    }
    warmup([meta])
    given["output"].fill_(torch.nan)
    graph = capture(given)
    assert torch.isnan(given["output"]).all()
    graph.replay()
    found = bits(given["output"])
    check(dataclasses.replace(call, scale=0.0625), given, found)
    assert torch.equal(run(given), found)


def test_capture_without_warm_up_is_refused():
    given = arguments(cases.build(cases.CASES[0]), scale=0.046875)
    graph, counter = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        counter.add_(1)
        with pytest.raises(RuntimeError, match=r"sparse_decode\.bridge\.warmup"):
            sparse_decode_attention(**given)
        with pytest.raises(RuntimeError, match='"dlpack" runs in JAX'):
            sparse_decode_attention(**given, route="dlpack")
        counter.add_(1)
    graph.replay()
    assert counter.item() == 2
    expected = run(given)
    capture(given).replay()
    assert torch.equal(bits(given["output"]), expected)


class Layers:
    """Some layers' calls on one set of index tensors, and inputs to choose from."""

    COUNT = 3
    CONTEXTS = (1500, 700, 90, 8)

    def __init__(self, choices):
        rng = np.random.default_rng(7)
        case = cases.Case("layers", self.CONTEXTS, slots=65, groups=2, gate="bfloat16")
        base = cases.build(case)
        cache = base.cache.astype(np.float32)
        cache[np.isnan(cache)] = rng.normal(size=int(np.isnan(cache).sum())) * 20
        cache = cache.astype(base.cache.dtype)
        self.choices = [self._choose(base, cache, rng) for _ in range(choices)]
        self.caches = [np.roll(cache, layer, 2) for layer in range(self.COUNT)]
        self.given = arguments(self.choices[0])
        self.layers = [
            {**self.given, "cache": torch_arrays.from_numpy(cache, "cuda"), "output": output}
            for cache, output in zip(self.caches, self.outputs(), strict=True)
        ]
        self.inputs = [
            {
                name: torch_arrays.from_numpy(getattr(call, name), "cuda")
                for name in ("query", "regions", "positions", "active", "gate")
            }
            for call in self.choices
        ]

    @staticmethod
    def _choose(base, cache, rng):
        """Other positions, regions, padding and values for a call of the same shapes."""
        contexts = np.repeat(Layers.CONTEXTS, 2)
        positions = rng.integers(-1, contexts)
        regions = np.stack([rng.integers(-1, -(-c // 8), base.regions.shape[1]) for c in contexts])
        return dataclasses.replace(
            base,
            cache=cache,
            query=rng.normal(size=base.query.shape).astype(base.query.dtype),
            gate=rng.normal(size=base.gate.shape).astype(base.gate.dtype),
            positions=positions.astype(base.positions.dtype),
            regions=regions.astype(base.regions.dtype),
            active=np.repeat(rng.random(4) < 0.8, 2),
        )

    def outputs(self):
        return [torch.full_like(self.given["query"], torch.nan) for _ in range(self.COUNT)]

    def load(self, choice):
        for name, tensor in self.inputs[choice].items():
            self.given[name].copy_(tensor)
        for layer in self.layers:
            layer["output"].fill_(torch.nan)

    def run(self):
        for layer in self.layers:
            sparse_decode_attention(**layer)

    def found(self):
        return torch.stack([bits(layer["output"]) for layer in self.layers])


def test_thousand_replays_of_layers_with_changing_inputs():
    layers = Layers(50)
    expected = []
    for choice, call in enumerate(layers.choices):
        layers.load(choice)
        layers.run()
        expected.append(layers.found())
        if choice < 6:
            for cache, found in zip(layers.caches, expected[-1], strict=True):
                check(dataclasses.replace(call, cache=cache), layers.given, found)
    assert len({result.cpu().numpy().tobytes() for result in expected}) == len(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.run()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    order = np.random.default_rng(1).integers(0, len(expected), 1000)
    for choice in order:
        layers.load(choice)
        graph.replay()
        wrong += (layers.found() != expected[choice]).any()
    assert wrong.item() == 0


def test_replays_on_two_streams_in_turn():
    given = arguments(cases.build(cases.CASES[0]))
    expected = run(given)
    graph = capture(given)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            given["output"].fill_(torch.nan)
            graph.replay()
            found = bits(given["output"])
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(found, expected)


# Cost.


@pytest.mark.serial
def test_thousand_calls_leave_no_memory_behind():
    given = arguments(cases.build(cases.CASES[0]))

    def in_use():
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        return {
            name: stats[name]
            for name in ("allocation.all.current", "allocated_bytes.all.current",
                         "reserved_bytes.all.current")
        }  # fmt: skip

    run(given)
    before = in_use()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(1000):
        sparse_decode_attention(**given)
    assert in_use() == before
    assert free - torch.cuda.mem_get_info()[0] < 1 << 20


def host_time(function):
    """Best mean over some rounds of calls, in microseconds; the queue never fills up."""
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(50):
            function()
        best = min(best, (time.perf_counter() - started) / 50)
    return best * 1e6


@pytest.mark.serial
def test_host_time():
    """A loose bound that a slow path could not keep; benchmarks measure it properly."""
    given = arguments(cases.build(cases.CASES[0]))
    arrays = [given.pop(name) for name in op.ARRAY_NAMES[:7]]
    times = {
        name: host_time(lambda function=function: function(*arrays, **given))
        for name, function in (
            ("direct", sparse_decode_attention),
            ("triton", triton_attention),
        )
    }
    print(", ".join(f"{name} {time:.1f} us" for name, time in times.items()), "of host time a call")
    assert times["direct"] < 60


SCRIPT = """
import sys
import torch
from sparse_decode import cases, torch_arrays
from sparse_decode.bridge import op, sparse_decode_attention
call = cases.build(cases.Case("process", (200, 77), gate="bfloat16"))
tensors = {name: torch_arrays.from_numpy(a, "cuda") for name, a in call.arrays().items()}
options = call.options()
torch.cuda.synchronize()
free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
for _ in range(3):
    sparse_decode_attention(**tensors, **options)
torch.cuda.synchronize()
grown = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved)
print("jax" in sys.modules, grown)
if "jax" in sys.modules:
    from jax._src import xla_bridge
    assert not xla_bridge._backends, xla_bridge._backends
torch.save(tensors["output"].cpu(), sys.argv[1])
"""


@pytest.mark.serial
def test_processes_start_no_jax_backend_and_share_the_disk_cache(tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))
    }
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "SPARSE_DECODE_CACHE_DIR": str(tmp_path / "kernels"),
    }
    outputs, imported = [], []
    for process in range(2):
        file = tmp_path / f"{process}.pt"
        done = subprocess.run(
            [sys.executable, "-P", "-c", SCRIPT, str(file)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        jax, grown = done.stdout.split()
        imported.append(jax)
        # Kernels and a little of the driver's own; JAX would take three quarters of the card.
        assert int(grown) < 64 << 20
        outputs.append(torch.load(file).view(torch.int16))
    assert imported == ["True", "False"]
    assert torch.equal(*outputs)
