"""Takes the Triton kernels out of a JAX function, with no GPU and no JAX GPU backend.

:func:`lower` lowers a function made of Pallas-Triton calls for a named GPU architecture and walks
the StableHLO module that JAX would hand to XLA. Everything in the resulting :class:`Program`
(shapes, dtypes, aliases, grid, warps, stages) is read from that module.

All that lowering knows of JAX's private parts is in this file, and used inside :func:`lower`:
importing this module does not import JAX, so that a stored program can be read without it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol
from unittest import mock

from sparse_decode._require import SUPPORTED, require_supported

# JAX derives the compute capability from the name of a card, and knows these.
DEVICE_KINDS = {
    80: "NVIDIA A100",
    86: "NVIDIA A10",
    89: "NVIDIA L4",
    90: "NVIDIA H100",
    100: "NVIDIA B200",
}

_TRITON_CALL = "__gpu$xla.gpu.triton"
_VIEWS = {"stablehlo.reshape", "stablehlo.bitcast_convert", "sdy.sharding_constraint"}

# What a kernel takes for granted of a pointer among its arguments.
_CLAIM = re.compile(
    r"(?P<before>%arg(?P<argument>\d+): !tt\.ptr<[^{}]*\{tt\.divisibility = )\d+ : i32"
)

# MLIR element type: dtype name, bytes.
_DTYPES = {
    "i1": ("bool", 1),
    "i8": ("int8", 1),
    "i16": ("int16", 2),
    "i32": ("int32", 4),
    "i64": ("int64", 8),
    "ui8": ("uint8", 1),
    "ui16": ("uint16", 2),
    "ui32": ("uint32", 4),
    "ui64": ("uint64", 8),
    "f16": ("float16", 2),
    "bf16": ("bfloat16", 2),
    "f32": ("float32", 4),
    "f64": ("float64", 8),
    "f8E4M3FN": ("float8_e4m3fn", 1),
    "f8E5M2": ("float8_e5m2", 1),
}


class Spec(Protocol):
    """Anything with a shape and a dtype: an array, ``jax.ShapeDtypeStruct``, :class:`Buffer`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements."""
        ...

    @property
    def dtype(self) -> Any:
        """A NumPy dtype or its name."""
        ...


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A dense row-major array in device memory.

    Attributes:
        shape: Shape in elements; ``()`` for a scalar.
        dtype: Name of the dtype, for example ``"bfloat16"``.
        itemsize: Bytes of one element.
        alignment: The kernels are compiled for addresses that are multiples of this many bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    alignment: int = 1

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One kernel launch.

    Attributes:
        name: The kernel's name.
        ttir: Its Triton IR as text.
        grid: Programs along x, y and z. A zero means that nothing is launched.
        num_warps: Warps of one program.
        num_stages: Depth of Triton's software pipeline.
        arguments: Index into :attr:`Program.buffers` of each pointer the kernel takes: operands
            first, then results. A result that aliases an operand names the operand's buffer again.
        aliases: Pairs (operand, result) that share memory, each counted from 0 in its own list.
    """

    name: str
    ttir: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    arguments: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """Kernel calls in launch order, and the buffers that they work on.

    Attributes:
        arch: Compute capability times ten, for example 90.
        buffers: All buffers. The first ``num_inputs`` are the function's arguments.
        num_inputs: Number of arguments.
        outputs: Buffer of each result of the function. One below ``num_inputs`` is an argument
            that the kernels update in place.
        calls: The kernel launches.
    """

    arch: int
    buffers: tuple[Buffer, ...]
    num_inputs: int
    outputs: tuple[int, ...]
    calls: tuple[KernelCall, ...]

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        """The function's arguments."""
        return self.buffers[: self.num_inputs]

    @property
    def results(self) -> tuple[int, ...]:
        """Buffers of the outputs that need memory of their own, in the order of the outputs."""
        return tuple(index for index in self.outputs if index >= self.num_inputs)

    @property
    def scratch(self) -> tuple[int, ...]:
        """Buffers that are neither input nor output."""
        named = {*range(self.num_inputs), *self.outputs}
        return tuple(index for index in range(len(self.buffers)) if index not in named)

    def to_json(self) -> str:
        """The program as JSON text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The inverse of :meth:`to_json`."""
        fields = json.loads(text)
        return cls(
            arch=fields["arch"],
            buffers=tuple(Buffer(**tupled(buffer)) for buffer in fields["buffers"]),
            num_inputs=fields["num_inputs"],
            outputs=tuple(fields["outputs"]),
            calls=tuple(KernelCall(**tupled(call)) for call in fields["calls"]),
        )


