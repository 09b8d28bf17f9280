"""`sparse_decode_attention` for PyTorch: the Pallas kernels on torch tensors, by either route.

The direct route launches the compiled kernels on torch's current stream; JAX only lowers them,
once, and is not even imported where they are found on disk. The DLPack route lends the tensors to
JAX and runs the kernels there. Both check a call by the same contract and launch it by the same
plan.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from sparse_decode import contract, torch_arrays
from sparse_decode.bridge import compile as compiling
from sparse_decode.bridge.launch import DirectProgram, device_index
from sparse_decode.bridge.lowering import DEVICE_KINDS, Buffer
from sparse_decode.contract import ARRAY_NAMES, ArraySpec, Geometry
from sparse_decode.plan import Config, Plan, make_plan, plan_again
from sparse_decode.torch_arrays import Key
from sparse_decode.validation import check_indices, check_option

Route = Literal["direct", "dlpack"]

# What the kernels' addresses are taken to be a multiple of, unless they are seen not to be.
ALIGNMENT = 32

# Applied to all tensors of a call at once, with map: that is faster than a loop.
_ADDRESS = torch.Tensor.data_ptr
_REQUIRES_GRAD = operator.attrgetter("requires_grad")

_Tensors: TypeAlias = tuple[torch.Tensor | None, ...]
_Keys: TypeAlias = tuple[Key | None, ...]


def sparse_decode_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    regions: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    active: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    query_len: int = 1,
    splits: int | None = None,
    clear_inactive: bool = True,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    route: Route = "direct",
    config: Config | None = None,
    validate: bool = False,
) -> None:
    """Attention of each (token, group) row over its selected regions, written into `output`.

    The Pallas kernels under the signature of vLLM's Step-5 `sparse_decode_attention`. Nothing is
    copied and nothing outside the tensors is read or written, whatever the index tensors hold.

    Args:
        query: `[rows, heads, 192]`, bfloat16 or float16; last stride 1.
        cache: `[pages, groups, page_size, 384]`, K then V; dtype of `query`, or FP8 as
            float8_e4m3fn or uint8. Last stride 1, the others free.
        regions: `[rows, slots]`, int32 or int64; ids of eight tokens each, negative if unused.
        block_table: `[requests, max_pages]`, int32; logical page to physical page.
        positions: `[rows]`, int32 or int64; a row attends to tokens up to its position.
        active: `[rows]`, bool; false for padding.
        output: `[rows, heads, 192]`, bfloat16 or float16; last stride 1.
        scale: Multiplies q.k.
        query_len: Query tokens a request.
        splits: Programs that share a row, 1 to 256; None leaves it to `config`.
        clear_inactive: Zero the inactive rows of `output`; otherwise they are left untouched.
        k_scale: One float32 on the device, needed with an FP8 cache and not looked at otherwise.
        v_scale: The same for v.
        gate: `[tokens, groups * heads]`, bfloat16, float16 or float32, before its sigmoid.
        route: "direct" launches on torch's current stream and can be captured in a CUDA graph once
            such a call was made or warmed up before. "dlpack" runs in JAX, ordered with torch's
            current stream; on CPU tensors it runs Pallas' interpreter and copies the result.
        config: Launch settings; None takes `sparse_decode.plan.default_config`.
        validate: Look for indices that cannot be meant first, and wait for the answer; see
            `sparse_decode.validation.check_indices`. Not in a CUDA graph or a compiled function.

    Raises:
        TypeError: An argument is no tensor, or a dtype or the type of an option is wrong.
        ValueError: A shape, stride, device or option is wrong, an FP8 scale is missing, a tensor
            requires a gradient, or validation found an index. As `ZeroCopyError`: JAX cannot take a
            tensor as it is.
        NotImplementedError: The device or an installed version cannot run the kernels by this
            route.
        RuntimeError: A CUDA graph is being captured, and the kernels are not loaded, the route is
            "dlpack", or indices are to be validated, which `torch.compile` cannot do either.
    """
    tensors = (
        query, cache, regions, block_table, positions, active, output, k_scale, v_scale, gate
    )  # fmt: skip
    if validate is not False:
        _validate(tensors, validate, scale, query_len, splits, clear_inactive, route, config)
    if torch.compiler.is_compiling():
        from sparse_decode.bridge.torch_op import attention

        attention(
            query, cache, regions, block_table, positions, active, output, scale, query_len,
            splits, clear_inactive, k_scale, v_scale, gate, route, _pack_config(config),
        )  # fmt: skip
        return
    _attend(tensors, scale, query_len, splits, clear_inactive, route, config)


def _attend(tensors: _Tensors, *options: Any) -> None:
    """The operation, outside of `torch.compile`.

    Args:
        tensors: In the order of `ARRAY_NAMES`.
        *options: Those of `_call`.
    """
    call = _call(_keys(tensors), *options)
    used = call.pick(tensors)
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, used)):
        _refuse_gradients(tensors)
    if not call.rows:
        return
    if call.dlpack:
        from sparse_decode.bridge.jax_route import run

        run(call, used)
        return
    addresses = [*map(_ADDRESS, used)]
    program = call.programs.get(())
    if program is None or not program.accepts(addresses):
        program = _build(call, _alignments(addresses))
    program.launch_at(call.device, addresses)


def _validate(tensors: _Tensors, validate: object, *options: Any) -> None:
    """Checks a call and then what its index tensors hold; the arguments are those of `_attend`."""
    check_option(validate)
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "validate: expected False in a compiled function, which cannot look at values; call "
            "sparse_decode.validation.check_indices outside of it"
        )
    _call(_keys(tensors), *options)
    given = dict(zip(ARRAY_NAMES, tensors, strict=True))
    names = ("cache", "regions", "block_table", "positions", "active")
    check_indices(**{name: given[name] for name in names}, query_len=options[1])


@dataclass(frozen=True)
class Explanation:
    """How a call would run.

    Attributes:
        route: "direct" or "dlpack"; None if it would raise an error.
        reason: Why, in words; the error's message if there is one.
    """

    route: Route | None
    reason: str


def explain_route(route: Route = "direct", **arguments: Any) -> Explanation:
    """Tells which route a call would take and why, without launching anything.

    Addresses and a capture in progress are not looked at: they can still raise an error.

    Args:
        route: As asked for.
        **arguments: The call's other arguments, by name.
    """
    try:
        call = _describe(arguments, route)
    except (NotImplementedError, TypeError, ValueError) as error:
        return Explanation(None, str(error))
    if not call.rows:
        return Explanation(route, "there are no rows; nothing is launched")
    if route == "dlpack":
        where = "in JAX on the GPU" if call.device >= 0 else "in Pallas' interpreter on the CPU"
        return Explanation("dlpack", f"asked for; runs {where}")
    arch = _arch(call.device)
    return Explanation("direct", f"compiled for sm_{arch}, launched on torch's current stream")


def warmup(
    calls: Iterable[Mapping[str, Any]],
    *,
    device: torch.device | str | int | None = None,
    processes: int | None = None,
) -> None:
    """Compiles and loads the direct route's kernels for calls to come, in parallel.

    Afterwards such calls may be captured in CUDA graphs, and start at once.

    Args:
        calls: The arguments of each call by name. Tensors count by shape, strides and dtype alone,
            so they may be meta tensors.
        device: The CUDA device to load on; by default the current one.
        processes: Compiling processes; by default one for each processor core.

    Raises:
        NotImplementedError: There is no NVIDIA GPU.
        RuntimeError: The current stream is being captured.
        ValueError: `device` is no CUDA device.

    See `sparse_decode_attention` for what else is raised.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise NotImplementedError("device: expected an NVIDIA GPU, and none is visible")
    index = device_index(device)
    described = [_describe(arguments, "direct", torch.device("cuda", index)) for arguments in calls]
    described = [call for call in described if call.rows]
    requests = [_request(call, ()) for call in described]
    executables = compiling.build(requests, processes=processes)
    for call, executable in zip(described, executables, strict=True):
        call.programs.setdefault((), DirectProgram(executable)).load(index)


