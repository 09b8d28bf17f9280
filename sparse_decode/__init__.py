"""Decode attention over selected regions of a paged KV cache.

This package is the framework-neutral core: it needs NumPy alone. Import the kernels from where
they live, so that no framework is loaded that you did not ask for:

- ``sparse_decode.pallas_kernels``: JAX, never imports torch.
- ``sparse_decode.triton_kernels``: PyTorch and Triton, never imports jax.
- ``sparse_decode.bridge``: hand-over of arrays and kernels between the two.
"""

__version__ = "0.1.0"
