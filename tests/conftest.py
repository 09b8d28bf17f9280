"""Where the tests run: natively where a CUDA GPU is visible, through both interpreters elsewhere.

The choice must stand in the environment before a framework is imported, hence here and through
the driver alone. ``CUDA_VISIBLE_DEVICES=`` hides a GPU; ``SPARSE_DECODE_GPU_TESTS=1`` demands one,
so that a run meant for the GPU cannot pass by skipping everything.
"""

import contextlib
import ctypes
import gc
import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _gpu_is_visible() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


# Tests see the installed packages, never the folders that happen to lie beside them.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

GPU = _gpu_is_visible()
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
if not GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
        # Interpreted kernels compile in half the time; later XLA has neither flag nor choice.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"

if importlib.util.find_spec("hypothesis"):
    import hypothesis

    # The first example of a test may compile a kernel.
    hypothesis.settings.register_profile("compiling", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("compiling")


def pytest_configure() -> None:
    if os.environ.get("SPARSE_DECODE_GPU_TESTS") == "1" and not GPU:
        raise pytest.UsageError("SPARSE_DECODE_GPU_TESTS=1, but no CUDA GPU is visible")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if GPU:
        return
    skip = pytest.mark.skip(reason="no CUDA GPU is visible")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="module")
def jax_busy():
    """A function that queues at least 12 ms of work on JAX's GPU."""
    from gpu_work import long_work

    return long_work()


@pytest.fixture
def settled():
    """Afterwards JAX has back all that it lent to PyTorch, so that no test disturbs the next."""
    import torch

    from sparse_decode.bridge import dlpack

    yield
    torch.cuda.synchronize()
    assert dlpack.flush(30)
    gc.collect()


@pytest.fixture
def jax_settings():
    """A context manager under which JAX's settings are as given by name."""
    jax = pytest.importorskip("jax")

    @contextlib.contextmanager
    def under(settings):
        before = {name: getattr(jax.config, name) for name in settings}
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)

    return under
