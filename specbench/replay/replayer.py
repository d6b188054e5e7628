"""Drafters replayed on recorded outputs by the engine's own loop: steps, predicted times.

Greedy decoding with a drafter commits the same tokens whatever the drafter, so a draft can be
verified against the recorded output. Drafters that read only tokens take exactly the live run's
steps. Heads also read the hidden states of committed tokens, which were recorded during plain
decoding and are the same up to rounding.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.artifacts import resolve
from specbench.config.compose import build_model
from specbench.config.schema import FLOAT32_WEIGHTS, ModelConfig
from specbench.decoding.composite import Composite
from specbench.decoding.device import to_device
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import NO_TOKENS, DraftContext, DraftTree, HeadCache
from specbench.decoding.tree import ROOT_ALONE, TreeGeometry
from specbench.decoding.turn import DecodeResult
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import CaseFailed, NeedsNotMet, SpecBenchError
from specbench.models import loading
from specbench.models.checkpoints import weights
from specbench.models.heads.drafter import HeadDrafter, heads_of
from specbench.replay import states
from specbench.replay.cost_surface import CostSurface
from specbench.replay.traces import RecordedTurn, Traces
from specbench.system.clock import CpuClock

if TYPE_CHECKING:
    from specbench.models.stored_target import StoredTarget


EXACT, ROUNDED = "exact", "exact up to rounding"  # replays of token drafters, of heads
_BEYOND = 64  # ids after the output's end, for drafts beyond it
# Phases timed in the replay; a surface's passes include verification and cache work.
_MEASURED = ("setup", "draft", "observe", "other")


@dataclass(slots=True)
class RecordedScores:
    """The recorded token at each row's depth, correct for every row on the recorded path."""

    choices: IntArray  # [n + 1]
    vocab_size: int
    depths: IntArray
    hidden: Mapping[int, torch.Tensor]
    verified = None

    def greedy(self) -> IntArray:
        return self.choices

    @property
    def logits(self) -> NoReturn:
        raise CaseFailed("no_model", "a recorded output has no logits")


class RecordedTarget:
    """Stands in for ``specbench.models.target.Target`` in ``specbench.decoding.engine.Engine``.

    Attributes:
        passes: ``(k, width, context)`` of each pass since ``load``: k = 1 and the rows of a tree
            (root included), or k rows of the given width in the batch layout; and the tokens cached
            before it.
    """

    device = torch.device("cpu")

    def __init__(self, vocab_size: int, max_nodes: int) -> None:
        self._vocab_size = vocab_size
        self._max_nodes = -1
        self.reserve(max_nodes)
        self.load(np.zeros(0, dtype=np.int64))

    def reserve(self, max_nodes: int) -> None:
        if max_nodes > self._max_nodes:
            self._max_nodes = max_nodes
            self._geometry = TreeGeometry(max_nodes)

    def load(self, output: IntArray, states: Mapping[int, torch.Tensor] | None = None) -> None:
        """Take the greedy output ``[n_new]`` of the next turn, and its hidden states by layer.

        ``states``: ``[n_prompt + n_new - 1, hidden]``.
        """
        self._output = np.concatenate([output, np.zeros(_BEYOND + self._max_nodes, np.int64)])
        self._states = states or {}
        self._n_prompt = self._done = 0
        self.passes: list[tuple[int, int, int]] = []

    def prefill(
        self, prompt: IntArray, *, all_logits: bool = False, hidden_layers: tuple[int, ...] = ()
    ) -> RecordedScores:
        self._n_prompt = len(prompt)
        hidden = {
            layer: rows[: len(prompt)] for layer, rows in self._select_layers(hidden_layers).items()
        }
        return RecordedScores(self._output[:1], self._vocab_size, ROOT_ALONE, hidden)

    def forward(
        self, root: int, tree: DraftTree, *, hidden_layers: tuple[int, ...] = ()
    ) -> RecordedScores:
        n = len(tree)
        self._geometry.read(tree, self._vocab_size)  # refuses a malformed draft
        k, width = (1, n + 1) if tree.rows is None else (tree.rows[0], tree.rows[1] + 1)
        self.passes.append((k, width, self._n_prompt + self._done))
        depths = self._geometry.depths[: n + 1]
        hidden: dict[int, torch.Tensor] = {}
        for layer, recorded in self._select_layers(hidden_layers).items():
            # Only rejected nodes are beyond the last state.
            rows = np.minimum(self._n_prompt + self._done + depths, len(recorded) - 1)
            hidden[layer] = recorded[to_device(rows, recorded.device)]
        choices = self._output[self._done + 1 + depths]
        return RecordedScores(choices, self._vocab_size, depths, hidden)

    def commit(self, tree: DraftTree, path: IntArray) -> None:
        self._done += len(path) + 1

    def free_rows(self) -> int:
        return self._max_nodes

    def _select_layers(self, layers: tuple[int, ...]) -> dict[int, torch.Tensor]:
        if any(layer not in self._states for layer in layers):
            raise CaseFailed(
                "no_model",
                f"the hidden states {', '.join(map(str, layers))} were not recorded. Record them "
                "with record=states, or run the method live (runner=offline)",
            )
        return {layer: self._states[layer] for layer in layers}


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """The steps of a replayed turn; pass times are a surface's, drafting times are measured.

    ``covered``: share of the passes inside the surface's grid.
    """

    decoded: DecodeResult
    prefill_s: float = 0.0
    decode_s: float = 0.0
    setup_s: float = 0.0
    phase_s: Mapping[str, float] | None = None
    covered: float = 1.0


