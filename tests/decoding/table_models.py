"""Target and draft models that are tables: logits depend on the last two tokens alone.

Fast enough for the thousands of turns that a test of distributions takes. The draft checks what
the real one cannot: that its cache holds what was committed, and that nodes are where they are said
to be.
"""

import numpy as np
import torch

from specbench.models.scores import Scores
from tests.models.heads.tiny_heads import states_of


def table(seed: int, vocab_size: int, spread: float = 1.5) -> torch.Tensor:
    """``[vocab, vocab, vocab]`` random logits by the last two tokens."""
    numbers = np.random.default_rng(seed).normal(0, spread, (vocab_size,) * 3)
    return torch.from_numpy(numbers).float()


def plain_depths(parents) -> np.ndarray:
    """``[n + 1]`` depths of the root and of the nodes below it, one after another."""
    depths = [0]
    for parent in parents.tolist():
        depths.append(depths[parent + 1] + 1)
    return np.array(depths)


class TableTarget:
    """What the engine asks of a target."""

    device = torch.device("cpu")
    n_parameters = 10
    graph_tokens = 0

    def __init__(self, logits: torch.Tensor) -> None:
        self.table = logits

    def prefill(self, prompt, *, all_logits=False, hidden_layers=()):
        self.text = prompt.tolist()
        hidden = states_of(prompt, hidden_layers) if hidden_layers else None
        if all_logits:  # before the first token stands itself
            before = [self.text[0], *self.text[:-1]]
            return Scores(self.table[before, self.text], states=hidden)
        return Scores(self.table[self.text[-2], self.text[-1]][None], states=hidden)

    def forward(self, root, tree, *, hidden_layers=()):
        self.root = int(root)
        pairs = [(self.text[-1], self.root)]
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            assert -1 <= parent < len(pairs) - 1
            pairs.append((pairs[parent + 1][1], token))
        before, last = zip(*pairs, strict=True)
        hidden = states_of(last, hidden_layers) if hidden_layers else None
        depths = plain_depths(tree.parents)
        return Scores(self.table[list(before), list(last)], states=hidden, depths=depths)

    def commit(self, tree, path):
        self.text += [self.root, *(int(tree.tokens[i]) for i in path)]

    def free_rows(self):
        return 1000


class TableDraft:
    """``specbench.models.draft.model.DraftModel`` in the plainest form; nodes are whole texts."""

    device = torch.device("cpu")
    n_parameters = 1000
    context_length = None

    def __init__(self, logits: torch.Tensor, room: int = 10**6, max_nodes: int = 10**6) -> None:
        self.table, self.vocab_size, self._room = logits, len(logits), room
        self._max_nodes = max_nodes
        self.forwards = self.tokens = 0
        self.text: list[int] = []
        self.nodes: list[list[int]] = []
        self.fed: list[int] = []  # rows of every pass
        self._generator = torch.Generator()

    def begin(self, tokens, seed=0):
        self.forwards = self.tokens = 0
        self.text, self.nodes, self.fed = tokens.tolist(), [], []
        self._generator.manual_seed(seed + 77)

    def free_rows(self, length):
        return self._room - length

    def _logits(self, texts):
        return torch.stack([self.table[text[-2], text[-1]] for text in texts])

    def _count(self, rows):
        self.forwards += 1
        self.tokens += rows
        self.fed.append(rows)

    def likeliest(self, logits):
        return logits.argmax(-1)

    def expect_chain(self, count):
        pass

    def likeliest_chain(self, tokens, count):
        return None

    def catch_up(self, tokens, *, draft_vocab=False):
        self.nodes = []
        text = tokens.tolist()
        assert text[: len(self.text)] == self.text, "the cache holds another text"
        if len(text) > len(self.text):
            self._count(len(text) - len(self.text))
        self.text = text
        return self._logits([text])[0]

    def extend(self, tokens, parents, *, draft_vocab=False):
        first = len(self.nodes)
        for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
            assert -1 <= parent < len(self.nodes)
            self.nodes.append((self.text if parent < 0 else self.nodes[parent]) + [token])
        assert len(self.nodes) <= self._max_nodes
        self._count(len(tokens))
        return self._logits(self.nodes[first:])

    def catching_up(self, *args, **options):
        yield from ()
        return self.catch_up(*args, **options)

    def extending(self, *args, **options):
        yield from ()
        return self.extend(*args, **options)

    def commit_path(self, path, survivors=None):
        for node in path.tolist():
            assert self.nodes[node][:-1] == self.text, "not a path"
            self.text = self.nodes[node]
        retained = [] if survivors is None else [self.nodes[i] for i in survivors.tolist()]
        assert all(node[: len(self.text)] == self.text for node in retained)
        self.nodes = retained

    def drop_nodes(self):
        self.nodes = []

    def draw(self, probs):
        return torch.multinomial(probs, 1, generator=self._generator).squeeze(1)

    def to_target_ids(self, ids):
        return ids

    def to_target_vocab(self, values, fill=0.0):
        return values

    def report(self):
        return {"draft_forwards": self.forwards, "draft_tokens": self.tokens, "devices": 1}
