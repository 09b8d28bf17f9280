"""Streams and long work, for tests of what happens while work is still queued."""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import torch

# About 10 ms of one spinning thread on a GPU of 1.5 to 2 GHz, for `torch.cuda._sleep`.
TEN_MS = 20_000_000

both_streams = pytest.mark.parametrize("kind", ["current", "side"])


def stream_of(kind: str) -> torch.cuda.Stream:
    return torch.cuda.Stream() if kind == "side" else torch.cuda.current_stream()


@functools.partial(jax.jit, static_argnums=1)
def matmuls(x: jax.Array, steps: int) -> jax.Array:
    """Long work whose numbers stay what they are: ones.

    Written out step by step: a loop whose length XLA does not know holds up the host.
    """
    for _ in range(steps):
        x = (x @ x) / x.shape[0]
    return x


def long_work() -> Callable[[], jax.Array]:
    """A function that queues at least 12 ms of work on JAX's GPU and returns at once."""
    ones = jnp.ones((4096, 4096), jnp.float32)
    for steps in (16, 32, 64, 128):
        matmuls(ones, steps).block_until_ready()
        began = time.perf_counter()
        matmuls(ones, steps).block_until_ready()
        if time.perf_counter() - began > 0.012:
            return functools.partial(matmuls, ones, steps)
    raise AssertionError("this GPU cannot be kept busy")
