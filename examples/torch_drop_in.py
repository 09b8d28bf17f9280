"""The op in place of vLLM's Step-5 `sparse_decode_attention`, under the same call.

`attention_layer` is written for the original. It runs with the original algorithm (the Triton
kernels) and with the Pallas kernels: only the import differs. On a GPU those are launched on
PyTorch's own stream; without one they run in JAX, through Pallas' interpreter.

    python examples/torch_drop_in.py
"""

# ruff: noqa: E402 - the environment has to be set before the frameworks are imported.

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from sparse_decode.devices import use_interpreters_without_gpu

use_interpreters_without_gpu()
# Triton's interpreter computes masked lanes too, NaN included, and discards them afterwards.
warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")

import torch

from sparse_decode import torch_arrays, triton_kernels
from sparse_decode.bridge import explain_route, sparse_decode_attention
from sparse_decode.call import Call
from sparse_decode.tolerance import judge, limits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REQUESTS, QUERY_LEN, GROUPS, HEADS, DIM = 3, 2, 1, 8, 192
PAGES, PAGE_SIZE, MAX_PAGES, SLOTS = 24, 64, 8, 9
OPTIONS: dict[str, Any] = {"scale": DIM**-0.5, "query_len": QUERY_LEN, "clear_inactive": True}


def attention_layer(
    sparse_decode_attention: Callable[..., None], tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Code that calls the original, argument by argument; it stays as it is."""
    query = tensors["query"]
    output = torch.empty_like(query)
    sparse_decode_attention(
        query,
        tensors["cache"],
        tensors["regions"],
        tensors["block_table"],
        tensors["positions"],
        tensors["active"],
        output,
        splits=triton_kernels.sparse_decode_splits(query.shape[0]),
        k_scale=tensors["k_scale"],
        v_scale=tensors["v_scale"],
        gate=tensors["gate"],
        **OPTIONS,
    )
    return output


def decode_step() -> dict[str, torch.Tensor]:
    """Tensors as a serving stack holds them: int64 indices, uint8 cache, one padded request."""
    random = torch.Generator().manual_seed(0)
    tokens = REQUESTS * QUERY_LEN
    rows = tokens * GROUPS
    cache = torch.randn(PAGES, GROUPS, PAGE_SIZE, 2 * DIM, generator=random) * 32
    last = torch.tensor([500, 130, 0])  # the first query token of each request
    positions = (last[:, None] + torch.arange(QUERY_LEN)).repeat_interleave(GROUPS)
    active = torch.tensor([True, True, False]).repeat_interleave(QUERY_LEN * GROUPS)
    regions = torch.full((rows, SLOTS), -1)
    for row, position in enumerate(positions.tolist()):
        history = torch.randperm(position // 8, generator=random)[: SLOTS - 1]
        chosen = torch.cat([history, torch.tensor([position // 8])])
        regions[row, SLOTS - len(chosen) :] = chosen
    pages = torch.randperm(PAGES, generator=random)
    tensors = {
        "query": torch.randn(rows, HEADS, DIM, generator=random).to(torch.bfloat16),
        "cache": cache.to(torch.float8_e4m3fn).view(torch.uint8),
        "regions": regions,
        "block_table": pages.view(REQUESTS, MAX_PAGES).to(torch.int32),
        "positions": positions,
        "active": active,
        "k_scale": torch.tensor(1 / 32),
        "v_scale": torch.tensor(1 / 32),
        "gate": torch.randn(tokens, GROUPS * HEADS, generator=random).to(torch.bfloat16),
    }
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def main() -> int:
    tensors = decode_step()
    attention: Callable[..., None] = sparse_decode_attention
    arguments = {**tensors, **OPTIONS, "output": torch.empty_like(tensors["query"])}
    explained = explain_route(**arguments)
    print(f"route: {explained.route}; {explained.reason}")
    if explained.route is None and DEVICE == "cpu":
        print('The direct route needs a GPU. Going on with route="dlpack":')
        attention = functools.partial(sparse_decode_attention, route="dlpack")
        explained = explain_route("dlpack", **arguments)
        print(f"route: {explained.route}; {explained.reason}")

    arrays: dict[str, Any] = {
        name: torch_arrays.to_numpy(tensor) for name, tensor in tensors.items()
    }
    allowed = limits(Call(**arrays, **OPTIONS))
    failed = False
    for name, function in (
        ("original algorithm, Triton kernels", triton_kernels.sparse_decode_attention),
        ("drop-in, Pallas kernels", attention),
    ):
        output = torch_arrays.to_numpy(attention_layer(function, tensors))
        verdict = judge(allowed, output, lse=None, before=None)
        failed |= not verdict.ok
        print(f"{name}: largest error {verdict.error:.1e}, {verdict.fault or 'within tolerance'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
