"""Texts for people who have another machine."""

from __future__ import annotations

import re
from pathlib import PurePath

# Two folders and more, or a file in the home folder, from the file system's root.
_PATH = re.compile(r"(?<![\w.:/])(?:~|/[^\s/,;:'\"\]})]+)(?:/[^\s/,;:'\"\]})]+)+/?")


def last_parts(text: str) -> str:
    """Return the text with each absolute path in it cut to its last part: ``…/b.jsonl``."""
    return _PATH.sub(lambda path: f"…/{PurePath(path[0]).name}", text)
