"""Corpora on the hub that the papers' tables and datastores are made from, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterator


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


# The first three are REST's, by its authors' names for the datastores; then what Cacheback's paper
# names, and what its scripts take.
HUB = {
    "sharegpt": HubCorpus("Aeala/ShareGPT_Vicuna_unfiltered", "conversations", "value"),
    "ultrachat": HubCorpus("stingning/ultrachat", "data"),
    "stack_python": HubCorpus("bigcode/the-stack-dedup", "content", folder="data/python"),
    "openwebtext": HubCorpus("Skylion007/openwebtext", "text"),
    "alpaca": HubCorpus("tatsu-lab/alpaca", "text"),
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
