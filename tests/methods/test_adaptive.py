import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from methods import adaptive
from methods.adaptive import Adaptive, best_threshold
from methods.opt_tree import OptTree
from methods.pld import PromptLookup
from methods.sps import Sps
from methods.suffix_decoding import SuffixDecoding
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import (
    NO_TOKENS,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)
from specbench.decoding.verify import BlockVerifier, RejectionVerifier
from specbench.errors import ConfigurationError
from specbench.replay.cost_surface import CostSurface, Grid
from tests.conftest import engine, quick_first
from tests.decoding import distributions as exact
from tests.decoding.distributions import P_LEAST, SAMPLINGS, VOCAB
from tests.decoding.table_models import TableDraft, TableTarget

CHAIN = np.arange(-1, 3)
BUSH = np.array([-1, -1, 0, 0, 1, 2])


@dataclass(kw_only=True, eq=False)
class FixedTree(Drafter):
    """Drafts one tree of token 1 again and again, with these path probabilities."""

    name: str = "fixed_tree"
    parents: np.ndarray = field(default_factory=lambda: CHAIN)
    path_probs: tuple = (0.9, 0.5, 0.45, 0.1)
    asked_remaining: list = field(default_factory=list)

    @property
    def needs(self):
        return Needs(max_nodes=len(self.parents), path_probs=True)

    def propose(self, state):
        self.asked_remaining.append(state.remaining)
        tokens = np.ones(len(self.parents), dtype=np.int64)
        return DraftTree(tokens, self.parents, path_probs=np.array(self.path_probs))

    def observe(self, state, outcome):
        self.outcome = outcome


def surface(tmp_path, seconds, n_sequences=0, dtype="float32"):
    """Write a surface whose passes of 1, 2, 3, .. rows take these seconds at any context.

    It has passes of up to ``n_sequences`` at once; rows cost the same in any sequence.
    """
    rows = tuple(range(1, len(seconds) + 1))
    times = np.array(seconds)[:, None, None].repeat(2, 1)
    grids = (
        Grid({"context": (1,)}, np.ones((1, 1))),
        Grid({"rows": rows, "context": (1, 900)}, times),
    )
    joint = None
    if n_sequences:
        counts = tuple(range(1, n_sequences + 1))
        rows_each = rows[: len(rows) // n_sequences]
        joint_times = np.array([[[seconds[n * r - 1]] for r in rows_each] for n in counts])
        axes = {"texts": counts, "rows": rows_each, "context": (1, 900)}
        joint = Grid(axes, joint_times[..., None].repeat(2, 2))
    path = tmp_path / "surface.json"
    model = {"name": "toy", "dtype": dtype, "device": "cpu"}
    machine = {"hardware": {}, "versions": {}}
    CostSurface(model, machine, *grids, texts=joint).write(path)
    return str(path)


def ready(part=None, **knobs):
    drafter = Adaptive(drafter=part or FixedTree(), **knobs)
    drafter.setup(DraftContext(VOCAB, frozenset()))
    drafter.reset()
    state = DecodeState(np.array([1, 2]), 50)
    state.commit(np.array([1]))
    drafter.begin(state)
    return drafter, state


def step(drafter, state, accepted):
    """Run a step that accepts the first ``accepted`` of a chain; return the nodes proposed."""
    tree = drafter.propose(state)
    path = np.arange(min(accepted, len(tree)))
    committed = np.ones(len(path) + 1, dtype=np.int64)
    state.commit(committed)
    drafter.observe(state, StepOutcome(tree, path, committed, None))
    return len(tree)


# -- nodes verified --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "n_verified"),
    [
        ({"policy": "threshold"}, 4),  # .9, .56, .9, .22: the draft ends after the last
        ({"policy": "threshold", "confidence": 0.6}, 2),
        ({"policy": "survival"}, 2),
        ({"policy": "survival", "shortest": 3}, 3),
        ({"policy": "survival", "least": 0.47}, 3),
        ({"policy": "bandit"}, 1),
    ],
)
def test_a_chain_is_cut_by_its_rule(knobs, n_verified):
    drafter, state = ready(**knobs)
    assert step(drafter, state, 0) == n_verified


