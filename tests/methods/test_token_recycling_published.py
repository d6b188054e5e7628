"""Token Recycling step by step against its published algorithm, restated with a dictionary."""

import json

import numpy as np
import pytest
import torch

from methods.token_recycling import TokenRecycling
from specbench.decoding.structs import DecodeState, DraftContext, StepOutcome
from specbench.paths import ASSETS

VOCABULARY, END, K = 24, 0, 8
FILES = {"template": "token_recycling_tree.json", "sam_60": "sam_token_recycling_tree.json"}


class Published:
    """Candidates of every token seen; a node is the candidate of its rank of its parent's token."""

    def __init__(self, name):
        self.paths = [tuple(p) for p in json.loads((ASSETS / FILES[name]).read_text())["paths"]]
        self.seen = {}

    def draft(self, root):
        tokens = {(): root}
        for path in self.paths:
            tokens[path] = self.seen.get(tokens[path[:-1]], [0] * K)[path[-1]]
        return [tokens[path] for path in self.paths]

    def step(self, root, draft, logits, limit):
        """Tokens that the step commits, at most ``limit``; learns unless the turn ends before."""
        at = {(): 0} | {path: i + 1 for i, path in enumerate(self.paths)}
        rows = [root, *draft]
        best = logits.argmax(-1).tolist()
        path = ()
        while (below := self._child(path, rows, at, best)) is not None:
            path = below
        accepted = [rows[at[path[: n + 1]]] for n in range(len(path))]
        bonus = best[at[path]]
        room = limit - len(accepted) - 1  # after the bonus
        if END in accepted or room < 0 or (room == 0 and bonus != END):
            return [*accepted, bonus][:limit], path
        for token, row in zip(rows, logits, strict=True):
            self.seen[token] = row.topk(K).indices.tolist()
        return [*accepted, bonus][:limit], path

    def _child(self, path, rows, at, best):
        for rank in range(K):
            below = (*path, rank)
            if below in at and rows[at[below]] == best[at[path]]:
                return below
        return None


@pytest.mark.parametrize("tree", FILES)
def test_every_step_is_the_published_one(tree):
    """Forty turns of one matrix; some end by the end token, as a bonus or among the accepted."""
    random = np.random.default_rng(7)
    # The next token depends on the last one, with some noise in the order of the others.
    likely = random.normal(0, 2.5, (VOCABULARY, VOCABULARY))
    likely[:, END] += 1.2
    ours, theirs = TokenRecycling(tree=tree), Published(tree)
    ours.setup(DraftContext(VOCABULARY, frozenset({END})))
    ours.reset()
    compared, ends = 0, {"bonus": 0, "accepted": 0}
    for _ in range(40):
        state = DecodeState(random.integers(1, VOCABULARY, 4), 40)
        state.commit(random.integers(1, VOCABULARY, 1))
        ours.begin(state)
        finished = False
        while not finished:
            root, draft = state.root, ours.propose(state)
            assert draft.tokens.tolist() == theirs.draft(root)
            compared += 1
            rows = np.array([root, *draft.tokens.tolist()])
            noise = random.normal(0, 0.7, (len(rows), VOCABULARY))
            logits = torch.from_numpy(likely[rows] + noise)
            committed, path = theirs.step(root, draft.tokens.tolist(), logits, state.remaining)
            cut = committed[: committed.index(END) + 1] if END in committed else committed
            nodes = [theirs.paths.index(path[: n + 1]) for n in range(len(path))]
            state.commit(np.array(cut))
            finished = END in cut or not state.remaining
            if END in cut:
                ends["bonus" if len(cut) > len(path) else "accepted"] += 1
            ours.observe(
                state,
                StepOutcome(draft, np.array(nodes, dtype=np.int64), np.array(cut), None,
                            logits=logits, finished=finished),
            )  # fmt: skip
    assert compared >= 200
    assert min(ends.values()) >= 2
