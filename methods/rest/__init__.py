"""REST: drafts a tree of what follows the text's last tokens in a large corpus.

Paper: "REST: Retrieval-Based Speculative Decoding", NAACL 2024, arXiv 2311.08252.
Reference code studied: FasterDecoding/REST 50a5fc1 (``DraftRetriever``) and its copy in Spec-Bench
    fd2c1cd (``model/rest``).
Datastore: a corpus with its suffix array, built beforehand by ``scripts/build_artifact.py``:
    UltraChat, which the paper and Spec-Bench search for chat, or ShareGPT, the reference's small
    store, or The Stack's Python for code. For the bundled model it is made on first use from the
    English of installed documentation (``specbench.artifacts.documentation``). The file's header,
    the run's manifest and every record name the corpus.
A step: the last 16 tokens are looked up, then 15, … 2, until some chunk of the datastore has them;
    the prefixes of up to 5000 continuations of each chunk are counted, the 64 most frequent kept,
    and cut so that their distinct tokens sum up to 64 at most. If a chunk has more matches, the
    first in lexicographic order are taken, whose continuations all begin alike. ``matches: even``
    is ours: evenly spaced ones.
Where ours differs, and why:
    - A chunk has 2^25 tokens (the reference: 2^29), so that it can be sorted in little memory; a
      large store has more of them, and each gives 5000 matches. ``--chunk`` changes it.
    - Equally frequent prefixes are taken shorter ones first, then in lexicographic order, and the
      cut drops the last of equals; the reference leaves both to a hash table's order, so that two
      of its runs differ.
    - A continuation ends with its document; the reference puts no separator between documents.
    - Without a match nothing is drafted (``dummy_token: null``; the reference: token 100).
      The first draft comes after the prompt's pass, as for every method here.
    - Ids are 32 bits wide (the reference: 16), and the file is mapped, not read into memory.
    - ``cut: false`` is ours: shared prefixes are then counted once, and the tree
      holds 64 nodes.
Example: the corpus holds "a b c", "a b c" and "a b d": after "x a b" the tree is c and d below the
    root, c first.
State kept: none beyond the committed tokens, so the state scope changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from methods.rest.datastore import Datastore
from specbench.config.schema import Count, Positive
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import (
    Artifact,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
)
from specbench.draft_structures.suffix_array import retrieve_tree


@dataclass(kw_only=True, eq=False)
class Retrieval(Drafter):
    """REST: drafts a tree of what follows the last tokens in a large corpus.

    Attributes:
        max_span: tokens looked up first.
        min_span: tokens looked up last.
        max_matches: continuations taken from a chunk of the datastore at most (k).
        matches: which matches are taken if there are more: ``first`` or ``even``.
        draft_len: tokens of a continuation.
        choices: prefixes kept, and nodes of the tree at most.
        cut: apply the reference's ``cut_to_choices``.
        dummy_token: id drafted where nothing matches; None drafts nothing.
        datastore: file of the datastore; None takes the one in the cache folder.
        store_tokens: about how many tokens of its corpus that one holds; None: all.
    """

    name: str = "rest"
    version: int = 2
    max_span: int = 16
    min_span: Positive = 2
    # The rank of a prefix packs its count, depth and position into 64 bits.
    max_matches: Annotated[int, Ge(1), Le(2**20)] = 5000
    matches: Literal["first", "even"] = "first"
    draft_len: Annotated[int, Ge(1), Le(255)] = 10
    choices: Positive = 64
    cut: bool = True
    dummy_token: Count | None = None
    datastore: str | None = None
    store_tokens: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = self.store_tokens is None or self.datastore is None
        self._require(whole, "store_tokens", "null where datastore names a file")
        longer = self.max_span >= self.min_span
        self._require(longer, "max_span", f"at least min_span={self.min_span}")
        self._no_match = DraftTree.empty()

    @property
    def needs(self) -> Needs:
        size = {} if self.store_tokens is None else {"store_tokens": self.store_tokens}
        command = "python scripts/build_artifact.py datastore --model MODEL --corpus ultrachat"
        file = Artifact(
            name="datastore",
            builder="methods.rest.datastore:build",
            command=" ".join([command, *(f"--store-tokens {n}" for n in size.values())]),
            path=self.datastore,
            params=size,
        )
        return Needs(artifacts=(file,), max_nodes=self.choices)

    def setup(self, context: DraftContext) -> None:
        if self.dummy_token is not None:
            inside = self.dummy_token < context.vocab_size
            self._require(inside, "dummy_token", f"below {context.vocab_size}")
            self._no_match = DraftTree.chain(np.array([self.dummy_token], dtype=np.int64))
        path = context.artifacts["datastore"]
        store = Datastore.open(path, context.tokenizer_hash or None)
        self._store, self._corpus = store.arrays, store.header["corpus"].get("name")
        rows = self.max_matches * (len(self._store.offsets) - 1)
        self._rows = np.empty((rows, self.draft_len), dtype=np.int32)
        self._sizes = np.empty(rows, dtype=np.int64)
        self._tokens = np.empty(self.choices, dtype=np.int64)
        self._parents = np.empty(self.choices, dtype=np.int64)
        # Compiles, or loads what was compiled before, outside any clock.
        self.propose(DecodeState(np.zeros(self.min_span, dtype=np.int64), 1))

    def propose(self, state: DecodeState) -> DraftTree:
        count, _ = retrieve_tree(
            *self._store,  # tokens, suffixes, offsets
            state.buffer,
            state.length,
            self.max_span,
            self.min_span,
            self.max_matches,
            self.matches == "even",
            self.choices,
            self.cut,
            self._rows,
            self._sizes,
            self._tokens,
            self._parents,
        )
        if count == 0:
            return self._no_match
        return DraftTree(self._tokens[:count].copy(), self._parents[:count].copy())

    def report(self) -> Mapping[str, ReportValue]:
        return {"corpus": self._corpus}
