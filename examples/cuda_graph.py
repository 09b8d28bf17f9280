"""The Pallas kernels inside a CUDA graph: several layers, a padded batch, replays with new inputs.

`warmup` compiles and loads the kernels, so that nothing is compiled or allocated anew during the
capture. After each replay the Triton kernels compute the same tensors anew, and both results are
held to the float64 oracle. Needs a GPU; a JAX without GPU support is enough.

    python examples/cuda_graph.py
"""

import sys
from typing import Any

import torch

from sparse_decode import torch_arrays
from sparse_decode.bridge import sparse_decode_attention, warmup
from sparse_decode.call import Call
from sparse_decode.devices import gpu_count
from sparse_decode.tolerance import judge, limits

LAYERS, BATCH, REPLAYS = 3, 8, 10
GROUPS, HEADS, DIM = 1, 8, 192
PAGES, PAGE_SIZE, MAX_PAGES, SLOTS = 512, 64, 32, 65
OPTIONS: dict[str, Any] = {"scale": DIM**-0.5, "query_len": 1, "clear_inactive": True}


def buffers(random: torch.Generator) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Tensors that stay in place: those of the batch, and those of each layer."""
    rows = BATCH * GROUPS
    batch = {
        "regions": torch.full((rows, SLOTS), -1, device="cuda"),
        "block_table": torch.zeros(BATCH, MAX_PAGES, dtype=torch.int32, device="cuda"),
        "positions": torch.zeros(rows, dtype=torch.int64, device="cuda"),
        "active": torch.zeros(rows, dtype=torch.bool, device="cuda"),
    }
    layers = []
    for _ in range(LAYERS):
        cache = torch.randn(PAGES, GROUPS, PAGE_SIZE, 2 * DIM, device="cuda", generator=random)
        layers.append(
            {
                "query": torch.zeros(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda"),
                "cache": (cache * 32).to(torch.float8_e4m3fn),
                "output": torch.zeros(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda"),
                "k_scale": torch.tensor(1 / 32, device="cuda"),
                "v_scale": torch.tensor(1 / 32, device="cuda"),
                "gate": torch.zeros(BATCH, GROUPS * HEADS, device="cuda"),
            }
        )
    return batch, layers


def fill(batch: dict, layers: list[dict], requests: int, random: torch.Generator) -> None:
    """New inputs for a batch of `requests`, in the same memory; the other rows are padding."""
    longest = MAX_PAGES * PAGE_SIZE
    lengths = torch.randint(1, longest, (BATCH,), device="cuda", generator=random)
    pages = torch.randperm(PAGES, device="cuda", generator=random)
    batch["block_table"].copy_(pages[: BATCH * MAX_PAGES].view(BATCH, MAX_PAGES))
    batch["positions"].copy_((lengths - 1).repeat_interleave(GROUPS))
    batch["active"].copy_((torch.arange(BATCH, device="cuda") < requests).repeat_interleave(GROUPS))
    # Random distinct regions at or before the current one; -1 fills the front.
    current = batch["positions"][:, None] // 8
    scores = torch.rand(BATCH * GROUPS, longest // 8, device="cuda", generator=random)
    ids = torch.arange(longest // 8, device="cuda")
    scores = scores.masked_fill(ids > current, -1).masked_fill(ids == current, 2)
    best, chosen = scores.topk(SLOTS)
    batch["regions"].copy_(chosen.masked_fill(best < 0, -1).flip(1))
    for layer in layers:
        layer["query"].normal_(generator=random)
        layer["gate"].normal_(generator=random)


def compare(batch: dict, layer: dict) -> tuple[float, str | None]:
    """Distance of a layer's output from that of the Triton kernels, and what is wrong with it."""
    from sparse_decode.triton_kernels import sparse_decode_attention as by_triton
    from sparse_decode.triton_kernels import sparse_decode_splits

    expected = torch.full_like(layer["output"], float("nan"))
    splits = sparse_decode_splits(len(expected))
    by_triton(**{**batch, **layer, "output": expected}, **OPTIONS, splits=splits)
    distance = (layer["output"] - expected).abs().max().item()

    tensors = {name: tensor for name, tensor in {**batch, **layer}.items() if name != "output"}
    arrays: dict[str, Any] = {
        name: torch_arrays.to_numpy(tensor) for name, tensor in tensors.items()
    }
    allowed = limits(Call(**arrays, **OPTIONS))
    outputs = {"graph": layer["output"], "Triton": expected}
    faults = [
        f"{name}: {verdict.fault}"
        for name, output in outputs.items()
        if not (verdict := judge(allowed, torch_arrays.to_numpy(output), None, None)).ok
    ]
    return distance, "; ".join(faults) or None


def main() -> int:
    if not gpu_count() or not torch.cuda.is_available():
        print(
            "This example needs a CUDA GPU and PyTorch with CUDA: a CUDA graph records GPU work. "
            "Nothing was run."
        )
        return 0
    random = torch.Generator("cuda").manual_seed(0)
    batch, layers = buffers(random)
    fill(batch, layers, BATCH, random)

    warmup([{**batch, **layer, **OPTIONS} for layer in layers])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            sparse_decode_attention(**batch, **layer, **OPTIONS)
    print(f"captured {LAYERS} layers for a batch of {BATCH} on {torch.cuda.get_device_name()}")

    failed = False
    for replay in range(REPLAYS):
        requests = 1 + replay % BATCH
        fill(batch, layers, requests, random)
        graph.replay()
        for index, layer in enumerate(layers):
            distance, fault = compare(batch, layer)
            failed |= fault is not None
            print(
                f"replay {replay}, {requests} requests and {BATCH - requests} padded, "
                f"layer {index}: {distance:.1e} from Triton, {fault or 'both within tolerance'}"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
