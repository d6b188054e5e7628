"""Mistakes that only a GPU would show, each planted: the rule that it breaks says so.

A rule is one of ``memory.RULES``, or what follows from them: other tokens than the CPU's, more than
one wait of the host in a step, and passes that are captured while a text is answered.
"""

import re
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from methods import opt_tree
from methods.hydra_heads import Hydra
from specbench.decoding import turn
from specbench.decoding.structs import DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import CaseFailed
from specbench.index.adjacency_matrix import AdjacencyMatrix
from specbench.models import static_pass
from specbench.models.graph_target import GraphTarget, key_bucket, row_bucket
from specbench.models.heads import head_graphs
from specbench.models.heads.head_graphs import HeadGraphs
from specbench.models.heads.row_cache import FixedRows, RowCache
from specbench.models.kv_cache import KVCache
from specbench.models.scores import Scores
from specbench.models.static_pass import FixedShape, StaticNodes, StaticPass
from specbench.models.target import Target
from specbench.system.clock import TorchEvents
from tests.conftest import tiny_model
from tests.gpu_rules import decoders, memory
from tests.gpu_rules.decoders import DEVICE, DRAFTED, HEADS, LATE, PROMPT, SECOND, TEXT, decode
from tests.gpu_rules.memory import (
    APART,
    CAPTURE,
    EARLY,
    FREED,
    PAGEABLE,
    PINNED,
    POOL,
    RACE,
    RULES,
    RuleBroken,
)

OUTPUT, WAITS = "other output", "more than one wait a step"
DRAFTS: dict[str, list] = {}  # of the CPU, by method


@pytest.fixture(scope="module")
def plain():
    return decoders.on_the_cpu()


# -- what is run ---------------------------------------------------------------------------------


def check(target, found, wanted) -> None:
    for reason in target.reasons.values():
        raise RuntimeError(reason)
    if found.output_ids != wanted:
        raise RuleBroken(OUTPUT, "another text than the CPU's")


def a_text(world, plain, device=DEVICE, after=None):
    target = decoders.target(max_nodes=20, device=device)
    if after is not None:
        after(target)
    world.waits.clear()
    found = decode(target, TEXT["random_drafts"]())
    in_steps = [wait for wait in world.waits if "clock.py" not in wait and "turn.py" not in wait]
    if len(in_steps) > found.n_target_passes + 1:  # and the prompt's
        raise RuleBroken(WAITS, f"{in_steps}")
    check(target, found, plain)


def on_the_second_device(world, plain):
    a_text(world, plain, SECOND)


def without_its_device(world, plain):
    a_text(world, plain, SECOND, lambda target: setattr(target, "on_device", nullcontext))


def after_moved_weights(world, plain):
    def moved(target):
        for part in target.model.parameters():
            part.data = part.data.clone()

    a_text(world, plain, after=moved)


def after_a_longer_text(world, plain):
    a_text(world, plain, after=lambda target: target.reserve(500, 20))


def with_a_draft(name, device):
    def run(world, plain):
        target, drafter = decoders.target(max_nodes=31), DRAFTED[name]()
        draft = decoders.draft(drafter, device)
        found = decode(target, drafter, draft_model=draft, overlap="stream")
        check(draft._target, found, plain)

    return run


def with_drafts(name):
    """Of the text nothing is seen: the target's tokens stand whatever is drafted."""
    make = {**TEXT, **DRAFTED, **HEADS}[name]

    def run(world, plain):
        with TemporaryDirectory() as folder:
            given = {"heads": decoders.heads(Path(folder))} if name in HEADS else {}
            drafter = make()
            target = decoders.target(max_nodes=max(drafter.needs.max_nodes, 5))
            if name in DRAFTED:
                given = {"draft_model": decoders.draft(drafter)}
            found = decoders.drafts(target, drafter, plain, **given)
            if name not in DRAFTS:
                there, drafter = Target(tiny_model("llama"), max_len=128), make()
                if name in DRAFTED:
                    given = {"draft_model": decoders.plain_draft(drafter)}
                wanted = decoders.drafts(there, drafter, plain, **given)
                DRAFTS[name] = [tree[:2] for tree in wanted]
        if [tree[:2] for tree in found] != DRAFTS[name]:
            raise RuleBroken(OUTPUT, "other drafts than the CPU's")

    return run


def two_passes_at_once(world, plain):
    """The second one is loaded while nobody has asked for what the first one found out."""
    target = decoders.target(max_nodes=3)
    target.prefill(PROMPT)
    tree = DraftTree.chain(np.array([4, 5]))
    target.forward(5, tree)
    scores = target.forward(6, tree)
    assert GreedyVerifier().verify(tree, scores)


