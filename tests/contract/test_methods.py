"""Contract of all methods: one test per guarantee, run over all of conf/method/."""

import dataclasses
import functools
import itertools
import re
import warnings
from collections import Counter

import hydra.errors
import numpy as np
import pytest

from runners.search import Entries, load_spaces
from specbench.config import compose
from specbench.config.schema import STATE_SCOPES
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftTree, Needs, StepOutcome
from specbench.errors import ConfigurationError
from specbench.models.target import Target
from specbench.paths import CONF_DIR
from tests.conftest import engine, quick_first
from tests.contract import driver
from tests.decoding.table_models import TableTarget, table

METHODS = driver.method_names()
COMMON = {"_target_", "name", "version", "state_scope", "paper_scope"}


@pytest.fixture(params=METHODS)
def name(request):
    return request.param


@pytest.fixture
def make(name, tmp_path_factory, monkeypatch):
    """Return a function that builds the method's drafter, set up with toy artifacts."""
    cache = tmp_path_factory.getbasetemp() / "contract-artifacts"

    def make_drafter(**knobs):
        drafter = driver.instantiate(name, **knobs)
        if driver.needs_a_target(drafter.needs):
            pytest.skip(f"{name} needs more of the target than its tokens")
        drafter.setup(driver.toy_context(drafter, cache, monkeypatch))
        drafter.reset()
        return drafter

    return make_drafter


def test_yaml_and_class_agree(name):
    config = driver.compose_method(name)
    drafter = driver.instantiate(name)
    assert isinstance(drafter, Drafter)
    assert config["name"] == drafter.name == name
    assert config["state_scope"] in STATE_SCOPES  # the yaml's, else the run's
    assert isinstance(config["version"], int) and config["version"] >= 1
    # The yaml shows every knob, with the class's own defaults.
    knobs = {key: value for key, value in config.items() if key != "_target_"}
    defaults = type(drafter)()
    # A yaml may set another scope, for a method that learns over the whole run.
    assert knobs.pop("state_scope") in STATE_SCOPES
    assert {"state_scope", *knobs} == {f.name for f in dataclasses.fields(defaults) if f.init}
    assert {key: getattr(defaults, key) for key in knobs} == knobs


def test_every_knob_is_documented(name):
    text = (CONF_DIR / "method" / f"{name}.yaml").read_text(encoding="utf-8")
    if other := re.search(
        r"^defaults: \[([a-z]\w*)", text, re.MULTILINE
    ):  # a method's, to start from
        text += (CONF_DIR / "method" / f"{other.group(1)}.yaml").read_text(encoding="utf-8")
    doc = "\n".join(cls.__doc__ or "" for cls in type(driver.instantiate(name)).__mro__)
    for knob in driver.compose_method(name).keys() - COMMON:
        assert re.search(rf"^{knob}:", text, re.MULTILINE), knob
        assert f"{knob}:" in doc, f"{knob} is missing in the class's docstring"


def test_the_experiment_of_draft_models_compares_them_all():
    cfg = compose.compose(["experiment=draft_models"])
    first = ["sps", "opt_tree", "pearl", "ouroboros", "ouroboros_warm"]
    labels = [e if isinstance(e, str) else e.get("label", e.method) for e in cfg.compare]
    assert labels[:5] == first
    ours = driver.named_in_readme() & driver.with_draft_model().keys()
    assert {cfg.method.name, *labels} >= {"ouroboros_warm", *ours}


def test_an_unknown_knob_is_refused(name):
    with pytest.raises(hydra.errors.InstantiationException, match="leader_lenght"):
        driver.instantiate(name, leader_lenght=2)


@pytest.mark.parametrize("method", quick_first(METHODS, ["cacheback"]))
def test_an_unknown_knob_is_refused_when_it_is_typed(method):
    with pytest.raises(ConfigurationError, match="leader_lenght"):
        driver.compose_method(method, "method.leader_lenght=2")


def test_an_unknown_state_scope_is_refused(name):
    refusals = (hydra.errors.InstantiationException, ConfigurationError)  # the latter: of parts
    with pytest.raises(refusals, match="forever"):
        driver.instantiate(name, state_scope="forever")


