"""Our methods as vLLM's drafter: ``--speculative-config`` with ``method: custom_class``.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "specbench.engines.vllm.pld", "num_speculative_tokens": 10}'

The last word names the method; its knobs stand in ``--additional-config '{"specbench": {…}}'``.
vLLM gives a drafter the sampled ids of each row of its batch and the rows' texts, and no request
ids. Rows move when others end, and a preempted request comes back later in any of them: a row
belongs to the known text that it continues. What nobody knows is a new text.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import hydra.utils
import numpy as np
from omegaconf import OmegaConf

from specbench.arrays import IntArray
from specbench.artifacts import resolve
from specbench.config.compare import with_parts
from specbench.config.compose import compose, option_names
from specbench.config.knobs import check_method
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, Needs, StepOutcome
from specbench.decoding.turn import StopRules
from specbench.errors import ConfigurationError, NeedsNotMet, unknown_name
from specbench.models.loading import tokenizer_hash

KNOBS = "specbench"  # of vLLM's ``additional_config``
_INTERFACE = "vllm.v1.spec_decode.custom_class_proposer"
_MAKER = "create_custom_proposer"  # earlier drafts of the interface had none
_READ = "0.32"  # the release whose source this was written from and driven with
_log = logging.getLogger(__name__)

# vLLM's configuration: its class cannot be imported where vLLM is not installed.
VllmConfig: TypeAlias = Any


class _Text:
    """One request's text, its drafter, and the draft that vLLM was given last."""

    __slots__ = ("chain", "drafter", "state", "tree")

    def __init__(self, drafter: Drafter, state: DecodeState) -> None:
        self.drafter, self.state = drafter, state
        self.tree, self.chain = DraftTree.empty(), np.empty(0, np.int64)

    def is_before(self, text: IntArray) -> bool:
        """Whether it is this text."""
        return self.state.length == len(text) and np.array_equal(self.state.tokens, text)

    def tokens(self) -> IntArray:
        """``[k]`` the draft."""
        return np.asarray(self.tree.tokens, dtype=np.int64)[self.chain]

    def drafted(self, accepted: IntArray) -> bool:
        """Whether the draft begins with these."""
        return np.array_equal(self.tokens()[: len(accepted)], accepted)

    def observe(self, committed: IntArray, accepted: int, finished: bool) -> None:
        self.state.commit(committed)
        self.state.step += 1
        outcome = StepOutcome(
            tree=self.tree,
            path=self.chain[:accepted],
            committed=committed.astype(np.int64),
            next_tokens=None,  # vLLM says none of rejected rows
            finished=finished,
        )
        self.drafter.observe(self.state, outcome)