def two_layers_of_a_draft(world, plain):
    draft = decoders.draft(DRAFTED["sps"]())
    draft.begin(PROMPT)
    draft.catch_up(np.append(PROMPT, 3))
    first = draft.extend(np.array([5]), np.array([-1]))
    draft.extend(np.array([6, 7]), np.array([0, 0]))  # another graph of the pool
    assert first.isfinite().all()


# -- mistakes ------------------------------------------------------------------------------------


def then(owner, name, more):
    """Behind what ``owner.name`` does, ``more`` is done with the same object."""

    def plant(patch):
        real = getattr(owner, name)

        def both(self, *args, **kwargs):
            result = real(self, *args, **kwargs)
            more(self)
            return result

        patch.setattr(owner, name, both)

    return plant


def instead(owner, name, other):
    return lambda patch: patch.setattr(owner, name, other)


def replaced(*names):
    return lambda self: [setattr(self, n, getattr(self, n).clone()) for n in names]


def in_the_pass(work):
    """``work`` is done within what is captured."""
    return then(StaticPass, "device_part", work)


def no_wait_of(forgets):
    """``forgets(stream)`` says of which streams a wait is left out."""

    def plant(patch):
        def wait(self, other):
            if not forgets(self):
                real(self, other)

        real = memory.Stream.wait_stream
        patch.setattr(memory.Stream, "wait_stream", wait)

    return plant


def is_default(stream):
    return stream in stream.world.defaults


def is_latest(stream):
    return stream is stream.world.streams[-1]


def baked_in_length(patch):
    def static(self, slots, keys):
        return real(self, torch.arange(self.length, self.length + len(slots), device=DEVICE), keys)

    real = KVCache.static
    patch.setattr(KVCache, "static", static)


def not_pinned(name):
    return then(StaticPass, "__init__", lambda self: setattr(self, name, getattr(self, name) + 0))


def kept_from_a_capture(patch):
    kept, real = [], static_pass.greedy_ids

    def ids(logits):
        found = real(logits)
        kept.append(found)
        return found

    patch.setattr(static_pass, "greedy_ids", ids)
    patch.setattr("specbench.models.scores.greedy_ids", lambda x: real(x) + 0 * kept[-1][:1])


def logits_of_a_buffer(patch):
    real = GraphTarget._nodes

    def nodes(self, ids, visible, depths, keep=0):
        n = len(ids)
        real(self, ids, visible, depths, keep)
        rows = row_bucket(n)
        keys = key_bucket(self.cache.length + len(depths) - n + rows, self.cache.max_len)
        return Scores(self._pass(rows, keys, 0).outputs[0][n - keep if keep else 0 : n])

    patch.setattr(GraphTarget, "_nodes", nodes)


def graphs_kept(patch):
    def free(self):
        passes = dict(self._passes)
        real(self)
        self._passes.update(passes)

    real = GraphTarget._free
    patch.setattr(GraphTarget, "_free", free)


def pageable(buffer, values):
    buffer[: len(values)].copy_(torch.from_numpy(values), non_blocking=True)


def last_row(self, numbers, states, keys):
    with head_graphs.on_fixed_rows(self._heads, numbers[:1], keys):
        return self._heads.read_fixed(states, numbers[1:2] * 0 + len(states))


def of_the_first_keys(self, what, length):
    return self._steps.get((what, head_graphs.key_bucket(length, self._longest)))


def from_the_last_graph(patch):
    def draft(self, length, feature, number=0):
        return real(self, length, self.feature, number)

    real = HeadGraphs.draft
    patch.setattr(HeadGraphs, "draft", draft)


def views_of_states(hidden, path, count):
    return {i: states[:count] for i, states in (hidden or {}).items()} or None


def transposed(self):
    self.visible.copy_(self._host_visible.T, non_blocking=True)


