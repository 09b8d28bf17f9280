"""Small Pallas-Triton functions that the tests of lowering and launching share."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

WIDTH = 64


def _scale_and_square(x_ref, scale_ref, scaled_ref, squares_ref):
    scaled = x_ref[...] * scale_ref[()]
    scaled_ref[...] = scaled
    squares_ref[pl.program_id(0)] = jnp.sum(scaled * scaled)


def _divide(scaled_ref, squares_ref, bias_ref, out_ref):
    norm = jnp.sqrt(squares_ref[pl.program_id(0)])
    out_ref[...] = scaled_ref[...] / norm + bias_ref[...]


def normalise(x, scale, bias):
    """``x * scale`` divided by each row's norm, plus ``bias``: two kernels, two scratch arrays."""
    rows = x.shape[0]
    row = pl.BlockSpec((1, WIDTH), lambda i: (i, 0))
    whole = pl.BlockSpec((rows,), lambda i: (0,))
    scaled, squares = pl.pallas_call(
        _scale_and_square,
        grid=(rows,),
        in_specs=[row, pl.BlockSpec((), lambda i: ())],
        out_specs=(row, whole),
        out_shape=(
            jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
    )(x, scale)
    out = pl.pallas_call(
        _divide,
        grid=(rows,),
        in_specs=[row, whole, pl.BlockSpec((1, WIDTH), lambda i: (0, 0))],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=1),
    )(scaled, squares, jax.jit(lambda b: b.reshape(1, WIDTH))(bias))
    return out.reshape(rows * WIDTH)


def _add(x_ref, total_ref, new_total_ref):
    new_total_ref[...] = total_ref[...] + x_ref[...]


def add_into(x, total):
    """``total + x``, in place of ``total``."""
    return pl.pallas_call(
        _add,
        out_shape=jax.ShapeDtypeStruct(total.shape, total.dtype),
        input_output_aliases={1: 0},
        compiler_params=plgpu.CompilerParams(),
    )(x, total)


def _masked(x_ref, active_ref, count_ref, out_ref):
    lanes = jnp.arange(out_ref.shape[0])
    mask = (lanes < count_ref[0]) & active_ref[0]
    x = plgpu.load(x_ref.at[lanes], mask=mask, other=0)
    plgpu.store(out_ref.at[lanes], x, mask=lanes < x_ref.shape[0])


def masked(x, active, count):
    """The first ``count`` elements of ``x`` if ``active``, zeros behind."""
    return pl.pallas_call(
        _masked,
        out_shape=jax.ShapeDtypeStruct((128,), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4),
    )(x, active, count)


def _product(a_ref, b_ref, steps_ref, out_ref):
    def step(i, total):
        k = pl.ds(i * 32, 32)
        return total + lax.dot_general(
            a_ref[:, k], b_ref[k, :], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    out_ref[...] = lax.fori_loop(0, steps_ref[0], step, jnp.zeros(out_ref.shape, jnp.float32))


def product(a, b, steps):
    """``a @ b`` over the first ``32 * steps`` columns of ``a``."""
    return pl.pallas_call(
        _product,
        out_shape=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
    )(a, b, steps)


def _copy(x_ref, out_ref, *, wait):
    row, lanes = pl.program_id(0), jnp.arange(WIDTH)
    if wait:
        # All addresses depend on the result, so that no load can come before the wait.
        [lanes] = plgpu.elementwise_inline_asm(
            "griddepcontrol.wait; mov.b32 $0, $1;",
            args=[lanes],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(lanes.shape, lanes.dtype)],
        )
    out_ref[row, lanes] = x_ref[row, lanes]


def copy(x, *, wait=False, rows=None):
    """A copy, by programs that first wait for the kernel before them if ``wait``."""
    return pl.pallas_call(
        functools.partial(_copy, wait=wait),
        grid=(x.shape[0] if rows is None else rows,),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=1),
    )(x)
