"""Mistakes that only a GPU would show, two for each rule, planted: the rule says so.

A rule is one of ``memory.RULES``, or what follows from them: other tokens than the CPU's, more than
one wait of the host in a step, and graphs that are recorded while a text is answered.
"""

import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from methods.eagle import Eagle3
from specbench.decoding import turn
from specbench.decoding.structs import DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.kernels import cuda_graphs
from specbench.models import graph_target
from specbench.models.graph_target import GraphTarget, StaticPass
from specbench.models.heads import drafter as head_drafter
from specbench.models.heads.row_cache import RowCache
from specbench.models.target import Target
from specbench.system.clock import TorchEvents
from tests.conftest import quick_first
from tests.fake_cuda import decoders, memory
from tests.fake_cuda.decoders import DEVICE, DRAFTED, HEADS, LATE, PROMPT, SECOND, TEXT, decode
from tests.fake_cuda.memory import (
    APART,
    CAPTURE,
    EARLY,
    FREED,
    LIBRARY,
    PAGEABLE,
    PINNED,
    POOL,
    RACE,
    RULES,
    RuleBroken,
)

OUTPUT, WAITS = "other output", "more than one wait a step"


@pytest.fixture(scope="module")
def plain():
    return decoders.plain(torch.float64)


# -- runs ---------------------------------------------------------------------------------------


def check(target, result, expected_ids) -> None:
    for reason in target.reasons.values():
        raise RuntimeError(reason)
    if result.output_ids != expected_ids:
        raise RuleBroken(OUTPUT, "another text than the CPU's")


def a_text(world, plain, device=DEVICE, after=None):
    target = decoders.target(max_nodes=20, device=device)
    if after is not None:
        after(target)
    world.waits.clear()
    result = decode(target, TEXT["random_drafts"]())
    in_steps = [wait for wait in world.waits if "clock.py" not in wait and "turn.py" not in wait]
    if len(in_steps) > result.n_target_passes + 1:  # and the prompt's
        raise RuleBroken(WAITS, f"{in_steps}")
    check(target, result, plain.ids)


def on_the_second_device(world, plain):
    a_text(world, plain, SECOND)


def after_a_longer_text(world, plain):
    a_text(world, plain, after=lambda target: target.reserve(500, 20))


def with_a_draft(name, device):
    def run(world, plain):
        target, drafter = decoders.target(max_nodes=31), DRAFTED[name]()
        draft = decoders.draft(drafter, device)
        result = decode(target, drafter, draft_model=draft, overlap="stream")
        check(draft.target, result, plain.ids)

    return run


def with_a_head(name):
    """Compare drafts: the output is the target's, whatever is drafted."""

    def run(world, plain):
        with TemporaryDirectory() as folder:
            files = decoders.heads(Path(folder))
            target = decoders.target(max_nodes=9)
            trees = decoders.drafts(target, HEADS[name](), plain, heads=files)
            there = Target(decoders.model("cpu"), max_len=128)
            expected = decoders.drafts(there, HEADS[name](), plain, heads=files)
        if {at: tree[:2] for at, tree in trees.items()} != {
            at: tree[:2] for at, tree in expected.items()
        }:
            raise RuleBroken(OUTPUT, "other drafts than the CPU's")

    return run


def two_passes_at_once(world, plain):
    """Load a second pass before the result of the first one is read."""
    target = decoders.target(max_nodes=3)
    target.prefill(PROMPT)
    tree = DraftTree.chain(np.array([4, 5]))
    target.forward(5, tree)
    scores = target.forward(6, tree)
    assert GreedyVerifier().verify(tree, scores)


# -- mistakes ------------------------------------------------------------------------------------


def then(owner, name, more):
    """Call ``more`` on the same object after ``owner.name``."""

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


def in_the_pass(work):
    """Run ``work`` within the captured pass."""
    return then(StaticPass, "device_part", work)


def no_wait_of(forgets):
    """Leave out the waits of streams for which ``forgets(stream)`` is true."""

    def plant(patch):
        def wait(self, other):
            if not forgets(self):
                real(self, other)

        real = memory.Stream.wait_stream
        patch.setattr(memory.Stream, "wait_stream", wait)

    return plant


def is_default(stream):
    return stream in stream.world.defaults


def baked_in_length(patch):
    def static_layers(self, tokens, positions, static, hidden_layers):
        lengths = torch.full_like(static.lengths, self.cache.length)
        return real(self, tokens, positions, replace(static, lengths=lengths), hidden_layers)

    real = GraphTarget.static_layers
    patch.setattr(GraphTarget, "static_layers", static_layers)


def kept_from_a_capture(patch):
    caught, real = [], graph_target.greedy_ids

    def ids(logits):
        result = real(logits)
        caught.append(result)
        return result

    patch.setattr(graph_target, "greedy_ids", ids)
    patch.setattr("specbench.models.scores.greedy_ids", lambda x: real(x) + 0 * caught[-1][:1])


