"""Kernels of other projects that compute the same, timed where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparse_decode.bench import SCALE, SETS, Workload
from sparse_decode.contract import HEAD_DIM, REGION_TOKENS, default_splits

Launch = Callable[[int, torch.Tensor], object]


@dataclass(frozen=True)
class Peer:
    """A kernel to compare with.

    Attributes:
        name: Short name, as in tables.
        module: What has to be importable.
        prepare: Returns a function that launches one set of a workload into an output; None where
            the peer cannot compute such a setting.
    """

    name: str
    module: str
    prepare: Callable[[Workload], Launch | None]

    def absent(self) -> str | None:
        """Why the peer is not measured here; None if it is."""
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            return f"absent: {error}"
        return None


def _original(workload: Workload) -> Launch:
    module = importlib.import_module(PEERS[0].module)
    splits = default_splits(workload.setting.rows)

    def launch(index: int, output: torch.Tensor) -> None:
        module.sparse_decode_attention(**workload.call(index, output), splits=splits)

    return launch


def _flashinfer(workload: Workload) -> Launch | None:
    """Each region is a page of 8 tokens, each row a request; the cache is read where it lies."""
    setting = workload.setting
    if setting.groups > 1 or setting.query_len > 1 or setting.inactive:
        return None
    flashinfer = importlib.import_module("flashinfer")
    lines = workload.cache.view(-1, REGION_TOKENS, 1, 2 * HEAD_DIM)
    cache = lines[..., :HEAD_DIM], lines[..., HEAD_DIM:]
    device = lines.device
    scratch = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    rows, live = setting.rows, setting.live_slots
    ends = torch.arange(rows + 1, dtype=torch.int32, device=device) * live
    last = (workload.positions % REGION_TOKENS + 1).int()
    wrappers = []
    for query, regions, table in workload.sets[:SETS]:
        # The region of the query token is cut short, so that it has to come last.
        token = regions[:, setting.slots - live :].sort(dim=1).values * REGION_TOKENS
        page = table.long().gather(1, token // setting.page_size)
        places = (page * setting.page_size + token % setting.page_size) // REGION_TOKENS
        indices = places.int().flatten()
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            scratch,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.empty_like(ends),
            paged_kv_indices_buffer=torch.empty_like(indices),
            paged_kv_last_page_len_buffer=torch.empty_like(last),
        )
        wrapper.plan(
            ends,
            indices,
            last,
            setting.heads,
            1,
            HEAD_DIM,
            REGION_TOKENS,
            sm_scale=SCALE,
            q_data_type=query.dtype,
            kv_data_type=lines.dtype,
        )
        wrappers.append(wrapper)
    scales = {"k_scale": 0.02, "v_scale": 0.03} if setting.fp8 else {}

    def launch(index: int, output: torch.Tensor) -> None:
        wrappers[index].run(workload.sets[index][0], cache, out=output, **scales)

    return launch


PEERS = (
    Peer("vllm", "vllm.models.step5.nvidia.ops.sparse_decode_attention", _original),
    Peer("flashinfer", "flashinfer", _flashinfer),
)