def test_trees_are_valid_whatever_the_text(make):
    drafter = make()
    passes = drafter.needs.draft_model or drafter.needs.heads  # model passes take longer
    for seed in range(1 if passes else 3):
        for n_prompt, n_new in (
            ((1, 5), (2, 30), (120, 20)) if passes else ((1, 5), (40, 60), (300, 20))
        ):
            prompt, output = driver.toy_turn(seed, n_prompt, n_new)
            trace = driver.play(drafter, prompt, output)
            assert sum(trace.accepted) == n_new - 1
        drafter.reset()


def steps_of(drafter, logits, prompt):
    """Return the drafts of a case's steps and the number of tokens that each committed."""
    drafts, propose = [], drafter.propose

    def watched(state):
        tree = propose(state)
        drafts.append((np.asarray(tree.tokens).tolist(), tree.parents.tolist()))
        return tree

    drafter.propose = watched
    loop = engine(TableTarget(logits), overlap="serial")
    if drafter.starts_empty(turn=0):
        drafter.reset()
    if drafter.needs.reference:
        plain = loop.decode(prompt, Drafter(name="ar"), max_new_tokens=30)
        drafter.set_reference(np.array(plain.output_ids))
    committed = loop.decode(prompt, drafter, max_new_tokens=30, seed=3).committed_per_step
    drafter.propose = propose
    return drafts, committed


def learns_across_cases(name):
    """Return whether the method or its paper learns across cases, by its yaml."""
    text = (CONF_DIR / "method" / f"{name}.yaml").read_text(encoding="utf-8")
    return re.search(r"^(state|paper)_scope: run\b", text, re.MULTILINE) is not None


LEARN = [*filter(learns_across_cases, METHODS)]


@pytest.mark.parametrize(
    ("method", "scope"), [(n, "prompt") for n in METHODS] + [(n, "run") for n in LEARN]
)
def test_steps_after_another_case_are_those_after_none_unless_kept_for_the_run(
    method, scope, tmp_path_factory, monkeypatch
):
    """So a reset forgets, and a seed determines the trace."""
    cache = tmp_path_factory.getbasetemp() / "contract-artifacts"
    logits = table(0, driver.VOCABULARY, 4.0)  # so peaked that texts repeat themselves
    case, foreign = driver.toy_text(5, 30), driver.toy_text(1, 30)
    last_steps = []
    for before in ([], [foreign]):
        drafter = driver.instantiate(method, state_scope=scope)
        drafter.setup(driver.toy_context(drafter, cache, monkeypatch))
        drafter.reset()
        last_steps.append([steps_of(drafter, logits, text) for text in (*before, case)][-1])
    if scope == "prompt":
        assert last_steps[0] == last_steps[1]
    elif method in driver.named_in_readme():  # other methods' learning need not show here
        assert last_steps[0] != last_steps[1]


def test_observing_an_empty_outcome_is_harmless(make):
    turn = driver.toy_turn(2)
    drafter = make()
    state = DecodeState(turn[0], 10)
    if drafter.needs.reference:
        drafter.set_reference(turn[1])
    state.commit(turn[1][:1])
    driver.show_prompt(drafter, turn[0])
    drafter.begin(state)
    drafter.observe(state, StepOutcome(DraftTree.empty(), NO_TOKENS, NO_TOKENS, None))
    driver.check_tree(drafter.propose(state), drafter.needs)
    drafter.end(state)


def feed(drafter, turn, accepted):
    """Feed a turn whose steps committed ``accepted`` tokens, without drafting."""
    state = DecodeState(turn[0], len(turn[1]))
    state.commit(turn[1][:1])
    drafter.begin(state)
    done = 1
    for count in accepted:
        committed = turn[1][done : done + count]
        done += count
        state.commit(committed)
        drafter.observe(state, StepOutcome(DraftTree.empty(), NO_TOKENS, committed, None))
    drafter.end(state)