class Replayer:
    """Prepares drafters for recorded outputs and replays them; without a surface, steps only.

    ``model``: the configuration's node, for files to build in ``cache_dir``.
    """

    def __init__(
        self,
        traces: Traces,
        surface: CostSurface | None,
        *,
        model: ModelConfig,
        cache_dir: Path,
        seed: int,
    ) -> None:
        self._traces, self._surface = traces, surface
        self._model, self._cache_dir, self._seed = model, cache_dir, seed
        self._limit = int(traces.config["generation"]["max_new_tokens"])
        self._target = RecordedTarget(traces.model["vocab_size"], 0)
        self._engine = Engine(
            self._target,
            GreedyVerifier(),
            eos_ids=frozenset(traces.model["eos_ids"]),
            context_length=traces.model["context_length"],
            clock=lambda: CpuClock(phases=True),
        )
        self._head_cache: HeadCache = {}
        self._states: tuple[RecordedTurn, dict[int, torch.Tensor]] | None = None

    def prepare(self, drafter: Drafter, heads: Mapping[str, Path] | None = None) -> Drafter:
        """Set a drafter up, with folders of trained heads by name (``needs.heads``).

        Raises:
            NeedsNotMet: it needs the model, a file that cannot be built here, or hidden states that
                were not recorded.
            WeightsNotFound: a head reads the target's embedding, and the weights are missing.
        """
        kind = replay_kind(drafter, self._traces)
        needs, recorded = drafter.needs, self._traces.model
        self._target.reserve(needs.max_nodes)
        artifacts = resolve.resolve(
            needs.artifacts,
            tokenizer=resolve.NamedTokenizer(
                recorded["tokenizer_hash"], lambda: loading.load_tokenizer(self._model)
            ),
            bundled=self._model.embedded,
            cache_dir=self._cache_dir,
            model_key=self.model_key(),
            model_name=build_model(self._model),
        )
        drafter.setup(
            DraftContext(
                vocab_size=recorded["vocab_size"],
                eos_ids=frozenset(recorded["eos_ids"]),
                tokenizer_hash=recorded["tokenizer_hash"],
                max_len=recorded["context_length"],
                artifacts=artifacts,
                seed=self._seed,
                target=self._stored_target if kind == ROUNDED else None,
                heads=heads or {},
                head_cache=self._head_cache,
            )
        )
        if kind == ROUNDED:  # after `setup`: a head's configuration may name the states it reads
            _check_layers(drafter, self._traces)
        return drafter

    @functools.cached_property
    def _stored_target(self) -> StoredTarget:
        """The target's embedding and LM head, from the recorded run's weights."""
        from specbench.models.stored_target import StoredTarget

        recorded, engine = self._traces.model, self._traces.config.get("engine", {})
        node = replace(self._model, revision=recorded["revision"] or self._model.revision)
        if weights.model_key(node) != self.model_key():
            raise NeedsNotMet(
                f"{weights.key_of(node)}={node.id} has other weights than those that "
                f"{self._traces.path} was recorded with, and heads read its embedding. "
                f"{_how_to_record(self._traces)}"
            )
        return StoredTarget(
            node,
            device=loading.choose_device(node.device),
            dtype=getattr(torch, str(recorded["dtype"])),
            draft_weights=engine.get("draft_weights", FLOAT32_WEIGHTS),
        )

    def _states_of(self, turn: RecordedTurn, layers: tuple[int, ...]) -> dict[int, torch.Tensor]:
        """Read a turn's hidden states by layer, once for labels that follow each other."""
        if not layers or turn.states is None:
            return {}
        stored = self._stored_target
        if self._states is None or self._states[0] is not turn:
            by_number = states.read_states(
                turn.states, turn.prompt_ids, turn.output_ids, stored.dtype, stored.device
            )
            self._states = (turn, by_number)
        return {layer: self._states[1][states.index_of(layer, stored.n_layers)] for layer in layers}

    def model_key(self) -> str:
        """Name the model as ``models.checkpoints.weights.model_key``, without its files."""
        model = self._traces.model
        return model.get("weights_hash") or f"{model.get('id')}@{model.get('revision')}"

    def replay_turn(
        self,
        drafter: Drafter,
        turn: RecordedTurn,
        *,
        empty: bool,
        seed: int | None = None,
        seen: IntArray = NO_TOKENS,
    ) -> ReplayedTurn:
        """Decode a recorded turn with a drafter from `prepare`.

        Args:
            empty: reset the drafter first; the time counts as its setup.
            seed: None takes the recorded one.
            seen: tokens of the case's previous turn, if the drafter has not forgotten them.
        """
        start = time.perf_counter()
        if empty:
            drafter.reset()
        reset_s = time.perf_counter() - start
        hidden = self._states_of(turn, drafter.needs.hidden_layers)
        self._target.load(turn.output_ids, hidden)
        if self._surface is None:  # with one, the drafter's time is measured
            for head in heads_of(drafter):
                head.foresee(len(turn.prompt_ids), hidden)
        if drafter.needs.reference:
            drafter.set_reference(turn.output_ids)
        decoded = self._engine.decode(
            turn.prompt_ids,
            drafter,
            max_new_tokens=self._limit,
            seed=turn.seed if seed is None else seed,
            seen=seen,
        )
        if decoded.output_ids != turn.output_ids.tolist():
            raise SpecBenchError(
                f"case {turn.case_id}, turn {turn.turn}: the replay does not end with the recorded "
                "output. Are the traces of another version of this program?"
            )
        if self._surface is None:
            return ReplayedTurn(decoded)
        k, width, context = np.array(self._target.passes, dtype=np.float64).reshape(-1, 3).T
        measured = decoded.timings.phase_s or {}
        phases = {name: measured.get(name, 0.0) for name in _MEASURED}
        phases["setup"] += reset_s
        phases["prefill"] = self._surface.prefill_s(len(turn.prompt_ids))
        phases["verify"] = float(self._surface.pass_s(k, width, context).sum())
        return ReplayedTurn(
            decoded,
            prefill_s=phases["prefill"],
            decode_s=sum(phases.values()) - phases["prefill"],
            setup_s=phases["setup"],
            phase_s=phases,
            covered=self._surface.covered(k, width, context),
        )

    def replay_turns(self, drafter: Drafter, turns: Iterable[RecordedTurn]) -> list[ReplayedTurn]:
        """Replay turns in order, keeping the drafter's state according to its scope."""
        drafter.reset()
        replayed: list[ReplayedTurn] = []
        last: RecordedTurn | None = None
        for turn in turns:
            empty, seen = drafter.starts_empty(turn.turn), NO_TOKENS
            if last is not None and not empty and last.case_id == turn.case_id:
                seen = np.concatenate((last.prompt_ids, last.output_ids))
            replayed.append(self.replay_turn(drafter, turn, empty=empty, seen=seen))
            last = turn
        return replayed


