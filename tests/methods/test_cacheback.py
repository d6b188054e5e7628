import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.cacheback import Cacheback
from methods.cacheback.frozen_table import FrozenTable
from methods.cacheback.kernels import grow_tree, insert_windows, rechain
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftContext, DraftTree, StepOutcome
from specbench.errors import ArtifactError, ConfigurationError
from tests.methods.cacheback_reference import PlainFrozen, PlainTable, draft

VOCABULARY = 50


def write_frozen(path, entries, leader_len=1, follower_len=1, tokenizer_hash="toy"):
    leaders = sorted(entries)
    rows = [follower for leader in leaders for follower in entries[leader]]
    offsets = np.cumsum([0] + [len(entries[leader]) for leader in leaders])
    table = FrozenTable.from_followers(
        np.array(leaders, dtype=np.int32).reshape(-1, leader_len),
        offsets,
        np.array(rows, dtype=np.int32).reshape(-1, follower_len),
    )
    table.write(path, tokenizer_hash=tokenizer_hash, header={})
    return path


def ready(tmp_path, frozen=None, **knobs):
    """A drafter that is set up; ``frozen`` lists the entries of its frozen tables."""
    drafter = Cacheback(**knobs)
    files = {}
    for i, artifact in enumerate(drafter.needs.artifacts):
        params = artifact.params
        files[artifact.name] = write_frozen(
            tmp_path / f"{i}.bin", frozen[i], params["leader_len"], params["follower_len"]
        )
    drafter.setup(
        DraftContext(VOCABULARY, frozenset(), tokenizer_hash="toy", max_len=99, artifacts=files)
    )
    drafter.reset()
    return drafter


def after_prefill(drafter, prompt, first, max_new_tokens=50):
    state = DecodeState(np.array(prompt, dtype=np.int64), max_new_tokens)
    state.commit(np.array([first]))
    drafter.begin(state)
    return state


def commit(drafter, state, tokens):
    state.commit(np.array(tokens, dtype=np.int64))
    outcome = StepOutcome(DraftTree.empty(), NO_TOKENS, np.array(tokens, dtype=np.int64), None)
    drafter.observe(state, outcome)


def test_nothing_is_compiled_after_setup(tmp_path):
    kernels = (grow_tree, insert_windows, rechain)
    drafter = ready(tmp_path, frozen=[{(1,): [(2, 3, 4)]}])
    compiled = [len(kernel.signatures) for kernel in kernels]
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 3_000)
    state = after_prefill(drafter, prompt, 1)
    assert drafter._dynamic[0].n_followers > 1024, "the table has not grown"
    commit(drafter, state, [2, 3])
    assert len(drafter.propose(state)) > 0
    assert [len(kernel.signatures) for kernel in kernels] == compiled


def test_a_frozen_table_of_other_lengths_or_another_tokenizer_is_refused(tmp_path):
    path = write_frozen(tmp_path / "a.bin", {(1,): [(2,)]})
    drafter = Cacheback(table="frozen", frozen_table=str(path))
    context = DraftContext(VOCABULARY, frozenset(), "toy", artifacts={"frozen_table": path})
    with pytest.raises(ConfigurationError, match="follower_len=1"):
        drafter.setup(context)
    other = DraftContext(VOCABULARY, frozenset(), "real", artifacts={"frozen_table": path})
    with pytest.raises(ArtifactError, match=r"(?s)'toy'.*'real'"):
        drafter.setup(other)


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))


@st.composite
def situations(draw):
    """Tables in order, a text, and how many tokens each step commits."""
    shapes = draw(
        st.lists(st.tuples(st.sampled_from(["dynamic", "frozen"]), SHAPES), min_size=1, max_size=3)
    )
    token = st.integers(0, 5)
    frozen = []
    for kind, (leader_len, follower_len, _, _) in shapes:
        if kind == "frozen":
            leader = st.tuples(*[token] * leader_len)
            follower = st.tuples(*[token] * follower_len)
            frozen.append(
                draw(
                    st.dictionaries(
                        leader, st.lists(follower, min_size=1, max_size=6, unique=True), max_size=5
                    )
                )
            )
    longest = max(shape[1] for _, shape in shapes)
    reserve = draw(st.integers(0, 8))
    return {
        "shapes": shapes,
        "frozen": frozen,
        "prompt": draw(st.lists(token, min_size=1, max_size=25)),
        "steps": draw(st.lists(st.lists(token, min_size=1, max_size=4), min_size=1, max_size=6)),
        "reserve": reserve,
        "total": draw(st.integers(longest + 1 + reserve, 40 + reserve)),
        "merge": draw(st.booleans()),
        "counts": draw(st.sampled_from(["paper", "fixed"])),
    }


@given(situation=situations())
def test_trees_and_tables_equal_the_plain_version_after_every_step(tmp_path_factory, situation):
    keys = ("leader_len", "follower_len", "leader_capacity", "follower_capacity")
    drafter = ready(
        tmp_path_factory.mktemp("tables"),
        situation["frozen"],
        tables=[
            {"kind": kind, **dict(zip(keys, shape, strict=True))}
            for kind, shape in situation["shapes"]
        ],
        total_draft_len=situation["total"],
        chaining_reserved=situation["reserve"],
        merge=situation["merge"],
        budget_counts=situation["counts"],
    )
    frozen = iter(situation["frozen"])
    tables = [
        PlainTable(*shape) if kind == "dynamic" else PlainFrozen(*shape[:2], next(frozen))
        for kind, shape in situation["shapes"]
    ]
    dynamic = [table for table in tables if isinstance(table, PlainTable)]
    state = after_prefill(drafter, situation["prompt"], situation["steps"][0][0])
    for table in dynamic:
        table.insert_windows(state.tokens.tolist(), 0, state.length)
    for step in situation["steps"][1:]:
        spent = state.last_committed if situation["counts"] == "paper" else 1
        expected = draft(
            state.tokens.tolist(),
            tables,
            max(0, situation["total"] - spent),
            situation["reserve"],
            situation["merge"],
        )
        tree = drafter.propose(state)
        assert tree.tokens.tolist() == expected[0]
        assert tree.parents.tolist() == expected[1]
        assert tree.sources.tolist() == expected[2]
        assert tree.tokens.dtype == tree.parents.dtype == np.int64
        assert len(tree) <= drafter.needs.max_nodes
        commit(drafter, state, step)
        for table in dynamic:
            table.insert_windows(state.tokens.tolist(), state.length - len(step), state.length)
        assert [t.snapshot() for t in drafter._dynamic] == [t.snapshot() for t in dynamic]
