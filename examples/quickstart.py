"""One decode step of a small attention layer, through every path, held to the float64 oracle.

NumPy plays the model: it fills a paged FP8 cache from hidden states, chooses the regions to attend
and makes the gate. The same call then goes to the Pallas kernels, to the Triton kernels and over
the bridge between them. The exit status is 1 if a result is out of tolerance.

    python examples/quickstart.py
"""

import functools
import os
import sys
import warnings
from typing import Any

import numpy as np
from ml_dtypes import bfloat16, finfo, float8_e4m3fn

from sparse_decode.call import Call
from sparse_decode.contract import HEAD_DIM, REGION_TOKENS
from sparse_decode.devices import use_interpreters_without_gpu

LENGTHS = (900, 333, 64, 17)  # tokens of each request, the current one included
PADDED_ROWS = 1  # the batch was made for one request more
HIDDEN, GROUPS, HEADS = 512, 2, 8  # 2 KV heads with 8 query heads each
PAGE_SIZE, PAGES = 32, 80
TOP_K = 16  # regions besides the current one


def decode_step(rng: np.random.Generator) -> Call:
    """What a model hands to the attention of one layer for one decode step."""
    requests = len(LENGTHS) + PADDED_ROWS
    w_query = rng.normal(size=(HIDDEN, GROUPS, HEADS, HEAD_DIM)) / HIDDEN**0.5
    w_key = rng.normal(size=(HIDDEN, GROUPS, HEAD_DIM)) / HIDDEN**0.5
    w_value = rng.normal(size=(HIDDEN, GROUPS, HEAD_DIM)) / HIDDEN**0.5
    w_gate = rng.normal(size=(HIDDEN, GROUPS * HEADS)) / HIDDEN**0.5

    hidden = [rng.normal(size=(length, HIDDEN)) for length in LENGTHS]
    keys = [np.einsum("th,hgd->tgd", states, w_key) for states in hidden]
    values = [np.einsum("th,hgd->tgd", states, w_value) for states in hidden]
    current = np.zeros((requests, HIDDEN))
    current[: len(LENGTHS)] = [states[-1] for states in hidden]
    query = np.einsum("bh,hgnd->bgnd", current, w_query)  # [requests, groups, heads, 192]

    # One scale for all keys and one for all values: the largest becomes the largest FP8 number.
    largest = float(finfo(float8_e4m3fn).max)
    k_scale = np.float32(max(abs(k).max() for k in keys) / largest)
    v_scale = np.float32(max(abs(v).max() for v in values) / largest)

    # The pages of a request lie anywhere. Whatever no token has written is NaN: it must not matter.
    cache = np.full((PAGES, GROUPS, PAGE_SIZE, 2 * HEAD_DIM), np.nan, float8_e4m3fn)
    max_pages = -(-max(LENGTHS) // PAGE_SIZE)
    block_table = np.zeros((requests, max_pages), np.int32)
    free = iter(rng.permutation(PAGES))
    for request, length in enumerate(LENGTHS):
        used = -(-length // PAGE_SIZE)
        block_table[request, :used] = [next(free) for _ in range(used)]
        tokens = np.arange(length)
        page, offset = block_table[request, tokens // PAGE_SIZE], tokens % PAGE_SIZE
        cache[page, :, offset, :HEAD_DIM] = (keys[request] / k_scale).astype(float8_e4m3fn)
        cache[page, :, offset, HEAD_DIM:] = (values[request] / v_scale).astype(float8_e4m3fn)

    # A region scores by its mean key; the current one is always in. Live ids end each line.
    slots = TOP_K + 1
    regions = np.full((requests, GROUPS, slots), -1, np.int32)
    for request, length in enumerate(LENGTHS):
        starts = np.arange(0, length, REGION_TOKENS)
        sizes = np.diff(np.append(starts, length))
        means = np.add.reduceat(keys[request], starts) / sizes[:, None, None]
        scores = np.einsum("rgd,gnd->gr", means, query[request])
        for group in range(GROUPS):
            best = np.argsort(-scores[group, :-1])[:TOP_K]
            chosen = [*best, len(starts) - 1]
            regions[request, group, slots - len(chosen) :] = chosen

    positions = np.zeros((requests, GROUPS), np.int32)
    positions[: len(LENGTHS)] = np.array(LENGTHS)[:, None] - 1
    active = np.arange(requests) < len(LENGTHS)
    return Call(
        query=query.reshape(-1, HEADS, HEAD_DIM).astype(bfloat16),
        cache=cache,
        regions=regions.reshape(-1, slots),
        block_table=block_table,
        positions=positions.reshape(-1),
        active=active.repeat(GROUPS),
        k_scale=np.array(k_scale),
        v_scale=np.array(v_scale),
        gate=(current @ w_gate).astype(bfloat16),
        scale=HEAD_DIM**-0.5,
    )


def attend_in_jax(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """The Pallas kernels: a function of JAX arrays, for use inside `jax.jit`."""
    import jax
    import jax.numpy as jnp

    from sparse_decode.pallas_kernels import sparse_decode_attention

    arrays = {name: jnp.asarray(array) for name, array in call.arrays().items()}
    attend = jax.jit(functools.partial(sparse_decode_attention, scale=call.scale, return_lse=True))
    output, lse = attend(**arrays)
    return np.asarray(output), np.asarray(lse)


def attend_in_torch(call: Call) -> np.ndarray:
    """The Triton kernels: in place on PyTorch tensors."""
    import torch

    from sparse_decode import torch_arrays
    from sparse_decode.paths import torch_device
    from sparse_decode.triton_kernels import sparse_decode_attention, sparse_decode_splits

    tensors: dict[str, Any] = {
        name: torch_arrays.from_numpy(array, torch_device())
        for name, array in call.arrays().items()
    }
    output = torch.empty_like(tensors["query"])
    splits = sparse_decode_splits(rows=len(output))
    sparse_decode_attention(**tensors, output=output, scale=call.scale, splits=splits)
    return torch_arrays.to_numpy(output)


def main() -> int:
    interpreted = use_interpreters_without_gpu()  # before JAX and Triton are imported
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave PyTorch its share
    # Triton's interpreter computes masked lanes too, NaN included, and discards them afterwards.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")

    from rich.console import Console

    from sparse_decode import parity, report
    from sparse_decode.tolerance import judge, limits

    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    for name, version in parity.versions().items():
        console.print(f"{name} {version}", end="   ")
    console.print(
        "\nNo GPU is visible: the kernels run through the interpreters of Pallas and Triton."
        if interpreted
        else "\nA GPU is visible: the kernels run natively where the table below says so."
    )
    console.print(report.status_table())

    call = decode_step(np.random.default_rng(0))
    size = call.geometry()
    console.print(
        f"requests of {', '.join(map(str, LENGTHS))} tokens and {PADDED_ROWS} padded; "
        f"{size.groups} groups of {size.heads} heads; {size.slots} slots; "
        f"FP8 pages of {size.page_size} tokens"
    )
    paths = parity.runnable()
    modes = {path.name: mode for path, mode in paths}
    allowed = limits(call)
    verdicts = []
    if "pallas" in modes:
        verdicts.append(judge(allowed, *attend_in_jax(call), before=None))
        console.print(f"JAX, jitted:        largest error {verdicts[-1].error:.1e}")
    if "triton" in modes:
        verdicts.append(judge(allowed, attend_in_torch(call), lse=None, before=None))
        console.print(f"PyTorch, in place:  largest error {verdicts[-1].error:.1e}")

    results = list(parity.check("decode step", call, paths=paths))
    console.print(report.parity_table(results))
    verdicts += [result.verdict for result in results]
    failed = sum(not verdict.ok for verdict in verdicts)
    if not results:
        console.print("No path can run here.")
    elif failed:
        console.print(f"{failed} of {len(verdicts)} results are out of tolerance.")
    else:
        console.print(f"All {len(results)} paths that can run here are within tolerance.")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
