"""The example methods of CONTRIBUTING.md work as they stand there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

import methods
from methods.union import Union
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DecodeState, DraftContext, StepOutcome
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import ConfigurationError
from specbench.system.clock import NullClock
from tests.table_models import TableDraft, TableTarget, table

ROOT = Path(__file__).resolve().parents[2]
PATTERN = re.compile(r"^```(?:python|yaml)\n(# (\S+\.(?:py|yaml))[^\n]*\n.*?)^```$", re.S | re.M)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes the code blocks under their own names, makes them importable; configs by method."""
    blocks = PATTERN.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    for text, name in blocks:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    modules = list((tmp_path / "methods").glob("*.py"))
    yamls = list((tmp_path / "conf" / "method").glob("*.yaml"))
    assert {module.stem for module in modules} == {yaml.stem for yaml in yamls}
    hidden = [module.name for module in modules if (ROOT / "methods" / module.name).exists()]
    assert not hidden, "an example must not hide a method"
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path / "methods")])
    importlib.invalidate_caches()
    return {yaml.stem: OmegaConf.load(yaml) for yaml in yamls}


@pytest.fixture
def example(written):
    """The configuration of the method that learns from tokens."""
    return written["successor_walk"]


def decode(drafter, stream, n_prompt):
    """Drive ``drafter`` as the engine does, with ``stream`` in the target's place.

    Returns the number of tokens committed by each step.
    """
    state = DecodeState(np.array(stream[:n_prompt], dtype=np.int64), len(stream) - n_prompt)
    state.commit(np.array(stream[n_prompt : n_prompt + 1], dtype=np.int64))
    drafter.begin(state)
    committed_per_step = []
    while state.remaining:
        tree = drafter.propose(state)
        assert len(tree) <= drafter.needs.max_nodes
        assert all(parent < node for node, parent in enumerate(tree.parents))
        path: list[int] = []
        at = state.length
        for node, parent in enumerate(tree.parents):
            last = path[-1] if path else -1
            if parent == last and at < len(stream) and int(tree.tokens[node]) == stream[at]:
                path.append(node)
                at += 1
        committed = np.array(stream[state.length : at + 1], dtype=np.int64)
        state.commit(committed)
        state.step += 1
        outcome = StepOutcome(tree, np.array(path, dtype=np.int64), committed, None)
        drafter.observe(state, outcome)
        committed_per_step.append(len(committed))
    drafter.end(state)
    assert state.tokens.tolist() == list(stream)
    return committed_per_step


def test_the_example_drafts_a_periodic_stream_in_full(example):
    """Prompt 1 2 3 1, first new token 2: every later token follows its last successor."""
    drafter = instantiate(example)
    drafter.setup(DraftContext(vocab_size=16, eos_ids=frozenset({0})))
    drafter.reset()
    stream = [1, 2, 3] * 20
    accepted = decode(drafter, stream, n_prompt=4)
    # 55 tokens after the first new one, 8 drafted + 1 of the target's own a step: 6 steps and 1.
    assert accepted == [9] * 6 + [1]


def test_the_example_learns_across_the_border_of_a_step_and_forgets(example):
    """5 9 is first seen as (last token of one step, first of the next)."""
    drafter = instantiate(example)
    # Prompt 5, first new token 9. Two empty drafts commit 7, then 5; 9 -> 7 and 7 -> 5 lie over the
    # borders of steps. With them the third draft is 9 7 5 ...; without, it would be 9 alone.
    assert decode(drafter, [5, 9, 7, 5, 9, 7, 5], n_prompt=1) == [1, 1, 3]
    drafter.reset()
    state = DecodeState(np.array([5], dtype=np.int64), 4)
    assert len(drafter.propose(state)) == 0


def test_the_example_refuses_a_knob_out_of_range(example):
    example.num_tokens = 0
    with pytest.raises(Exception) as caught:
        instantiate(example)
    cause = caught.value.__cause__ or caught.value
    assert isinstance(cause, ConfigurationError)
    assert "method.num_tokens=0" in str(cause)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in_a_union"])
def test_the_example_with_a_draft_model_is_exact(written, alone):
    """The draft is the target with some noise; it asserts that its cache holds the text."""
    drafter = instantiate(written["likeliest_chain"])
    walk = instantiate(written["successor_walk"])
    method = drafter if alone else Union(drafters=[walk, drafter], max_nodes=8)
    logits = table(0, 8, 3.0)
    draft = TableDraft(logits + 0.7 * table(1, 8))
    method.setup(DraftContext(8, frozenset(), draft_model=draft))
    loop = Engine(TableTarget(logits), GreedyVerifier(), eos_ids=frozenset(), clock=NullClock)
    prompt = np.array([3, 1, 4], dtype=np.int64)
    expected = loop.decode(prompt, Drafter(name="plain"), max_new_tokens=60)
    method.reset()
    found = loop.decode(prompt, method, max_new_tokens=60)
    assert found.output_ids == expected.output_ids
    assert found.n_target_passes < 0.8 * expected.n_target_passes
    counts = {key.rpartition(".")[2]: value for key, value in found.drafter.items()}
    assert 0 < counts["draft_forwards"] <= counts["draft_tokens"]


def test_the_lists_that_the_recipe_names_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = text.partition("To be added to by hand")[2].partition("\n## ")[0]
    lines = re.findall(r"^- .*?(?=^- |\Z)", recipe, re.S | re.M)
    assert len(lines) == 5
    for line in lines:
        words = re.findall(r"`([^`]+)`", line)
        folder, names = Path(), []
        for word in words:
            if word.endswith((".py", ".yaml")):
                path = Path(word)
                folder = path.parent if path.parent.name else folder
                source = (ROOT / folder / path.name).read_text(encoding="utf-8")
                for name in names:
                    assert re.search(rf"^{name}\b.*[=:]", source, re.M), (name, word)
                if path.parent.name:
                    names = []
            elif re.fullmatch(r"[A-Z_]+|compare", word):
                names.append(word)
