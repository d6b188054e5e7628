"""Documents of plain text files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

# A file without blank lines is cut into pieces of so many characters.
PIECE = 1 << 20


def file_texts(paths: Iterable[Path]) -> Iterator[str]:
    """What blank lines separate in UTF-8 files, at most about `PIECE` characters each.

    Raises:
        ConfigurationError: a file cannot be read or is no UTF-8 text.
    """
    for path in paths:
        lines: list[str] = []
        size = 0
        try:
            with path.open(encoding="utf-8") as handle:
                for line in handle:
                    blank = not line.strip()
                    if lines and (blank or size > PIECE):
                        yield "".join(lines)
                        lines, size = [], 0
                    if not blank:
                        lines.append(line)
                        size += len(line)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the text {path}: {error}") from error
        if lines:
            yield "".join(lines)
