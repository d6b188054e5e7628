"""A method with a draft model as one part of a union: others may commit beyond its own draft."""

import numpy as np
import pytest

from methods.card import Card
from methods.opt_tree import OptTree
from methods.ouroboros import Ouroboros
from methods.pearl import Pearl
from methods.sps import Sps
from methods.union import Union
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import GREEDY, Sampling
from specbench.decoding.structs import DraftContext, DraftTree
from specbench.decoding.verify import GreedyVerifier, RejectionVerifier
from specbench.errors import ConfigurationError
from tests.contract import driver
from tests.decoding.table_models import TableDraft, TableTarget, table
from tests.methods.table_turns import PROMPT, VOCAB

METHODS = driver.with_draft_model() | {
    "sps": lambda: Sps(gamma=3),
    "heuristic": lambda: Sps(gamma=2, schedule="heuristic", max_gamma=5),
    "opt_tree": lambda: OptTree(nodes=8, threshold=0.0, max_depth=3),
    "card": lambda: Card(k=4, r=3, max_depth=8),
    "card_uncorrected": lambda: Card(k=4, r=3, max_depth=8, correct=False),
    "pearl": lambda: Pearl(gamma=3),
    "ouroboros": lambda: Ouroboros(gamma=2, ngram=3, window=3, guesses=3, topk=1),
}


class Lucky(Drafter):
    """Knows the next tokens now and then, many of them at once."""

    def __init__(self, text):
        super().__init__(name="lucky")
        self.text = text

    def propose(self, state):
        done = state.length - state.n_prompt
        right = self.text[done : done + 15]
        if state.step % 4 < 2:
            return DraftTree.empty()
        if state.step % 4 == 2:
            right = [*right[:2], *((token + 1) % VOCAB for token in right[2:])]
        return DraftTree.chain(np.array(right, dtype=np.int64))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_a_part_follows_what_other_parts_commit(method, sampling):
    """The draft asserts that its cache holds the text and that nodes hang where they should."""
    verifier = GreedyVerifier() if sampling.greedy else RejectionVerifier(sampling)
    logits = table(0, VOCAB, 3.0)
    loop = Engine(TableTarget(logits), verifier, eos_ids=frozenset(), overlap="serial")
    for seed in range(3):
        plain = loop.decode(PROMPT, Drafter(name="ar"), max_new_tokens=80, seed=seed).output_ids
        drafter = Union(drafters=[METHODS[method](), Lucky(plain)])
        room = drafter.needs.draft_nodes
        draft = TableDraft(logits + 0.8 * table(1, VOCAB), max_nodes=room)
        drafter.setup(DraftContext(VOCAB, frozenset(), sampling=sampling, draft_model=draft))
        drafter.reset()
        result = loop.decode(PROMPT, drafter, max_new_tokens=80, seed=seed)
        assert result.output_ids == plain
        name = METHODS[method]().name
        assert min(result.drafter["found_by_lucky"], result.drafter[f"found_by_{name}"]) > 0
        assert max(result.committed_per_step) > 10


@pytest.mark.parametrize("method", METHODS)
def test_a_union_reserves_what_its_part_does(method):
    part = METHODS[method]()
    needs = Union(drafters=[part, Drafter(name="ar")], max_nodes=5).needs
    assert needs.draft_nodes == (part.needs.draft_nodes or part.needs.max_nodes)


def test_two_parts_with_a_draft_model_are_refused():
    with pytest.raises(ConfigurationError, match=r"cannot hold sps and card together: .* cache"):
        Union(drafters=[Sps(), Card()])
