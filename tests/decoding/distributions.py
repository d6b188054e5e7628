"""Exact distributions of sampled texts, many trials at once, and statistics to compare them by.

Everything is small enough to be known exactly: a vocabulary of six tokens, and models whose next
token depends on the last two. The distribution of every text of four tokens is then a table.

How far to trust a comparison:

- *False alarms.* Seeds are fixed, so a test passes or fails for good. Were they drawn anew, a right
  verifier's smallest p of one comparison would be below ``P_LEAST`` with a probability of at most
  ``P_LEAST`` times the distributions compared (five). The suites make fewer than 100 comparisons,
  so all of them together would raise a false alarm in at most 100 * 5 * 2e-5 = 1 % of all choices
  of seeds.
- *Small cells.* Texts that are expected fewer than five times are counted together, with the next
  rarest ones until five are expected there too. A text that cannot occur must not.
"""

import itertools

import numpy as np
import torch
from scipy import stats

from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import Sampling, Uniforms, sample
from specbench.decoding.structs import DraftTree, Proposal
from tests.conftest import engine
from tests.decoding import table_models
from tests.decoding.table_models import TableTarget

VOCAB = 6
N_TOKENS = 4  # of a text: the first from the prompt's pass, then three of steps
P_LEAST = 2e-5
TRIALS = 20_000
PROMPT = np.array([3, 1], dtype=np.int64)
SAMPLINGS = {
    "cold": Sampling(0.3),
    "warm": Sampling(1.0),
    "hot": Sampling(1.5),
    "top_p": Sampling(1.0, top_p=0.8),
    "top_k": Sampling(1.5, top_k=3),
    "both": Sampling(1.0, top_p=0.7, top_k=4),
}


def table(seed):
    """``[VOCAB] * 3`` logits by the last two tokens."""
    return table_models.table(seed, VOCAB)


# -- drafts ----------------------------------------------------------------------------------------

CHAIN, PAIRS, BUSH = (-1, 0, 1), (-1, -1, 0, 0, 1, 2), (-1, -1, -1, 0, 0, 1, 2, 2, 3)
# name: (parents, how children are chosen, the draft's logits, its sampling where not the target's)
DRAFTS = {
    "chain": (CHAIN, "replacement", table(1), None),
    "with": (BUSH, "replacement", table(1), None),
    "without": (BUSH, "without", table(1), None),
    "top": (BUSH, "top", table(1), None),
    # draws repeat, and without replacement soon run out of tokens
    "duplicates": (PAIRS, "replacement", table(2), Sampling(0.2)),
    "exhausted": (BUSH, "without", table(2), Sampling(1.0, top_k=2)),
    "equal": (PAIRS, "replacement", table(0), None),
    "equal_without": (PAIRS, "without", table(0), None),
    "disjoint": (PAIRS, "replacement", -20 * table(0), Sampling(1.0, top_k=1)),
}
DRAWN = [name for name, draft in DRAFTS.items() if draft[1] != "top"]


class TreeDrafts(Drafter):
    """A tree of fixed shape, its tokens drawn from a draft table or (``top``) the likeliest."""

    def __init__(self, parents, kind, logits, sampling):
        super().__init__(name="tree_drafts")
        self.parents, self.kind = np.array(parents, dtype=np.int64), kind
        self.q = sampling.probs(logits)
        self.host_q = self.q.double().numpy()

    @staticmethod
    def named(draft, sampling):
        """One of ``DRAFTS`` for a target with this sampling."""
        parents, kind, logits, own_sampling = DRAFTS[draft]
        return TreeDrafts(parents, kind, logits, own_sampling or sampling)

    def begin(self, state):
        self.random = np.random.default_rng(state.seed)

    def draw(self, before, last):
        """``[m, n]`` tokens of a tree behind each of m texts that end in ``before, last [m]``."""
        trials = np.arange(len(last))
        befores, lasts = [before], [last]
        elders = {}
        for parent in self.parents.tolist():
            q = self.host_q[befores[parent + 1], lasts[parent + 1]].copy()
            taken = elders.setdefault(parent, [])
            if self.kind == "top":  # a function of the context: the next likeliest token
                token = np.argsort(-q, axis=1, kind="stable")[:, len(taken)]
            else:
                if self.kind == "without":
                    for elder in taken:
                        q[trials, elder] = 0
                mass = q.cumsum(1)
                # where nothing is left to draw, any token: the verifier must pass it over
                reach = mass[:, -1:] * (1 - self.random.random((len(last), 1)))
                token = (mass < reach).sum(1)
            taken.append(token)
            befores.append(lasts[parent + 1])
            lasts.append(token)
        return np.stack(lasts[1:], 1)

    def rows(self, before, last, tokens):
        """``[m, n, VOCAB]`` what each node was drawn from."""
        contexts = contexts_of(before, last, tokens, self.parents)[:, self.parents + 1]
        return self.q[contexts[..., 0], contexts[..., 1]]

    def propose(self, state):
        before, last = state.tokens[-2:-1], state.tokens[-1:]
        tokens = self.draw(before, last)
        if self.kind == "top":
            return DraftTree(tokens[0], self.parents)
        rows = self.rows(before, last, tokens)[0]
        proposal = Proposal(rows, np.arange(len(rows)), self.kind == "replacement")
        return DraftTree(tokens[0], self.parents, probs=proposal)


