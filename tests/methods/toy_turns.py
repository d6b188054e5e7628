"""Turns decoded with a drafter: by a target that is a plain function, and by a tiny model."""

import numpy as np

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DecodeState, StepOutcome
from specbench.decoding.verify import GreedyVerifier
from specbench.decoding.verify.greedy import longest_match

NO_AUX = np.empty(0, dtype=np.bool_)


def pairs(tree):
    """Return token and parent of every node."""
    return list(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))


def markov_rule(seed, vocab_size=6, order=2):
    """Make a target whose next token depends on the last ``order`` tokens: it soon repeats."""
    table = np.random.default_rng(seed).integers(0, vocab_size, vocab_size**order)

    def rule(text):
        state = 0
        for token in text[-order:]:
            state = state * vocab_size + token
        return int(table[state])

    return rule


def continued(rule, prompt, n):
    """Continue ``prompt`` by ``rule``, one token after the other."""
    text = list(prompt)
    for _ in range(n):
        text.append(rule(text))
    return text[len(prompt) :]


def play(drafter, prompt, n, rule):
    """Play a turn against ``rule``; return the output, and each step's tokens and tree."""
    state = DecodeState(np.array(prompt, dtype=np.int64), n)
    state.commit(np.array([rule(list(prompt))], dtype=np.int64))
    drafter.begin(state)
    steps = []
    while state.remaining > 0:
        tree = drafter.propose(state)
        assert len(tree) <= drafter.needs.max_nodes
        text = state.tokens.tolist()
        branches, next_tokens = [], [rule(text)]
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            branches.append((branches[parent] if parent >= 0 else []) + [token])
            next_tokens.append(rule(text + branches[-1]))
        choices = np.array(next_tokens, dtype=np.int64)
        path = np.empty(len(tree), dtype=np.int64)
        aux = NO_AUX if tree.aux is None else tree.aux
        path = path[: longest_match(tree.tokens, tree.parents, aux, choices, path)]
        last = path[-1] + 1 if len(path) else 0
        committed = np.concatenate((tree.tokens[path], choices[last : last + 1]))
        committed = committed[: state.remaining]
        state.commit(committed)
        state.step += 1
        drafter.observe(
            state, StepOutcome(tree, path, committed, choices, finished=state.remaining == 0)
        )
        steps.append((committed.tolist(), tree))
    drafter.end(state)
    return state.new_tokens.tolist(), steps


def decode(target, drafter, prompt, n, eos=frozenset()):
    """Decode one turn with the engine; the drafter must be set up, and reset if needed."""
    engine = Engine(target, GreedyVerifier(), eos_ids=eos)
    return engine.decode(prompt, drafter, max_new_tokens=n)


def plain(target, prompt, n, eos=frozenset()):
    """Decode greedily without drafts."""
    return decode(target, Drafter(name="ar"), prompt, n, eos).output_ids
