"""Installed documentation: English prose that every machine with this project has, as token ids.

Docstrings and comments of Python's own library and of the packages this project requires, Python's
help topics and the packages' descriptions, cut into paragraphs. Code, tables and signatures are
left out by keeping paragraphs that consist mostly of plain words, each once. About 24 MB of text;
the same versions give the same.

The ids are kept in the cache folder: reading and tokenizing take nine tenths of the time that a
frozen table takes, and a sweep over leader and follower lengths needs a table for each pair.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specbench.arrays import Array
from specbench.artifacts import resolve
from specbench.artifacts.corpora import Corpus
from specbench.artifacts.kept_ids import KeptIds
from specbench.artifacts.progress import Progress
from specbench.decoding.structs import Artifact
from specbench.models import loading
from specbench.storage.arrays import ArrayTable

STEM = "documentation"
# Raised when the same packages give other ids.
BUILDER_VERSION = 1

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


def _texts(name: str) -> Iterator[str]:
    if name == "python":
        # Some systems package it apart.
        if importlib.util.find_spec("pydoc_data") is not None:
            from pydoc_data.topics import topics

            yield from (topics[key] for key in sorted(topics))
    else:
        # The description only: the other fields are names and version numbers.
        yield str(importlib.metadata.metadata(name).json.get("description", ""))
    for path in _files(name):
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            # A broken link or an old encoding: one file more or less changes no table.
            continue
        for match in _DOCSTRING.finditer(source):
            yield match.group(2)
        for match in _COMMENT.finditer(source):
            yield _COMMENT_SIGN.sub("", match.group(0))


def _files(name: str) -> list[Path]:
    """The Python files of a source, in order."""
    if name == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
    else:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            return []
        root = Path(spec.submodule_search_locations[0])
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if name != "python" or not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]


class TokenArrays(NamedTuple):
    """Documents one behind the other.

    Attributes:
        tokens: ``[total]`` int32.
        ends: ``[n]`` int64, where each document ends.
    """

    tokens: Array
    ends: Array


class TokenizedDocuments(ArrayTable[TokenArrays]):
    """Documents as ids; ``header["corpus"]`` says of what, with the SHA-256 of the texts."""

    kind = "documents"
    version = 1
    layout = TokenArrays

    def __iter__(self) -> Iterator[Array]:
        begin = 0
        for end in self.arrays.ends.tolist():
            yield self.arrays.tokens[begin:end]
            begin = end


def documentation(
    tokenizer: Any, cache_dir: Path, progress: Progress, max_tokens: int | None = None
) -> Corpus:
    """The documentation installed here; its ids come from the cache where they are there.

    Raises:
        ArtifactError: the file in the cache is damaged.
    """
    # Other versions of the packages are another text.
    wanted = Artifact(STEM, f"{__name__}:build", command="", params={"sources": sources()})
    files = resolve.resolve(
        [wanted], tokenizer=tokenizer, bundled=True, cache_dir=cache_dir, progress=progress
    )
    documents = TokenizedDocuments.open(files[STEM], loading.tokenizer_hash(tokenizer))
    facts = dict(documents.header["corpus"])
    sha256 = facts.pop("sha256")
    return Corpus(facts, documents, lambda: sha256, max_tokens=max_tokens, progress=progress)


def build(tokenizer: Any, path: Path, progress: Progress, sources: dict[str, str]) -> None:
    """Read and tokenize; ``sources`` is what is installed, a part of the file's name."""
    # Sources differ in size by a hundred times, so files are counted and not sources.
    n_files = {name: len(_files(name)) for name in sources}

    def texts() -> Iterator[str]:
        done = 0
        for name, fresh in installed_prose():
            yield from fresh
            done += n_files.get(name, 0)
            progress("reading installed documentation, files", done, sum(n_files.values()))

    facts = {
        "name": "installed_documentation",
        "description": "prose of docstrings, comments, help topics and package descriptions",
        "sources": sources,
    }
    sha = loading.tokenizer_hash(tokenizer)
    with KeptIds(path.with_name(f"{path.name}.tokens"), sha) as kept:
        corpus = Corpus.of_texts(facts, texts(), tokenizer, kept)
        # In memory: 20 MB for five million tokens.
        documents = [np.empty(0, dtype=np.int32), *corpus]
    ends = np.cumsum([len(ids) for ids in documents[1:]], dtype=np.int64)
    TokenizedDocuments(TokenArrays(np.concatenate(documents), ends)).write(
        path,
        tokenizer_hash=sha,
        header={"corpus": corpus.described()},
    )