def test_a_tree_is_cut_below_the_nodes_that_end_it():
    part = FixedTree(parents=BUSH, path_probs=(0.8, 0.2, 0.6, 0.1, 0.15, 0.3))
    drafter, state = ready(part)
    assert drafter.propose(state).parents.tolist() == [-1, -1, 0, 0, 2]
    drafter, state = ready(part, policy="survival", least=0.5, shortest=1)
    assert drafter.propose(state).parents.tolist() == [-1, -1, 0, 0, 2]
    drafter, state = ready(part, policy="bandit")
    assert drafter.propose(state).parents.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("seconds", "rate", "plain"),
    [
        ([1, 1, 1, 1, 1], 4, 4),  # free rows
        ([1, 1.2, 1.4, 1.6, 1.8], 3, 3),
        ([1, 1.6, 2.2, 2.8, 3.4], 1, 1),
        ([1, 2, 3, 4, 5], 0, 0),
        ([1, 1.1, 2.0, 2.1, 2.2], 1, 1),  # a step between two and three rows
        ([1, 1.95, 2, 2, 2.5], 3, 0),  # and one that only several nodes together pay for
    ],
)
def test_marginal_buys_what_pays(tmp_path, seconds, rate, plain):
    for objective, n_verified in (("rate", rate), ("plain", plain)):
        file = surface(tmp_path, seconds)
        drafter, state = ready(policy="marginal", surface=file, objective=objective)
        assert step(drafter, state, 0) == n_verified
    # By hand: all counts of nodes, their tokens over their time.
    path_probs = np.array(FixedTree().path_probs)
    values = [(1 + path_probs[:n].sum()) / seconds[n] for n in range(5)]
    assert int(np.argmax(values)) == rate


def test_marginal_takes_the_likeliest_nodes_of_a_tree(tmp_path):
    part = FixedTree(parents=BUSH, path_probs=(0.8, 0.2, 0.6, 0.1, 0.15, 0.3))
    file = surface(tmp_path, [1, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8])
    drafter, state = ready(part, policy="marginal", surface=file)
    assert drafter.propose(state).parents.tolist() == [-1, 0]


def test_a_step_whose_draft_is_cut_to_nothing_is_plain_decodings(tmp_path):
    file = surface(tmp_path, [1, 3, 5, 7, 9])
    seen = []

    class Watched(TableTarget):
        def forward(self, root, tree, *, hidden_layers=()):
            seen.append(tree)
            return super().forward(root, tree, hidden_layers=hidden_layers)

    loop = engine(Watched(exact.table(0)))
    drafter = Adaptive(drafter=FixedTree(), policy="marginal", surface=file)
    drafter.setup(DraftContext(VOCAB, frozenset()))
    result = loop.decode(exact.PROMPT, drafter, max_new_tokens=12)
    assert result.n_drafted == 0 and all(tree is DraftTree.empty() for tree in seen)
    assert result.drafter["offered_per_step"] == [4] * 11  # drafting is paid all the same
    plain = loop.decode(exact.PROMPT, Drafter(name="ar"), max_new_tokens=12)
    assert result.output_ids == plain.output_ids


# -- rows of several sequences ---------------------------------------------------------------------


