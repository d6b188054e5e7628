"""Play a drafter against a given output: what the engine does, without the model's pass.

A turn's output is fixed in advance. A step accepts the longest path of the draft that the output
continues with, commits it with the next token, and shows the drafter the outcome. Methods that
need more of the target than its tokens (`needs_a_target`) are tested with a tiny model instead.
"""

import functools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hydra.utils
import numpy as np
import pytest
from omegaconf import OmegaConf

from methods.ngrammys import bigram_table
from specbench.arrays import IntArray
from specbench.artifacts import documentation, resolve
from specbench.config.compose import compose, option_names
from specbench.config.entries import PART_KNOBS, with_parts
from specbench.config.validate import check_method
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import GREEDY, Sampling
from specbench.decoding.structs import (
    NO_TOKENS,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)
from specbench.paths import PROJECT
from tests.conftest import tiny_draft, tiny_model
from tests.models.heads import tiny_heads

VOCABULARY = 60
EOS = 2
# Smaller than the paper's, which are slow and useless with so small a vocabulary.
TOY_SIZES: dict[str, dict[str, object]] = {
    "card": {"k": 12, "r": 3},
    "medusa": {"levels": [3, 2]},
    "hydra": {"levels": [3, 2]},
    "eagle": {"levels": [3, 2]},
    "eagle2": {"total": 6, "depth": 1, "top_k": 3},
    "eagle3": {"total": 6, "depth": 1, "top_k": 3},
    "sam_eagle2": {"auxiliary": {"method": "eagle2", "total": 6, "depth": 1, "top_k": 3}},
    "ouroboros": {"gamma": 2, "ngram": 4, "window": 5, "guesses": 5},
    "ngram_mod": {"n_match": 1, "n_max": 6, "n_min": 1},
    "ngram_map": {"size_n": 2, "size_m": 4},
    "suffix_else_head": {
        "drafters": ["suffix_decoding", {"method": "eagle2", "total": 6, "depth": 1, "top_k": 3}],
        "min_score": 0.3,
    },
}


def method_names() -> list[str]:
    """List all methods by their yaml files."""
    return option_names("method")


def compose_method(name: str, *overrides: str) -> dict:
    """Compose the method's configuration as the runner hands it to the class."""
    return dict(_composed(name, overrides))


@functools.cache
def _composed(name: str, overrides: tuple[str, ...]) -> dict:
    # Without the pair file: it holds settings for one model, not the method's defaults.
    cfg = compose([f"method={name}", "pair=none", *overrides])
    check_method(cfg.method)
    knobs = OmegaConf.to_container(cfg.method, resolve=True)
    del knobs["label"]
    return knobs


def instantiate(name: str, **knobs: object) -> Drafter:
    """Build the drafter with its yaml's knobs, overridden by ``knobs``."""
    node = with_parts({**compose_method(name), **TOY_SIZES.get(name, {}), **knobs})
    if "rebuild" in node:
        node["rebuild"] = "sync"  # background threads would make drafts depend on timing
    return hydra.utils.instantiate(node, _convert_="all")


def methods_that_need(need: str) -> list[str]:
    """List the methods whose ``needs`` has ``need`` set, except those made of other methods."""
    nodes = {name: compose_method(name) for name in option_names("method")}
    single = {name: node for name, node in nodes.items() if not {*PART_KNOBS} & node.keys()}
    return [
        name
        for name, node in single.items()
        if getattr(hydra.utils.get_class(node["_target_"])().needs, need)
    ]


def named_in_readme() -> set[str]:
    """List the methods of README's table, which a user's own method is not in."""
    table = (PROJECT / "README.md").read_text(encoding="utf-8").partition("\n## Methods")[2]
    names = re.findall(r"`(\w+)`", table.partition("\n## ")[0])
    return {*option_names("method")} & {*names}


def with_draft_model() -> dict[str, Callable[[], Drafter]]:
    """Map the methods that draft with a second model to functions that build them."""
    return {name: functools.partial(instantiate, name) for name in methods_that_need("draft_model")}


def needs_a_target(needs: Needs) -> bool:
    """Return whether the method needs more than committed tokens and the reference output."""
    return bool(needs.logits or needs.prompt_logits)