MISTAKES = {
    "the numbers' buffer is replaced": (
        then(StaticPass, "load", replaced("numbers")), a_text, FREED),
    "the mask's buffer is replaced": (then(StaticPass, "load", replaced("visible")), a_text, FREED),
    "a draft's buffer is replaced": (
        then(StaticNodes, "load", replaced("_depths")), with_a_draft("sps", DEVICE), FREED),
    "weights move under their graphs": (lambda _: None, after_moved_weights, FREED),
    "graphs outlive their cache": (graphs_kept, after_a_longer_text, FREED),
    "a length is baked in": (baked_in_length, a_text, OUTPUT),
    "the mask is transposed": (then(StaticPass, "_ship", transposed), a_text, OUTPUT),
    "the result is not pinned": (not_pinned("_result"), a_text, PAGEABLE),
    "the numbers are not pinned": (not_pinned("_host"), a_text, PAGEABLE),
    "the outcome is read before its event": (
        instead(StaticPass, "read", lambda self: self._result.numpy()), a_text, EARLY),
    "events are timed before they are reached": (
        instead(TorchEvents, "synchronize", lambda self: None), a_text, EARLY),
    "the event is another device's": (
        lambda _: None, without_its_device, EARLY),
    "buffers are written while they are sent": (
        instead(StaticPass, "land", lambda self: None), two_passes_at_once, PINNED),
    "a capture starts before its buffers are filled": (
        no_wait_of(lambda stream: not is_default(stream)), a_text, RACE),
    "drafting beside the pass starts too early": (
        no_wait_of(is_latest), with_a_draft("pearl", DEVICE), RACE),
    "the next step does not wait for drafting beside": (
        no_wait_of(is_default), with_a_draft("card", DEVICE), RACE),
    "rows of a draft are on the target's device": (
        then(StaticNodes, "__init__",
             lambda self: setattr(self, "_row_numbers", self._row_numbers.to(DEVICE))),
        with_a_draft("sps", SECOND), APART),
    "a capture asks for a number": (in_the_pass(lambda s: int(s.numbers[0])), a_text, CAPTURE),
    "a capture uploads a number": (
        in_the_pass(lambda s: torch.tensor([1], device=s.numbers.device)), a_text, CAPTURE),
    "a capture writes a Python number at indices": (
        in_the_pass(lambda s: s.numbers.clone().__setitem__(s.numbers[:1] * 0, 1)), a_text,
        CAPTURE),
    "a capture selects by a mask": (
        in_the_pass(lambda s: s.numbers[s.numbers > 0]), a_text, CAPTURE),
    "a capture draws": (in_the_pass(lambda s: s.numbers.double().uniform_()), a_text, CAPTURE),
    "a capture's memory is kept": (kept_from_a_capture, a_text, POOL),
    "a draft's logits stay in their buffer": (
        logits_of_a_buffer, two_layers_of_a_draft, POOL),
    "a head's numbers are replaced": (
        then(HeadGraphs, "read", replaced("_new")), with_drafts("eagle2"), OUTPUT),
    "a head's numbers are not pinned": (
        instead(head_graphs, "fill", pageable), with_drafts("eagle2"), PAGEABLE),
    "rows that a graph read are not counted": (
        instead(RowCache, "read", lambda self, n: None), with_drafts("eagle2"), OUTPUT),
    "padding is taken for the last row": (
        instead(Hydra, "_read", last_row), with_drafts("hydra"), OUTPUT),
    "a head's length is baked in": (
        then(FixedRows, "__init__",
             lambda self: setattr(self, "_length", torch.full_like(self._length, 41))),
        with_drafts("eagle"), OUTPUT),
    "a head looks at too few keys": (
        instead(HeadGraphs, "_step", of_the_first_keys), with_drafts("eagle2"), OUTPUT),
    "a head's states are a pass's own": (
        instead(turn, "_of_committed", views_of_states), with_drafts("eagle2"), POOL),
    "states that a head asks for are captured in a step": (
        instead(GraphTarget, "expect", lambda self, layers: None), with_drafts("eagle3"), LATE),
    "nodes of an earlier draft are seen": (
        then(StaticNodes, "load", lambda self: self._numbers[2:3].fill_(self.keys)),
        with_drafts("opt_tree"), OUTPUT),
    "a layer's logits are replaced": (
        then(opt_tree._Graphs, "best", replaced("_logits")), with_drafts("opt_tree"), OUTPUT),
    "a head drafts from what a graph read before": (
        from_the_last_graph, with_drafts("eagle"), OUTPUT),
    "Token Recycling's matrix is replaced": (
        then(AdjacencyMatrix, "clear", replaced("rows")), with_drafts("token_recycling"), FREED),
    "a step waits twice": (
        then(FixedShape, "run", lambda self: self.outputs[0].sum().item()), a_text, WAITS),
    "the result's copy waits": (
        instead(StaticPass, "_tell",
                lambda self: self._result[: len(self.outputs[1])].copy_(self.outputs[1])),
        a_text, WAITS),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_breaks_its_rule(mistake, pretended, plain, monkeypatch):
    plant, run, rule = MISTAKES[mistake]
    plant(monkeypatch)
    errors = (RuntimeError, IndexError, CaseFailed) if rule == OUTPUT else RuntimeError
    with pytest.raises(errors, match=re.escape(f"[{rule}]") if rule != OUTPUT else None):
        run(pretended, plain)
    pretended.coming.clear()


def test_nothing_is_said_where_nothing_is_wrong(pretended, plain):
    for run in (a_text, after_a_longer_text, two_passes_at_once, on_the_second_device):
        run(pretended, plain)
    with_a_draft("pearl", DEVICE)(pretended, plain)
    for name in ("eagle", "eagle2", "eagle3", "hydra", "opt_tree", "token_recycling"):
        with_drafts(name)(pretended, plain)
    assert {rule for *_, rule in MISTAKES.values()} == {*RULES, OUTPUT, WAITS, LATE}