def test_what_is_bought_over_all_texts_is_the_best_of_all_choices(tmp_path):
    """Compares with an enumeration of all subtrees of two or three drafts."""
    random = np.random.default_rng(5)
    counts = []
    for _ in range(25):
        n_sequences, steps = int(random.integers(2, 4)), random.uniform(0.02, 0.5, 20)
        file = surface(tmp_path, 1 + np.cumsum(steps), n_sequences=n_sequences)
        trees = []
        for _ in range(n_sequences):
            n = int(random.integers(0, 4))
            parents = np.array([random.integers(-1, i) for i in range(n)], dtype=np.int64)
            probs, path_probs = random.uniform(0.2, 1, n), np.ones(n + 1)  # the root is the last
            for node, parent in enumerate(parents):
                path_probs[node] = path_probs[parent] * probs[node]
            trees.append(DraftTree(np.ones(n, np.int64), parents, path_probs=path_probs[:-1]))
        slots = [Adaptive(drafter=FixedTree(), policy="marginal", surface=file) for _ in trees]
        for slot, tree in zip(slots, trees, strict=True):
            slot.setup(DraftContext(VOCAB, frozenset(), budget_shared=True))
            slot.begin(DecodeState(np.array([1]), 9))
            slot.drafter.propose = lambda _, tree=tree: tree
        drafts = joint_drafts(slots)
        priced = CostSurface.read(tmp_path / "surface.json")

        def rate(gained, nodes, priced=priced, n=n_sequences):
            """Tokens save steps of all sequences: the whole of their row, a part of the rest."""
            at_once = np.array([n, n - 1.0, n])
            rows, context = np.array([n, n - 1.0, n + nodes]), np.full(3, 32.0)
            plain, fewer, joint_s = priced.joint_pass_s(at_once, rows, context)
            row_s = min(plain - fewer, plain / n)
            worth = row_s + (plain / n - row_s) / n**0.5
            return (plain + gained * worth) / joint_s

        every = [[(len(p), tree.path_probs[p].sum()) for p in parts(tree)] for tree in trees]
        best = max(
            rate(sum(gain for _, gain in chosen), sum(n for n, _ in chosen))
            for chosen in itertools.product(*every)
        )
        actual = rate(sum(t.path_probs.sum() for t in drafts if len(t)), sum(map(len, drafts)))
        assert actual == pytest.approx(best)
        counts.append((sum(map(len, drafts)), sum(map(len, trees))))
    assert any(0 < n < total for n, total in counts) and any(n == 0 < total for n, total in counts)


def test_a_text_whose_drafts_do_not_pay_drafts_less_and_less(tmp_path):
    """A node costs .5 s and a token saves .68 s: .8 of one gains .04 s, .1 of one none."""
    file = surface(tmp_path, 1 + 0.5 * np.arange(6), n_sequences=2)
    parts = [FixedTree(parents=np.array([-1]), path_probs=(sure,)) for sure in (0.8, 0.1)]
    slots = [Adaptive(drafter=part, policy="marginal", surface=file) for part in parts]
    for slot in slots:
        slot.setup(DraftContext(VOCAB, frozenset(), budget_shared=True))
        slot.begin(DecodeState(np.array([1]), 99))
    n_verified = np.array([[len(tree) for tree in joint_drafts(slots)] for _ in range(64)])
    steps_drafted = [np.flatnonzero(slot.report()["offered_per_step"]).tolist() for slot in slots]
    rarely = [0, 1, 3, 6, 11, 20, 37, 54]
    assert steps_drafted == [[*range(64)], rarely]
    assert n_verified.sum(axis=0).tolist() == [len(steps_drafted[0]), 0]
    parts[1].path_probs = (0.8,)
    second_drafts = [len(joint_drafts(slots)[1]) for _ in range(24)]
    assert second_drafts == [0] * 7 + [1] * 17


def test_what_a_text_rests_for_is_learnt_when_the_rest_is_over(tmp_path):
    """Afterwards suffix decoding drafts as if it had looked at every step."""
    file = surface(tmp_path, 1 + 2.0 * np.arange(9), n_sequences=2)
    tokens = np.array([5, 6, 7, 8] * 7 + [1, 2, 3, 4])
    results = []
    for rests in (True, False):
        slot = Adaptive(drafter=SuffixDecoding(), policy="marginal", surface=file)
        slot.setup(DraftContext(VOCAB, frozenset(), budget_shared=rests))
        slot.reset()
        state = DecodeState(tokens[:4], 64)
        slot.begin(state)
        drafted = []
        for n, token in enumerate(tokens[4:]):
            joint_drafts([slot], states=[state])
            drafted.append(slot.report()["offered_per_step"][-1])
            state.commit(np.array([token]))
            outcome = StepOutcome(DraftTree.empty(), NO_TOKENS, tokens[n + 4 : n + 5], None)
            slot.observe(state, outcome)
        slot.end(state)
        slot.begin(DecodeState(np.array([9, 1, 2]), 64))
        results.append((drafted, slot.drafter.propose(DecodeState(np.array([9, 1, 2]), 64)).tokens))
    (rarely, rested_draft), (always, eager_draft) = results
    active = [n for n, count in enumerate(rarely) if count]
    assert [rarely[n] for n in active] == [always[n] for n in active]
    assert len(active) < len(always) / 2
    assert rested_draft.tolist() == eager_draft.tolist() and len(rested_draft)