def tupled(value: Any) -> Any:
    """JSON's lists, at any depth, as the tuples they were."""
    if isinstance(value, dict):
        return {name: tupled(item) for name, item in value.items()}
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def lower(
    fn: Callable[..., Any], *specs: Spec, arch: int, alignments: Sequence[int] = ()
) -> Program:
    """Lowers a function made only of Pallas-Triton calls, and of reshapes between them.

    Neither a GPU nor a JAX with GPU support is needed, and no JAX backend is initialised. 64-bit
    types are off during the lowering, whatever the process has set.

    Args:
        fn: The function, jitted or not, of arrays alone. It returns an array or a tree of them.
        *specs: Shape and dtype of each argument.
        arch: Compute capability times ten: 80 (A100), 86, 89, 90 (H100, H200) or 100 (B200).
        alignments: For each argument, what its address is sure to be a multiple of, in bytes; by
            default what JAX promises its kernels.

    Returns:
        The program. Its outputs are the leaves of the function's result.

    Raises:
        MissingDependency: JAX is not installed.
        NotImplementedError: The installed JAX or ``arch`` is not supported, or the function does
            something else than call Pallas-Triton kernels on whole arrays; the operation is named.
        ValueError: An argument has a 64-bit dtype, which JAX would narrow.
    """
    jax = _Jax.find()
    if arch not in DEVICE_KINDS:
        raise NotImplementedError(f"arch: expected one of {sorted(DEVICE_KINDS)}, got {arch}")
    structs = [jax.struct(spec) for spec in specs]
    for index, struct in enumerate(structs):
        if struct.dtype.itemsize > 4:
            raise ValueError(
                f"argument {index}: JAX would narrow {struct.dtype.name}; "
                "pass a 64-bit array as pairs of 32-bit words"
            )
    with jax.targeting(arch):
        lowered = jax.jit(fn, keep_unused=True).trace(*structs).lower(lowering_platforms=("cuda",))
        program = _Walk(jax, lowered.compiler_ir("stablehlo"), arch).program()
    return _realigned(program, alignments) if alignments else program


def _realigned(program: Program, alignments: Sequence[int]) -> Program:
    """The program for inputs at addresses that are less aligned than JAX promises."""
    inputs = (
        dataclasses.replace(buffer, alignment=min(buffer.alignment, alignment))
        for buffer, alignment in zip(program.inputs, alignments, strict=True)
    )
    buffers = (*inputs, *program.buffers[program.num_inputs :])

    def realign(call: KernelCall) -> KernelCall:
        def claim(match: re.Match[str]) -> str:
            alignment = buffers[call.arguments[int(match["argument"])]].alignment
            return f"{match['before']}{alignment} : i32"

        return dataclasses.replace(call, ttir=_CLAIM.sub(claim, call.ttir))

    calls = tuple(realign(call) for call in program.calls)
    return dataclasses.replace(program, buffers=buffers, calls=calls)


@dataclasses.dataclass(frozen=True)
class _TargetDevice:
    """Stands in for JAX's default device, so that JAX does not start a backend to find one.

    JAX accepts an object of its own kind of device only by the word "Device" in its type's name.
    """

    compute_capability: str
    device_kind: str = "stand-in"
    platform: str = "gpu"

    @property
    def client(self) -> _TargetDevice:
        """The device's backend, of which JAX asks the platform alone."""
        return self


# Guards the patches in _Jax.targeting, which are visible to the whole process.
_LOWERING = threading.Lock()


