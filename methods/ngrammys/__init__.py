"""N-Grammys: k drafts of w tokens from the text's n-grams and the model's own bigrams.

Paper: "The N-Grammys: Accelerating Autoregressive Inference with Learning-Free Batched
    Speculation", arXiv 2411.03786. There is no repository; its appendix B has listings, which
    differ from the text in places (below). We implement the text, except for the unigram.
Strategies:
    unigram          k single tokens by the model's embeddings only; the same at every step.
    bigram           k single tokens, most probable after the last one alone.
    extended_bigram  the same k, each continued to w tokens by the bigram's best next token.
    context          continuations of the last q tokens in the text, w tokens each, most frequent
                     first, ties to the later one; only whole windows count.
    mixed            as many context rows as there are, the rest extended bigrams: the paper's.
Layouts: ``batch`` runs the k rows as a batch, each with the whole text in its own cache, as in the
    paper; ``tree`` runs the same rows as one tree below the root, which accepts the same tokens
    unless ``context`` finds fewer than k rows: the batch then repeats rows or the last token (MAT
    1.30 in the batch layout, 1.22 as a tree, on texts without matches).
Model table: next tokens after every single token, from running the model once over its vocabulary:
    on first use for the bundled model, otherwise by ``scripts/build_artifact.py``.
Where ours differs, and why:
    - Extended bigrams repeat the bigram's best token. The paper names greedy decoding with the
      model as the alternative and does not specify which it used.
    - ``bos: false``: the paper does not specify whether a begin token precedes the single token.
    - The listing of the context n-gram ignores recency and returns the query, too.
    - The unigram is the listing's, by an inner product: the text's, nearest to the mean output
      embedding, ranks rare words first (`rank_unigrams`).
    - A bigram row equal to a context row is replaced by the next best one.
    - If ``context`` finds fewer than k rows, the batch keeps its shape by repeating the last row,
      or the last token if there is none. A tree has only the rows found.
    - The first draft comes after the prompt's pass, as for every method here.
Example: ``k`` 3, ``w`` 2 after "a b c a d e a", where the model says f after a and g after f: the
    rows are "d e", the later one, "b c" and "f g".
State kept: none beyond the committed tokens, so the state scope has no effect.
Recorded for each step (``drafter`` in the records): the number of rows from either source, in run
    order (context first, best first), and the winning row's index among all rows, its source and
    its rank there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from methods.ngrammys.bigram_table import TOP, BigramTable
from methods.ngrammys.context_rows import context_rows, merge_rows, table_rows
from specbench.config.schema import Positive
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import (
    Artifact,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
    StepOutcome,
)
from specbench.errors import ConfigurationError

# Strategies that speculate a single token.
_SINGLE = ("unigram", "bigram")
_CONTEXT, _MODEL = 0, 1


class _StepRows(NamedTuple):
    """The rows of one step: the text's n-grams first, either source's best first."""

    context: int
    model: int
    winner: int  # row of the accepted path (the first of equal rows), -1 for none
    accepted: int  # draft tokens


@dataclass(kw_only=True, eq=False)
class NGrammys(Drafter):
    """N-Grammys: k drafts of w tokens from the text's n-grams and the model's bigrams.

    Attributes:
        strategy: ``unigram``, ``bigram``, ``extended_bigram``, ``context`` or ``mixed``.
        k: rows.
        w: tokens of a row; ``unigram`` and ``bigram`` have one.
        q: last tokens of the text that a context n-gram must begin with.
        layout: ``batch`` or ``tree``.
        merge: in the tree, share the common beginnings of rows.
        bos: take the table built with the begin token before the single token.
        bigram_table: file of the model's table; None takes the one in the cache folder.
    """

    name: str = "ngrammys"
    strategy: Literal["unigram", "bigram", "extended_bigram", "context", "mixed"] = "mixed"
    k: Positive = 10
    w: Positive = 10
    q: Positive = 1
    layout: Literal["batch", "tree"] = "batch"
    merge: bool = True
    bos: bool = False
    bigram_table: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._width = 1 if self.strategy in _SINGLE else self.w
        self._rows_per_step: list[_StepRows] = []
        self._counts: tuple[int, int] | None = None
        self._owners = np.empty(0, dtype=np.int64)

    @property
    def source_names(self) -> tuple[str, ...]:
        return ("context", "unigram" if self.strategy == "unigram" else "bigram")

    @property
    def needs(self) -> Needs:
        top = max(TOP, self.k)
        bos = " --bos" if self.bos else ""
        wider = f" --top {top}" if top > TOP else ""
        table = Artifact(
            name="bigram_table",
            builder="methods.ngrammys.bigram_table:build",
            command=f"python scripts/build_artifact.py bigram_table --model MODEL{bos}{wider}",
            path=self.bigram_table,
            params={"top": top, "bos": self.bos},
            per_model=True,
        )
        return Needs(
            artifacts=() if self.strategy == "context" else (table,),
            layout=self.layout,
            batch=self.k if self.layout == "batch" else 1,
            max_nodes=self.k * self._width,
        )

    def setup(self, context: DraftContext) -> None:
        if self.strategy == "context":
            self._bigrams = np.zeros((1, 1), dtype=np.int32)
            self._unigrams = np.zeros(0, dtype=np.int32)
        else:
            table = self._open(context)
            self._bigrams, self._unigrams = table.bigrams, table.unigrams[: self.k]
        self._rows = np.zeros((self.k, self._width), dtype=np.int64)
        size = self.k * self._width
        self._nodes = np.empty((3, size), dtype=np.int64)
        indices = np.arange(size)
        self._chains = np.where(indices % self._width == 0, -1, indices - 1)
        self._row_of_node = indices // self._width
        # Compiles, or loads what was compiled before, outside any clock.
        state = DecodeState(np.zeros(self.q + self._width + 1, dtype=np.int64), 1)
        self.propose(state)
        merge_rows(self._rows, 1, self._width, *self._nodes)

    def _open(self, context: DraftContext) -> BigramTable:
        path = context.artifacts["bigram_table"]
        table = BigramTable.open(path, context.tokenizer_hash or None)
        vocab, top = table.bigrams.shape
        if vocab > context.vocab_size or top < min(self.k, vocab):
            raise ConfigurationError(
                f"{path} has {top} next tokens for each of {vocab} ids, but the run needs "
                f"method.k={self.k} of at most {context.vocab_size}: build it with --top {self.k}."
            )
        if table.bos != self.bos:
            raise ConfigurationError(
                f"{path} was built with bos={table.bos}, but the run asks for {self.bos}: set "
                f"method.bos={str(table.bos).lower()} or build a table for it."
            )
        if context.target is not None:
            table.check_model(context.target.fingerprint(), path)
        return table

    def reset(self) -> None:
        self._rows_per_step = []
        self._counts = None

    def begin(self, state: DecodeState) -> None:
        self.reset()

    def propose(self, state: DecodeState) -> DraftTree:
        from_text = count = 0
        if self.strategy in ("context", "mixed"):
            from_text = context_rows(state.buffer, state.length, self.q, self._width, self._rows)
            count = from_text
        if self.strategy != "context":
            firsts = self._unigrams if self.strategy == "unigram" else self._after(state.root)
            count = table_rows(self._bigrams, firsts, self._width, self._rows, count)
        self._counts = (from_text, count - from_text)
        if self.layout == "batch":
            return self._batch(state.root, from_text, count)
        return self._tree(from_text, count)

    def _after(self, root: int) -> np.ndarray:
        # Ids that only padding of the vocabulary has are not in the table.
        return self._bigrams[root] if root < len(self._bigrams) else self._unigrams[:0]

    def _batch(self, root: int, from_text: int, count: int) -> DraftTree:
        self._rows[count:] = self._rows[count - 1] if count else root
        sources = np.where(self._row_of_node < from_text, _CONTEXT, _MODEL)
        if self.strategy == "context":
            sources[:] = _CONTEXT
        self._owners = self._row_of_node
        return DraftTree(
            self._rows.reshape(-1).copy(), self._chains, rows=(self.k, self._width), sources=sources
        )

    def _tree(self, from_text: int, count: int) -> DraftTree:
        if self.merge:
            n = merge_rows(self._rows, count, self._width, *self._nodes)
            tokens, parents, owners = self._nodes[:, :n].copy()
        else:
            n = count * self._width
            tokens = self._rows.reshape(-1)[:n].copy()
            parents, owners = self._chains[:n], self._row_of_node[:n]
        self._owners = owners
        sources = np.where(owners < from_text, _CONTEXT, _MODEL)
        return DraftTree(tokens, parents, sources=sources)

    def report(self) -> Mapping[str, ReportValue]:
        context, model = self.source_names
        won = [self._origin(step) for step in self._rows_per_step]
        return {
            f"rows_{context}": [step.context for step in self._rows_per_step],
            f"rows_{model}": [step.model for step in self._rows_per_step],
            "won_row": [step.winner for step in self._rows_per_step],
            "won_source": [source for source, _ in won],
            "won_rank": [rank for _, rank in won],
            "accepted": [step.accepted for step in self._rows_per_step],
        }

    def _origin(self, step: _StepRows) -> tuple[str | None, int]:
        """Return the winning row's source and its index in that source's rows, or None and -1."""
        context, model = self.source_names
        if step.winner < 0:
            return None, -1
        if step.winner < step.context:
            return context, step.winner
        # The batch repeats its last row to keep its shape, and the first of equal rows wins.
        return model, step.winner - step.context

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if self._counts is None:  # a recorded turn is replayed: nothing was proposed
            return
        path = outcome.path
        winner = int(self._owners[path[-1]]) if len(path) else -1
        self._rows_per_step.append(_StepRows(*self._counts, winner, len(path)))
        self._counts = None
