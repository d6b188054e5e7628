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
from specbench.artifacts.corpora import Corpus, progress_bar, tokenized
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


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text that read like English, each on one line."""
    for block in _BLANK_LINE.split(text):
        pieces = block.split()
        paragraph = " ".join(pieces)
        plain = sum(_WORD.fullmatch(piece) is not None for piece in pieces)
        if len(paragraph) >= _SHORTEST and plain >= _SHARE_OF_WORDS * len(pieces):
            yield paragraph


def sources() -> dict[str, str]:
    """List the sources on this machine, with versions."""
    installed = (name for name in PACKAGES if importlib.util.find_spec(name) is not None)
    versions = {name: importlib.metadata.version(name) for name in installed}
    return {"python": platform.python_version(), **versions}


def installed_prose() -> Iterator[tuple[str, list[str]]]:
    """Yield name and paragraphs of each source; no paragraph comes twice."""
    seen: set[str] = set()
    for name in sources():
        source = dict.fromkeys(p for text in _texts(name) for p in paragraphs(text))
        fresh = [paragraph for paragraph in source if paragraph not in seen]
        seen.update(fresh)
        yield name, fresh


def _texts(name: str) -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    if name == "python":
        # Some systems package it apart.
        if importlib.util.find_spec("pydoc_data") is not None:
            from pydoc_data.topics import topics

            yield from (topics[key] for key in sorted(topics))
    else:
        # The description only: the other fields are names and version numbers.
        yield str(importlib.metadata.metadata(name).json.get("description", ""))
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            return
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


class TokenArrays(NamedTuple):
    """Documents, concatenated."""

    tokens: Array  # [total] int32
    ends: Array  # [n] int64, where each document ends


class TokenizedDocuments(ArrayTable[TokenArrays]):
    """Documents as ids; ``header["corpus"]`` describes their source."""

    kind = "documents"
    version = 1
    layout = TokenArrays

    def __iter__(self) -> Iterator[Array]:
        return iter(np.split(self.arrays.tokens, self.arrays.ends[:-1]))


def documentation(tokenizer: Any, cache_dir: Path, max_tokens: int | None = None) -> Corpus:
    """Read the documentation installed here; its ids come from the cache if they are there.

    Raises:
        ArtifactError: the file in the cache is damaged.
    """
    # Other versions of the packages have other texts.
    artifact = Artifact(STEM, f"{__name__}:build", command="", params={"sources": sources()})
    files = resolve.resolve([artifact], tokenizer=tokenizer, bundled=True, cache_dir=cache_dir)
    documents = TokenizedDocuments.open(files[STEM], loading.tokenizer_hash(tokenizer))
    return Corpus(documents.header["corpus"], documents, max_tokens)


def build(tokenizer: Any, path: Path, sources: dict[str, str]) -> None:
    """Read and tokenize; ``sources``: the installed ones, a part of the file's name."""
    prose = progress_bar("reading", " packages", len(sources), installed_prose())
    texts = (text for _, fresh in prose for text in fresh)
    # In memory: 20 MB for five million tokens.
    documents = [np.asarray(ids, dtype=np.int32) for ids in tokenized(texts, tokenizer)]
    tokens = np.concatenate([np.empty(0, dtype=np.int32), *documents])
    ends = np.cumsum([len(ids) for ids in documents], dtype=np.int64)
    facts = {
        "name": "installed_documentation",
        "description": "prose of docstrings, comments, help topics and package descriptions",
        "sources": sources,
    }
    TokenizedDocuments(TokenArrays(tokens, ends)).write(
        path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header={"corpus": facts}
    )
