"""Texts that tables and datastores are made from: installed documentation, files, the hub.

Installed documentation is English prose that every machine with this project has: docstrings and
comments of Python's own library and of the packages this project requires, Python's help topics and
the packages' descriptions, cut into paragraphs. Code, tables and signatures are left out by keeping
paragraphs that consist mostly of plain words, each once. About 24 MB of text; the same versions
give the same.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from specbench.errors import ConfigurationError, unknown_name

# Required by this project, directly or through torch, and rich in prose. Import names; the
# distributions are called the same.
PACKAGES = (
    "accelerate",
    "datasets",
    "huggingface_hub",
    "matplotlib",
    "networkx",
    "numba",
    "numpy",
    "pandas",
    "pyarrow",
    "scipy",
    "sympy",
    "torch",
    "transformers",
)

# Chosen on answers of the bundled model: below, code gets in; above, too little is left.
_SHARE_OF_WORDS = 0.85
_SHORTEST = 40

# Texts tokenized at once: enough for the tokenizer's threads, little enough to stay small.
_BATCH = 512

_DOCSTRING = re.compile(r"(\"\"\"|''')(.*?)\1", re.DOTALL)
_COMMENT = re.compile(r"(?:^[ \t]*#(?!!)[^\n]*\n)+", re.MULTILINE)
_COMMENT_SIGN = re.compile(r"^[ \t]*#+[ \t]?", re.MULTILINE)
_BLANK_LINE = re.compile(r"\n\s*\n")
_WORD = re.compile(r"[\"'(]?[A-Za-z][a-z'\u2019-]*[.,;:!?]?[\")]?")
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph (words separated by single spaces) reads like English text."""
    if len(paragraph) < _SHORTEST:
        return False
    words = paragraph.split(" ")
    plain = sum(_WORD.fullmatch(word) is not None for word in words)
    return plain >= _SHARE_OF_WORDS * len(words)


def paragraphs(text: str) -> Iterator[str]:
    """The prose paragraphs of a text, each on one line."""
    for block in _BLANK_LINE.split(text):
        paragraph = " ".join(block.split())
        if is_prose(paragraph):
            yield paragraph


def sources() -> dict[str, str]:
    """What is read on this machine, with versions."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        if importlib.util.find_spec(name) is not None:
            found[name] = importlib.metadata.version(name)
    return found


def installed_prose() -> Iterator[tuple[str, list[str]]]:
    """Name and paragraphs of one source after the other; no paragraph comes twice."""
    seen: set[str] = set()
    for name in sources():
        fresh = []
        for text in _texts(name):
            for paragraph in paragraphs(text):
                if paragraph not in seen:
                    seen.add(paragraph)
                    fresh.append(paragraph)
        yield name, fresh


def documentation(
    progress: Callable[[str, int, int], None] | None,
) -> tuple[Iterator[str], dict[str, Any]]:
    """What the bundled model's tables and stores are made from, for a file and for its header.

    Returns:
        The paragraphs, read lazily, and JSON-ready facts about them.
    """
    read_from = sources()

    def texts() -> Iterator[str]:
        for i, (name, fresh) in enumerate(installed_prose()):
            if progress is not None:
                progress(f"reading documentation of {name}", i, len(read_from))
            yield from fresh

    return texts(), {
        "name": "installed_documentation",
        "description": "prose of docstrings, comments, help topics and package descriptions",
        "sources": read_from,
    }


def _texts(name: str) -> Iterator[str]:
    if name == "python":
        # Some systems package it apart.
        if importlib.util.find_spec("pydoc_data") is not None:
            from pydoc_data.topics import topics

            yield from (topics[key] for key in sorted(topics))
        root = Path(sysconfig.get_paths()["stdlib"])
    else:
        # The description only: the other fields are names and version numbers.
        yield str(importlib.metadata.metadata(name).json.get("description", ""))
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.submodule_search_locations
        root = Path(spec.submodule_search_locations[0])
    for path in sorted(root.rglob("*.py")):
        if name == "python" and _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            # A broken link or an old encoding: one file more or less changes no table.
            continue
        for match in _DOCSTRING.finditer(source):
            yield match.group(2)
        for match in _COMMENT.finditer(source):
            yield _COMMENT_SIGN.sub("", match.group(0))


# -- text files -----------------------------------------------------------------------------------

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


# -- the hub --------------------------------------------------------------------------------------


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

    ``revision`` is the data set's; None takes the newest.

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


# -- ids ------------------------------------------------------------------------------------------


class Receiver(Protocol):
    """What documents are added to, and how many it has."""

    n_documents: int
    n_tokens: int

    def add(self, tokens: list[int], /) -> None: ...


def add_texts(
    texts: Iterable[str],
    tokenizer: Any,
    to: Receiver,
    *,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Tokenize ``texts`` (one is one document, without special tokens) and add them to ``to``.

    Args:
        max_tokens: stop after about so many.
        progress: called after every batch with the documents and tokens so far.

    Returns:
        SHA-256 of the documents, as hex.
    """
    digest = hashlib.sha256()
    stream = iter(texts)
    while batch := list(islice(stream, _BATCH)):
        for text in batch:
            digest.update(text.encode("utf-8", "surrogatepass"))
            digest.update(b"\0")
        for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
            to.add(ids)
        if progress is not None:
            progress(to.n_documents, to.n_tokens)
        if max_tokens is not None and to.n_tokens >= max_tokens:
            break
    return digest.hexdigest()
