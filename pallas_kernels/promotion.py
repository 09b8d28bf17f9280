"""JAX's usual rules of promotion, for code that is called from programs with stricter ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def usual_promotion(function: Callable[P, R]) -> Callable[P, R]:
    """The function under the defaults of `jax_numpy_dtype_promotion` and `.._rank_promotion`."""

    @functools.wraps(function)
    def under_usual_rules(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return under_usual_rules
