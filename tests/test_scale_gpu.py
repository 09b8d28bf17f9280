"""Sizes at which 32 bits do not reach: caches of many GiB, 65536 rows, a million tokens of context.

A cache of many GiB holds the pages of a small call, spread from its first page to its last, and NaN
everywhere else; the small call's oracle judges it. Calls of many rows are judged by samples, and
compared on all rows with the Triton path.
"""

import dataclasses
import gc
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import soak  # noqa: E402
from soak import Kind  # noqa: E402

from sparse_decode import cases, torch_arrays  # noqa: E402
from sparse_decode.bridge import dlpack, packed_to_jax, to_jax, to_torch  # noqa: E402
from sparse_decode.call import Call  # noqa: E402
from sparse_decode.contract import ARRAY_NAMES  # noqa: E402
from sparse_decode.oracle import attended, evaluate  # noqa: E402
from sparse_decode.pallas_kernels import PackedCache, sparse_decode_attention  # noqa: E402
from sparse_decode.tolerance import judge, limits  # noqa: E402

GIB = 1 << 30
SAMPLES = 16
PATHS = ("triton", "direct", "dlpack", "pallas")
# Those that take a cache in which pages are not whole pieces of memory.
ANY_STRIDES = ("triton", "direct")


@pytest.fixture(autouse=True)
def card_given_back():
    """Gives back what earlier tests of this process have left in reserve, and the test itself."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        assert dlpack.flush(30)
    gc.collect()
    torch.cuda.empty_cache()


def by_pallas(arguments: dict[str, Any]) -> None:
    """The Pallas kernels in JAX on the tensors' memory."""
    cache = arguments["cache"]
    with jax.enable_x64(True):
        given = {
            name: to_jax(value) if name in ARRAY_NAMES else value
            for name, value in arguments.items()
            if name not in ("cache", "output") and value is not None
        }
        if cache.is_contiguous():
            given["cache"] = to_jax(cache)
        else:
            storage, offset = packed_to_jax(cache)
            given["cache"] = PackedCache(
                storage,
                offset,
                groups=cache.shape[1],
                page_size=cache.shape[2],
                group_stride=cache.stride(1),
                token_stride=cache.stride(2),
            )
        result = sparse_decode_attention(**given)
    arguments["output"].copy_(to_torch(result))


def attend(path: str, arguments: dict[str, Any]) -> None:
    if path == "pallas":
        by_pallas(arguments)
    else:
        soak.attend(path, arguments)


# Large caches.


@dataclass(frozen=True)
class Large:
    """A cache.

    Attributes:
        name: For the test's name.
        nbytes: Its size.
        dtype: Its dtype.
        groups, page_size: As in the contract.
        order: Its dimensions from the outermost in memory to the innermost.
        page_stride: Elements between pages, where it is a view into larger ones.
        paths: The paths that take it.
    """

    name: str
    nbytes: int
    dtype: str = "float8_e4m3fn"
    groups: int = 1
    page_size: int = 64
    order: tuple[int, ...] = (0, 1, 2, 3)
    page_stride: int | None = None
    paths: tuple[str, ...] = PATHS


