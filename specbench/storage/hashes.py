"""SHA-256 of files, and of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path


def ids_sha256(ids: Sequence[int]) -> str:
    """Hash token ids, as SHA-256 hex."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def file_sha256(path: Path, memo_dir: Path | None = None) -> str:
    """Hash a file, as SHA-256 hex; remembered in ``memo_dir`` by path, size and mtime.

    Raises:
        OSError: the file cannot be read.
    """
    memo = None
    if memo_dir is not None:
        stat = path.stat()
        identity = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        memo = memo_dir / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.sha256"
        if memo.is_file() and len(digest := memo.read_text(encoding="ascii")) == 64:
            return digest
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if memo is not None:
        memo.parent.mkdir(parents=True, exist_ok=True)
        memo.write_text(digest, encoding="ascii")  # cut off, it is not taken
    return digest
