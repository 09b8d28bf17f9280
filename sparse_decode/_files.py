"""Files that are either the old or the new one, never half of either."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file beside `path` and, once it is complete, puts it in its place."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