def learns_while_it_drafts(make):
    """Return whether its next drafts depend on earlier drafts, not on the text only."""
    for seed in range(4):
        for n_words in (driver.VOCABULARY, 6):
            turn, following = (driver.toy_turn(seed + k, n_words=n_words) for k in (0, 1))
            drafter, fed = make(), make()
            feed(fed, turn, driver.play(drafter, *turn).accepted)
            if driver.play(fed, *following) != driver.play(drafter, *following):
                return True
    return False


DRAFTS_TEACH = {
    "ngram_map": "counts a key when it drafts from it, as llama.cpp does",
    "racer": "a draft moves links of its automaton, as in its reference",
}


def test_a_method_of_tokens_alone_can_be_fed_without_drafting(make):
    """Resuming a run with state scope `run` feeds recorded tokens: the next trace is the same."""
    if not make().needs.tokens_only:
        pytest.skip("replay is not promised")
    assert not learns_while_it_drafts(make)


def test_a_second_draft_is_the_first_one(name, make):
    if name in DRAFTS_TEACH:
        pytest.skip(DRAFTS_TEACH[name])
    needs = make().needs
    if not needs.tokens_only or needs.draft_model or needs.overlap:
        pytest.skip("a model of its own, or a thread, goes on between two drafts")
    turn = driver.toy_turn(0, n_words=6)
    assert driver.play(make(), *turn, times=2) == driver.play(make(), *turn)


def counts_twice(make):
    """Return whether a second turn drafts otherwise than with a new prompt of the same text."""
    for seed in range(4):
        for n_words in (driver.VOCABULARY, 6):  # of few words, contexts of some tokens come again
            (prompt, output), (question, answer) = (
                driver.toy_turn(seed + k, 30, 40, n_words) for k in (0, 9)
            )
            first = np.concatenate((prompt, output))
            second = np.concatenate((first, question)), answer
            drafter, fresh = make(), make()
            driver.play(drafter, prompt, output)
            if driver.play(drafter, *second, seen=first) != driver.play(fresh, *second):
                return True
    return False


def test_a_method_of_tokens_alone_counts_a_dialogues_earlier_turns_once(name, make):
    if not make().needs.tokens_only:
        pytest.skip("it learns from more than the text")
    if name in LEARN:
        pytest.skip("finished turns enter a store besides the text")
    assert not counts_twice(lambda: make(state_scope="prompt"))


def copies_a_repeating_text(drafter):
    """Return whether some draft of several tokens is fully accepted in a repeating text."""
    text = np.tile(np.array([5, 9, 23, 40, 17, 33, 51, 44]), 15)
    trace = driver.play(drafter, text[:60], text[60:])
    drafted = zip(trace.trees, trace.accepted, strict=True)
    return any(1 < len(tree) == accepted - 1 for tree, accepted in drafted)


def test_a_method_of_tokens_alone_that_copies_no_repetition_is_named(name, make):
    """Warn only, because a method may draft from other sources. Wrong parents show here."""
    drafter = make()
    drafts_elsewhere = drafter.needs.artifacts or drafter.needs.draft_model or name in LEARN
    if not drafter.needs.tokens_only or drafts_elsewhere:
        pytest.skip("it drafts from more than the text")
    if name not in ("ar", "random_drafts") and not copies_a_repeating_text(drafter):
        warnings.warn(
            f"no draft of several tokens by method={name} is right as a whole in a text that "
            "repeats itself: look at its trees' parents, and whether it drafts at all",
            stacklevel=1,
        )