class WordTokenizer:
    """Gives each word an id below `VOCABULARY`; used by builders of artifacts."""

    def __len__(self) -> int:
        return VOCABULARY

    def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        ids = [[zlib.crc32(word.encode()) % VOCABULARY for word in t.split()] for t in texts]
        return {"input_ids": ids}


def toy_context(
    drafter: Drafter,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int = 0,
    sampling: Sampling = GREEDY,
    architecture: str = "llama",
) -> DraftContext:
    """Make a context whose artifacts are built by their builders from a few random paragraphs.

    ``architecture`` is the target's; use a separate ``cache_dir`` for each.
    """
    word_ids = np.random.default_rng(5).zipf(1.4, (40, 60)) % 90
    paragraphs = [" ".join(f"w{i}" for i in row) for row in word_ids]
    monkeypatch.setattr(documentation, "installed_prose", lambda: iter([("toy", paragraphs)]))
    monkeypatch.setattr("specbench.models.loading.tokenizer_hash", lambda tokenizer: "toy")
    monkeypatch.setattr(
        bigram_table, "load_model_of", lambda _: tiny_model(architecture, vocab_size=VOCABULARY)
    )
    files = resolve.resolve(
        drafter.needs.artifacts,
        tokenizer=WordTokenizer(),
        bundled=True,
        cache_dir=cache_dir,
        model_key="toy",
    )
    reads = bool(drafter.needs.heads)
    heads = tiny_heads.save_each(cache_dir / "heads", vocab=VOCABULARY) if reads else {}
    draft = tiny_draft(drafter.needs, vocab_size=VOCABULARY) if drafter.needs.draft_model else None
    return DraftContext(
        VOCABULARY,
        frozenset({EOS}),
        "toy",
        512,
        files,
        seed,
        sampling,
        # Methods that check the target's fingerprint are set up without a target here.
        target=tiny_heads.Ghost(VOCABULARY) if reads else None,
        draft_model=draft,
        heads=heads,
    )


@dataclass
class Trace:
    """Drafts and accepted counts of one turn."""

    trees: list[DraftTree] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.plain() == other.plain()

    def plain(self) -> list[tuple]:
        return [
            (tree.tokens.tolist(), tree.parents.tolist(), count)
            for tree, count in zip(self.trees, self.accepted, strict=True)
        ]


def accepted_path(tree: DraftTree, continuation: IntArray) -> IntArray:
    """Return the longest path that ``continuation`` begins with; the first of equals wins."""
    depth = np.zeros(len(tree), dtype=np.int64)
    matches = np.zeros(len(tree), dtype=np.bool_)
    best = -1
    for i, parent in enumerate(tree.parents.tolist()):
        depth[i] = 0 if parent < 0 else depth[parent] + 1
        candidate = tree.aux is None or not tree.aux[i]
        above = parent < 0 or matches[parent]
        at = depth[i]
        if candidate and above and at < len(continuation) and tree.tokens[i] == continuation[at]:
            matches[i] = True
            if best < 0 or depth[i] > depth[best]:
                best = i
    path = []
    while best >= 0:
        path.append(best)
        best = int(tree.parents[best])
    return np.array(path[::-1], dtype=np.int64)


def check_tree(tree: DraftTree, needs: Needs) -> None:
    """Check the invariants of a tree that the engine relies on."""
    tokens, parents = np.asarray(tree.tokens), tree.parents
    assert tokens.dtype == parents.dtype == np.int64
    assert tokens.shape == parents.shape == (len(tree),)
    assert len(tree) <= needs.max_nodes
    assert ((parents >= -1) & (parents < np.arange(len(tree)))).all()
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
    if tree.aux is not None:
        children = parents >= 0
        assert not (tree.aux[parents[children]] & ~tree.aux[children]).any()
    if tree.sources is not None:
        assert len(tree.sources) == len(tree)
    if tree.path_probs is not None:
        assert tree.path_probs.shape == parents.shape and tree.path_probs.dtype == np.float64
        assert (tree.path_probs > 0).all()
        assert (tree.path_probs <= np.append(tree.path_probs, 1.0)[parents] + 1e-12).all()


