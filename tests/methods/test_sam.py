import numpy as np
import pytest

from methods.pld import PromptLookup
from methods.sam import SuffixAutomatonDecoding
from methods.sam.static_automaton import DocumentAutomaton
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import (
    NO_TOKENS,
    Artifact,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)
from specbench.errors import ConfigurationError
from tests.conftest import VOCAB

DYNAMIC, STATIC, AUXILIARY = 0, 1, 2


def context(path=None, tokenizer_hash="toy", **more):
    files = {"static_automaton": path} if path else {}
    return DraftContext(VOCAB, frozenset(), tokenizer_hash, 512, {**files, **more})


@pytest.fixture
def static(tmp_path):
    """Write static automata of documents; the vocabulary's last id ends them."""

    def write(documents, vocabulary=VOCAB):
        built = DocumentAutomaton(vocabulary - 1)
        for document in documents:
            built.add(document)
        path = tmp_path / "static.bin"
        built.finish(vocabulary).write(path, tokenizer_hash="toy", header={})
        return path

    return write


def ready(path=None, **knobs):
    knobs.setdefault("automata", "both" if path else "dynamic")
    drafter = SuffixAutomatonDecoding(**knobs)
    drafter.setup(context(path))
    drafter.reset()
    return drafter


def after(drafter, text):
    """Return the state in which the last token of ``text`` is the first new one."""
    state = DecodeState(np.array(text[:-1], dtype=np.int64), 50)
    state.commit(np.array(text[-1:]))
    drafter.begin(state)
    return state


def drafted(tree):
    return tree.tokens.tolist(), tree.parents.tolist(), tree.sources.tolist()


# -- alone -----------------------------------------------------------------------------------------


def test_a_new_turn_starts_with_its_own_prompt():
    drafter = ready()
    after(drafter, [1, 2, 3, 1])
    assert len(drafter.propose(after(drafter, [4, 1]))) == 0


def test_a_long_text_is_forgotten_by_halves():
    drafter = ready(max_tokens=8)
    state = after(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1])
    assert len(drafter.propose(state)) == 0
    state = after(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 9, 7])
    assert drafter.propose(state).tokens.tolist() == [8, 9]


# -- with an auxiliary -----------------------------------------------------------------------------


CALLS = (
    *("setup", "reset", "set_reference", "observe_prompt", "begin"),
    *("overlap", "observe", "end", "close"),
)


class Spy(Drafter):
    """Drafts one token and notes every other call with its arguments."""

    def __init__(self):
        super().__init__(name="spy")
        self.calls = []
        for name in CALLS:
            setattr(self, name, lambda *given, name=name: self.calls.append((name, *given)))

    @property
    def needs(self):
        file = Artifact("table", "methods.cacheback.frozen_table:build", "make it")
        return Needs(
            tokens_only=False, logits=True, prompt_logits=True, reference=True, overlap=True,
            hidden_layers=(3,), sampling=False, max_nodes=7, artifacts=(file,),
        )  # fmt: skip

    def propose(self, state):
        return DraftTree(np.array([9]), np.array([-1]), sources=np.array([4]))


def test_short_chains_are_padded_only_with_pad_token():
    text = [1, 2, 1, 2]
    knobs = {"len_threshold": 2, "max_predicts": 6}
    tree = (plain_one := ready(auxiliary=PromptLookup(), **knobs)).propose(after(plain_one, text))
    assert tree.tokens.tolist() == [1]
    padded = ready(auxiliary=PromptLookup(), pad_token=0, **knobs)
    assert padded.propose(after(padded, text)).tokens.tolist() == [1, 0, 0, 0, 0]


def test_the_auxiliary_gets_every_call_and_its_own_files(tmp_path, static):
    spy = Spy()
    drafter = SuffixAutomatonDecoding(auxiliary=spy)
    needs = drafter.needs
    assert [a.name for a in needs.artifacts] == ["static_automaton", "part0.table"]
    assert (needs.tokens_only, needs.logits, needs.prompt_logits) == (False, True, True)
    assert (needs.reference, needs.overlap, needs.sampling) == (True, True, False)
    assert (needs.hidden_layers, needs.max_nodes) == ((3,), 39)
    drafter.setup(context(static([[1]]), **{"part0.table": tmp_path}))
    drafter.reset()
    drafter.set_reference(NO_TOKENS)
    drafter.observe_prompt(NO_TOKENS, None)
    state = after(drafter, [1, 2])
    tree = drafter.propose(state)
    assert tree.sources.tolist() == [AUXILIARY]
    drafter.overlap(state, tree)
    state.commit(np.array([9, 3]))
    drafter.observe(state, StepOutcome(tree, np.array([0]), np.array([9, 3]), None))
    drafter.end(state)
    drafter.close()
    assert tuple(name for name, *_ in spy.calls) == CALLS
    assert spy.calls[0][1].artifacts == {"table": tmp_path}
    # Its own sources, not ours.
    observed = spy.calls[CALLS.index("observe")][2].tree
    assert (len(observed), observed.sources.tolist()) == (1, [4])


# -- bad input -------------------------------------------------------------------------------------


def test_a_pad_token_outside_the_vocabulary_is_refused():
    drafter = SuffixAutomatonDecoding(automata="dynamic", pad_token=VOCAB)
    with pytest.raises(ConfigurationError, match="pad_token"):
        drafter.setup(context())
