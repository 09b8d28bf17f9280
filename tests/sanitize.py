r"""A few calls through the named paths for compute-sanitizer; exit status 1 if one is wrong.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 XLA_PYTHON_CLIENT_ALLOCATOR=platform \
        compute-sanitizer --tool memcheck --error-exitcode 9 python tests/sanitize.py direct dlpack

With these variables every tensor and array is an allocation of its own, so that an access just past
its end is seen, and a read of scratch that nobody wrote. All that the kernels may read is written:
inputs are copies of whole buffers, padding included. Run it once without the sanitizer first:
compiling under it takes long. tests/test_sanitizer_gpu.py does all that.

In place of paths, `out-of-bounds` or `unwritten` runs a kernel that does this on purpose. A tool
that is silent about it proves nothing.
"""

import sys

import torch
import triton
import triton.language as tl
from shapes import in_turn

from sparse_decode.cases import CASES, build
from sparse_decode.parity import check
from sparse_decode.paths import PATHS

# Those with padding have their turn where a shape lends programs.
NAMES = (
    "fp8",
    "fp8_outside",
    "fp8_inactive",
    "fp8_edges",
    "fp8_padded",
    "uint8_verify4_groups2",
    "bf16_half_padded",
    "fp8_strided_gate",
    "bf16_split1_gate",
    "bf16_outside",
    "bf16_packed_strided",
)
# Elements from the begin of a tensor of 128 to where the planted fault reads.
PLANTED = {"out-of-bounds": 1 << 16, "unwritten": 0}


@triton.jit
def sparse_decode_planted(tensor_ptr, result_ptr, FIRST: tl.constexpr):
    """Copies 128 elements, from `FIRST` on."""
    lane = tl.arange(0, 128)
    tl.store(result_ptr + lane, tl.load(tensor_ptr + FIRST + lane))


def plant(name: str) -> int:
    """Commits a fault."""
    tensor, result = (torch.empty(128, device="cuda") for _ in range(2))
    sparse_decode_planted[1,](tensor_ptr=tensor, result_ptr=result, FIRST=PLANTED[name])
    torch.cuda.synchronize()
    return 0


def main(wanted: list[str]) -> int:
    """The command; returns the exit status."""
    if len(wanted) == 1 and wanted[0] in PLANTED:
        return plant(wanted[0])
    paths = [(path, path.status().mode) for path in PATHS if path.name in wanted]
    if not wanted or len(paths) != len(wanted) or any(mode != "native" for _, mode in paths):
        print(f"expected paths that run natively here, of {[path.name for path in PATHS]}")
        return 2
    failed = 0
    named = {case.name: case for case in CASES}
    for turn, name in enumerate(NAMES):
        for result in check(name, in_turn(build(named[name]), turn), None, paths):
            failed += not result.verdict.ok
            print(name, result.path, result.verdict.fault or "ok", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