def contexts_of(before, last, tokens, parents):
    """``[m, n + 1, 2]`` the last two tokens at the root and every node of m trees."""
    pairs = [np.stack([before, last], 1)]
    for node, parent in enumerate(parents.tolist()):
        pairs.append(np.stack([pairs[parent + 1][:, 1], tokens[:, node]], 1))
    return np.stack(pairs, 1)


# -- trials ----------------------------------------------------------------------------------------


def turns(verifier, drafter, n, n_tokens, target_table=None, **options):
    """``[n, n_tokens]`` outputs of the engine, a seed each, and the tokens that a step commits."""
    target = TableTarget(table(0) if target_table is None else target_table)
    loop = engine(target, verifier, **options)
    outputs, steps = np.empty((n, n_tokens), dtype=np.int64), 0
    for seed in range(n):
        drafter.reset()
        result = loop.decode(PROMPT, drafter, max_new_tokens=n_tokens, seed=seed)
        outputs[seed] = result.output_ids
        steps += result.n_target_passes
    return outputs, n * (n_tokens - 1) / max(steps, 1)


def plain_turns(sampling, n, n_tokens, target_table=None, prompt=PROMPT):
    """What plain sampling with the verifiers' random numbers of each seed emits, text by text."""
    p = sampling.probs(table(0) if target_table is None else target_table)
    outputs = np.empty((n, n_tokens), dtype=np.int64)
    numbers = Uniforms()
    for seed in range(n):
        numbers.begin(seed)
        text = prompt.tolist()
        for i in range(n_tokens):
            row = p[text[-2], text[-1]][None]
            text.append(int(sample(row, torch.from_numpy(numbers.take(1)))))
            outputs[seed, i] = text[-1]
    return outputs


# -- distributions --------------------------------------------------------------------------------


def distribution_of(sampling, target_table=None):
    """``[VOCAB] * N_TOKENS`` the exact probability of every text."""
    p = sampling.probs((table(0) if target_table is None else target_table).double()).numpy()
    joint = np.zeros((VOCAB,) * N_TOKENS)
    for ids in itertools.product(range(VOCAB), repeat=N_TOKENS):
        text = [*PROMPT.tolist(), *ids]
        joint[ids] = np.prod([p[text[i], text[i + 1], text[i + 2]] for i in range(N_TOKENS)])
    return joint


def chi_square(seen, expected):
    """Statistic and degrees of freedom; infinite where something impossible was seen."""
    seen, expected = seen.reshape(-1), expected.reshape(-1)
    if seen[expected <= 0].any():
        return np.inf, 1
    seen, expected = seen[expected > 0], expected[expected > 0]
    order = np.argsort(expected, kind="stable")
    seen, expected = seen[order], expected[order]
    few = int((expected < 5).sum())
    if few:  # the rare ones together, and with them the next rarest until five are expected
        few = min(max(few, int(np.searchsorted(expected.cumsum(), 5)) + 1), len(expected))
        seen = np.append(seen[few:], seen[:few].sum())
        expected = np.append(expected[few:], expected[:few].sum())
    return float(((seen - expected) ** 2 / expected).sum()), max(len(expected) - 1, 0)


def p_value(seen, joint):
    """How likely a statistic at least as large is, for counts of texts by ``joint``."""
    statistic, freedom = chi_square(seen, joint * seen.sum())
    return float(stats.chi2.sf(statistic, freedom)) if freedom else float(statistic < np.inf)


def worst_p(outputs, joint):
    """The smallest p over texts of the first 1, 2, 3, … tokens; ``joint`` is the longest's."""
    counts = np.zeros_like(joint)
    np.add.at(counts, tuple(outputs[:, : joint.ndim].T), 1)
    rest = [tuple(range(n, joint.ndim)) for n in range(1, joint.ndim + 1)]
    return min(p_value(counts.sum(axes), joint.sum(axes)) for axes in rest)


def transitions_p(outputs, sampling, target_table=None):
    """Test a token given the two before it, over all positions of all turns together."""
    p = sampling.probs((table(0) if target_table is None else target_table).double()).numpy()
    prompt = np.broadcast_to(PROMPT, (len(outputs), len(PROMPT)))
    text = np.concatenate([prompt, outputs], 1)
    seen = np.zeros((VOCAB,) * 3)
    np.add.at(seen, (text[:, :-2], text[:, 1:-1], text[:, 2:]), 1)
    tests = [
        chi_square(seen[a, b], p[a, b] * seen[a, b].sum())
        for a, b in np.ndindex(VOCAB, VOCAB)
        if seen[a, b].sum()
    ]
    return float(stats.chi2.sf(sum(s for s, _ in tests), sum(f for _, f in tests)))