class _Jax:
    """The parts of JAX used here, public and private."""

    def __init__(self, version: str) -> None:
        jax = importlib.import_module("jax")
        sharding = importlib.import_module("jax.sharding")
        triton = importlib.import_module("jax._src.pallas.triton.lowering")
        self.version = version
        self.jit = jax.jit
        mlir = importlib.import_module("jax._src.lib.mlir")
        self.ir = mlir.ir
        self.passes = mlir.passmanager.PassManager
        self.alias = importlib.import_module("jax._src.lib.mlir.dialects").hlo.OutputOperandAlias
        self.ir_context = triton._new_ir_context
        self._jax = jax
        self._dtype = jax.numpy.dtype
        self._mesh = sharding.AbstractMesh
        self._device = sharding.AbstractDevice
        self._use_mesh = sharding.use_abstract_mesh
        self._auto = sharding.AxisType.Auto
        self._registration = importlib.import_module(
            "jax._src.pallas.triton.pallas_call_registration"
        )

    @classmethod
    def find(cls) -> _Jax:
        """Imports JAX and checks that all that is needed is there."""
        version = require_supported("jax", needed_by="lowering a Pallas kernel").__version__
        try:
            return cls(version)
        except (ImportError, AttributeError) as error:
            raise NotImplementedError(
                f"jax {version} lacks a part of the Pallas-Triton backend ({error}); supported: "
                "jax >={},<{}".format(*SUPPORTED["jax"])
            ) from error

    def struct(self, spec: Spec) -> Any:
        return self._jax.ShapeDtypeStruct(tuple(spec.shape), self._dtype(spec.dtype))

    @contextmanager
    def targeting(self, arch: int) -> Iterator[None]:
        """Lowers for ``arch`` while inside, without JAX looking for a device."""
        device = _TargetDevice(f"{arch // 10}.{arch % 10}")
        abstract = self._device(device_kind=DEVICE_KINDS[arch], platform="gpu", num_cores=None)
        mesh = self._mesh((1,), ("x",), (self._auto,), abstract_device=abstract)
        with ExitStack() as stack:
            stack.enter_context(_LOWERING)
            if hasattr(self._registration, "deprecations"):
                # JAX 0.11 and newer warn at each lowering. A filter would hold for all threads, and
                # make Python forget what it has shown once.
                silent = mock.Mock(spec=["warn"])
                stack.enter_context(mock.patch.object(self._registration, "deprecations", silent))
            # What the program has chosen for itself must not change the kernels.
            stack.enter_context(self._jax.enable_x64(False))
            stack.enter_context(self._jax.default_matmul_precision(None))
            stack.enter_context(self._jax.numpy_dtype_promotion("standard"))
            stack.enter_context(self._jax.numpy_rank_promotion("allow"))
            stack.enter_context(self._jax.default_device(device))
            stack.enter_context(self._use_mesh(mesh))
            if hasattr(self._registration, "jax"):
                # JAX 0.10 asks the GPU backend itself for the compute capability.
                answer = mock.Mock(local_devices=lambda backend: [device])
                stack.enter_context(mock.patch.object(self._registration, "jax", answer))
            yield


class _View(NamedTuple):
    """What an SSA value stands for: a buffer as it was after ``version`` in-place updates."""

    buffer: int
    version: int