def replay_kind(drafter: Drafter, traces: Traces) -> str:
    """Tell whether a replay is ``exact`` or ``exact up to rounding``.

    Raises:
        NeedsNotMet: the drafter needs the model; the message has a remedy.
    """
    if drafter.needs.clock:
        raise NeedsNotMet(
            f"method={drafter.name} goes by the time that its steps take, and a replay takes none. "
            "Type method.reward=priced, or run it live (runner=offline)."
        )
    kind = _kind(drafter)
    if kind is None:
        raise NeedsNotMet(
            f"method={drafter.name} needs more of the model than a recorded output has, so it "
            "cannot be replayed and is tried live: type runner=offline, or leave it out."
        )
    if kind == ROUNDED and traces.hidden_states is None:
        raise NeedsNotMet(
            f"method={drafter.name} reads the target's hidden states, and {traces.path} holds "
            f"none. {_how_to_record(traces)}"
        )
    return kind


def _kind(drafter: Drafter) -> str | None:
    """Return None if committed tokens, their states and the reference output do not suffice."""
    needs = drafter.needs
    if isinstance(drafter, Composite):
        kinds = {_kind(part) for part in drafter.parts}
        return None if None in kinds else ROUNDED if ROUNDED in kinds else EXACT
    if not needs.hidden_layers and (needs.tokens_only or needs.reference):
        return EXACT
    # Rejected nodes' states and logits are not recorded.
    more = needs.tree_hidden or needs.logits or needs.prompt_logits or needs.draft_model
    return ROUNDED if isinstance(drafter, HeadDrafter) and not more else None


def _check_layers(drafter: Drafter, traces: Traces) -> None:
    assert traces.hidden_states is not None
    n_layers, recorded = traces.hidden_states
    needed = {states.index_of(layer, n_layers) for layer in drafter.needs.hidden_layers}
    if missing := sorted(needed - recorded):
        layers = f" 'record_layers={sorted((needed | recorded) - {n_layers})}'"
        raise NeedsNotMet(
            f"method={drafter.name} reads the hidden states {', '.join(map(str, missing))}, and "
            f"{traces.path} holds {', '.join(map(str, sorted(recorded)))}. "
            f"{_how_to_record(traces, layers)}"
        )


def _how_to_record(traces: Traces, layers: str = "") -> str:
    return (
        f"Type: python run.py method=ar model={traces.config['model']['name']} "
        f"record=states{layers}, with the questions wanted, and name its folder in runner.traces."
    )
