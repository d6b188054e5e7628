"""Installed documentation as token ids: read and tokenized once for every file made from it.

Reading and tokenizing take nine tenths of the time that a frozen table takes, and a sweep over
leader and follower lengths needs a table for each pair of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specbench.arrays import Array
from specbench.artifacts import resolve
from specbench.artifacts.corpora import add_texts, documentation, sources
from specbench.artifacts.resolve import Progress
from specbench.decoding.structs import Artifact
from specbench.models import loading
from specbench.storage.arrays import ArrayTable

STEM = "documentation"
# Raised when the same packages give other ids.
BUILDER_VERSION = 1


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


class _Collected:
    """Ids of the documents so far, in memory: 20 MB for five million tokens."""

    def __init__(self) -> None:
        self.n_documents = self.n_tokens = 0
        self._documents: list[Array] = []
        self._ends: list[int] = []

    def add(self, tokens: list[int]) -> None:
        self._documents.append(np.asarray(tokens, dtype=np.int32))
        self.n_documents += 1
        self.n_tokens += len(tokens)
        self._ends.append(self.n_tokens)

    def arrays(self) -> TokenArrays:
        tokens = np.concatenate([np.empty(0, dtype=np.int32), *self._documents])
        return TokenArrays(tokens, np.array(self._ends, dtype=np.int64))


def tokenized_documentation(
    tokenizer: Any, cache_dir: Path, progress: Progress | None
) -> TokenizedDocuments:
    """The documentation installed here in the tokenizer's ids, from the cache where it is there.

    Raises:
        ArtifactError: the file in the cache is damaged.
    """
    # Other versions of the packages are another text.
    builder = f"{__name__}:build_default"
    wanted = Artifact(STEM, builder, command="", params={"sources": sources()})
    found = resolve.resolve(
        [wanted], tokenizer=tokenizer, bundled=True, cache_dir=cache_dir, progress=progress
    )
    return TokenizedDocuments.open(found[STEM], loading.tokenizer_hash(tokenizer))


def build_default(
    tokenizer: Any, out_path: Path, progress: Progress | None, sources: dict[str, str]
) -> None:
    """Read and tokenize; ``sources`` is what is installed, a part of the file's name."""
    texts, corpus = documentation(progress)
    found = _Collected()
    text_hash = add_texts(texts, tokenizer, found)
    TokenizedDocuments(found.arrays()).write(
        out_path,
        tokenizer_hash=loading.tokenizer_hash(tokenizer),
        header={"corpus": {**corpus, "sources": sources, "sha256": text_hash}},
    )