def graphs_kept(patch):
    def free(self):
        passes = dict(self._passes)
        real(self)
        self._passes.update(passes)

    real = GraphTarget._free
    patch.setattr(GraphTarget, "_free", free)


def pageable(buffer, values):
    buffer[: len(values)].copy_(torch.from_numpy(values), non_blocking=True)


def views_of_states(hidden, path, count):
    return {i: states[:count] for i, states in (hidden or {}).items()} or None


def forgotten_once(patch):
    """Forget the work space before a capture, but not after it."""
    real, calls = cuda_graphs._forget_work_space, iter(range(10**6))
    patch.setattr(cuda_graphs, "_forget_work_space", lambda: next(calls) % 2 or real())


MISTAKES = {
    "a capture asks for a number": (in_the_pass(lambda s: int(s.numbers[0])), a_text, CAPTURE),
    "a capture draws": (in_the_pass(lambda s: s.numbers.double().uniform_()), a_text, CAPTURE),
    "the result is not pinned": (
        then(StaticPass, "__init__", lambda s: setattr(s, "_result", s._result + 0)), a_text,
        PAGEABLE),
    "a head's numbers are not pinned": (
        instead(head_drafter, "fill", pageable), with_a_head("eagle2"), PAGEABLE),
    "the numbers' buffer is replaced": (
        then(StaticPass, "load", lambda s: setattr(s, "numbers", s.numbers.clone())), a_text,
        OUTPUT),
    "graphs outlive their cache": (graphs_kept, after_a_longer_text, FREED),
    "a capture's memory is kept": (kept_from_a_capture, a_text, POOL),
    "a head's states are a pass's own": (
        instead(turn, "_committed_states", views_of_states), with_a_head("eagle2"), POOL),
    "the outcome is read before its event": (
        instead(StaticPass, "read", lambda self: self._result.numpy()), a_text, EARLY),
    "events are timed before they are reached": (
        instead(TorchEvents, "synchronize", lambda self: None), a_text, EARLY),
    "buffers are written while they are sent": (
        instead(StaticPass, "land", lambda self: None), two_passes_at_once, PINNED),
    "a capture starts before its buffers are filled": (
        no_wait_of(lambda stream: not is_default(stream)), a_text, RACE),
    "the next step does not wait for drafting beside": (
        no_wait_of(is_default), with_a_draft("card", DEVICE), RACE),
    "rows of a draft are on the target's device": (
        then(StaticPass, "__init__",
             lambda self: setattr(self._static, "visible", self.visible.to(DEVICE))),
        with_a_draft("sps", SECOND), APART),
    "products find the work space of those before": (
        instead(cuda_graphs, "_forget_work_space", lambda: None), a_text, LIBRARY),
    "products leave their work space behind": (forgotten_once, a_text, LIBRARY),
    "a length is baked in": (baked_in_length, a_text, OUTPUT),
    "rows that a graph read are not counted": (
        instead(RowCache, "read", lambda self, n: None), with_a_head("eagle2"), OUTPUT),
    "a step waits twice": (
        then(StaticPass, "run", lambda self: self.outputs[0].sum().item()), a_text, WAITS),
    "the result's copy waits": (
        instead(StaticPass, "_tell",
                lambda self: self._result[: len(self.outputs[1])].copy_(self.outputs[1])),
        a_text, WAITS),
    "states that a head asks for are captured in a step": (
        instead(GraphTarget, "expect", lambda self, layers: None), with_a_head("eagle3"), LATE),
    "a check replaces the caches of a head": (
        then(Eagle3, "reset", lambda self: setattr(self, "_reserved", 0)), with_a_head("eagle3"),
        LATE),
}  # fmt: skip


ONE_A_RULE = {rule: mistake for mistake, (_, _, rule) in MISTAKES.items()}.values()


@pytest.mark.parametrize("mistake", quick_first(MISTAKES, ONE_A_RULE))
def test_a_planted_mistake_breaks_its_rule(mistake, pretended, plain, monkeypatch):
    plant, run, rule = MISTAKES[mistake]
    plant(monkeypatch)
    errors = (RuntimeError, IndexError) if rule == OUTPUT else RuntimeError
    with pytest.raises(errors, match=re.escape(f"[{rule}]") if rule != OUTPUT else None):
        run(pretended, plain)
    pretended.coming.clear()


def test_no_rule_breaks_without_a_mistake(pretended, plain):
    for run in (a_text, after_a_longer_text, two_passes_at_once, on_the_second_device):
        run(pretended, plain)
    for run in (with_a_draft("pearl", DEVICE), with_a_head("eagle2"), with_a_head("eagle3")):
        run(pretended, plain)
    assert {rule for *_, rule in MISTAKES.values()} == {*RULES, OUTPUT, WAITS, LATE}
