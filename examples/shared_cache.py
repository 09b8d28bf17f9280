"""One paged cache, two frameworks: PyTorch writes keys and values, JAX attends over them.

A page holds a header and the keys and values of every layer, as in a serving stack. PyTorch owns
the memory and appends a token at each step; JAX reads the very same bytes through the bridge, with
one compiled program for all layers. Nothing is copied, on a GPU or on a CPU: the bridge compares
the addresses, and so does this file.

    python examples/shared_cache.py
"""

# ruff: noqa: E402 - the environment has to be set before the frameworks are imported.

import os
import sys
from typing import Any

from sparse_decode.devices import use_interpreters_without_gpu

use_interpreters_without_gpu()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave PyTorch its share

import jax
import jax.numpy as jnp
import torch

from sparse_decode import torch_arrays
from sparse_decode.bridge import ZeroCopyError, packed_to_jax, to_jax, to_torch
from sparse_decode.call import Call
from sparse_decode.pallas_kernels import PackedCache, sparse_decode_attention
from sparse_decode.tolerance import Verdict, judge, limits

LAYERS, STEPS = 3, 3
REQUESTS, GROUPS, HEADS, DIM = 2, 1, 8, 192
PAGES, PAGE_SIZE, MAX_PAGES = 12, 16, 4
SLOTS = 4  # the current region and the three before it
SCALE = DIM**-0.5
# Bytes of a page's parts. Parts in multiples of 16 let the kernels load widely.
HEADER = 64
LAYER = GROUPS * PAGE_SIZE * 2 * DIM
PAGE = HEADER + LAYERS * LAYER

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANDOM = torch.Generator(DEVICE).manual_seed(0)
traces = 0


@jax.jit
def attend(query, cache, regions, block_table, positions, active, k_scale, v_scale):
    """JAX's part. The offset in `cache` is an argument: one program serves every layer."""
    global traces
    traces += 1  # runs when JAX traces, not when the program runs
    return sparse_decode_attention(
        query,
        cache,
        regions,
        block_table,
        positions,
        active,
        scale=SCALE,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def layer_view(storage: torch.Tensor, layer: int) -> torch.Tensor:
    """`[pages, groups, page_size, 384]`: a view whose page stride is larger than its page."""
    return storage.view(torch.float8_e4m3fn).as_strided(
        (PAGES, GROUPS, PAGE_SIZE, 2 * DIM),
        (PAGE, PAGE_SIZE * 2 * DIM, 2 * DIM, 1),
        HEADER + layer * LAYER,
    )


def write(
    cache: torch.Tensor, block_table: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor
) -> None:
    """Writes keys and values of one token of each request, in place."""
    page = block_table.gather(1, tokens[:, None] // PAGE_SIZE)[:, 0]
    line = torch.randn(REQUESTS, GROUPS, 2, DIM, device=DEVICE, generator=RANDOM)
    line = (line / scales[:, None]).to(torch.float8_e4m3fn).view(REQUESTS, GROUPS, 2 * DIM)
    cache.view(torch.uint8)[page, :, tokens % PAGE_SIZE] = line.view(torch.uint8)


def verdict(output: torch.Tensor, **tensors: torch.Tensor) -> Verdict:
    """How far a result is from the float64 oracle."""
    arrays: dict[str, Any] = {
        name: torch_arrays.to_numpy(tensor) for name, tensor in tensors.items()
    }
    allowed = limits(Call(**arrays, scale=SCALE))
    return judge(allowed, torch_arrays.to_numpy(output), lse=None, before=None)


def main() -> int:
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "the CPU, in interpreters"
    print(f"torch {torch.__version__}, jax {jax.__version__}, on {where}")

    # 0xff is NaN in FP8: what no token has written must not matter.
    storage = torch.full((PAGES, PAGE), 0xFF, dtype=torch.uint8, device=DEVICE)
    layers = [layer_view(storage, layer) for layer in range(LAYERS)]
    k_scale, v_scale = torch.tensor(0.02, device=DEVICE), torch.tensor(0.03, device=DEVICE)
    scales = torch.stack([k_scale, v_scale])
    pages = torch.randperm(PAGES, device=DEVICE, generator=RANDOM)
    pages = pages[: REQUESTS * MAX_PAGES].view(REQUESTS, MAX_PAGES)
    block_table = pages.to(torch.int32)
    active = torch.ones(REQUESTS * GROUPS, dtype=torch.bool, device=DEVICE)
    lengths = torch.tensor([45, 20], device=DEVICE)
    for token in range(45):
        for cache in layers:
            # The shorter request writes its next token until the longer one has caught up.
            write(cache, pages, lengths.clamp(max=token), scales)

    try:
        to_jax(layers[0])
    except ZeroCopyError as error:
        print(f"to_jax refuses a view with gaps: {error}")

    # What does not change from step to step is handed over once.
    constants = {
        "block_table": to_jax(block_table),
        "active": to_jax(active),
        "k_scale": to_jax(k_scale),
        "v_scale": to_jax(v_scale),
    }
    failed = False
    for step in range(STEPS):
        positions = lengths.to(torch.int32)
        back = torch.arange(SLOTS - 1, -1, -1, dtype=torch.int32, device=DEVICE)
        regions = (positions[:, None] // 8 - back).clamp(min=-1)
        for layer, cache in enumerate(layers):
            write(cache, pages, lengths, scales)
            query = torch.randn(REQUESTS, HEADS, DIM, device=DEVICE, generator=RANDOM)
            query = query.to(torch.bfloat16)

            # The hand-over: JAX's work comes after all that torch has queued by now, so JAX sees
            # the token that was just written.
            array, offset = packed_to_jax(cache)
            assert array.unsafe_buffer_pointer() == storage.data_ptr()
            assert offset == cache.storage_offset()
            result = attend(
                to_jax(query),
                PackedCache(array, jnp.int32(offset), groups=GROUPS, page_size=PAGE_SIZE),
                to_jax(regions),
                positions=to_jax(positions),
                **constants,
            )
            # And back: torch's stream waits for JAX, so torch may write into the cache again.
            output = to_torch(result)
            assert output.data_ptr() == result.unsafe_buffer_pointer()

            found = verdict(
                output,
                query=query,
                cache=cache,
                regions=regions,
                block_table=block_table,
                positions=positions,
                active=active,
                k_scale=k_scale,
                v_scale=v_scale,
            )
            failed |= not found.ok
            print(
                f"step {step}, layer {layer}: cache at {storage.data_ptr():#x} + {offset}, "
                f"largest error {found.error:.1e}, {found.fault or 'within tolerance'}"
            )
        lengths += 1
    print(f"JAX traced {traces} program for {LAYERS} layers and {STEPS} steps")
    return 1 if failed or traces != 1 else 0


if __name__ == "__main__":
    sys.exit(main())
