"""Knobs out of range are refused, with the value, the rule or the nearest valid name."""

import re

import pytest

from methods.cacheback import Cacheback
from methods.card import Card
from methods.eagle import Eagle
from methods.jacobi import Jacobi
from methods.lookahead import Lookahead
from methods.medusa import Medusa
from methods.ngrammys import NGrammys
from methods.opt_tree import OptTree
from methods.ouroboros import Ouroboros
from methods.pearl import Pearl
from methods.pld import PromptLookup
from methods.rest import Retrieval
from methods.sam import SuffixAutomatonDecoding
from methods.ssd import Spacelike
from methods.suffix_decoding import SuffixDecoding
from methods.token_recycling import TokenRecycling
from methods.union import Union
from specbench.errors import ConfigurationError

GAMMA = r"method\.gamma=.* auto, or between 1 and 64"
# The method, its knobs, and expressions that the message matches.
REFUSED = [
    (Cacheback, {"total_draft_len": 19}, "total_draft_len=19", "drafts nothing", "at least 20"),
    (Cacheback, {"leader_len": 0}, "leader_len=0", "at least 1"),
    (Cacheback, {"table": "duel"}, "duel", "dual"),
    (Cacheback, {"budget_counts": "papers"}, "papers", "paper"),
    (Cacheback, {"chaining_reserved": -1}, "chaining_reserved=-1"),
    (Cacheback, {"tables": [{"kind": "frozzen"}]}, "frozzen", "frozen"),
    (Cacheback, {"tables": [{"kind": "dynamic", "leader_length": 2}]}, "leader_length", "_len"),
    (Cacheback, {"tables": [{"leader_len": 2}]}, r"tables\[0\]", "kind"),
    (Cacheback, {"tables": [{"kind": "dynamic", "follower_len": 0}]}, r"\[0\]\.follower_len"),
    (Cacheback, {"state_scope": "case"}, "state_scope", "case"),
    (Card, {"r": 0}, r"method.r=0 .* auto, or between 1 and method.max_depth=50"),
    (Card, {"r": 51}, "method.r=51"),
    (Card, {"r": "often"}, "method.r='often'"),
    (Card, {"r": 2.5}, "method.r=2.5"),
    (Card, {"k": 0}, "method.k=0"),
    (Card, {"k": 5000}, "method.k=5000 .* at most"),
    (Card, {"max_depth": 0}, "method.max_depth=0"),
    (Jacobi, {"block_len": 0}, "method.block_len=0"),
    (Jacobi, {"fill": "promt"}, "Did you mean 'prompt'"),
    (Lookahead, {"window": 0}, "method.window=0"),
    (Lookahead, {"guesses": 0}, "method.guesses=0"),
    (Lookahead, {"ngram": 1}, "method.ngram=1 .* at least 2"),
    (Eagle, {"tree": "medusa_63", "levels": [2, 1]}, r"two trees. Type method\.levels=null"),
    (Medusa, {"tree": "by_model", "levels": [2]}, r"by_model .* two trees"),
    (NGrammys, {"strategy": "mixt"}, "mixt", "mixed"),
    (NGrammys, {"layout": "batched"}, "batched", "batch"),
    (NGrammys, {"k": 0}, "k=0"),
    (NGrammys, {"w": 0}, "w=0"),
    (NGrammys, {"q": 0}, "q=0"),
    (OptTree, {"nodes": 0}, "method.nodes"),
    (OptTree, {"max_depth": 0}, "method.max_depth"),
    (OptTree, {"threshold": 1.5}, "method.threshold"),
    (Ouroboros, {"gamma": 0}, r"method\.gamma=0 .* at least 1"),
    (Ouroboros, {"ngram": 1}, r"method\.ngram=1"),
    (Ouroboros, {"window": 0}, r"method\.window=0"),
    (Ouroboros, {"guesses": 0}, r"method\.guesses=0"),
    (Ouroboros, {"topk": 21}, r"method\.topk=21 .* between 0 and guesses"),
    *((Pearl, {"gamma": gamma}, GAMMA) for gamma in (0, 65, "some", 1.5)),
    (PromptLookup, {"variant": "specbensh"}, "specbensh", "specbench"),
    (PromptLookup, {"max_ngram": 0}, "max_ngram=0"),
    (PromptLookup, {"min_ngram": 4}, "max_ngram=3", "min_ngram=4"),
    (PromptLookup, {"num_tokens": 0}, "num_tokens=0"),
    (Retrieval, {"matches": "evenly"}, "evenly", "even"),
    (Retrieval, {"max_span": 1}, "max_span=1", "min_span=2"),
    (Retrieval, {"choices": 0}, "choices=0"),
    (Retrieval, {"draft_len": 256}, "draft_len=256"),
    (Retrieval, {"max_matches": 2**21}, "max_matches"),
    (SuffixAutomatonDecoding, {"automata": "dynamik"}, "dynamic"),
    (SuffixAutomatonDecoding, {"max_predicts": 1}, "max_predicts"),
    (SuffixAutomatonDecoding, {"alpha": 0.0}, "alpha"),
    (SuffixAutomatonDecoding, {"top_k": 0}, "top_k"),
    (SuffixAutomatonDecoding, {"len_bias": -1}, "len_bias"),
    (SuffixAutomatonDecoding, {"len_threshold": 0}, "len_threshold"),
    (SuffixAutomatonDecoding, {"max_tokens": 1}, "max_tokens"),
    (Spacelike, {"rebuild": "synch"}, "synch", "sync"),
    (Spacelike, {"max_query": 1, "min_query": 2}, "max_query=1", "min_query=2"),
    (Spacelike, {"draft_len": 0}, "draft_len=0"),
    (Spacelike, {"max_matches": 0}, "max_matches=0"),
    (Spacelike, {"buffer_tokens": 2**31}, "buffer_tokens"),
    (Spacelike, {"rebuild_requests": None}, "rebuild_requests", "rebuild_seconds"),
    (Spacelike, {"rebuild_seconds": -1.0}, "rebuild_seconds=-1.0"),
    (SuffixDecoding, {"depth": 1}, "depth"),
    (SuffixDecoding, {"factor": -1.0}, "factor"),
    (SuffixDecoding, {"min_token_prob": 1.5}, "min_token_prob"),
    (SuffixDecoding, {"max_spec_tokens": 0}, "max_spec_tokens"),
    (SuffixDecoding, {"draft": "chain"}, "draft"),
    (SuffixDecoding, {"max_cached_requests": -2}, "max_cached_requests"),
    (SuffixDecoding, {"max_cached_tokens": 0}, "max_cached_tokens"),
    (TokenRecycling, {"k": 0}, "method.k=0"),
    (TokenRecycling, {"k": 7}, "method.k=7 is too small .* method.breadth=80"),
    (TokenRecycling, {"update": "lst"}, "Did you mean 'last'"),
    (TokenRecycling, {"depth": 0}, "method.depth=0"),
    (TokenRecycling, {"depth": 2}, "method.depth=2 cannot make a tree: .* between 2 and 72"),
    (TokenRecycling, {"breadth": 5}, "method.breadth=5 cannot make a tree: .* between 6 and"),
    (TokenRecycling, {"levels": []}, "at least one level"),
    (TokenRecycling, {"levels": [9]}, r"method.levels=\[9\] cannot make a tree"),
    (TokenRecycling, {"levels": [4], "depth": 3}, "leave out"),
    (Union, {"drafters": []}, "drafters"),
    (Union, {"max_nodes": 0}, "max_nodes"),
    (Union, {"fill": "rank"}, "ranked"),
    (Union, {"depth_cost": 0.0}, "depth_cost"),
    (Union, {"priority": ["sma"]}, "'sam'"),
    (Union, {"quotas": [1, 2]}, "quotas"),
    (Union, {"quotas": [1, 2, -1]}, "quotas"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_values_out_of_range_are_refused(case):
    method, knobs, *expected = case
    with pytest.raises(ConfigurationError) as caught:
        method(**knobs)
    for expression in expected:
        assert re.search(expression, str(caught.value))
