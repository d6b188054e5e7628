"""Builds static automata: by default from installed documentation, else from any corpus.

As in the reference, every id of the vocabulary is a document of its own, too, each document ends
with the end token, and the automaton holds all of them as one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from methods.sam.automaton import SuffixAutomaton
from methods.sam.static_automaton import StaticAutomaton
from specbench.arrays import Array
from specbench.artifacts.corpora import Corpus
from specbench.artifacts.documentation import documentation
from specbench.models import loading

STEM = "static_automaton"
# Raised when the same text gives another automaton: every machine then builds again.
BUILDER_VERSION = 2


class DocumentAutomaton:
    """An automaton that documents are added to.

    Args:
        end_token: put after every document that does not end with it; None for nothing.

    Attributes:
        n_documents: documents added.
        n_tokens: their tokens, end tokens included.
    """

    def __init__(self, end_token: int | None = None) -> None:
        self.n_documents = 0
        self.n_tokens = 0
        self._end = [] if end_token is None else [end_token]
        self._growing = SuffixAutomaton()
        self._text = np.empty(1024, dtype=np.int64)

    def add(self, ids: Sequence[int] | Array) -> None:
        self.n_documents += 1
        self.n_tokens += self._append([*ids])

    def finish(self, vocab_size: int) -> StaticAutomaton:
        """Add every id below ``vocab_size`` as a document and freeze the automaton."""
        for i in range(vocab_size):
            self._append([i])
        return StaticAutomaton.freeze(self._growing, self._text[: len(self._growing)])

    def _append(self, ids: list[int]) -> int:
        """Add a document with its end; returns its tokens."""
        document = ids if ids[-1:] == self._end else [*ids, *self._end]
        begin = len(self._growing)
        end = begin + len(document)
        if end > len(self._text):
            self._text = np.resize(self._text, 2 * end)
        self._text[begin:end] = document
        self._growing.extend(self._text, begin, end)
        return len(document)


def build(tokenizer: Any, path: Path, *, corpus: Corpus | None = None) -> None:
    """Write the automaton of a corpus; None takes installed documentation."""
    if corpus is None:
        corpus = documentation(tokenizer, path.parent.parent)
    added = DocumentAutomaton(getattr(tokenizer, "eos_token_id", None))
    for ids in corpus:
        added.add(ids.tolist())
    header = {
        "builder_version": BUILDER_VERSION,
        "corpus": corpus.described(),
        "n_documents": added.n_documents,
        "n_tokens": added.n_tokens,
    }
    added.finish(len(tokenizer)).write(
        path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header=header
    )
