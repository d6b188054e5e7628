from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.cacheback import Cacheback
from methods.lookahead import Lookahead
from methods.pld import PromptLookup
from methods.sam import SuffixAutomatonDecoding
from methods.suffix_decoding import SuffixDecoding
from methods.token_recycling import TokenRecycling
from methods.union import Union
from specbench.config.entries import with_parts
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
from tests.methods.toy_turns import decode, plain


@dataclass(kw_only=True, eq=False)
class Fixed(Drafter):
    """Always the same tree; notes what it sees."""

    tree: DraftTree
    required: Needs = field(default_factory=Needs)
    seen: list = field(default_factory=list)
    overlapped: list = field(default_factory=list)
    artifacts: dict = field(default_factory=dict)

    @property
    def needs(self):
        return self.required

    def setup(self, context):
        self.artifacts = dict(context.artifacts)

    def propose(self, state):
        return self.tree

    def overlap(self, state, tree):
        self.overlapped.append(tree)

    def observe(self, state, outcome):
        self.seen.append(outcome)


def fixed(tokens, parents, name="part", required=None, **more):
    tree = DraftTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64), **more)
    return Fixed(name=name, tree=tree, required=required or Needs())


def ready(*parts, **knobs):
    drafter = Union(drafters=list(parts), **knobs)
    drafter.setup(DraftContext(VOCAB, frozenset(), max_len=256))
    drafter.reset()
    return drafter


def begin(drafter):
    state = DecodeState(np.array([1, 2]), 20)
    state.commit(np.array([3]))
    drafter.begin(state)
    return state


def drafted(tree):
    return tree.tokens.tolist(), tree.parents.tolist(), tree.sources.tolist()


# -- merging ---------------------------------------------------------------------------------------


def test_cheap_paths_of_all_parts_go_first():
    a = fixed([1, 2, 3, 4], [-1, -1, -1, 0])
    b = fixed([5, 6], [-1, 0])
    drafter = ready(a, b, max_nodes=5)
    # Costs: 1 and 5 0.5, 4 and 6 1, 2 1.5, 3 2.5.
    assert drafted(drafter.propose(begin(drafter))) == (
        [1, 5, 4, 6, 2],
        [-1, -1, 0, 1, -1],
        [0, 1, 0, 1, 0],
    )
    # A level as dear as two siblings: 1 and 5 2, 2 3, 3 and 4 4, 6 4.
    drafter = ready(a, b, max_nodes=5, depth_cost=2.0)
    assert drafter.propose(begin(drafter)).tokens.tolist() == [1, 5, 2, 3, 4]


def test_priority_is_by_name_and_sources_count_the_parts_as_listed():
    a, b = fixed([1, 2], [-1, 0], name="a"), fixed([1, 3], [-1, 0], name="b")
    drafter = ready(a, b, priority=["b"], fill="priority")
    assert drafter.source_names == ("a", "b")
    assert drafted(drafter.propose(begin(drafter))) == ([1, 3, 2], [-1, 0, 0], [1, 1, 0])


def test_quotas_limit_places_not_shared_nodes():
    a = fixed([1, 2, 3], [-1, 0, 1])
    b = fixed([1, 2, 4, 5], [-1, 0, 1, 2])
    drafter = ready(a, b, quotas=[2, 1], fill="priority")
    assert drafted(drafter.propose(begin(drafter))) == ([1, 2, 4], [-1, 0, 1], [0, 0, 1])


def test_auxiliary_nodes_are_never_shared_and_go_first():
    window = np.array([False, True, True])
    a = fixed([5, 5, 6], [-1, -1, 1], aux=window)
    b = fixed([5], [-1])
    drafter = ready(b, a)
    tree = drafter.propose(begin(drafter))
    assert tree.tokens.tolist() == [5, 6, 5]
    assert tree.parents.tolist() == [-1, 0, -1]
    assert tree.aux.tolist() == [True, True, False]
    assert tree.sources.tolist() == [1, 1, 0]


def paths(tokens, parents):
    result = []
    for token, parent in zip(tokens, parents, strict=True):
        result.append((*(result[parent] if parent >= 0 else ()), token))
    return result


@st.composite
def trees(draw):
    n = draw(st.integers(0, 12))
    tokens = [draw(st.integers(0, 3)) for _ in range(n)]
    return tokens, [draw(st.integers(-1, i - 1)) for i in range(n)]


