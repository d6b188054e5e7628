"""SHA-256 of files, and of token ids."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path


def ids_sha256(ids: Sequence[int]) -> str:
    """SHA-256 of token ids as hex."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def file_sha256(path: Path, memo_dir: Path | None = None) -> str:
    """SHA-256 of a file as hex; remembered in ``memo_dir`` by path, size and mtime.

    Raises:
        OSError: the file cannot be read.
    """
    memo = None
    if memo_dir is not None:
        stat = path.stat()
        identity = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        memo = memo_dir / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.sha256"
        if memo.is_file() and len(known := memo.read_text(encoding="ascii").strip()) == 64:
            return known
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if memo is not None:
        memo.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: two threads of one process may get here at once.
        with tempfile.NamedTemporaryFile(
            "w", dir=memo.parent, encoding="ascii", delete=False
        ) as temporary:
            temporary.write(digest)
        os.replace(temporary.name, memo)
    return digest
