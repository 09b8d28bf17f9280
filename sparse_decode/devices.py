"""What this machine has, found out without importing a framework."""

from __future__ import annotations

import ctypes
import os


def gpu_count() -> int:
    """CUDA GPUs that this process may use, by the driver's word."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def use_interpreters_without_gpu() -> bool:
    """On a machine without a GPU, makes Triton and JAX run kernels on the CPU.

    Both read the environment when they are imported, so call this before. Settings that are already
    there stay.

    Returns:
        Whether the interpreters were asked for.
    """
    if gpu_count():
        return False
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return True