def test_rows_go_to_the_text_that_keeps_the_others_waiting(tmp_path):
    """Two sequences take 4 s, one 3.5 s: a token of the last saves 3.5 s, of the other .5 s."""
    file = surface(tmp_path, [3.5, 4.0, 4.6, 5.2, 7.6, 10, 12, 14], n_sequences=2)
    slots, _ = two_slots(file, (0.9, 0.8))
    sizes = []
    for remaining in ((9, 9), (9, 8), (9, 8), (8, 8), (8, 8)):
        sizes.append([len(tree) for tree in joint_drafts(slots, remaining)])
    assert sizes == [[1, 1], [2, 0], [2, 0], [1, 1], [1, 1]]
    # The sequence ahead still drafts, because it cannot know when the other catches up.
    offered = [slot.report()["offered_per_step"] for slot in slots]
    assert offered == [[2] * 5] * 2


def test_where_no_draft_could_pay_nobody_drafts(tmp_path):
    """A further row takes 1 s, and a certain token saves at most .9 s."""
    file = surface(tmp_path, [2.0, 2.1, 3.1, 4.1, 5.1, 6.1, 7.1, 8.1], n_sequences=2)
    slots, states = two_slots(file, (1, 1))
    for step in range(40):
        for state in states:
            state.step = step
        if step == 20:  # one is far ahead: what the other gains saves whole steps
            states[0].remaining = 9
        joint_drafts(slots, states=states)
    offered = [slot.report()["offered_per_step"] for slot in slots]
    assert offered == [[0] * 24 + [2] * 16] * 2, "the group looks every eighth step"


@pytest.mark.parametrize(("accepted", "active"), [(2, 40), (1, 40), (0, 6)])
def test_drafts_are_trusted_as_far_as_the_groups_last_ones_were_right(accepted, active, tmp_path):
    """Two nodes are reported as certain; an accepted token saves .9 s, a row takes .3 s.

    With half of them accepted drafts still pay. With none, the expected acceptance falls until the
    group rests, forgets, and tries again.
    """
    file = surface(tmp_path, [1.0, 1.8, 2.1, 2.4, 2.7, 3.0, 3.3, 3.6], n_sequences=2)
    slots, states = two_slots(file, (1, 1))
    steps = []
    for step in range(40):
        for state in states:
            state.step = step
        drafts = joint_drafts(slots, states=states)
        steps.append(any(map(len, drafts)))
        for slot, state, tree in zip(slots, states, drafts, strict=True):
            path = np.arange(min(accepted, len(tree)))
            slot.observe(state, StepOutcome(tree, path, np.ones(len(path) + 1, int), None))
    assert sum(steps) == active
    assert steps[0] and any(steps[24:]), "what was long ago counts less"


def two_slots(file, probs):
    """Make two slots of a group that draft chains of two nodes, and their states."""
    slots = [
        Adaptive(
            drafter=FixedTree(parents=CHAIN[:2], path_probs=probs), policy="marginal", surface=file
        )
        for _ in range(2)
    ]
    states = [DecodeState(np.array([1]), 99) for _ in slots]
    for slot, state in zip(slots, states, strict=True):
        slot.setup(DraftContext(VOCAB, frozenset(), budget_shared=True))
        slot.begin(state)
    return slots, states


def joint_drafts(slots, remaining=(9, 9, 9), states=None):
    """Return the drafts of slots that choose jointly."""
    states = states or [DecodeState(np.array([1]), n) for n in remaining]
    works = [slot.drafting(state) for slot, state in zip(slots, states, strict=False)]
    trees: list[DraftTree] = []
    answers = [None] * len(works)
    while not trees:
        calls = []
        for work, answer in zip(works, answers, strict=True):
            try:
                calls.append(work.send(answer))
            except StopIteration as done:
                trees.append(done.value)
        answers = calls[0].answer([call.request for call in calls]) if calls else []
    return trees


