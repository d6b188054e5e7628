"""Toy files of made-up text: methods that draft from a file are timed without the real one.

A toy has the real file's format and is opened by the same code, but holds little: what a look-up
in a datastore of gigabytes costs is not seen with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from methods.cacheback.ngram_counts import WindowCounter, frequent_followers
from methods.ngrammys.bigram_table import BigramTable
from methods.rest.builder import build_datastore
from methods.sam.builder import DocumentAutomaton
from specbench.arrays import IntArray
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import Artifact
from specbench.models.checkpoints.weights import sample_weights

TOKENIZER = "toy"  # in place of a tokenizer's hash
HEADER = {"corpus": {"name": "toy", "description": "made-up text of a few words"}}


class ToyFiles:
    """Builds what drafters need, each file once.

    Args:
        folder: where the files are put.
        model: the target; its table of next tokens names it, but is made up too.
        texts: documents of ids.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, texts: list[IntArray]) -> None:
        self._folder = folder
        self._model = model
        self._texts = texts
        self._vocab = len(model.get_output_embeddings().weight)
        self._made: dict[str, Path] = {}

    def files(self, drafter: Drafter) -> dict[str, Path]:
        """Paths by ``Artifact.name``.

        Raises:
            ValueError: there is no toy of a file that it needs.
        """
        return {file.name: self._file(file) for file in drafter.needs.artifacts}

    def _file(self, artifact: Artifact) -> Path:
        key = f"{artifact.builder} {sorted(artifact.params.items())}"
        if key not in self._made:
            path = self._folder / f"toy-{len(self._made)}.bin"
            kind = artifact.builder.split(".")[1]
            makers: dict[str, Any] = {
                "cacheback": self._frozen_table,
                "ngrammys": self._bigram_table,
                "rest": self._datastore,
                "sam": self._automaton,
            }
            if kind not in makers:
                raise ValueError(f"no toy is made of {artifact.name} (by {artifact.builder})")
            makers[kind](path, **artifact.params)
            self._made[key] = path
        return self._made[key]

    def _frozen_table(self, path: Path, **shape: int) -> None:
        with WindowCounter(shape["leader_len"] + shape["follower_len"], self._vocab) as counter:
            for text in self._texts:
                counter.add(text)
            table = frequent_followers(
                counter, shape["leader_len"], shape["leader_capacity"], shape["follower_capacity"]
            )
        table.write(path, tokenizer_hash=TOKENIZER, header=HEADER)

    def _bigram_table(self, path: Path, *, top: int, bos: bool) -> None:
        words = np.unique(np.concatenate(self._texts))[:top]
        random = np.random.default_rng(0)
        # Running the model on every id, as the real one is built, would take minutes.
        after = random.permuted(np.tile(words, (self._vocab, 1)), axis=1)
        table: Any = BigramTable(
            after.astype(np.int32), words.astype(np.int32), sample_weights(self._model), bos
        )
        table.write(path, tokenizer_hash=TOKENIZER, header=HEADER)

    def _datastore(self, path: Path) -> None:
        build_datastore(
            self._texts, path, tokenizer_hash=TOKENIZER, corpus=HEADER["corpus"],
            vocab_size=self._vocab,
        )  # fmt: skip

    def _automaton(self, path: Path) -> None:
        documents = DocumentAutomaton()
        for text in self._texts:
            documents.add(text)
        automaton = documents.finish(self._vocab)
        automaton.write(path, tokenizer_hash=TOKENIZER, header=HEADER)