@given(
    drafts=st.lists(trees(), min_size=1, max_size=4),
    max_nodes=st.integers(1, 40),
    fill=st.sampled_from(["ranked", "priority"]),
    depth_cost=st.floats(0.1, 3.0),
)
def test_the_merged_tree_is_a_trie_of_the_parts(drafts, max_nodes, fill, depth_cost):
    parts = [fixed(tokens, parents) for tokens, parents in drafts]
    drafter = ready(*parts, max_nodes=max_nodes, fill=fill, depth_cost=depth_cost)
    state = begin(drafter)
    tree = drafter.propose(state)
    merged = paths(tree.tokens.tolist(), tree.parents.tolist())
    part_paths = [set(paths(*draft)) for draft in drafts]
    everything = set().union(*part_paths)
    assert len(set(merged)) == len(merged) == min(max_nodes, len(everything))
    assert set(merged) <= everything
    for path, source in zip(merged, tree.sources.tolist(), strict=True):
        assert source == next(i for i, paths_of in enumerate(part_paths) if path in paths_of)
    # What each part sees of any outcome is true of its own nodes.
    rows = {(): 0} | {path: i + 1 for i, path in enumerate(merged)}
    choices = np.arange(100, 101 + len(tree))
    for node, path in enumerate(merged):
        accepted = [merged.index(path[: i + 1]) for i in range(len(path))]
        assert accepted[-1] == node
        outcome = StepOutcome(tree, np.array(accepted), np.array([9]), choices)
        drafter.observe(state, outcome)
        for part, (tokens, parents) in zip(parts, drafts, strict=True):
            seen = part.seen.pop()
            seen_paths = paths(seen.tree.tokens.tolist(), seen.tree.parents.tolist())
            assert seen_paths == [p for p in paths(tokens, parents) if p in rows]
            assert seen.next_tokens.tolist() == [100] + [100 + rows[p] for p in seen_paths]
            known_part = [p for i in range(len(path)) if (p := path[: i + 1]) in seen_paths]
            assert [seen_paths[i] for i in seen.path] == known_part
            for above, below in zip([-1, *seen.path], seen.path, strict=False):
                assert seen.tree.parents[below] == above


# -- outcomes --------------------------------------------------------------------------------------


def test_each_part_sees_the_rows_it_needs():
    a = fixed([5, 6], [-1, 0], "a", required=Needs(logits=True), sources=np.array([3, 4]))
    b = fixed([7, 5, 8], [-1, -1, 1], "b", required=Needs(hidden_layers=(2,), tree_hidden=True))
    c = fixed([9], [-1], "c")
    drafter = ready(a, b, c, fill="priority", max_nodes=4)
    state = begin(drafter)
    tree = drafter.propose(state)
    assert tree.tokens.tolist() == [5, 6, 7, 8]
    rows = np.arange(5)[:, None] * np.ones(3)
    state.commit(np.array([5, 8, 1]))
    outcome = StepOutcome(
        tree,
        np.array([0, 3]),
        np.array([5, 8, 1]),
        np.array([5, 8, 0, 0, 1]),
        logits=rows,
        hidden={2: rows[[0, 1, 4]], 4: rows[[0, 1, 4]]},
        tree_hidden={2: rows, 4: rows},
        finished=True,
    )
    drafter.observe(state, outcome)
    (seen,) = a.seen
    assert seen.tree is a.tree
    assert seen.path.tolist() == [0] and seen.committed.tolist() == [5, 8, 1] and seen.finished
    assert seen.logits[:, 0].tolist() == [0, 1, 2]
    assert seen.hidden is None and seen.tree_hidden is None
    (seen,) = b.seen
    assert seen.path.tolist() == [1, 2]
    assert seen.next_tokens.tolist() == [5, 0, 8, 1]
    assert seen.tree_hidden[2][:, 0].tolist() == [0, 3, 1, 4] and list(seen.tree_hidden) == [2]
    # Of what all parts have had accepted, its own tokens or not.
    assert seen.hidden[2][:, 0].tolist() == [0, 1, 4] and list(seen.hidden) == [2]
    assert seen.logits is None
    (seen,) = c.seen  # its only node was beyond the budget
    assert (len(seen.tree), len(seen.path), seen.next_tokens.tolist()) == (0, 0, [5])
    # 5 was in both, and is credited to the first; 8 only b had.
    credited = {"accepted_from_a": 1, "accepted_from_b": 1, "accepted_from_c": 0}
    assert drafter.report() == credited | {"found_by_a": 1, "found_by_b": 2, "found_by_c": 0}
    drafter.begin(state)
    assert set(drafter.report().values()) == {0}


def test_a_tree_that_the_engine_cut_is_cut_for_the_parts_too():
    a, b = fixed([5, 6], [-1, 0]), fixed([7, 8], [-1, 0])
    drafter = ready(a, b)
    state = begin(drafter)
    tree = drafter.propose(state)
    cut = DraftTree(tree.tokens[:3], tree.parents[:3], sources=tree.sources[:3])
    assert cut.tokens.tolist() == [5, 7, 6]
    drafter.observe(state, StepOutcome(cut, NO_TOKENS, np.array([1]), np.arange(4)))
    assert a.seen[0].tree is a.tree
    assert b.seen[0].tree.tokens.tolist() == [7]
    assert b.seen[0].next_tokens.tolist() == [0, 2]


def test_overlap_goes_to_the_parts_that_need_it():
    a = fixed([5, 6], [-1, 0], required=Needs(overlap=True))
    b = fixed([7], [-1])
    drafter = ready(b, a, max_nodes=2)
    state = begin(drafter)
    drafter.overlap(state, drafter.propose(state))
    assert [tree.tokens.tolist() for tree in a.overlapped] == [[5]]
    assert b.overlapped == []


