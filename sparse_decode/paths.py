"""The ways to compute a call, each as one function from a NumPy `Call` to a NumPy `Outcome`.

Nothing here imports a framework before it is asked to.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sparse_decode._require import MissingDependency, require_pallas_triton, require_supported
from sparse_decode.call import Call, page_storage


@dataclass(frozen=True)
class Outcome:
    """What a path computed.

    Attributes:
        output: `[rows, heads, 192]`.
        lse: `[rows, heads]` float32, natural logarithm; None where the path does not return it.
        before: What the output buffer held before the call; None where the path made a new array.
    """

    output: np.ndarray
    lse: np.ndarray | None
    before: np.ndarray | None


@dataclass(frozen=True)
class Status:
    """Whether and how a path can run here.

    Attributes:
        mode: "native" on a GPU, "interpreter" on the CPU, None where it cannot run.
        reason: What it runs on, or why it cannot.
    """

    mode: str | None
    reason: str


@dataclass(frozen=True)
class Path:
    """One way to compute a call.

    Attributes:
        name: Short name, as in tables.
        summary: What runs where, in words.
        status: Tells whether it can run here.
        run: Computes a call. Raises what the path's public function raises.
    """

    name: str
    summary: str
    status: Callable[[], Status]
    run: Callable[[Call], Outcome]


def _missing(*modules: str) -> str | None:
    """Why some of the modules cannot be used, in words."""
    try:
        for module in modules:
            require_pallas_triton() if module == "jax" else require_supported(module)
    except (MissingDependency, NotImplementedError) as error:
        return str(error)
    return None


def _jax_status() -> Status:
    if missing := _missing("jax"):
        return Status(None, missing)
    jax = importlib.import_module("jax")
    if jax.default_backend() == "gpu":
        from sparse_decode.pallas_kernels.op import check_device

        try:
            check_device(fp8=False)
        except NotImplementedError as error:
            return Status(None, str(error))
        return Status("native", jax.devices()[0].device_kind)
    return Status("interpreter", f"Pallas' interpreter on {jax.default_backend()}")


def _torch_status() -> Status:
    if missing := _missing("torch", "triton"):
        return Status(None, missing)
    torch = importlib.import_module("torch")
    if importlib.import_module("triton").knobs.runtime.interpret:
        return Status("interpreter", "Triton's interpreter on cpu")
    if torch.cuda.is_available():
        return Status("native", torch.cuda.get_device_name())
    return Status(None, "no CUDA GPU is visible, and TRITON_INTERPRET=1 is not set")


def torch_device() -> str:
    """Where tensors of the PyTorch paths live here."""
    return "cuda" if _torch_status().mode == "native" else "cpu"


@contextlib.contextmanager
def _jax_arrays(call: Call) -> Iterator[dict[str, Any]]:
    """A call's arrays in JAX; a cache that is not dense as a `PackedCache`."""
    import jax

    from sparse_decode.pallas_kernels import PackedCache

    wide = "int64" in (call.regions.dtype.name, call.positions.dtype.name)
    with jax.enable_x64(wide):
        arrays = {
            name: jax.numpy.asarray(a) for name, a in call.arrays().items() if name != "cache"
        }
        if call.cache.flags.c_contiguous:
            arrays["cache"] = jax.numpy.asarray(call.cache)
        else:
            storage, offset, (_, group, token, _) = page_storage(call.cache)
            arrays["cache"] = PackedCache(
                jax.numpy.asarray(storage),
                jax.numpy.int32(offset),
                groups=call.cache.shape[1],
                page_size=call.cache.shape[2],
                group_stride=group,
                token_stride=token,
                offset_unit=math.gcd(offset, 16),
            )
        yield arrays


def _run_pallas(call: Call) -> Outcome:
    from sparse_decode.pallas_kernels import sparse_decode_attention

    with _jax_arrays(call) as arrays:
        output, lse = sparse_decode_attention(
            **arrays, **call.options(), return_lse=True, config=call.config
        )
        return Outcome(np.asarray(output), np.asarray(lse), call.output)


def _both_status() -> Status:
    """Both frameworks in one process; PyTorch's status where they can meet."""
    pallas, torch = _jax_status(), _torch_status()
    for status in (torch, pallas):
        if not status.mode:
            return status
    if pallas.mode != torch.mode:
        return Status(None, f"on different devices: {pallas.reason}, {torch.reason}")
    return torch


def _dlpack_status() -> Status:
    both = _both_status()
    return _jax_status() if both.mode else both


def _direct_status() -> Status:
    torch = _torch_status()
    if missing := _missing("jax", "torch", "triton"):
        return Status(None, missing)
    if torch.mode != "native":
        return Status(
            None, "no CUDA GPU is visible; the kernels are launched without an interpreter"
        )
    return torch


def _tensors(call: Call) -> dict[str, Any]:
    """A call's arrays on the device of the PyTorch paths, with an output buffer."""
    from sparse_decode import torch_arrays

    device = torch_device()
    tensors = {name: torch_arrays.from_numpy(a, device) for name, a in call.arrays().items()}
    if call.output is None:
        tensors["output"] = tensors["query"].new_full(call.query.shape, float("nan"))
    return tensors


def _in_place(call: Call, run: Callable[..., None], **options: object) -> Outcome:
    """Runs a function that writes into `output`."""
    from sparse_decode import torch_arrays

    tensors = _tensors(call)
    before = torch_arrays.to_numpy(tensors["output"])
    run(**tensors, **{**call.options(), **options})
    return Outcome(torch_arrays.to_numpy(tensors["output"]), None, before)


def _run_triton(call: Call) -> Outcome:
    from sparse_decode.triton_kernels import sparse_decode_attention, sparse_decode_splits

    splits = sparse_decode_splits(len(call.query)) if call.splits is None else call.splits
    return _in_place(call, sparse_decode_attention, splits=splits)


def _run_bridge(route: str, call: Call) -> Outcome:
    from sparse_decode.bridge import sparse_decode_attention

    return _in_place(call, sparse_decode_attention, route=route, config=call.config)


def _run_triton_on_jax(call: Call) -> Outcome:
    from sparse_decode.bridge import triton_sparse_decode_attention

    options = {name: value for name, value in call.options().items() if name != "clear_inactive"}
    with _jax_arrays(call) as arrays:
        output = arrays.pop("output", None)
        dtype = None if output is None else output.dtype
        output = triton_sparse_decode_attention(**arrays, **options, dtype=dtype)
        return Outcome(np.asarray(output), None, None)


PATHS = (
    Path("pallas", "Pallas kernels in JAX", _jax_status, _run_pallas),
    Path("triton", "Triton kernels in PyTorch", _torch_status, _run_triton),
    Path(
        "direct",
        "Pallas kernels on PyTorch's stream",
        _direct_status,
        partial(_run_bridge, "direct"),
    ),
    Path(
        "dlpack",
        "Pallas kernels in JAX, PyTorch's tensors",
        _dlpack_status,
        partial(_run_bridge, "dlpack"),
    ),
    Path("triton-on-jax", "Triton kernels, JAX's arrays", _both_status, _run_triton_on_jax),
)