class _Walk:
    """Follows the values of a lowered module through its operations."""

    def __init__(self, jax: _Jax, module: Any, arch: int) -> None:
        self._jax = jax
        self._arch = arch
        self._functions = {
            op.attributes["sym_name"].value: op
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        self._buffers: list[Buffer] = []
        self._versions: list[int] = []
        self._calls: list[KernelCall] = []

    def program(self) -> Program:
        main = self._functions["main"]
        inputs = [self._new(argument.type) for argument in main.regions[0].blocks[0].arguments]
        returned = self._run(main, inputs)
        outputs = self._outputs(returned, len(inputs))
        return Program(
            arch=self._arch,
            buffers=tuple(self._buffers),
            num_inputs=len(inputs),
            outputs=outputs,
            calls=tuple(self._calls),
        )

    def _outputs(self, returned: list[tuple[_View, Any]], num_inputs: int) -> tuple[int, ...]:
        """Gives each output's buffer the type that the function returns it with."""
        outputs: list[int] = []
        for position, ((index, version), type_) in enumerate(returned):
            known = self._buffers[index]
            shown = dataclasses.replace(_buffer(type_), alignment=known.alignment)
            if index in outputs:
                raise NotImplementedError(f"output {position}: the same memory is returned twice")
            if index < num_inputs and (version == 0 or shown != known):
                raise NotImplementedError(
                    f"output {position}: returns argument {index} unchanged or reshaped; "
                    "an argument can be returned only as a kernel updated it in place"
                )
            self._buffers[index] = shown
            outputs.append(index)
        return tuple(outputs)

    def _new(self, type_: Any) -> _View:
        self._buffers.append(_buffer(type_))
        self._versions.append(0)
        return _View(len(self._buffers) - 1, 0)

    def _run(self, function: Any, arguments: Sequence[_View]) -> list[tuple[_View, Any]]:
        """Runs through a function; returns what it returns, each with its MLIR type."""
        block = function.regions[0].blocks[0]
        values = dict(zip(block.arguments, arguments, strict=True))
        for op in block.operations:
            op = op.operation
            operands = [self._current(values[operand], op.name) for operand in op.operands]
            if op.name in _VIEWS:
                results = operands
            elif op.name == "func.call":
                callee = self._functions[op.attributes["callee"].value]
                results = [view for view, _ in self._run(callee, operands)]
            elif op.name == "func.return":
                return list(zip(operands, [value.type for value in op.operands], strict=True))
            elif _is_triton_call(op):
                results = self._launch(op, operands)
            else:
                raise NotImplementedError(
                    f"{_describe(op)}: only Pallas-Triton calls, reshapes and bitcasts between "
                    "them can be launched directly"
                )
            values.update(zip(op.results, results, strict=True))
        raise AssertionError("a function without a return")

    def _current(self, view: _View, used_by: str) -> _View:
        if view.version != self._versions[view.buffer]:
            raise NotImplementedError(
                f"{used_by} reads an array after a kernel updated it in place; JAX would copy it"
            )
        return view

    def _launch(self, op: Any, operands: list[_View]) -> list[_View]:
        """Records a kernel call; returns its results."""
        config = op.attributes["mhlo.backend_config"]
        aliases = self._aliases(op)
        operand_of = {result: operand for operand, result in aliases}
        read = [view.buffer for view in operands]
        results = []
        for position, result in enumerate(op.results):
            if position not in operand_of:
                results.append(self._new(result.type))
                continue
            index = read[operand_of[position]]
            if read.count(index) > 1:
                raise NotImplementedError(
                    f"{config['name'].value}: an operand that is updated in place is also passed "
                    "as another operand"
                )
            self._versions[index] += 1
            results.append(_View(index, self._versions[index]))
        arguments = (*read, *(view.buffer for view in results))
        ttir, alignments = self._kernel(config["ir"].value_bytes, len(arguments))
        for index, alignment in zip(arguments, alignments, strict=True):
            buffer = self._buffers[index]
            alignment = max(alignment, buffer.alignment)
            self._buffers[index] = dataclasses.replace(buffer, alignment=alignment)
        self._calls.append(
            KernelCall(
                name=config["name"].value,
                ttir=ttir,
                grid=tuple(config[f"grid_{axis}"].value for axis in "xyz"),
                num_warps=config["num_warps"].value,
                num_stages=config["num_stages"].value,
                arguments=arguments,
                aliases=aliases,
            )
        )
        return results

    def _aliases(self, op: Any) -> tuple[tuple[int, int], ...]:
        """Pairs (operand, result) that share memory."""
        pairs = []
        for attribute in op.attributes["output_operand_aliases"]:
            alias = self._jax.alias(attribute)
            # Empty where the call has one result, which is then no tuple.
            position = list(alias.output_tuple_indices) or [0]
            pairs.append((alias.operand_index, position[0]))
        return tuple(pairs)

    def _kernel(self, bytecode: bytes, num_arguments: int) -> tuple[str, list[int]]:
        """The kernel's Triton IR as text, and the alignment that it assumes of each pointer."""
        with self._jax.ir_context():
            module = self._jax.ir.Module.parse(bytecode)
            [function] = module.body.operations
            types = self._jax.ir.FunctionType(function.attributes["function_type"].value).inputs
            attributes = list(function.attributes["arg_attrs"])
            if len(types) != num_arguments or not all(
                str(type_).startswith("!tt.ptr") for type_ in types
            ):
                raise NotImplementedError(
                    f"jax {self._jax.version}: a Triton kernel that does not take one pointer for "
                    f"each operand and result, but {[str(type_) for type_ in types]}"
                )
            alignments = [
                item["tt.divisibility"].value if "tt.divisibility" in item else 1
                for item in attributes
            ]
            # A parser gives operations without a location the place where it read them; spelled
            # out as unknown, the same kernel always becomes the same machine code.
            self._jax.passes.parse("builtin.module(strip-debuginfo)").run(module.operation)
            return module.operation.get_asm(enable_debug_info=True), alignments


def _buffer(type_: Any) -> Buffer:
    element = str(type_.element_type)
    if element not in _DTYPES:
        raise NotImplementedError(f"dtype {element}: not supported by the direct launch")
    dtype, itemsize = _DTYPES[element]
    return Buffer(tuple(type_.shape), dtype, itemsize)


def _is_triton_call(op: Any) -> bool:
    return (
        op.name == "stablehlo.custom_call"
        and op.attributes["call_target_name"].value == _TRITON_CALL
    )


def _describe(op: Any) -> str:
    if op.name == "stablehlo.custom_call":
        return f"{op.name} @{op.attributes['call_target_name'].value}"
    return op.name
