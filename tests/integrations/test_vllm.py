"""Our methods behind vLLM's drafter interface, driven by a scheduler that follows vLLM's source."""

import functools
import importlib
import sys

import numpy as np
import pytest

from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftContext, DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import ConfigurationError, NeedsNotMet
from specbench.integrations import vllm as adapter
from specbench.replay.replayer import RecordedTarget
from tests.contract.driver import EOS as TOY_EOS
from tests.contract.driver import VOCABULARY, WordTokenizer, instantiate, toy_context
from tests.integrations import vllm_scheduler
from tests.integrations.vllm_scheduler import EOS, Request
from tests.methods.toy_turns import continued, markov_rule

K, LONGEST, VOCAB = 8, 160, 40
# Chains of no more than K tokens, so that vLLM verifies what our engine does.
METHODS = {
    "pld": {"num_tokens": K},
    "suffix_decoding": {"max_spec_tokens": K},
    "ngram_map": {"size_n": 2, "size_m": K},
    "ngram_mod": {"n_match": 2, "n_max": K, "n_min": 1, "entries": 4096},
    "sam": {"automata": "dynamic", "max_predicts": K + 1},
    "random_drafts": {"n_nodes": K, "shape": "chain"},
    "adaptive": {"drafter": {"method": "suffix_decoding", "max_spec_tokens": K}},
}


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    for name, module in vllm_scheduler.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def build(method, config):
    """Build it as vLLM does, from the path in its speculative configuration."""
    module, name = f"specbench.integrations.vllm.{method}".rsplit(".", 1)
    drafter = getattr(importlib.import_module(module), name)(config)
    drafter.load_model(None)
    return drafter


