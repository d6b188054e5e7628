"""Building frozen tables from texts: the default of the bundled model, and any corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from methods.cacheback.frozen_table import FrozenTable
from methods.cacheback.ngram_counts import CHUNK, WindowCounter, frequent_followers
from specbench.artifacts.corpora import add_texts
from specbench.artifacts.documentation import tokenized_documentation
from specbench.artifacts.resolve import Progress
from specbench.models import loading

STEM = "frozen_table"
# Raised when the same text gives another table: every machine then builds again.
BUILDER_VERSION = 1


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

    def fill(counter: WindowCounter) -> Mapping[str, Any]:
        digest = add_texts(texts, tokenizer, counter, max_tokens=max_tokens, progress=counting)
        return {**corpus, "sha256": digest}

    width = leader_len + follower_len
    counter = WindowCounter(width, len(tokenizer), chunk=chunk, keep=keep_windows, seed=seed)
    table, header = _filled(counter, fill, leader_len, leader_capacity, follower_capacity, progress)
    return table, {**header, "keep_windows": keep_windows, "seed": seed}


def _filled(
    counter: WindowCounter,
    fill: Callable[[WindowCounter], Mapping[str, Any]],
    leader_len: int,
    leader_capacity: int,
    follower_capacity: int,
    progress: Progress | None,
) -> tuple[FrozenTable, dict[str, Any]]:
    """The table of what ``fill`` adds to the counter; it returns facts about that."""

    def choosing(done: int, total: int) -> None:
        if progress is not None:
            progress("choosing followers", done, total)

    with counter:
        corpus = fill(counter)
        table = frequent_followers(
            counter, leader_len, leader_capacity, follower_capacity, choosing
        )
    return table, {
        "builder_version": BUILDER_VERSION,
        "corpus": dict(corpus),
        "leader_capacity": leader_capacity,
        "follower_capacity": follower_capacity,
        "keep_windows": 1.0,
        "seed": 0,
        "n_documents": counter.n_documents,
        "n_tokens": counter.n_tokens,
        "n_windows": counter.n_windows,
    }


def build_default(
    tokenizer: Any,
    out_path: Path,
    progress: Progress | None,
    *,
    leader_len: int,
    follower_len: int,
    leader_capacity: int,
    follower_capacity: int,
    cache_dir: Path | None = None,
) -> None:
    """The bundled model's table, from the prose of installed documentation, in under a minute.

    The documentation's ids are kept in ``cache_dir`` (by default the one that ``out_path`` is in),
    so that tables of other lengths take seconds.
    """
    documents = tokenized_documentation(tokenizer, cache_dir or out_path.parent.parent, progress)

    def fill(counter: WindowCounter) -> Mapping[str, Any]:
        for ids in documents:
            counter.add(ids)
        corpus: Mapping[str, Any] = documents.header["corpus"]
        return corpus

    table, header = _filled(
        WindowCounter(leader_len + follower_len, len(tokenizer)),
        fill,
        leader_len,
        leader_capacity,
        follower_capacity,
        progress,
    )
    table.write(out_path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header=header)