def _describe(
    arguments: Mapping[str, Any], route: Route, device: torch.device | None = None
) -> _Call:
    """The call with these arguments; its tensors may be said to lie on another device."""
    defaults = {"query_len": 1, "splits": None, "clear_inactive": True, "config": None}
    arguments = {**defaults, **arguments}
    arguments.pop("validate", None)
    keys = _keys(tuple(arguments.pop(name, None) for name in ARRAY_NAMES))
    if device is not None:
        keys = tuple(key and (*key[:3], device) for key in keys)
    names = ("scale", "query_len", "splits", "clear_inactive", "config")
    unknown = sorted(set(arguments) - set(names))
    if unknown or "scale" not in arguments:
        raise TypeError(f"expected the arguments of a call, got unknown {unknown} or no scale")
    scale, query_len, splits, clear_inactive, config = (arguments[name] for name in names)
    return _call(keys, scale, query_len, splits, clear_inactive, route, config)


def _keys(tensors: _Tensors) -> _Keys:
    """The `torch_arrays.key` of each tensor, None for None."""
    try:
        return tuple(
            [x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
        )
    except (AttributeError, TypeError):
        for name, tensor in zip(ARRAY_NAMES, tensors, strict=True):
            torch_arrays.optional_key(name, tensor)
        raise


@dataclass
class _Call:
    """What all calls with equal keys share.

    Attributes:
        rows: Rows; nothing is launched for none.
        device: Index of the CUDA device, -1 for the CPU.
        dlpack: Whether it runs in JAX.
        specs: The arrays by name.
        plan: How the kernels are launched; None without rows.
        names: The arrays that the kernels take, in the order of the program's inputs.
        pick: Takes their tensors from those of all `ARRAY_NAMES`.
        programs: The direct route's kernels, once they are built, by the alignments of the
            addresses; () is the best.
        jitted: The DLPack route's programs by the layout of the cache.
    """

    rows: int
    device: int
    dlpack: bool
    specs: dict[str, ArraySpec]
    plan: Plan | None
    names: tuple[str, ...]
    pick: Any
    programs: dict[tuple[int, ...], DirectProgram] = dataclasses.field(default_factory=dict)
    jitted: dict[Any, Any] = dataclasses.field(default_factory=dict)


@torch_arrays.remembered
def _call(
    keys: _Keys,
    scale: float,
    query_len: int,
    splits: int | None,
    clear_inactive: bool,
    route: Route,
    config: Config | None,
) -> _Call:
    """Checks a call, seen as the keys of its tensors, and plans it."""
    geometry, specs = _check(keys, scale, query_len, splits, clear_inactive, route, config)
    device = _check_device(keys[0][3], route, geometry.fp8)  # type: ignore[index]
    if not geometry.fp8:
        specs = {name: spec for name, spec in specs.items() if name not in ("k_scale", "v_scale")}
    plan = None
    if geometry.rows:
        plan = make_plan(
            geometry,
            specs,
            scale=scale,
            clear_inactive=clear_inactive,
            config=config,
            splits=splits,
        )
    names = tuple(name for name in ARRAY_NAMES if name in specs)
    pick = operator.itemgetter(*(ARRAY_NAMES.index(name) for name in names))
    return _Call(geometry.rows, device, route == "dlpack", specs, plan, names, pick)


def _check(
    keys: _Keys,
    scale: float,
    query_len: int,
    splits: int | None,
    clear_inactive: bool,
    route: Route,
    config: Config | None,
) -> tuple[Geometry, dict[str, ArraySpec]]:
    """Checks a call, except whether the device can run it; returns its sizes and arrays."""
    if route not in ("direct", "dlpack"):
        raise ValueError(f'route: expected "direct" or "dlpack", got {route!r}')
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config: expected a Config or None, got {type(config).__name__}")
    for name, key in zip(ARRAY_NAMES[:7], keys, strict=False):
        if key is None:
            torch_arrays.key(name, None)  # type: ignore[arg-type]
    specs = {
        name: torch_arrays.spec_of(key)
        for name, key in zip(ARRAY_NAMES, keys, strict=True)
        if key is not None
    }
    geometry = contract.check_call(
        **specs,
        scale=scale,
        query_len=query_len,
        splits=1 if splits is None else splits,
        clear_inactive=clear_inactive,
    )
    return geometry, specs


def _check_device(device: torch.device, route: Route, fp8: bool) -> int:
    """Index of the device, -1 for the CPU; raises if the route cannot run there."""
    if device.type == "cpu" and route == "dlpack":
        return -1
    if device.type != "cuda" or torch.version.cuda is None:
        hint = '; on the CPU, ask for route="dlpack"' if device.type == "cpu" else ""
        raise NotImplementedError(f"query: expected a tensor on an NVIDIA GPU, got {device}{hint}")
    if fp8:
        capability = torch.cuda.get_device_capability(device)
        contract.check_capability(capability, fp8, lambda: torch.cuda.get_device_name(device))
    if route == "direct" and _arch(device.index) not in DEVICE_KINDS:
        known = ", ".join(map(str, DEVICE_KINDS))
        raise NotImplementedError(
            f"query: expected a GPU with one of the architectures sm_{{{known}}}, got "
            f"sm_{_arch(device.index)} ({torch.cuda.get_device_name(device)})"
        )
    return device.index


def _refuse_gradients(tensors: _Tensors) -> None:
    if torch.is_grad_enabled():
        torch_arrays.refuse_gradients(**dict(zip(ARRAY_NAMES, tensors, strict=True)))


def _pack_config(config: Config | None) -> list[int] | None:
    """A config as numbers, which is all that a PyTorch operator takes."""
    if not isinstance(config, Config):
        return config
    return [getattr(config, field.name) for field in dataclasses.fields(config)]


# Direct route.


def _arch(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def _alignments(addresses: list[int]) -> tuple[int, ...]:
    """What each address is a multiple of, up to what the kernels can make use of."""
    return tuple(min(address & -address, ALIGNMENT) or ALIGNMENT for address in addresses)


def _build(call: _Call, alignments: tuple[int, ...]) -> DirectProgram:
    """The kernels of a call for addresses with these alignments, from memory, disk or scratch."""
    if set(alignments) == {ALIGNMENT}:
        alignments = ()
    if alignments not in call.programs:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and no call like this was made before: call it "
                "once, or sparse_decode.bridge.warmup, before the capture"
            )
        [executable] = compiling.build([_request(call, alignments)])
        call.programs.setdefault(alignments, DirectProgram(executable))
    return call.programs[alignments]


def _request(call: _Call, alignments: tuple[int, ...]) -> compiling.Request:
    """What to build for a call."""
    arch = _arch(call.device)
    dependent = arch >= compiling.FIRST_ARCH_WITH_PDL
    plan = call.plan
    cache_is_even = not alignments or alignments[call.names.index("cache")] % 2 == 0
    if plan.words and not cache_is_even:  # type: ignore[union-attr]
        plan = plan_again(plan, call.specs, cache_is_even=False)  # type: ignore[arg-type]
    plan = dataclasses.replace(plan, dependent_launch=dependent)  # type: ignore[type-var]
    names = call.names

    def make() -> Any:
        from sparse_decode.pallas_kernels.kernels import attend

        return lambda *buffers: attend(plan, dict(zip(names, buffers, strict=True)))["output"]

    return compiling.Request(
        make=make,
        key=repr((plan, names, _sources())),
        specs=tuple(Buffer(*reversed(plan.buffer(name)), 0) for name in names),
        arch=arch,
        launch_pdl=dependent,
        alignments=alignments,
    )


def _sources() -> tuple[str, ...]:
    modules = ("pallas_kernels", "plan", "contract")
    return tuple(compiling.source_hash(f"sparse_decode.{module}") for module in modules)