def parts(tree):
    """Yield all sets of nodes that contain their nodes' parents."""
    for chosen in itertools.product((False, True), repeat=len(tree)):
        held = np.append(chosen, True)  # the root is the last one
        if all(held[tree.parents[node]] for node in np.flatnonzero(chosen)):
            yield np.flatnonzero(chosen)


# -- what is learnt --------------------------------------------------------------------------------


def test_the_best_threshold_is_that_of_all_thresholds_tried():
    random = np.random.default_rng(0)
    for _ in range(200):
        probs = random.choice(np.linspace(0.05, 1, 12), random.integers(6, 30))
        accepted = random.random(len(probs)) < probs
        if accepted.all() or not accepted.any():
            continue
        costs = {}
        for limit in sorted(set(probs.tolist())):
            wrong = sum(1 for c, a in zip(probs, accepted, strict=True) if c >= limit and not a)
            missed = sum(1 for c, a in zip(probs, accepted, strict=True) if c < limit and a)
            costs[limit] = wrong / (~accepted).sum() + 3 * missed / accepted.sum()
        best = best_threshold(probs, accepted)
        assert costs[best] == pytest.approx(min(costs.values()))
        assert all(cost > costs[best] - 1e-12 for cost in costs.values())
        # The largest of equals wins.
        assert not [t for t, cost in costs.items() if t > best and cost < costs[best] - 1e-12]


def test_the_threshold_moves_once_both_outcomes_are_known_and_begins_anew_each_turn():
    part = FixedTree(path_probs=(0.9, 0.9 * 0.5, 0.9 * 0.5 * 0.9, 0.9 * 0.5 * 0.9 * 0.3))
    drafter, state = ready(part)
    for _ in range(3):  # .9 is accepted, .5 is not
        assert step(drafter, state, 1) == 4
    assert step(drafter, state, 1) == 2  # six tokens judged: ends after a token below .9
    drafter.begin(state)
    assert step(drafter, state, 1) == 4
    drafter, state = ready(part, refit=False)
    assert [step(drafter, state, 1) for _ in range(6)] == [4] * 6


def timed(monkeypatch, seconds):
    """Run a bandit whose steps take ``seconds`` by the nodes verified; return its arms, from 1."""
    now = [0.0]
    monkeypatch.setattr(adaptive.time, "perf_counter", lambda: now[0])

    def run(steps, accepted, **knobs):
        drafter, state = ready(policy="bandit", **knobs)
        arms = []
        for _ in range(steps):
            tree = drafter.propose(state)
            arms.append(len(tree))
            now[0] += seconds[len(tree)]
            path = np.arange(min(accepted, len(tree)))
            state.commit(np.ones(1, dtype=np.int64))
            drafter.observe(state, StepOutcome(tree, path, np.ones(1, dtype=np.int64), None))
        return arms

    return run


def test_the_bandit_tries_every_arm_and_settles_on_the_best(monkeypatch):
    run = timed(monkeypatch, [1, 1.0, 1.1, 1.2, 1.9])
    assert run(20, 2) == [1, 2, 3, 4, 1, 2, 3] + [2] * 13
    assert run(20, 4)[7:] == [3] * 13
    # With a bonus per arm the others come back.
    assert len(set(run(40, 2, counts="arm")[7:])) == 4


def test_the_bandit_asks_for_no_deeper_draft():
    part = FixedTree()
    drafter, state = ready(part, policy="bandit", arms=3)
    for depth in (1, 2, 3):
        assert step(drafter, state, 0) == depth
    assert part.asked_remaining == [2, 3, 4] and state.remaining == 46


def test_priced_steps_need_no_clock(tmp_path):
    file = surface(tmp_path, [1, 1.0, 1.1, 1.2, 1.9])
    drafter, state = ready(policy="bandit", reward="priced", surface=file)
    assert not drafter.needs.clock and ready(policy="bandit")[0].needs.clock
    assert [step(drafter, state, 2) for _ in range(12)] == [1, 2, 3, 4, 1, 2, 3] + [2] * 5


