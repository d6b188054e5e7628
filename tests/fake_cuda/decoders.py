"""Targets, drafters and their decoding on a device, as runs put them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from methods.card import Card
from methods.dflash import DFlash
from methods.eagle import Eagle, Eagle2, Eagle3
from methods.hydra_heads import Hydra
from methods.medusa import Medusa
from methods.opt_tree import OptTree
from methods.ouroboros import Ouroboros
from methods.pearl import Pearl
from methods.pld import PromptLookup
from methods.random_drafts import RandomDrafts
from methods.sps import Sps
from methods.token_recycling import TokenRecycling
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.lossless import audit_output
from specbench.decoding.structs import DraftContext, DraftTree
from specbench.decoding.turn import DecodeResult
from specbench.decoding.verify import GreedyVerifier, Verifier
from specbench.kernels.cuda_graphs import GraphRecorder, Recorded
from specbench.models.checks.audit_tolerance import calibrate
from specbench.models.draft.model import DraftModel
from specbench.models.graph_target import GraphTarget
from specbench.models.heads.layer_shape import read_shape
from specbench.models.target import Target
from tests.conftest import VOCAB, tiny_model
from tests.fake_cuda.memory import RuleBroken
from tests.models.heads import tiny_heads

DEVICE, SECOND = "cuda:0", "cuda:1"
EOS = frozenset({2})
FUSED = partial(GraphTarget, fused=True)  # as runs have it
PROMPT = np.random.default_rng(0).integers(3, VOCAB, 40)
TOKENS = 24
LATE = "a capture in a text"  # a rule of ours: a turn that waits for one is timed

TEXT: dict[str, Callable[[], Drafter]] = {
    "plain": lambda: Drafter(name="plain"),
    "pld": PromptLookup,
    "random_drafts": lambda: RandomDrafts(name="random_drafts", n_nodes=20),
    "token_recycling": TokenRecycling,
}
DRAFTED: dict[str, Callable[[], Drafter]] = {
    "sps": lambda: Sps(gamma=3),
    "confidence": lambda: Sps(gamma=4, confidence=0.3),
    "opt_tree": lambda: OptTree(nodes=12, threshold=0.1, max_depth=4),
    "pearl": lambda: Pearl(gamma=3),
    "card": lambda: Card(k=6, r=3, max_depth=12),
    "ouroboros": lambda: Ouroboros(gamma=3, ngram=3, window=4, guesses=4, topk=2),
}
HEADS: dict[str, Callable[[], Drafter]] = {
    "medusa": lambda: Medusa(levels=[3, 4, 2]),
    "ddtree": lambda: Medusa(tree="dynamic", nodes=9),
    "hydra": lambda: Hydra(levels=[3, 4, 2]),
    "eagle": lambda: Eagle(levels=[3, 4, 2]),
    "eagle2": lambda: Eagle2(total=9, depth=2, top_k=3),
    "eagle3": lambda: Eagle3(total=9, depth=2, top_k=3),
    "dflash": lambda: DFlash(tree="dynamic", nodes=9),
    "dspark": lambda: DFlash(name="dspark", head="dspark"),
}


def model(device: str = DEVICE, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    return tiny_model("llama", dtype=dtype, **options).to(device)


def target(
    *, engine: Callable[..., Target] = FUSED, device: str = DEVICE,
    dtype: torch.dtype = torch.float64, **sizes: Any,
) -> Target:  # fmt: skip
    return engine(model(device, dtype), **({"max_len": 128, "max_nodes": 127} | sizes))


def draft(drafter: Drafter, device: str = DEVICE, dtype: torch.dtype = torch.float64) -> DraftModel:
    """Another model than the target, on the graph engine."""
    nodes = drafter.needs.draft_nodes or drafter.needs.max_nodes
    network = model("cpu", dtype, seed=1)
    network.lm_head.weight.data.mul_(8)  # more certain than random weights: deep trees pay
    fixed = FUSED(network.to(device), max_len=128 + nodes, max_nodes=nodes, drafts=True)
    return DraftModel(fixed, target_vocab=VOCAB, max_nodes=nodes)


def heads(folder: Path) -> dict[str, Path]:
    """Checkpoints of all heads, that fit the tiny model."""
    shape = read_shape(tiny_model("llama").config.to_dict(), "llama")
    return tiny_heads.save_each(folder, VOCAB, shape)


def decode(
    where: Any, drafter: Drafter, *, verifier: Verifier | None = None, turns: int = 1,
    tokens: int = TOKENS, overlap: str = "auto", **given: Any,
) -> DecodeResult:  # fmt: skip
    """Decode some turns, each from a fresh state; heads may record graphs in the first one only.

    Raises:
        RuleBroken: another graph was recorded while a prompt was decoded.
    """
    context = DraftContext(vocab_size=VOCAB, eos_ids=EOS, max_len=128, target=where)
    drafter.setup(replace(context, **given))
    if (layers := drafter.needs.hidden_layers) and isinstance(where, GraphTarget):
        where.expect(layers)
    engine = Engine(where, verifier or GreedyVerifier(), eos_ids=EOS, overlap=overlap)
    try:
        for turn in range(turns):
            drafter.reset()
            with recorded_graphs() as graphs:
                result = engine.decode(PROMPT, drafter, max_new_tokens=tokens)
            for recorder, name in graphs:
                if turn or recorder is where:
                    raise RuleBroken(LATE, name)
    finally:
        drafter.close()
    return result


@contextmanager
def recorded_graphs() -> Iterator[list[tuple[GraphRecorder, str]]]:
    """List the graphs recorded within: their recorders and names."""
    graphs: list[tuple[GraphRecorder, str]] = []
    record = GraphRecorder.record

    def recording(self: GraphRecorder, call: Recorded, name: str) -> bool:
        graphs.append((self, name))
        return record(self, call, name)

    with mock.patch.object(GraphRecorder, "record", recording):
        yield graphs


class Plain:
    """The output of plain decoding on the CPU in a number format.

    Attributes:
        ids: its tokens.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._target = Target(model("cpu", dtype), max_len=128)
        self.ids = decode(self._target, Drafter(name="plain")).output_ids
        self._tolerance = calibrate([self._target], [PROMPT]).value
        self._rounded = dtype.itemsize < 4

    def check(self, output_ids: list[int], name: str = "") -> None:
        """Assert that the output is its own; in half precision all differences are near ties."""
        if self._rounded and output_ids != self.ids:
            text = PROMPT.tolist(), output_ids, self.ids
            assert audit_output(self._target, *text, self._tolerance).verdict == "near_tie", name
        else:
            assert output_ids == self.ids, name


