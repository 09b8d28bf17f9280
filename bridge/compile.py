"""Compiles the kernels of a lowered program with Triton, and keeps them on disk.

No GPU is needed. A stored entry holds the finished machine code, so that a later process gets its
kernels from :func:`build` without importing JAX or Triton, let alone tracing or compiling.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sparse_decode._files import replace_file
from sparse_decode._require import require, require_supported
from sparse_decode.bridge import lowering
from sparse_decode.bridge.lowering import KernelCall, Program, Spec

FIRST_ARCH_WITH_PDL = 90

_WORKER = f"import sys, {__name__} as compile; compile._work(*sys.argv[1:])"

# Variables that say where files lie, not what is compiled.
_NEUTRAL_VARIABLES = {"TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET"}


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """Machine code of one kernel, and what a launch of it needs to know.

    Attributes:
        name: The kernel's symbol in ``cubin``.
        cubin: The machine code, an ELF file.
        arch: Compute capability times ten that it was compiled for.
        num_warps: Warps of one program.
        shared: Dynamic shared memory of one program in bytes.
        num_parameters: Pointers that the kernel takes. Those beyond the arguments of its
            :class:`~sparse_decode.bridge.lowering.KernelCall` are null.
        launch_pdl: Launched with programmatic dependent launch: it may start while the kernel
            before it still runs, and waits by itself where it must.
    """

    name: str
    cubin: bytes
    arch: int
    num_warps: int
    shared: int
    num_parameters: int
    launch_pdl: bool = False


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor.

    Attributes:
        registers: 32-bit registers of a thread.
        spilled: Local memory of a thread in bytes; 0 when no register was spilled.
        shared: Shared memory of a program in bytes, static and dynamic.
    """

    registers: int
    spilled: int
    shared: int