@dataclasses.dataclass(kw_only=True, eq=False)
class Successors(Drafter):
    """Drafts what most often followed the last ``context`` tokens, again and again."""

    name: str = "successors"
    context: int = 1
    fault: str = ""

    def reset(self):
        self.counts = Counter()

    def learn(self, tokens):
        width = self.context + 1
        self.counts.update(
            tuple(tokens[i : i + width].tolist()) for i in range(len(tokens) - self.context)
        )

    def begin(self, state):
        careless = self.fault == "counts twice"
        self.learn(state.tokens[0 if careless else max(0, state.n_seen - self.context) :])

    def observe(self, state, outcome):
        self.learn(state.tokens[-len(outcome.committed) - self.context :])

    def propose(self, state):
        text, draft = state.tokens.tolist(), []
        while self.fault != "never drafts" and len(draft) < 4:
            last = tuple([*text, *draft][-self.context :])
            likely = [(n, -w[-1]) for w, n in self.counts.items() if w[:-1] == last]
            if not likely:
                break
            draft.append(-max(likely)[1])
        if self.fault == "learns while it drafts" and draft:
            self.learn(np.array([*text[-self.context :], *draft]))
        if self.fault == "changes the text":
            state.buffer[0] = 3
        parents = np.arange(-1, len(draft) - 1)
        if self.fault == "all below the root":
            parents[:] = -1
        if self.fault == "a wrong parent":
            parents[2:] -= 2
        return DraftTree(np.array(draft, dtype=np.int64), parents)


def successors(fault, context):
    def make():
        drafter = Successors(fault=fault, context=context)
        drafter.reset()
        return drafter

    return make


@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("counts twice", counts_twice),
        ("learns while it drafts", learns_while_it_drafts),
        ("all below the root", lambda make: not copies_a_repeating_text(make())),
        ("a wrong parent", lambda make: not copies_a_repeating_text(make())),
        ("never drafts", lambda make: not copies_a_repeating_text(make())),
    ],
)
def test_what_a_new_method_may_get_wrong_shows(fault, shows, context):
    assert shows(successors(fault, context))
    assert not shows(successors("", context))


def test_a_method_that_changes_the_text_is_stopped():
    with pytest.raises(AssertionError, match="only reads the text"):
        driver.play(successors("changes the text", 1)(), *driver.toy_turn(0))


# --- methods that read logits: the same promises beside a tiny model ----------------------------


def faults_beside_a_model(drafter, context, target):
    """List what a method does wrong in a turn, another one and, after `reset`, the first again."""
    drafter.setup(dataclasses.replace(context, target=target))
    faults, propose = set(), drafter.propose

    def propose_twice(state):
        text = state.buffer.copy()
        first, second = propose(state), propose(state)
        if not np.array_equal(text, state.buffer):
            faults.add("changes the text")
            state.buffer[:] = text
        if driver.Trace([first], [0]) != driver.Trace([second], [0]):
            faults.add("learns while it drafts")
        driver.check_tree(second, drafter.needs)
        trees.append((second.tokens.tolist(), second.parents.tolist()))
        return second

    drafter.propose = propose_twice
    runs, deepest = [], 0
    for seed in (0, 1, 0):
        trees = []
        drafter.reset()
        prompt = np.tile(driver.toy_turn(seed)[0][:7], 4)
        turn = engine(target).decode(prompt, drafter, max_new_tokens=48)
        runs.append((turn.output_ids, trees))
        deepest = max(deepest, *turn.committed_per_step)
    if runs[0] != runs[2]:
        faults.add("keeps what it learned after reset")
    if deepest < 3:
        faults.add("no draft of two tokens is accepted")
    return faults


def reads_a_model(name):
    needs = driver.instantiate(name).needs
    return driver.needs_a_target(needs) and not (needs.heads or needs.draft_model or needs.overlap)


@pytest.fixture(scope="module")
def target():
    model = driver.tiny_model("llama", vocab_size=driver.VOCABULARY)
    return Target(model, max_len=128, max_nodes=128)