class VllmDrafter:
    """vLLM's interface around one of our methods.

    Args:
        config: vLLM's.
        method: its name, as in ``method=<name>``.

    Raises:
        NeedsNotMet: the method needs more than tokens, or this vLLM hands drafters something else.
        ConfigurationError: an unknown method or knob.
    """

    def __init__(self, config: VllmConfig, method: str) -> None:
        _check_engine(config)
        knobs = (config.additional_config or {}).get(KNOBS, {})
        self._drafter = _instantiated(method, knobs)
        _check_tokens_suffice(self._drafter)
        model = config.model_config
        self._longest = int(config.speculative_config.num_speculative_tokens)
        self._max_len = int(model.max_model_len)
        self._context = _context(self._drafter, model)
        # As many again as can run may wait, preempted or not scheduled; others are forgotten.
        self._most = 2 * int(config.scheduler_config.max_num_seqs)
        self._rules = StopRules(self._context.eos_ids)
        self._texts: dict[int, _Text] = {}  # by a number of ours; what was seen last comes last
        self._rows: list[int | None] = []  # of the last call
        self._count = 0
        self._idle: list[Drafter] = []
        self._told = False
        self._idle.append(self._ready())  # compiles here and not behind a request

    def load_model(self, *_: object, **__: object) -> None:
        """Nothing: vLLM calls it after its own model is loaded."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int] | IntArray,
        token_ids_cpu: Any,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A chain for each row, empty where there is nothing to draft.

        Args:
            sampled_token_ids: what the last pass of each row committed; none while its prompt is
                still being read.
            num_tokens_no_spec: ``[rows]`` tokens of each row, these included.
            token_ids_cpu: ``[rows, longest]`` their ids; behind them stand old drafts.
            slot_mappings: not looked at.
        """
        ids, drafts = np.asarray(token_ids_cpu), list[list[int]]()
        rows: list[int | None] = []
        seen: set[int] = set()
        for row, sampled in enumerate(sampled_token_ids):
            draft = None
            if n := len(sampled):
                text = ids[row, : int(num_tokens_no_spec[row])]
                number = self._known(row, text[: len(text) - n], seen)
                if number is None:
                    self._count += 1
                    number = self._count
                seen.add(number)
                draft = self._advance(number, text, n)
            rows.append(None if draft is None else number)
            drafts.append(draft or [])
        self._rows = rows
        self._forget(seen)
        return drafts

    def _known(self, row: int, before: IntArray, taken: set[int]) -> int | None:
        """The text that a row continues: most often the one that stood there at the last call."""
        here = self._rows[row] if row < len(self._rows) else None
        for number in (here, *reversed(self._texts)):
            if number is None or number in taken or number not in self._texts:
                continue
            if self._texts[number].is_before(before):
                return number
        return None

    def _advance(self, number: int, text: IntArray, n: int) -> list[int] | None:
        """Show a drafter the last n tokens of a text, and ask it; None where the text ended."""
        known = self._texts.pop(number, None)
        sampled = text[len(text) - n :]
        committed = self._rules.cut(sampled)
        over = int(committed[-1]) in self._context.eos_ids
        if known is not None and known.drafted(sampled[:-1]):
            known.observe(committed, n - 1, over)
        else:
            if known is not None:  # what vLLM verified was not what was drafted
                self._leave(known)
            known = self._begin(text[: len(text) - n + len(committed)])
        if over or known.state.remaining < 2:
            self._leave(known)
            return None
        self._texts[number] = known
        return self._propose(known)

    def _begin(self, text: IntArray) -> _Text:
        state = DecodeState(text[:-1].astype(np.int64), self._max_len - len(text) + 1)
        drafter = self._idle.pop() if self._idle else self._ready()
        if drafter.starts_empty(0):
            drafter.reset()
        state.commit(text[-1:])
        drafter.begin(state)
        return _Text(drafter, state)

    def _propose(self, text: _Text) -> list[int]:
        text.tree = text.drafter.propose(text.state)
        chain = best_chain(text.tree)
        if len(chain) < len(text.tree) and not self._told:
            self._told = True
            _log.warning(
                "method=%s drafts trees, and vLLM verifies chains: each tree's best chain is "
                "taken. Its numbers here are not the tree's.",
                text.drafter.name,
            )
        text.chain = chain[: min(self._longest, text.state.remaining - 1)]
        draft: list[int] = text.tokens().tolist()
        return draft

    def _leave(self, text: _Text) -> None:
        text.drafter.end(text.state)
        self._idle.append(text.drafter)

    def _forget(self, kept: set[int]) -> None:
        """Give up the texts that were not seen for longest; what comes back all the same is new."""
        for number in [one for one in self._texts if one not in kept]:
            if len(self._texts) > self._most:
                self._leave(self._texts.pop(number))

    def _ready(self) -> Drafter:
        drafter = copy.deepcopy(self._drafter)  # before its setup a drafter is its knobs
        drafter.setup(self._context)
        return drafter


def best_chain(tree: DraftTree) -> IntArray:
    """``[k]`` nodes of the chain that a tree is verified by where only chains can be.

    Where the drafter says how likely its nodes are, the path that most tokens are expected of; else
    every node's first child.
    """
    n = len(tree)
    worth = np.ones(n) if tree.survival is None else np.asarray(tree.survival, np.float64).copy()
    child = np.full(n + 1, -1, dtype=np.int64)  # by row; row 0 is the root
    for node in reversed(range(n)):
        if tree.aux is not None and tree.aux[node]:
            continue
        worth[node] += worth[child[node + 1]] if child[node + 1] >= 0 else 0.0
        before = child[tree.parents[node] + 1]
        # Of equals the first, which is looked at last.
        if before < 0 or tree.survival is None or worth[node] >= worth[before]:
            child[tree.parents[node] + 1] = node
    path, node = [], child[0]
    while node >= 0:
        path.append(node)
        node = child[node + 1]
    return np.array(path, dtype=np.int64)