def play(
    drafter: Drafter,
    prompt: IntArray,
    output: IntArray,
    seen: IntArray = NO_TOKENS,
    *,
    times: int = 1,
) -> Trace:
    """Play one turn, from ``begin`` to ``end``; check that no draft or token changes later.

    Args:
        seen: the dialogue's earlier turns, which the prompt begins with.
        times: proposals per step, all from the same random numbers; the last one counts.
    """
    trace = Trace()
    text = [*prompt.tolist(), *output.tolist()]
    drafted = []
    needs = drafter.needs
    state = DecodeState(prompt, len(output), seen=seen)
    if needs.reference:
        drafter.set_reference(output)
    state.commit(output[:1])
    show_prompt(drafter, prompt)
    drafter.begin(state)
    while state.remaining:
        before = state.buffer.copy()
        for _ in range(times - 1):
            with same_random_numbers(drafter):
                drafter.propose(state)
        tree = drafter.propose(state)
        assert np.array_equal(state.buffer, before), "a method only reads the text"
        check_tree(tree, needs)
        done = state.length - state.n_prompt
        path = accepted_path(tree, output[done:])
        if needs.overlap:
            drafter.overlap(state, tree)
        # The last token of the output may be a draft token: then no bonus follows.
        committed = output[done : done + len(path) + 1]
        trace.trees.append(tree)
        drafted.append((tree.tokens.tolist(), tree.parents.tolist()))
        trace.accepted.append(len(committed))
        state.step += 1
        state.commit(committed)
        outcome = StepOutcome(
            tree,
            path,
            committed,
            None,
            hidden=states_of_committed(drafter, state, len(committed)),
            finished=not state.remaining,
        )
        drafter.observe(state, outcome)
    drafter.end(state)
    assert text == state.tokens.tolist() == [*prompt.tolist(), *output.tolist()]
    assert drafted == [(tree.tokens.tolist(), tree.parents.tolist()) for tree in trace.trees]
    return trace


@contextmanager
def same_random_numbers(drafter: Drafter) -> Iterator[None]:
    """Restore the drafter's random generators afterwards, so that they repeat their draws."""
    holders = [drafter, *getattr(drafter, "parts", ())]
    values = [value for holder in holders for value in vars(holder).values()]
    generators = [value for value in values if isinstance(value, np.random.Generator)]
    before = [generator.bit_generator.state for generator in generators]
    yield
    for generator, state in zip(generators, before, strict=True):
        generator.bit_generator.state = state


def show_prompt(drafter: Drafter, prompt: IntArray) -> None:
    """Give the drafter the prompt's hidden states if it needs them."""
    if layers := drafter.needs.hidden_layers:
        drafter.observe_prompt_hidden(prompt, tiny_heads.states_of(prompt, layers))


def states_of_committed(drafter: Drafter, state: DecodeState, count: int) -> Mapping | None:
    """Return hidden states of the former root and the tokens just committed, except the last."""
    layers = drafter.needs.hidden_layers
    tokens = state.tokens[state.length - count - 1 : state.length - 1]
    return tiny_heads.states_of(tokens, layers) if layers else None


def toy_text(seed: int, length: int, n_words: int = VOCABULARY) -> IntArray:
    """Make tokens that repeat like a text: copies of earlier stretches between new words.

    With few words, contexts of several tokens recur with other continuations.
    """
    random = np.random.default_rng(seed)
    text = random.integers(3, n_words, 12).tolist()
    while len(text) < length:
        if random.random() < 0.6:
            start, size = random.integers(0, len(text)), random.integers(2, 9)
            text += text[start : start + size]
        else:
            text += random.integers(3, n_words, random.integers(1, 4)).tolist()
    return np.array(text[:length], dtype=np.int64)


def toy_turn(
    seed: int, n_prompt: int = 40, n_new: int = 60, n_words: int = VOCABULARY
) -> tuple[IntArray, IntArray]:
    """Make prompt and output of one random turn."""
    text = toy_text(seed, n_prompt + n_new, n_words)
    return text[:n_prompt], text[n_prompt:]
