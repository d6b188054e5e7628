"""Texts to build datastores from: corpora on the hub by name, and local files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# A text file without blank lines between documents is cut into pieces of so many characters.
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class HubCorpus:
    """A data set on the hub.

    Attributes:
        id: of the data set.
        column: where a row's text is: a string, a list of strings, or a list of messages.
        message: key of a message's text, where messages are mappings.
        folder: part of the data set, where it has several.
    """

    id: str
    column: str
    message: str | None = None
    folder: str | None = None


# What REST's authors used, by their names for the datastores.
HUB = {
    "sharegpt": HubCorpus("Aeala/ShareGPT_Vicuna_unfiltered", "conversations", "value"),
    "ultrachat": HubCorpus("stingning/ultrachat", "data"),
    "stack_python": HubCorpus("bigcode/the-stack-dedup", "content", folder="data/python"),
}


def hub_texts(name: str, revision: str | None) -> Iterator[str]:
    """Documents of a corpus in `HUB`, streamed; every message of a dialogue is one.

    Args:
        name: a key of `HUB`.
        revision: of the data set; None takes the newest.

    Raises:
        ConfigurationError: an unknown name, or the hub cannot be read.
    """
    if name not in HUB:
        raise unknown_name("corpus", name, HUB)
    from datasets import load_dataset

    source = HUB[name]
    part = {"data_dir": source.folder} if source.folder else {}
    try:
        rows = load_dataset(source.id, split="train", streaming=True, revision=revision, **part)
        for row in rows:
            yield from row_texts(row[source.column], source.message)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot stream {source.id} from the hub: {error}. Check the network and "
            "HF_HUB_OFFLINE, or name local texts instead."
        ) from error


def row_texts(value: Any, message: str | None) -> Iterator[str]:
    """The texts in one column of one row; see `HubCorpus`."""
    parts: list[Any] = [value] if isinstance(value, str) else value
    for part in parts:
        yield part if message is None else part[message]


def file_texts(paths: list[Path]) -> Iterator[str]:
    """Documents of UTF-8 files: what blank lines separate, cut into pieces of about 1 MB.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    for path in paths:
        try:
            with path.open(encoding="utf-8") as handle:
                lines: list[str] = []
                size = 0
                for line in handle:
                    if (not line.strip() and lines) or size > _PIECE:
                        yield "".join(lines)
                        lines, size = [], 0
                    if line.strip():
                        lines.append(line)
                        size += len(line)
                if lines:
                    yield "".join(lines)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read {path}: {error}") from error