LARGE = (
    Large("fp8_3gib", 3 * GIB),
    Large("fp8_5gib", 5 * GIB),
    Large("bf16_5gib", 5 * GIB, "bfloat16"),
    Large("fp8_packed", 5 * GIB, groups=2, page_size=256, page_stride=GIB),
    Large("bf16_packed", 5 * GIB, "bfloat16", groups=2, page_size=256, page_stride=GIB // 2),
    Large("fp8_token_major", 5 * GIB, groups=2, order=(0, 2, 1, 3)),
    Large("bf16_token_major", 5 * GIB, "bfloat16", groups=2, order=(0, 2, 1, 3)),
    Large("fp8_groups_outermost", 5 * GIB, groups=2, order=(1, 0, 2, 3), paths=ANY_STRIDES),
    Large("bf16_groups_outermost", 5 * GIB, "bfloat16", 2, order=(1, 0, 2, 3), paths=ANY_STRIDES),
    Large("fp8_tokens_outermost", 3 * GIB, order=(2, 0, 1, 3), paths=ANY_STRIDES),
    # Here 2**31 elements or more lie between two groups or tokens, which the Pallas kernels refuse.
    Large("fp8_far_groups", 5 * GIB, groups=8, order=(1, 0, 2, 3), paths=("triton",)),
    Large("bf16_far_tokens", 5 * GIB, "bfloat16", order=(2, 0, 1, 3), paths=("triton",)),
)
VERY_LARGE = (
    Large("fp8_100gib", 100 * GIB),
    Large("bf16_packed_20gib", 20 * GIB, "bfloat16", page_size=256, page_stride=2 * GIB),
    Large("fp8_packed_25gib", 25 * GIB, page_size=256, page_stride=5 * GIB),
)


def on_every_path(caches):
    return [
        pytest.param(large, path, id=f"{large.name}-{path}")
        for large in caches
        for path in large.paths
    ]


def small_call(large: Large) -> Call:
    query = large.dtype if large.dtype == "bfloat16" else "bfloat16"
    return cases.build(
        cases.Case(
            f"scale_{large.name}",
            (200, 77),
            cache=large.dtype,
            query=query,
            groups=large.groups,
            page_size=large.page_size,
            splits=2,
        )
    )


def enlarged(call: Call, large: Large, device: str) -> dict[str, Any]:
    """The arguments of a call whose pages lie in a large cache, an attended one at its very end."""
    tensors = {name: torch_arrays.from_numpy(a, device) for name, a in call.arrays().items()}
    small = tensors["cache"]
    strides, elements = [0] * 4, 1
    pages = large.nbytes // (large.page_stride or small[0].numel()) // small.itemsize
    shape = (pages, *small.shape[1:])
    for dim in reversed(large.order):
        strides[dim], elements = elements, elements * shape[dim]
    if large.page_stride:
        strides[0], elements = large.page_stride, pages * large.page_stride
    # Bytes of 0xFF are NaN in either dtype.
    memory = torch.full((elements * small.itemsize,), 0xFF, dtype=torch.uint8, device=device)
    begin = 128 if large.page_stride else 0
    cache = memory.view(small.dtype).as_strided(shape, strides, begin)

    used = np.unique(np.concatenate([attended(call, row)[0] for row in range(len(call.query))]))
    by_use = np.argsort(np.isin(np.arange(len(small)), used), kind="stable")
    place = np.empty(len(small), np.int64)
    place[by_use] = np.linspace(0, pages - 1, len(small)).astype(np.int64)
    assert place[used].max() == pages - 1
    for page, at in enumerate(place):
        cache[at].copy_(small[page])
    table = call.block_table.copy()
    known = (table >= 0) & (table < len(small))
    table[known] = place[table[known]]
    tensors |= {"cache": cache, "block_table": torch_arrays.from_numpy(table, device)}
    return {**tensors, **call.options()}


def check_large(large: Large, path: str) -> None:
    call = small_call(large)
    arguments = enlarged(call, large, "cuda")
    attend(path, arguments)
    verdict = judge(limits(call), torch_arrays.to_numpy(arguments["output"]), None, None)
    assert verdict.ok, verdict.fault


@pytest.mark.parametrize("large", [*LARGE, *VERY_LARGE], ids=lambda large: large.name)
def test_an_enlarged_call_is_the_call(large):
    """The same in a few MiB, where no GPU is needed."""
    stride = large.page_stride and large.groups * large.page_size * 384 + 256
    nbytes = 12 * (stride or large.groups * large.page_size * 384) * 2
    call = small_call(large)
    few = dataclasses.replace(large, nbytes=nbytes, page_stride=stride)
    arguments = enlarged(call, few, "cpu")
    assert arguments["cache"].is_contiguous() == (few.order == (0, 1, 2, 3) and not stride)
    found = evaluate(soak.sampled(arguments, range(len(call.query))))
    np.testing.assert_array_equal(found.exact, evaluate(call).exact)


@pytest.mark.gpu
@pytest.mark.parametrize(("large", "path"), on_every_path(LARGE))
def test_large_cache(large, path):
    check_large(large, path)


@pytest.mark.gpu
@pytest.mark.serial
@pytest.mark.parametrize(("large", "path"), on_every_path(VERY_LARGE))
def test_very_large_cache(large, path):
    free = torch.cuda.mem_get_info()[0]
    if free < large.nbytes + 2 * GIB:
        pytest.skip(f"needs {large.nbytes / GIB + 2:.0f} GiB of free memory, got {free / GIB:.0f}")
    check_large(large, path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_far_groups", "bf16_far_tokens"])
def test_strides_out_of_reach_are_refused(name):
    large = next(large for large in LARGE if large.name == name)
    arguments = enlarged(small_call(large), large, "cuda")
    with pytest.raises(NotImplementedError, match=r"^cache: .*within 2\*\*31 elements"):
        attend("direct", arguments)


# Many rows, long contexts, wide selections.

MANY = {
    "rows_65536": Kind(65536, slots=17, pages=4096, max_pages=8, gate="bfloat16"),
    "rows_65536_verify8_groups8": Kind(
        1024,
        cache="bfloat16",
        groups=8,
        query_len=8,
        slots=33,
        page_size=16,
        pages=512,
        gate="float32",
    ),
    "context_1m": Kind(2, slots=1025, page_size=16, pages=4096, max_pages=65536),
    "context_1m_bf16": Kind(
        1, cache="bfloat16", slots=513, page_size=16, pages=4096, max_pages=65536, splits=32
    ),
    "slots_1025_verify8_heads16_groups8": Kind(
        4, heads=16, groups=8, query_len=8, slots=1025, max_pages=512, pages=512, gate="bfloat16"
    ),
    "slots_1025_verify8_heads16_groups8_splits32": Kind(
        2, heads=16, groups=8, query_len=8, slots=1025, max_pages=512, pages=512, splits=32
    ),
}
# With 12 GiB of partial results, whose offsets need more than 32 bits.
MANY_SPLITS = {
    "rows_65536_splits32": Kind(65536, slots=257, splits=32),
    "rows_65536_head1_splits256": Kind(65536, heads=1, slots=65, splits=256),
}


def check_many(kind: Kind, path: str) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    (arguments,) = soak.draw(kind, "cuda", generator)
    tokens = kind.max_pages * kind.page_size
    last = len(arguments["query"]) - 1
    # The first row and the last attend to the last token of their tables, on the last page.
    for row in (0, last):
        arguments["active"][row] = True
        arguments["positions"][row] = tokens - 1
        arguments["regions"][row, -1] = tokens // 8 - 1
        arguments["block_table"][row // (kind.groups * kind.query_len), -1] = kind.pages - 1
    attend(path, arguments)
    rows = {0, last, *random.Random(2).sample(range(last + 1), min(SAMPLES, last + 1))}
    assert soak.fault_of_rows(arguments, sorted(rows)) is None
    if path != "triton":
        other = soak.result("triton", arguments)
        assert soak.fault_between(arguments, arguments["output"], other, "triton") is None


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", MANY)
def test_many(name, path):
    check_many(MANY[name], path)


@pytest.mark.gpu
@pytest.mark.serial
@pytest.mark.parametrize("path", ["triton", "direct", "dlpack"])
@pytest.mark.parametrize("name", MANY_SPLITS)
def test_many_rows_with_many_splits(name, path):
    check_many(MANY_SPLITS[name], path)