def test_needs_are_those_of_all_parts_and_files_are_kept_apart(tmp_path):
    def table(path):
        return Artifact("table", "methods.cacheback.frozen_table:build", "make it", path)

    a = fixed([1], [-1], required=Needs(artifacts=(table("a"),), max_nodes=300, reference=True))
    b = fixed([1], [-1], required=Needs(artifacts=(table("b"),), tokens_only=False, logits=True))
    drafter = Union(drafters=[a, b], max_nodes=9)
    needs = drafter.needs
    assert {f.name: f.path for f in needs.artifacts} == {"part0.table": "a", "part1.table": "b"}
    assert (needs.max_nodes, needs.tokens_only) == (9, False)
    assert needs.reference and needs.logits and not needs.prompt_logits
    files = {"part0.table": tmp_path / "a", "part1.table": tmp_path / "b"}
    drafter.setup(DraftContext(VOCAB, frozenset(), artifacts=files))
    assert a.artifacts == {"table": tmp_path / "a"}
    assert b.artifacts == {"table": tmp_path / "b"}


# -- in a decode loop ------------------------------------------------------------------------------


def real_parts():
    return [
        Cacheback(table="dynamic"),
        SuffixAutomatonDecoding(automata="dynamic"),
        SuffixDecoding(depth=16, state_scope="prompt"),
        PromptLookup(),
    ]


def test_lossless_on_tiny_models(make_target, rng):
    target = make_target("mistral_window")
    prompt = np.tile(rng.integers(0, VOCAB, 6), 2)
    truth = plain(target, prompt, 40)
    drafter = ready(
        TokenRecycling(learn_prompt=True),
        Lookahead(window=3, ngram=3, guesses=3),
        *real_parts(),
        max_nodes=40,
    )
    result = decode(target, drafter, prompt, 40)
    assert result.output_ids == truth
    assert result.n_aux > 0
    drafter.reset()
    assert decode(target, drafter, prompt, 40).drafted_per_step == result.drafted_per_step


@pytest.mark.parametrize(
    "make",
    [
        lambda: TokenRecycling(breadth=20, depth=4),
        lambda: Lookahead(window=3, ngram=3, guesses=3),
        lambda: Cacheback(table="dynamic", total_draft_len=30, chaining_reserved=4, merge=True),
        lambda: SuffixDecoding(state_scope="prompt"),
    ],
)
def test_a_union_of_one_accepts_what_its_part_accepts(make, make_target, rng):
    target = make_target("llama")
    prompt = np.tile(rng.integers(0, VOCAB, 6), 2)
    alone, inside = make(), make()
    alone.setup(DraftContext(VOCAB, frozenset(), max_len=256, target=target))
    alone.reset()
    drafter = Union(drafters=[inside], max_nodes=40)
    drafter.setup(DraftContext(VOCAB, frozenset(), max_len=256, target=target))
    drafter.reset()
    expected = decode(target, alone, prompt, 40)
    result = decode(target, drafter, prompt, 40)
    assert result.committed_per_step == expected.committed_per_step
    assert result.n_aux == expected.n_aux


# -- bad input -------------------------------------------------------------------------------------


def test_unresolved_names_are_no_drafters():
    with pytest.raises(ConfigurationError, match="cacheback"):
        _ = Union().needs


def test_a_part_in_the_batch_layout_is_refused():
    with pytest.raises(ConfigurationError, match="rows"):
        Union(drafters=[fixed([1], [-1], name="rows", required=Needs(layout="batch"))])


@pytest.mark.parametrize("lost_bonus", [True, False])
def test_a_window_that_was_left_whole_goes_on_when_candidates_are_cut(lost_bonus):
    """Lookahead's window inside a union with too little room for its guesses too.

    With the bonus lost a guess ends in an auxiliary node of its own, which may be cut as well.
    """
    part = Lookahead(window=3, ngram=3, guesses=9, lost_bonus=lost_bonus)
    union = ready(part, max_nodes=12)
    advanced = []
    real = part._window.advance
    part._window.advance = lambda tokens: (advanced.append(1), real(tokens))[1]
    random = np.random.default_rng(0)
    state = DecodeState(random.integers(0, 8, 40), 60)
    state.commit(np.array([3]))
    union.begin(state)
    for _ in range(40):
        tree = union.propose(state)
        choices = random.integers(0, 8, len(tree) + 1)
        state.commit(choices[:1])
        union.observe(state, StepOutcome(tree, NO_TOKENS, choices[:1], choices))
    assert len(advanced) == 40


def test_a_part_may_have_knobs():
    node = with_parts(
        {
            "name": "union",
            "drafters": ["cacheback", {"method": "ngrammys", "layout": "tree", "k": 4}],
        }
    )
    assert [part["name"] for part in node["drafters"]] == ["cacheback", "ngrammys"]
    assert (node["drafters"][1]["layout"], node["drafters"][1]["k"]) == ("tree", 4)
    with pytest.raises(ConfigurationError, match="no key 'kk'"):
        with_parts({"name": "union", "drafters": [{"method": "ngrammys", "kk": 4}]})
