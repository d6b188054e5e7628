"""Building frozen tables from texts: the default of the bundled model, and any corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from specbench.artifacts.corpora import documentation
from specbench.artifacts.resolve import Progress
from specbench.index.lru.frozen_table import FrozenTable
from specbench.index.lru.ngram_counts import CHUNK, WindowCounter, frequent_followers
from specbench.models import loading

STEM = "frozen_table"
# Raised when the same text gives another table: every machine then builds again.
BUILDER_VERSION = 1

# Texts tokenised at once: enough for the tokenizer's threads, little enough to stay small.
_BATCH = 512


def count_texts(
    texts: Iterable[str],
    tokenizer: Any,
    counter: WindowCounter,
    *,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Tokenise ``texts`` (one is one document, without special tokens) and count their windows.

    Args:
        counter: where the windows are counted.
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
            counter.add(ids)
        if progress is not None:
            progress(counter.n_documents, counter.n_tokens)
        if max_tokens is not None and counter.n_tokens >= max_tokens:
            break
    return digest.hexdigest()


def sample_documents(texts: Iterable[str], share: float, seed: int) -> Iterator[str]:
    """Each text with probability ``share``, drawn from ``seed``."""
    random = np.random.default_rng(seed)
    return (text for text in texts if share >= 1.0 or random.random() < share)


def build_from_texts(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    leader_len: int,
    follower_len: int,
    leader_capacity: int,
    follower_capacity: int,
    corpus: Mapping[str, Any],
    keep_windows: float = 1.0,
    max_tokens: int | None = None,
    seed: int = 0,
    chunk: int = CHUNK,
    progress: Progress | None = None,
) -> tuple[FrozenTable, dict[str, Any]]:
    """Count texts and keep what is frequent.

    Args:
        corpus: JSON-ready facts about the texts, for the header.
        keep_windows: probability that a window is counted.
        max_tokens: stop after about so many tokens.
        seed: of that choice.
        chunk: windows sorted at once; bounds the memory.

    Returns:
        The table and the header to write it with.
    """

    def counting(n_documents: int, n_tokens: int) -> None:
        if progress is not None:
            progress("counting tokens", n_tokens, max_tokens or 0)

    def choosing(done: int, total: int) -> None:
        if progress is not None:
            progress("choosing followers", done, total)

    width = leader_len + follower_len
    with WindowCounter(width, len(tokenizer), chunk=chunk, keep=keep_windows, seed=seed) as counter:
        text_hash = count_texts(texts, tokenizer, counter, max_tokens=max_tokens, progress=counting)
        table = frequent_followers(
            counter, leader_len, leader_capacity, follower_capacity, choosing
        )
    header = {
        "builder_version": BUILDER_VERSION,
        "corpus": {**corpus, "sha256": text_hash},
        "leader_capacity": leader_capacity,
        "follower_capacity": follower_capacity,
        "keep_windows": keep_windows,
        "seed": seed,
        "n_documents": counter.n_documents,
        "n_tokens": counter.n_tokens,
        "n_windows": counter.n_windows,
    }
    return table, header


def build_default(tokenizer: Any, out_path: Path, progress: Progress | None, **params: Any) -> None:
    """The bundled model's table, from the prose of installed documentation, in under a minute."""
    texts, corpus = documentation(progress)
    table, header = build_from_texts(texts, tokenizer, corpus=corpus, **params)
    table.write(out_path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header=header)