@dataclasses.dataclass(frozen=True)
class Executable:
    """A program and its compiled kernels, one for each of ``program.calls``."""

    program: Program
    kernels: tuple[CompiledKernel, ...]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to build: a function of arrays, for given shapes and a given architecture.

    Attributes:
        make: Returns the function to lower. It is called only when nothing is stored, and is the
            place to import JAX.
        key: Names the function, its static parameters and its source: whatever decides the
            result and is not in ``specs``, ``arch`` and ``launch_pdl``. :func:`source_hash` of
            the package that defines the function is a good part of it.
        specs: Shape and dtype of each argument, for example as
            :class:`~sparse_decode.bridge.lowering.Buffer`.
        arch: Compute capability times ten.
        launch_pdl: Compile for programmatic dependent launch.
        alignments: As for :func:`~sparse_decode.bridge.lowering.lower`.
    """

    make: Callable[[], Callable[..., Any]]
    key: str
    specs: tuple[Spec, ...]
    arch: int
    launch_pdl: bool = False
    alignments: tuple[int, ...] = ()

    def digest(self) -> str:
        """Hash of everything that the executable depends on."""
        return _hash(
            self.key,
            [(list(spec.shape), str(spec.dtype)) for spec in self.specs],
            self.arch,
            self.launch_pdl,
            self.alignments,
            _versions(),
            sorted(
                (name, value)
                for name, value in os.environ.items()
                if name.startswith(("TRITON_", "DISABLE_", "PTXAS_"))
                and name not in _NEUTRAL_VARIABLES
            ),
        )


def build(requests: Sequence[Request], *, processes: int | None = None) -> list[Executable]:
    """Gets executables from the disk cache; lowers, compiles and stores the missing ones.

    Several processes may do so at once, with the same or with other requests.

    Args:
        requests: What to build.
        processes: Compiling processes; by default one for each processor core.

    Returns:
        One executable for each request.

    Warns:
        RuntimeWarning: A stored entry was damaged, and was built again and replaced; or the
            cache's folder cannot be written.

    See :func:`~sparse_decode.bridge.lowering.lower` and :func:`compile_many` for what else is
    raised.
    """
    paths = [_cache_dir() / f"{request.digest()}.kernels" for request in requests]
    found = {path: _read(path) for path in paths}
    missing = {
        path: request for path, request in zip(paths, requests, strict=True) if found[path] is None
    }
    programs = {
        path: lowering.lower(
            request.make(), *request.specs, arch=request.arch, alignments=request.alignments
        )
        for path, request in missing.items()
    }
    jobs = [
        Job(call, request.arch, request.launch_pdl)
        for path, request in missing.items()
        for call in programs[path].calls
    ]
    kernels = iter(compile_many(jobs, processes=processes))
    for path, program in programs.items():
        found[path] = Executable(program, tuple(next(kernels) for _ in program.calls))
        try:
            _write(path, found[path])
        except OSError as error:
            warnings.warn(
                f"compiled kernels are not kept for the next process: {error}; set "
                "SPARSE_DECODE_CACHE_DIR to a folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )
    return [found[path] for path in paths]


@dataclasses.dataclass(frozen=True)
class Job:
    """One kernel to compile; see :func:`compile_kernel`."""

    call: KernelCall
    arch: int
    launch_pdl: bool = False


def compile_kernel(call: KernelCall, arch: int, *, launch_pdl: bool = False) -> CompiledKernel:
    """Compiles one kernel with the installed Triton.

    Args:
        call: The kernel.
        arch: Compute capability times ten.
        launch_pdl: Compile for programmatic dependent launch. The kernel must execute
            ``griddepcontrol.wait`` before it touches memory that an earlier kernel writes.

    Raises:
        MissingDependency: Triton is not installed.
        NotImplementedError: The installed Triton is too old, ``launch_pdl`` on an architecture
            without it, or a kernel that needs scratch memory of Triton's own.
        ValueError: ``launch_pdl`` for a kernel that never waits.
    """
    if launch_pdl and arch < FIRST_ARCH_WITH_PDL:
        raise NotImplementedError(
            f"launch_pdl: needs arch {FIRST_ARCH_WITH_PDL} or newer, got {arch}"
        )
    triton = require_supported("triton", needed_by="compiling a kernel")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", arch, 32)
    options = {
        "num_warps": call.num_warps,
        "num_stages": call.num_stages,
        "launch_pdl": launch_pdl,
        "enable_fp_fusion": True,
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Said although the option is given.
        warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION is unset", UserWarning)
        source = Path(folder, "kernel.ttir")
        source.write_text(call.ttir)
        compiled = triton.compile(str(source), target=target, options=options)
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise NotImplementedError(f"{call.name}: Triton wants scratch memory or a cluster for it")
    if launch_pdl and "griddepcontrol.wait" not in compiled.asm["ptx"]:
        raise ValueError(
            f"launch_pdl: kernel {call.name} never executes griddepcontrol.wait, so it would read "
            "what the kernel before it has not yet written"
        )
    return CompiledKernel(
        name=metadata.name,
        cubin=compiled.asm["cubin"],
        arch=arch,
        num_warps=metadata.num_warps,
        shared=metadata.shared,
        num_parameters=_count_parameters(compiled.asm["ptx"]),
        launch_pdl=launch_pdl,
    )


def compile_many(jobs: Sequence[Job], *, processes: int | None = None) -> list[CompiledKernel]:
    """Compiles kernels in parallel processes: threads would wait for each other in Triton.

    Args:
        jobs: The kernels.
        processes: By default one for each processor core. With 1, or for a single kernel, none is
            started.

    Returns:
        One compiled kernel for each job.

    Raises:
        RuntimeError: A process failed; the message ends with what it said.

    Without processes, see :func:`compile_kernel` for what is raised.
    """
    count = min(len(jobs), processes or os.cpu_count() or 1)
    if count <= 1:
        return [compile_kernel(job.call, job.arch, launch_pdl=job.launch_pdl) for job in jobs]
    kernels: list[Any] = [None] * len(jobs)
    with ThreadPoolExecutor(count) as pool:
        shares = [jobs[first::count] for first in range(count)]
        for first, done in enumerate(pool.map(_compile_elsewhere, shares)):
            kernels[first::count] = done
    return kernels


def _compile_elsewhere(share: Sequence[Job]) -> list[CompiledKernel]:
    """Compiles in a new interpreter, which neither forks this process nor reruns its script."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, done = Path(folder, "wanted"), Path(folder, "done")
        wanted.write_text(json.dumps([dataclasses.asdict(job) for job in share]))
        worker = subprocess.run(
            [sys.executable, "-P", "-c", _WORKER, str(wanted), str(done)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        if worker.returncode:
            raise RuntimeError(f"compiling failed in a process of its own:\n{worker.stderr}")
        return [_kernel_from(fields) for fields in json.loads(done.read_text())]


def _work(wanted: str, done: str) -> None:
    """What :func:`_compile_elsewhere` starts."""
    kernels = []
    for job in json.loads(Path(wanted).read_text()):
        call = KernelCall(**lowering.tupled(job["call"]))
        kernels.append(compile_kernel(call, job["arch"], launch_pdl=job["launch_pdl"]))
    Path(done).write_text(json.dumps([_kernel_fields(kernel) for kernel in kernels]))


def resources(kernel: CompiledKernel) -> Resources:
    """Reads registers, spills and shared memory from a kernel's machine code.

    Raises:
        MissingDependency: Triton, whose package brings the ``cuobjdump`` program, is missing.
        RuntimeError: ``cuobjdump`` failed, or its answer was not understood.
    """
    require("triton", extra="torch", needed_by="reading a kernel's resources")
    tool = importlib.import_module("triton.knobs").nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.cubin)
        run = subprocess.run(
            [tool, "--dump-resource-usage", str(cubin)], capture_output=True, text=True, check=False
        )
    match = re.search(
        rf"Function {re.escape(kernel.name)}:\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)",
        run.stdout,
    )
    if run.returncode or match is None:
        raise RuntimeError(f"cuobjdump on {kernel.name}: {run.stdout}{run.stderr}")
    registers, stack, static, local = map(int, match.groups())
    return Resources(registers, stack + local, static + kernel.shared)


@functools.lru_cache
def source_hash(package: str) -> str:
    """Hash of all Python files of an installed package or module, which is not imported.

    Args:
        package: Dotted name. The packages above it are imported.

    Raises:
        ModuleNotFoundError: There is no such package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module named {package!r}", name=package)
    if spec.submodule_search_locations is None:
        return _hash(Path(spec.origin).read_text())
    root = Path(spec.origin).parent
    files = sorted(root.rglob("*.py"))
    return _hash(*((str(file.relative_to(root)), file.read_text()) for file in files))


@functools.lru_cache
def _versions() -> tuple[tuple[str, str | None], ...]:
    """Versions of the compilers, found without importing them, and a hash of this code."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return (
        *((name, version(name)) for name in ("jax", "jaxlib", "triton", "pytorch-triton")),
        ("lowering", source_hash(lowering.__name__)),
        ("compile", source_hash(__name__)),
    )


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _count_parameters(ptx: str) -> int:
    """Parameters of the one kernel in a PTX file; Triton appends some to those of the source."""
    entry = re.search(r"\.entry\s+[^\s(]+\s*\(([^)]*)\)", ptx)
    return 0 if entry is None else entry[1].count(".param")


