"""Building static automata from texts or token ids: the bundled model's default, and any corpus.

A document is a text, or ids (a prompt with its answer). As in the reference, every id of the
vocabulary is a document of its own, too, each document ends with the end token, and the automaton
is that of all of them as one text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from methods.sam.automaton import SuffixAutomaton
from methods.sam.static_automaton import StaticAutomaton
from specbench.arrays import Array
from specbench.artifacts.corpora import add_texts
from specbench.artifacts.documentation import tokenized_documentation
from specbench.artifacts.resolve import Progress
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


def build_from_texts(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    corpus: Mapping[str, Any],
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> tuple[StaticAutomaton, dict[str, Any]]:
    """The automaton of texts, each a document.

    Args:
        corpus: JSON-ready facts about the texts, for the header.
        max_tokens: stop after about so many tokens.

    Returns:
        The automaton and the header to write it with.
    """

    def adding(n_documents: int, n_tokens: int) -> None:
        if progress is not None:
            progress("adding tokens", n_tokens, max_tokens or 0)

    documents: Any = DocumentAutomaton(getattr(tokenizer, "eos_token_id", None))
    digest = add_texts(texts, tokenizer, documents, max_tokens=max_tokens, progress=adding)
    return _finished(documents, tokenizer, {**corpus, "sha256": digest}, progress)


def build_from_ids(
    documents: Iterable[Sequence[int] | Array],
    tokenizer: Any,
    *,
    corpus: Mapping[str, Any],
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> tuple[StaticAutomaton, dict[str, Any]]:
    """The automaton of token ids; see `build_from_texts`."""
    added = DocumentAutomaton(getattr(tokenizer, "eos_token_id", None))
    digest = hashlib.sha256()
    for ids in documents:
        digest.update(np.asarray([len(ids), *ids], dtype="<i8").tobytes())
        added.add(ids)
        if progress is not None:
            progress("adding tokens", added.n_tokens, max_tokens or 0)
        if max_tokens is not None and added.n_tokens >= max_tokens:
            break
    return _finished(added, tokenizer, {**corpus, "sha256": digest.hexdigest()}, progress)


def _finished(
    documents: DocumentAutomaton,
    tokenizer: Any,
    corpus: Mapping[str, Any],
    progress: Progress | None,
) -> tuple[StaticAutomaton, dict[str, Any]]:
    if progress is not None:
        progress("counting continuations", 0, 0)
    header = {
        "builder_version": BUILDER_VERSION,
        "corpus": dict(corpus),
        "n_documents": documents.n_documents,
        "n_tokens": documents.n_tokens,
    }
    return documents.finish(len(tokenizer)), header


def build_default(tokenizer: Any, out_path: Path, progress: Progress | None) -> None:
    """The bundled model's automaton, from the prose of installed documentation."""
    documents = tokenized_documentation(tokenizer, out_path.parent.parent, progress)
    added = DocumentAutomaton(getattr(tokenizer, "eos_token_id", None))
    for ids in documents:
        added.add(ids.tolist())
        if progress is not None:
            progress("adding tokens", added.n_tokens, 0)
    automaton, header = _finished(added, tokenizer, documents.header["corpus"], progress)
    automaton.write(out_path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header=header)