plain = cache(Plain)


def drafts(
    where: Any, drafter: Drafter, plain: Plain, **given: Any
) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Collect a drafter's trees, each after a step that accepted none to five tokens.

    Keys are the number of calls and of output tokens so far.

    Every other tree is verified, and right tokens in place of the others: so paths of all lengths
    are read, whether it drafts well or badly. At one step in six it is not called, as in a union,
    where unread tokens must stay unharmed.
    """
    trees: dict[tuple[int, int], tuple[Any, ...]] = {}
    propose = drafter.propose
    n_calls = 0

    def recording(state: Any) -> DraftTree:
        nonlocal n_calls
        n_calls += 1
        n, done = n_calls % 6, state.length - state.n_prompt
        right = np.array(plain.ids[done : done + n], dtype=np.int64)
        if n != 2:
            tree = propose(state)
            tokens, survival = torch.as_tensor(tree.tokens).tolist(), tree.path_probs
            if state.tokens[state.n_prompt :].tolist() == plain.ids[:done]:
                trees[n_calls, done] = tokens, tree.parents.tolist(), survival
        return tree if n % 2 else DraftTree.chain(right[: state.remaining - 1])

    drafter.propose = recording  # type: ignore[method-assign]
    plain.check(decode(where, drafter, turns=2, **given).output_ids)
    return trees
