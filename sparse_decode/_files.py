"""Files that are either the old or the new one, never half of either."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file beside `path` and, once it is complete, puts it in its place.

    A link stays and its target is replaced. What is no file, such as a pipe, is written to.

    Raises:
        OSError: It cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    draft = path.with_name(f".{uuid.uuid4().hex}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