@pytest.fixture
def context_of(tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.getbasetemp() / "contract-artifacts"
    return lambda drafter: driver.toy_context(drafter, cache, monkeypatch)


@pytest.mark.parametrize("name", [*filter(reads_a_model, METHODS)])
def test_a_method_that_reads_logits_forgets_and_learns_only_when_told(name, target, context_of):
    drafter = driver.instantiate(name)
    faults = faults_beside_a_model(drafter, context_of(drafter), target)
    if name in DRAFTS_TEACH:
        faults.discard("learns while it drafts")
    if "no draft of two tokens is accepted" in faults:
        faults.remove("no draft of two tokens is accepted")
        warnings.warn(f"method={name}: no draft of two tokens is accepted", stacklevel=1)
    assert not faults


class Likeliest(Drafter):
    """Drafts what the model found likeliest after each token, with a planted fault."""

    fault = ""

    @property
    def needs(self):
        return Needs(tokens_only=False, logits=True, max_nodes=4)

    def setup(self, context):
        self.successor = {}

    def reset(self):
        if self.fault != "keeps what it learned after reset":
            self.successor = {}

    def begin(self, state):
        self.successor |= dict(itertools.pairwise(state.tokens.tolist()))

    def observe(self, state, outcome):
        nodes = [state.tokens[-len(outcome.committed) - 1], *outcome.committed[:-1]]
        likeliest = outcome.logits.argmax(-1).tolist()
        self.successor |= dict(zip(map(int, nodes), likeliest, strict=False))

    def propose(self, state):
        draft = [state.root]
        while self.fault != "never drafts" and len(draft) < 5 and draft[-1] in self.successor:
            draft.append(self.successor[draft[-1]])
        if self.fault == "learns while it drafts":
            self.successor[draft[-1]] = len(self.successor) % driver.VOCABULARY
        if self.fault == "changes the text":
            state.buffer[0] += 1
        parents = np.arange(-1, len(draft) - 2)
        if self.fault == "all below the root":
            parents[:] = -1
        return DraftTree(np.array(draft[1:], dtype=np.int64), parents)


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("", set()),
        ("changes the text", {"changes the text"}),
        ("learns while it drafts", {"learns while it drafts"}),
        ("keeps what it learned after reset", {"keeps what it learned after reset"}),
        ("all below the root", {"no draft of two tokens is accepted"}),
        ("never drafts", {"no draft of two tokens is accepted"}),
    ],
)
def test_what_a_method_that_reads_logits_may_get_wrong_shows(fault, shows, target, context_of):
    drafter = Likeliest(name="likeliest")
    drafter.fault = fault
    assert faults_beside_a_model(drafter, context_of(drafter), target) >= shows
    if not fault:
        assert not faults_beside_a_model(drafter, context_of(drafter), target)


def test_the_oracle_is_always_right_and_as_often_as_it_says(monkeypatch, tmp_path):
    prompt, output = driver.toy_turn(0, 20, 2_001)
    for accuracy, expected in ((1.0, 5.0), (0.5, 1 + 0.5 + 0.25 + 0.125 + 0.0625), (0.0, 1.0)):
        drafter = driver.instantiate("oracle", accuracy=accuracy)
        drafter.setup(driver.toy_context(drafter, tmp_path, monkeypatch))
        mean = float(np.mean(driver.play(drafter, prompt, output).accepted))
        assert mean == pytest.approx(expected, abs=0.0 if accuracy in (0.0, 1.0) else 0.12)


@pytest.mark.parametrize(
    ("shape", "parents"), [("chain", [-1, 0, 1, 2]), ("wide", [-1, -1, -1, -1]), ("random", None)]
)
def test_random_drafts_have_the_shape_asked_for(shape, parents, monkeypatch, tmp_path):
    drafter = driver.instantiate("random_drafts", n_nodes=4, shape=shape)
    drafter.setup(driver.toy_context(drafter, tmp_path, monkeypatch))
    trace = driver.play(drafter, *driver.toy_turn(0))
    if parents is not None:
        assert all(tree.parents.tolist() == parents for tree in trace.trees)
    else:
        assert len({tuple(tree.parents.tolist()) for tree in trace.trees}) > 3


@functools.cache
def all_entries():
    return Entries(compose.compose(["method=ar"]))


def test_every_method_that_drafts_has_a_space_of_settings_that_can_be_built(name):
    """A new method is searched by its yaml only; the two for calibration are never advised."""
    if name in ("ar", "oracle", "random_drafts"):
        assert name not in load_spaces()
        return
    entries = all_entries()
    candidates = entries.candidates(load_spaces([name]), 6, 0)[name]
    assert len(candidates) >= 4, "most of a space must be of use"
    for candidate in candidates:
        assert entries.entry(name, candidate.knobs).method["name"] == name