def requests(n, limit=40):
    """Make requests of different lengths over a few ids; some share a prompt, some end by EOS."""
    queue = []
    for i in range(n):
        random = np.random.default_rng(i % (n - n // 10))  # the last tenth repeats the first
        prompt = (random.integers(0, 5, int(random.integers(3, 50))) + 2).tolist()
        queue.append(Request(prompt, int(random.integers(1, limit)), ruled(i % 17)))
    return queue


def ruled(seed):
    """Make a rule over ids 2 to 6 that soon repeats itself, with EOS at some positions."""
    inner = markov_rule(seed, vocab_size=5)

    def rule(text):
        if len(text) % 61 == 60:
            return EOS
        return inner([token % 5 for token in text]) + 2

    return rule


@functools.cache
def alone(method):
    """Make a drafter for our engine, and a record of its drafts by the text's length."""
    drafter, drafts = instantiate(method, **METHODS[method]), {}
    drafter.setup(DraftContext(VOCAB, frozenset([EOS]), max_len=LONGEST))
    propose = drafter.propose

    def noted(state):
        tree = propose(state)
        drafts[state.length] = np.asarray(tree.tokens).tolist()
        return tree

    drafter.propose = noted
    return drafter, drafts


def ours(method, request):
    """Decode the request in our engine; return output, and drafts by the text's length."""
    drafter, drafts = alone(method)
    drafter.reset()
    drafts.clear()
    output = continued(request.rule, request.prompt, request.max_tokens)
    if EOS in output:
        output = output[: output.index(EOS) + 1]
    target = RecordedTarget(VOCAB, K)
    target.load(np.array(output))
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset([EOS]))
    engine.decode(np.array(request.prompt), drafter, max_new_tokens=request.max_tokens)
    return output, dict(drafts)


def within(drafts, request):
    """Cut drafts at a request's last token, beyond which no step can commit."""
    last = len(request.prompt) + request.max_tokens
    return {n: draft[: max(0, last - n - 1)] for n, draft in drafts.items()}


@pytest.mark.parametrize("method", METHODS)
def test_drafts_of_many_requests_in_reused_rows_are_our_engines(method):
    config = vllm_scheduler.config(K, knobs=METHODS[method])
    workload = requests(80)
    engine = vllm_scheduler.Engine(build(method, config), config)
    engine.run(workload)
    accepted = 0
    for request in workload:
        output, drafts = ours(method, request)
        assert request.output == output
        assert within(request.drafts, request) == within(drafts, request)
        accepted += len(output) - 1 - len(drafts)
    moved = sum(len(request.rows) > 1 for request in workload)
    assert accepted > 100 and moved > 0  # else nothing was compared


@pytest.mark.parametrize("method", ["pld", "suffix_decoding"])
def test_preempted_requests_go_on_with_their_drafter(method):
    config = vllm_scheduler.config(K, knobs=METHODS[method])
    workload = requests(60, limit=90)
    engine = vllm_scheduler.Engine(build(method, config), config, pressure=0.3)
    engine.run(workload)
    assert sum(request.preempted for request in workload) > 5
    common = 0
    for request in workload:
        output, drafts = ours(method, request)
        assert request.output == output
        drafts, theirs = within(drafts, request), within(request.drafts, request)
        both = [n for n in theirs if n in drafts]  # a preempted one is given no draft to verify
        assert [theirs[n] for n in both] == [drafts[n] for n in both]
        common += len(both)
    assert common > 300


def test_steps_without_drafts_near_the_longest_text_and_forgotten_texts_cost_nothing_but_drafts():
    config = vllm_scheduler.config(K, seqs=2, longest=80, knobs=METHODS["pld"])
    workload = requests(40, limit=30)
    engine = vllm_scheduler.Engine(build("pld", config), config, pressure=0.3)
    engine.run(workload)
    for request in workload:
        assert request.output == ours("pld", request)[0]


@pytest.mark.parametrize("method", ["pld", "suffix_decoding"])
def test_a_request_that_ignores_end_tokens_is_drafted_for_behind_them(method):
    config = vllm_scheduler.config(K, knobs=METHODS[method])
    workload = requests(40)
    for request in workload:
        request.ignore_eos = True
    engine = vllm_scheduler.Engine(build(method, config), config)
    engine.run(workload)
    behind = 0
    for request in workload:
        assert request.output == continued(request.rule, request.prompt, request.max_tokens)
        if EOS in request.output:
            end = len(request.prompt) + request.output.index(EOS) + 1
            behind += sum(n > end and bool(draft) for n, draft in request.drafts.items())
    assert behind > 20


def test_of_a_tree_the_likeliest_chain_is_drafted():
    #       root -> 5 -> 6        (.5, .4)
    #            -> 7 -> 8 -> 9   (.45, .44, .1)
    tokens, parents = np.array([5, 6, 7, 8, 9]), np.array([-1, 0, -1, 2, 3])
    first = adapter.best_chain(DraftTree(tokens, parents))
    assert tokens[first].tolist() == [5, 6]
    probs = np.array([0.5, 0.4, 0.45, 0.44, 0.1])
    likely = adapter.best_chain(DraftTree(tokens, parents, path_probs=probs))
    assert tokens[likely].tolist() == [7, 8, 9]
    assert not len(adapter.best_chain(DraftTree.empty()))


def test_a_tree_method_runs_by_its_chains(caplog):
    knobs = {"table": "dynamic", "total_draft_len": 24, "chaining_reserved": 8}
    config = vllm_scheduler.config(K, knobs=knobs)
    workload = requests(30)
    engine = vllm_scheduler.Engine(build("cacheback", config), config)
    engine.run(workload)
    assert sum(len(request.output) - 1 - len(request.drafts) for request in workload) > 20
    assert "vLLM verifies chains" in caplog.text
    for request in workload:
        assert request.output == ours("pld", request)[0]


@pytest.mark.parametrize(
    ("method", "knobs", "message"),
    [
        ("token_recycling", {}, "token_recycling needs more than tokens"),
        ("eagle2", {}, "eagle2 needs more than tokens"),
        ("sps", {}, "sps needs more than tokens"),
        ("suffix_decoding", {"state_scope": "run"}, "state_scope: prompt"),
        ("pld", {"num_token": 3}, "num_tokens"),
    ],
)
def test_what_cannot_draft_in_vllm_is_refused_by_name(method, knobs, message):
    with pytest.raises(ConfigurationError, match=message):
        build(method, vllm_scheduler.config(K, knobs=knobs))
    with pytest.raises(AttributeError, match="pdl"):
        build("pdl", vllm_scheduler.config(K))


@pytest.mark.parametrize("fault", ["old", "v2", "async"])
def test_a_vllm_that_calls_drafters_in_another_way_is_refused(monkeypatch, fault):
    config = vllm_scheduler.config(K)
    config.use_v2_model_runner = fault == "v2"
    config.scheduler_config.async_scheduling = fault == "async"
    if fault == "old":
        for name, module in vllm_scheduler.modules("0.19.1", maker=False).items():
            monkeypatch.setitem(sys.modules, name, module)
    hints = {"old": "0.19.1", "v2": "VLLM_USE_V2_MODEL_RUNNER=0", "async": "--no-async-scheduling"}
    with pytest.raises(NeedsNotMet, match=hints[fault]):
        build("pld", config)


@pytest.mark.parametrize("method", ["sam", "ngrammys"])
def test_methods_with_files_draft_from_the_files_of_vllms_tokenizer(method, monkeypatch, tmp_path):
    context = toy_context(instantiate(method), tmp_path, monkeypatch)
    requested = []

    def resolved(needed, *, tokenizer, bundled, **_):
        assert isinstance(tokenizer, WordTokenizer) and not bundled
        requested.extend(needed)
        return context.artifacts

    monkeypatch.setattr(adapter.resolve, "resolve", resolved)
    monkeypatch.setattr(adapter, "tokenizer_hash", lambda tokenizer: context.tokenizer_hash)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: WordTokenizer())
    config = vllm_scheduler.config(K, vocab=VOCABULARY)
    config.model_config.hf_config.eos_token_id = TOY_EOS
    workload = requests(20)
    engine = vllm_scheduler.Engine(build(method, config), config)
    engine.run(workload)
    assert requested and any(draft for request in workload for draft in request.drafts.values())
    for request in workload:
        assert request.output == ours("pld", request)[0]