def _cache_dir() -> Path:
    chosen = os.environ.get("SPARSE_DECODE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "sparse_decode"
    except RuntimeError:
        # A user without a home: nothing is found there, and what cannot be kept is warned of.
        return Path(os.devnull) / "sparse_decode"


def _kernel_fields(kernel: CompiledKernel) -> dict[str, Any]:
    return {
        **dataclasses.asdict(kernel),
        "cubin": base64.b64encode(kernel.cubin).decode(),
    }


def _kernel_from(fields: dict[str, Any]) -> CompiledKernel:
    return CompiledKernel(**{**fields, "cubin": base64.b64decode(fields["cubin"])})


def _read(path: Path) -> Executable | None:
    """The stored entry, or None where there is none, or none that can be used."""
    try:
        checksum, _, content = path.read_text().partition("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warnings.warn(f"{path} cannot be read: {error}; built again", RuntimeWarning, stacklevel=3)
        return None
    except UnicodeDecodeError:
        checksum, content = "", "damaged"
    if checksum != _hash(content):
        warnings.warn(f"{path} is damaged: built again", RuntimeWarning, stacklevel=3)
        return None
    fields = json.loads(content)
    return Executable(
        Program.from_json(fields["program"]),
        tuple(_kernel_from(kernel) for kernel in fields["kernels"]),
    )


def _write(path: Path, executable: Executable) -> None:
    """Stores an entry in one step, so that no reader ever sees half of it."""
    content = json.dumps(
        {
            "program": executable.program.to_json(),
            "kernels": [_kernel_fields(kernel) for kernel in executable.kernels],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, f"{_hash(content)}\n{content}".encode())
