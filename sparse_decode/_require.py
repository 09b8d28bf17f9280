"""Optional dependencies: a clear message when one is missing or has an unsupported version."""

import importlib
import re
from types import ModuleType


class MissingDependency(ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def require(module: str, *, extra: str, needed_by: str | None = None) -> ModuleType:
    """Imports an optional dependency.

    Args:
        module: Dotted name of the module to import.
        extra: Extra of this distribution that installs it.
        needed_by: What needs it, for the message. By default the extra's name.

    Returns:
        The imported module.

    Raises:
        MissingDependency: The module's top-level package is not installed. An import that fails
            inside an installed package is another fault, and its own error passes through.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        needed_by = needed_by or f"the {extra!r} part of sparse_decode"
        raise MissingDependency(
            f"{package} is not installed, but {needed_by} needs it. "
            f"To install it: pip install 'sparse-decode[{extra}]'",
            name=package,
        ) from error


def check_version(module_name: str, found: str, minimum: str, below: str | None = None) -> None:
    """Checks that ``minimum <= found < below``, by the numbers that a version starts with.

    Pre-release and local parts are ignored: ``2.11.0a0+cu130`` counts as ``2.11.0``.

    Args:
        module_name: Name for the message.
        found: The installed version.
        minimum: First supported version.
        below: First version that is no longer supported, if any.

    Raises:
        NotImplementedError: The version is outside the supported range.
    """
    if _release(found) >= _release(minimum) and (
        below is None or _release(found) < _release(below)
    ):
        return
    supported = f">={minimum}" + (f",<{below}" if below else "")
    raise NotImplementedError(
        f"{module_name} {found} is not supported; sparse_decode needs {module_name} {supported}"
    )


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without trailing zeros, so that 3.6 equals 3.6.0."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise ValueError(f"version: expected digits first, for example '1.2.3', got {version!r}")
    numbers = [int(number) for number in match[0].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


# First supported version, first that is no longer, and the extra that brings a framework.
SUPPORTED: dict[str, tuple[str, str | None, str]] = {
    "jax": ("0.10.2", "0.13", "jax-cuda13"),
    "torch": ("2.11", None, "torch"),
    "triton": ("3.6", None, "torch"),
}


def require_supported(module: str, *, needed_by: str | None = None) -> ModuleType:
    """Imports a framework in a version that is supported.

    Args:
        module: "jax", "torch" or "triton".
        needed_by: What needs it, for the message.

    Raises:
        MissingDependency: It is not installed.
        NotImplementedError: Its version is not supported.
    """
    oldest, below, extra = SUPPORTED[module]
    found = require(module, extra=extra, needed_by=needed_by)
    check_version(module, found.__version__, oldest, below)
    return found


def require_pallas_triton(*, needed_by: str | None = None) -> None:
    """Checks that a supported JAX is there, with the Triton backend of Pallas.

    Args:
        needed_by: What needs it, for the message.

    Raises:
        MissingDependency: JAX is not installed.
        NotImplementedError: Its version is not supported, or it has no Triton backend for Pallas.
    """
    version = require_supported("jax", needed_by=needed_by).__version__
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        oldest, below, _ = SUPPORTED["jax"]
        raise NotImplementedError(
            f"jax {version} has no Triton backend for Pallas ({error}), which the kernels are "
            f"written for; sparse_decode needs jax >={oldest},<{below}"
        ) from error