def _instantiated(method: str, knobs: Mapping[str, Any]) -> Drafter:
    if method not in option_names("method"):
        raise unknown_name("method", method, option_names("method"))
    # Without the pair file: what suits one model here says nothing about vLLM's.
    cfg = compose([f"method={method}", "pair=none"])
    node = {**OmegaConf.to_container(cfg.method, resolve=True), **knobs}  # type: ignore[dict-item]
    check_method(node)
    del node["label"]
    try:
        drafter: Drafter = hydra.utils.instantiate(with_parts(node), _convert_="all")
    except hydra.errors.InstantiationException as error:
        if isinstance(error.__cause__, ConfigurationError):
            raise error.__cause__ from None
        raise
    return drafter


def _check_tokens_suffice(drafter: Drafter) -> None:
    needs = drafter.needs
    if not needs.tokens_only or needs.clock or needs.overlap:
        raise NeedsNotMet(
            f"method={drafter.name} needs {_more_than_tokens(needs)}, and vLLM shows a "
            "custom_class drafter tokens alone. Name a method that drafts from tokens: "
            "specbench.engines.vllm.pld, .sam or .suffix_decoding."
        )
    if drafter.state_scope == "run":
        raise NeedsNotMet(
            f"method={drafter.name} learns from text to text (state_scope=run), and in vLLM "
            "several are decoded at once, each with a drafter of its own. Put state_scope: prompt "
            f"into additional_config's {KNOBS!r}."
        )


def _more_than_tokens(needs: Needs) -> str:
    found = {
        "a draft model": needs.draft_model,
        "hidden states": bool(needs.hidden_layers),
        "logits": needs.logits or needs.prompt_logits or needs.first_logits,
        "the plain output": needs.reference,
        "the time that steps take": needs.clock,
    }
    return " and ".join(what for what, asked in found.items() if asked) or "the target's choices"


def _check_engine(config: VllmConfig) -> None:
    """Refuse a vLLM that calls drafters in another way."""
    vllm = importlib.import_module("vllm")
    try:
        known = hasattr(importlib.import_module(_INTERFACE), _MAKER)
    except ImportError:
        known = False
    if not known:
        raise NeedsNotMet(
            f"vLLM {vllm.__version__} has no {_INTERFACE}.{_MAKER}: it calls drafters in another "
            f"way. Install vLLM {_READ} or later."
        )
    if getattr(config, "use_v2_model_runner", False):
        raise NeedsNotMet(
            "vLLM's Model Runner V2 takes no custom_class drafter. Start vLLM with "
            "VLLM_USE_V2_MODEL_RUNNER=0."
        )
    if config.scheduler_config.async_scheduling:
        raise NeedsNotMet(
            "vLLM schedules asynchronously and would show the drafter no tokens. Start vLLM with "
            "--no-async-scheduling."
        )
    if not vllm.__version__.startswith(_READ):
        _log.warning(
            "vLLM %s: this drafter was tried with %s, and vLLM calls the interface experimental.",
            vllm.__version__,
            _READ,
        )


def _context(drafter: Drafter, model: Any) -> DraftContext:
    """What drafters may know of vLLM's model."""
    eos = (model.try_get_generation_config() or {}).get("eos_token_id")
    eos = model.hf_config.eos_token_id if eos is None else eos
    needs, sha, files = drafter.needs, "", dict[str, Path]()
    if needs.artifacts:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer)
        sha, cache = tokenizer_hash(tokenizer), compose().cache_dir
        files = resolve.resolve(
            needs.artifacts, tokenizer=tokenizer, bundled=False, cache_dir=cache, model_key=""
        )
    return DraftContext(
        vocab_size=int(model.get_vocab_size()),
        eos_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        tokenizer_hash=sha,
        max_len=int(model.max_model_len),
        artifacts=files,
    )


def __getattr__(name: str) -> Any:
    """The class that vLLM imports by a method's name, ``specbench.engines.vllm.pld``."""
    if name.startswith("_") or name not in option_names("method"):
        raise AttributeError(
            f"{name!r} is no method. specbench.engines.vllm has {', '.join(option_names('method'))}"
        )

    def __init__(self: VllmDrafter, config: VllmConfig) -> None:
        VllmDrafter.__init__(self, config, name)

    return type(name, (VllmDrafter,), {"__init__": __init__})
