"""Both Triton kernels, compiled ahead of time for each architecture; no GPU is needed.

Kernels under Triton's interpreter cannot be compiled, so this file also runs as a program, without
`TRITON_INTERPRET`, which compiles what the operation would launch and prints what it takes.
"""

import json
import os
import subprocess
import sys
from itertools import product

import pytest

ARCHITECTURES = (80, 90, 100)
SPLIT_KERNELS = [
    (arch, cache, splits)
    for arch, cache, splits in product(
        ARCHITECTURES, ("bfloat16", "float16", "float8_e4m3fn"), (1, 4)
    )
    if arch >= 89 or cache != "float8_e4m3fn"
]
COMBINE_KERNELS = [
    (arch, "bfloat16", splits) for arch in ARCHITECTURES for splits in (2, 32, 128, 256)
]

# Registers a thread and bytes of shared memory a program. Measured with triton 3.6.0 and 3.9.0 on
# all three architectures, at R 513, heads 8 and pages of 64: 96 to 118 registers for 16 bits, 144
# to 151 for FP8. Shared memory is the same in both versions: one tile of K and V, the indices of
# the next ones, and from architecture 90 on 1024 bytes of the system's own.
SPLIT_BOUNDS = {"16 bits": (128, 58880 + 1024), "fp8": (168, 34304 + 1024)}
# Measured: 34 to 37, 157 to 160, and 124 to 130 registers where more warps share the work.
COMBINE_BOUNDS = {2: (40, 0), 32: (160, 128), 128: (136, 1024), 256: (136, 2048)}


def compile_all() -> dict[str, dict[str, object]]:
    """Compiles every kernel of the lists above."""
    import torch

    from sparse_decode.triton_kernels import kernels, op

    found = {}
    for arch, cache, splits in SPLIT_KERNELS:
        launch, dtypes = _launch(op, torch, arch, cache, splits)
        found[f"split {arch} {cache} {splits}"] = _compile(
            kernels._split, launch.split, dtypes, arch
        )
    for arch, cache, splits in COMBINE_KERNELS:
        launch, dtypes = _launch(op, torch, arch, cache, splits)
        found[f"combine {arch} {cache} {splits}"] = _compile(
            kernels._combine, launch.combine, dtypes, arch
        )
    return found


def _launch(op, torch, arch, cache, splits):
    """The launch of a typical call on `arch`, and the Triton dtypes of the pointers."""
    device = torch.device("cuda", 0)
    short = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8e4nv"}
    fp8 = cache == "float8_e4m3fn"
    query = "bfloat16" if fp8 else cache
    rows, heads = 64, 8
    described = {
        "query": ((rows, heads, 192), query, short[query]),
        "cache": ((4096, 1, 64, 384), cache, short[cache]),
        "regions": ((rows, 513), "int64", "i64"),
        "block_table": ((rows, 1024), "int32", "i32"),
        "positions": ((rows,), "int64", "i64"),
        "active": ((rows,), "bool", "i1"),
        "output": ((rows, heads, 192), query, short[query]),
        "k_scale": ((), "float32", "fp32") if fp8 else None,
        "v_scale": ((), "float32", "fp32") if fp8 else None,
        "gate": ((rows, heads), "bfloat16", "bf16"),
    }
    keys = [
        entry
        and (
            torch.Size(entry[0]),
            torch.empty(entry[0], device="meta").stride(),
            getattr(torch, entry[1]),
            device,
        )
        for entry in described.values()
    ]
    op._check_device = lambda device, fp8: arch >= 90
    launch = op._launch.__wrapped__(*keys, 192**-0.5, 1, splits, True)
    dtypes = {f"{name}_ptr": entry[2] for name, entry in described.items() if entry}
    return launch, dtypes | ({"partial_ptr": "fp32", "lse_ptr": "fp32"} if splits > 1 else {})


def _compile(kernel, arguments, dtypes, arch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sparse_decode.bridge.compile import CompiledKernel, resources

    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        aligned = False
        if parameter.is_constexpr or (name.endswith("_ptr") and name not in dtypes):
            signature[name], constants[name] = "constexpr", arguments.get(name)
        elif name.endswith("_ptr"):
            signature[name], aligned = "*" + dtypes[name], True
        elif isinstance(arguments[name], float):
            signature[name] = "fp32"
        elif arguments[name] == 1 and not parameter.do_not_specialize:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            aligned = arguments[name] % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in arguments.items() if name not in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )
    taken = resources(
        CompiledKernel(
            name=compiled.metadata.name,
            cubin=compiled.asm["cubin"],
            arch=arch,
            num_warps=compiled.metadata.num_warps,
            shared=compiled.metadata.shared,
            num_parameters=0,
        )
    )
    ptx = compiled.asm["ptx"]
    loads = [ptx.find(word) for word in ("ld.global", "cp.async") if word in ptx]
    return {
        "registers": taken.registers,
        "spilled": taken.spilled,
        "shared": taken.shared,
        "wait": ptx.find("griddepcontrol.wait"),
        "first_load": min(loads),
        "launch_pdl": options.get("launch_pdl", False),
    }


@pytest.fixture(scope="module")
def compiled():
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def check(taken, arch, registers, shared):
    assert taken["spilled"] == 0
    assert taken["registers"] <= registers
    assert taken["shared"] <= shared
    assert taken["launch_pdl"] == (arch >= 90)
    if arch >= 90:
        assert 0 <= taken["wait"] < taken["first_load"]
    else:
        assert taken["wait"] == -1


@pytest.mark.parametrize(("arch", "cache", "splits"), SPLIT_KERNELS)
def test_split(compiled, arch, cache, splits):
    bounds = SPLIT_BOUNDS["fp8" if cache == "float8_e4m3fn" else "16 bits"]
    check(compiled[f"split {arch} {cache} {splits}"], arch, *bounds)


@pytest.mark.parametrize(("arch", "cache", "splits"), COMBINE_KERNELS)
def test_combine(compiled, arch, cache, splits):
    registers, shared = COMBINE_BOUNDS[splits]
    check(compiled[f"combine {arch} {cache} {splits}"], arch, registers, shared + 1024)


if __name__ == "__main__":
    json.dump(compile_all(), sys.stdout, indent=1)