# -- around draft models ---------------------------------------------------------------------------

PARTS = {"sps": lambda: Sps(gamma=4), "opt_tree": lambda: OptTree(nodes=8, max_depth=4)}
CUTS = [
    {"policy": "threshold"},
    {"policy": "survival", "least": 0.4, "shortest": 1},
    {"policy": "marginal"},
    {"policy": "bandit", "reward": "priced"},
]


def on_tables(part, knobs, sampling, tmp_path):
    if "surface" not in knobs and knobs["policy"] in ("marginal", "bandit"):
        knobs = knobs | {"surface": surface(tmp_path, [1, 1.2, 1.5, 1.9, 2.4, 2.8, 3.2, 3.6, 4])}
    drafter = Adaptive(drafter=PARTS[part](), **knobs)
    draft = TableDraft(exact.table(0) + 0.7 * exact.table(1))
    drafter.setup(DraftContext(VOCAB, frozenset(), sampling=sampling, draft_model=draft))
    return drafter


@pytest.mark.parametrize("knobs", CUTS, ids=lambda knobs: knobs["policy"])
@pytest.mark.parametrize("part", PARTS)
def test_greedy_output_is_plain_decodings(part, knobs, tmp_path):
    loop = engine(TableTarget(exact.table(0)), overlap="serial")
    drafter = on_tables(part, knobs, Sampling(0.0), tmp_path)
    plain = loop.decode(exact.PROMPT, Drafter(name="ar"), max_new_tokens=40)
    result = loop.decode(exact.PROMPT, drafter, max_new_tokens=40)
    assert result.output_ids == plain.output_ids
    assert sum(result.drafter["offered_per_step"]) >= result.n_drafted > 0


@pytest.mark.parametrize(
    "verifier", quick_first([RejectionVerifier, BlockVerifier], [RejectionVerifier])
)
@pytest.mark.parametrize("knobs", CUTS, ids=lambda knobs: knobs["policy"])
def test_cutting_a_drawn_draft_leaves_the_distribution(knobs, verifier, tmp_path):
    sampling = SAMPLINGS["warm"]
    drafter = on_tables("sps", knobs, sampling, tmp_path)
    outputs, _ = exact.turns(verifier(sampling), drafter, 60, 16, overlap="serial")
    assert exact.worst_p(outputs, exact.distribution_of(sampling)) > P_LEAST
    assert exact.transitions_p(outputs, sampling) > P_LEAST


def test_a_draft_model_drafts_no_further_than_the_rule_lets_it(tmp_path):
    loop = engine(TableTarget(exact.table(0)), overlap="serial")
    whole = on_tables("sps", {"policy": "marginal"}, Sampling(0.0), tmp_path)
    short = on_tables("sps", {"policy": "threshold", "confidence": 0.9, "refit": False},
                      Sampling(0.0), tmp_path)  # fmt: skip
    offered = [
        np.mean(loop.decode(exact.PROMPT, d, max_new_tokens=40).drafter["offered_per_step"])
        for d in (whole, short)
    ]
    assert offered[1] < offered[0] - 0.5


# -- refusals --------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="does not report how likely its nodes are"):
        Adaptive(drafter=PromptLookup())
    for knobs in ({"policy": "marginal"}, {"policy": "bandit", "reward": "priced"}):
        with pytest.raises(ConfigurationError, match="runner=cost"):
            Adaptive(drafter=FixedTree(), **knobs)
    with pytest.raises(ConfigurationError, match="policy"):
        Adaptive(drafter=FixedTree(), policy="marginl")
    file = surface(tmp_path, [1, 1, 1, 1, 1])
    drafter = Adaptive(drafter=FixedTree(), policy="marginal", surface=file)

    with pytest.raises(ConfigurationError, match=r"no passes of several texts.*runner=cost"):
        drafter.setup(DraftContext(VOCAB, frozenset(), budget_shared=True))

    class Half:
        dtype, device = torch.float16, torch.device("cpu")

    with pytest.raises(ConfigurationError, match="dtype float32"):
        drafter.setup(DraftContext(VOCAB, frozenset(), target=Half()))
