r"""A few calls through the named paths for compute-sanitizer; exit status 1 if one is wrong.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 XLA_PYTHON_CLIENT_PREALLOCATE=false \
        compute-sanitizer --tool memcheck --error-exitcode 9 python tests/sanitize.py direct dlpack

Without PyTorch's caching allocator every tensor has an allocation of its own, so that an access
just past its end is seen. Run it once without the sanitizer first: compiling under it takes long.
"""

import sys

from sparse_decode.cases import CASES, build
from sparse_decode.parity import check
from sparse_decode.paths import PATHS

NAMES = (
    "fp8",
    "fp8_outside",
    "fp8_inactive",
    "fp8_edges",
    "uint8_verify4_groups2",
    "fp8_strided_gate",
    "bf16_split1_gate",
    "bf16_packed_strided",
)


def main(wanted: list[str]) -> int:
    paths = [(path, path.status().mode) for path in PATHS if path.name in wanted]
    if len(paths) != len(wanted) or any(mode != "native" for _, mode in paths):
        print(f"expected paths that run natively here, of {[path.name for path in PATHS]}")
        return 2
    failed = 0
    for case in CASES:
        if case.name in NAMES:
            for result in check(case.name, build(case), None, paths):
                failed += not result.verdict.ok
                print(case.name, result.path, result.verdict.fault or "ok", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
