"""The project's folders; no other module derives them from its own path."""

from __future__ import annotations

import os
import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
CONF_DIR = PROJECT / "conf"
ASSETS = PROJECT / "assets"


_LONGEST = 200  # bytes of a part of a file's name, of the 255 that file systems take


def file_name(text: str) -> str:
    """Make a text part of a file's name: ``_`` for letters that some file system refuses."""
    safe = re.sub(r"[^\w.+-]", "_", text).strip(".")
    return safe.encode()[:_LONGEST].decode(errors="ignore") or "_"


def typed_path(text: str | Path) -> Path:
    """Expand a path as a user typed it; a ``~`` of an unknown user stays."""
    return Path(os.path.expanduser(text))


def typed_file(text: str) -> Path:
    """Find a file as a user typed it: from here, else from the project's folder, if missing too."""
    file = typed_path(text)
    return file.absolute() if file.is_file() else PROJECT / file
