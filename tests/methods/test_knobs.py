"""Knobs out of range are refused, with the key, the value and what it must be."""

import re

import pytest

from methods.cacheback import Cacheback
from methods.card import Card
from methods.eagle import Eagle
from methods.logitspec import LogitSpec
from methods.lookahead import Lookahead
from methods.medusa import Medusa
from methods.ouroboros import Ouroboros
from methods.pearl import Pearl
from methods.pld import PromptLookup
from methods.rest import Retrieval
from methods.sam import SuffixAutomatonDecoding
from methods.ssd import Spacelike
from methods.token_recycling import TokenRecycling
from methods.union import Union
from specbench.errors import ConfigurationError

# The method, its knobs, and expressions that the message matches.
REFUSED = [
    # by their types
    (Lookahead, {"ngram": 1}, "`method.ngram` must be at least 2 .* got 1"),
    (Lookahead, {"window": "3"}, "`method.window` must be a whole number .* got '3'"),
    (PromptLookup, {"variant": "specbensh"}, "`method.variant` must be one of 'specbench', .* got"),
    (PromptLookup, {"max_ngram": 0}, "`method.max_ngram` must be at least 1 or null"),
    (SuffixAutomatonDecoding, {"alpha": 0.0}, "`method.alpha` must be above 0"),
    (Spacelike, {"buffer_tokens": 2**31}, "`method.buffer_tokens` must be below"),
    *((Pearl, {"gamma": gamma}, "`method.gamma` must be") for gamma in (0, 65, "some", 1.5)),
    (LogitSpec, {"caps": [4, 3]}, "`method.caps` must be a list of at least 3"),
    (LogitSpec, {"caps": [4, 3, 0]}, "`method.caps` must be at least 1"),
    (Union, {"drafters": []}, "`method.drafters` must be"),
    (Union, {"quotas": [1, 2, -1]}, "`method.quotas` must be at least 0"),
    # by what else is set
    (Cacheback, {"total_draft_len": 19}, "`method.total_draft_len` must be at least 20"),
    (Cacheback, {"tables": [{"kind": "frozzen"}]}, r"`method.tables\[0\]` must be", "frozzen"),
    (Cacheback, {"tables": [{"kind": "dynamic", "leader_length": 2}]}, "leader_length", "_len"),
    (Cacheback, {"tables": [{"leader_len": 2}]}, r"tables\[0\]", "kind"),
    (Cacheback, {"tables": [{"kind": "dynamic", "follower_len": 0}]}, r"\[0\]\.follower_len"),
    (Card, {"r": 51}, "`method.r` must be at most max_depth=50"),
    (Card, {"k": 5000}, "`method.k` must be at most"),
    (Eagle, {"tree": "medusa_63", "levels": [2, 1]}, r"two trees. Type method\.levels=null"),
    (Medusa, {"tree": "by_model", "levels": [2]}, r"by_model .* two trees"),
    (Medusa, {"tree": "dynamic", "levels": [2]}, r"dynamic .* two trees"),
    (Ouroboros, {"topk": 21}, "`method.topk` must be at most guesses=20"),
    (PromptLookup, {"min_ngram": 4}, "`method.min_ngram` must be at most max_ngram=3"),
    (Retrieval, {"max_span": 1}, "`method.max_span` must be at least min_span=2"),
    (Spacelike, {"max_query": 1, "min_query": 2}, "max_query", "min_query=2"),
    (Spacelike, {"rebuild_requests": None}, "rebuild_requests", "rebuild_seconds"),
    (TokenRecycling, {"k": 7}, "method.k=7 is too small .* method.breadth=80"),
    (TokenRecycling, {"depth": 2}, "method.depth=2 cannot make a tree: .* between 2 and 72"),
    (TokenRecycling, {"levels": []}, "at least one level"),
    (TokenRecycling, {"levels": [4], "depth": 3}, "leave out"),
    (Union, {"priority": ["sma"]}, "'sam'"),
    (Union, {"quotas": [1, 2]}, "`method.quotas` must be as long as"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_values_out_of_range_are_refused(case):
    method, knobs, *expected = case
    with pytest.raises(ConfigurationError) as caught:
        method(**knobs)
    for expression in expected:
        assert re.search(expression, str(caught.value))
