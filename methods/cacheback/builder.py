"""Builds frozen tables: by default from installed documentation, else from any corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from methods.cacheback.ngram_counts import CHUNK, WindowCounter, frequent_followers
from specbench.artifacts.corpora import Corpus
from specbench.artifacts.documentation import documentation
from specbench.models import loading

STEM = "frozen_table"
# Raised when the same text gives another table: every machine then builds again.
BUILDER_VERSION = 1


def build(
    tokenizer: Any,
    path: Path,
    *,
    leader_len: int,
    follower_len: int,
    leader_capacity: int,
    follower_capacity: int,
    corpus: Corpus | None = None,
    keep_windows: float = 1.0,
    seed: int = 0,
    chunk: int = CHUNK,
) -> None:
    """Count a corpus and write what is frequent.

    Args:
        corpus: None takes installed documentation, whose ids are kept in the cache folder that
            ``path`` is in, so that tables of other lengths take seconds.
        keep_windows: probability that a window is counted.
        seed: of that choice.
        chunk: windows sorted at once; bounds the memory.
    """
    if corpus is None:
        corpus = documentation(tokenizer, path.parent.parent)
    width = leader_len + follower_len
    with WindowCounter(width, len(tokenizer), chunk=chunk, keep=keep_windows, seed=seed) as counter:
        for ids in corpus:
            counter.add(ids)
        table = frequent_followers(counter, leader_len, leader_capacity, follower_capacity)
    header = {
        "builder_version": BUILDER_VERSION,
        "corpus": corpus.described(),
        "leader_capacity": leader_capacity,
        "follower_capacity": follower_capacity,
        "keep_windows": keep_windows,
        "seed": seed,
        "n_documents": counter.n_documents,
        "n_tokens": counter.n_tokens,
        "n_windows": counter.n_windows,
    }
    table.write(path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header=header)
