"""Drafters replayed on recorded outputs by the engine's own loop: steps, predicted times."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specbench.arrays import IntArray
from specbench.artifacts import resolve
from specbench.config.compose import build_model
from specbench.config.schema import BFLOAT16_WEIGHTS, FLOAT32_WEIGHTS, ModelConfig
from specbench.decoding.batch import BatchEngine, TurnRequest
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.head_drafter import heads_of
from specbench.decoding.structs import NO_TOKENS, DraftContext, Loaded
from specbench.decoding.turn import DecodeResult
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import NeedsNotMet, SpecBenchError
from specbench.models import loading
from specbench.models.checkpoints import weights
from specbench.replay import states
from specbench.replay.cost_surface import CostSurface
from specbench.replay.lock_step import TextSteps
from specbench.replay.recorded_target import PathLearner, RecordedBatch, RecordedTarget
from specbench.replay.replay_kind import (
    APPROXIMATE,
    ROUNDED,
    check_layers,
    how_to_record,
    replay_kind,
)
from specbench.replay.traces import RecordedTurn, Traces
from specbench.system.clock import CpuClock

if TYPE_CHECKING:
    import torch

    from specbench.models.stored_target import StoredTarget


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """A turn that was replayed.

    Attributes:
        decoded: steps as the live run takes them, with the replay's own timings.
        prefill_s, decode_s, setup_s: predicted by the surface, drafting measured; 0 without one.
        phase_s: the same by phase; None without a surface.
        covered: share of the passes that lie inside the surface's grid; 1 without one.
        steps: for a schedule of several texts; None without a surface.
    """

    decoded: DecodeResult
    prefill_s: float = 0.0
    decode_s: float = 0.0
    setup_s: float = 0.0
    phase_s: Mapping[str, float] | None = None
    covered: float = 1.0
    steps: TextSteps | None = None


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A recorded turn that is to be replayed, see `Replayer.replay_turn`."""

    drafter: Drafter
    turn: RecordedTurn
    empty: bool
    seed: int
    seen: IntArray


class Replayer:
    """Prepares drafters for recorded outputs and replays them.

    Args:
        surface: predicts what target passes cost; None: steps only.
        model: the configuration's model node, for files that must be built in ``cache_dir``.
        seed: the run's.
        seats: texts that are decoded at once.
        budget_shared: whether drafters choose rows over the drafts of all of them.
    """

    def __init__(
        self,
        traces: Traces,
        surface: CostSurface | None,
        *,
        model: ModelConfig,
        cache_dir: Path,
        seed: int,
        seats: int = 1,
        budget_shared: bool = False,
    ) -> None:
        self._loaded: Loaded = {}
        self._traces = traces
        self._surface = surface
        self._model = model
        self._cache_dir = cache_dir
        self._limit = int(traces.config["generation"]["max_new_tokens"])
        self._eos = frozenset(traces.model["eos_ids"])
        vocab_size = int(traces.model["vocab_size"])
        self._targets = [RecordedTarget(vocab_size, 0) for _ in range(seats)]
        self._budget_shared = budget_shared
        self._engine = Engine(
            self._targets[0],
            GreedyVerifier(),
            eos_ids=self._eos,
            context_length=traces.model["context_length"],
            clock=_clock,
        )
        self._tokenizer = resolve.NamedTokenizer(
            traces.model["tokenizer_hash"], lambda: loading.load_tokenizer(model)
        )
        self._seed = seed
        self._stored: StoredTarget | None = None
        self._states: list[tuple[RecordedTurn, dict[int, torch.Tensor]]] = []

    def prepare(
        self, drafter: Drafter, heads: Mapping[str, Path] | None = None, seat: int = 0
    ) -> Drafter:
        """Set a drafter up, wrapped where it learns from logits.

        Args:
            heads: folders of trained heads, by name as in ``needs.heads``.
            seat: its place among the texts that are decoded at once.

        Raises:
            NeedsNotMet: it needs the model, a file that cannot be built here, or hidden states that
                were not recorded.
            WeightsNotFound: a head reads the target's embedding, which is not to be had.
        """
        kind = replay_kind(drafter, self._traces)
        needs = drafter.needs
        self._targets[seat].reserve(needs.max_nodes)
        drafter.setup(
            DraftContext(
                vocab_size=int(self._traces.model["vocab_size"]),
                eos_ids=self._eos,
                tokenizer_hash=self._traces.model["tokenizer_hash"],
                max_len=self._traces.model["context_length"],
                artifacts=resolve.resolve(
                    needs.artifacts,
                    tokenizer=self._tokenizer,
                    bundled=self._model.embedded,
                    cache_dir=self._cache_dir,
                    model_key=self.model_key(),
                    model_name=build_model(self._model),
                ),
                seed=self._seed,
                target=self._stored_target() if kind == ROUNDED else None,
                heads=heads or {},
                loaded=self._loaded,
                budget_shared=self._budget_shared,
            )
        )
        if kind == ROUNDED:  # behind `setup`: a head's configuration may say which states it reads
            check_layers(drafter, self._traces)
        if kind != APPROXIMATE:
            return drafter
        return PathLearner(
            name=drafter.name,
            version=drafter.version,
            state_scope=drafter.state_scope,
            inner=drafter,
            target=self._targets[seat],
        )

    def _stored_target(self) -> StoredTarget:
        """The target's embedding and LM head, of the very weights that were recorded."""
        if self._stored is None:
            import torch

            from specbench.models.stored_target import StoredTarget

            recorded, engine = self._traces.model, self._traces.config.get("engine", {})
            node = replace(self._model, revision=recorded["revision"] or self._model.revision)
            if weights.model_key(node) != self.model_key():
                raise NeedsNotMet(
                    f"{weights.key_of(node)}={node.id} has other weights than those that "
                    f"{self._traces.path} was recorded with, and heads read its embedding. "
                    f"{how_to_record(self._model.name)}"
                )
            self._stored = StoredTarget(
                node,
                device=loading.choose_device(node.device),
                dtype=getattr(torch, recorded["dtype"]),
                draft_weights=engine.get("draft_weights", FLOAT32_WEIGHTS),
                rounded=torch.bfloat16 if recorded.get("weights") == BFLOAT16_WEIGHTS else None,
            )
        return self._stored

    def _states_of(self, turn: RecordedTurn, layers: tuple[int, ...]) -> dict[int, torch.Tensor]:
        """A turn's hidden states, numbered as ``layers``; labels that follow each other share them.

        Raises:
            ArtifactError: the file is damaged.
        """
        if not layers or turn.states is None:
            return {}
        stored = self._stored_target()
        if not any(known is turn for known, _ in self._states):
            read = states.read_states(
                turn.states, turn.prompt_ids, turn.output_ids, stored.dtype, stored.device
            )
            self._states = [*self._states, (turn, read)][-len(self._targets) :]
        (found,) = (read for known, read in self._states if known is turn)
        return {layer: found[states.place(layer, stored.n_layers)] for layer in layers}

    def model_key(self) -> str:
        """As ``models.checkpoints.weights.model_key`` names the model, without its files."""
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
        """Decode a recorded turn.

        Args:
            drafter: from `prepare`.
            turn: its output is what the target will say.
            empty: reset the drafter first; the time counts as its setup.
            seed: the turn's; None takes the recorded one.
            seen: the text of the case's turn before, where the drafter has not forgotten it.

        Raises:
            CaseFailed: the draft is malformed.
            SpecBenchError: the engine does not end with the recorded output.
        """
        reset_s = self._load(0, drafter, turn, empty=empty)
        decoded = self._engine.decode(
            turn.prompt_ids,
            drafter,
            max_new_tokens=self._limit,
            seed=turn.seed if seed is None else seed,
            seen=seen,
        )
        _check_output(decoded, turn)
        if self._surface is None:
            return ReplayedTurn(decoded)
        return self._predict(
            decoded, turn, self._targets[0], decoded.timings.phase_s or {}, reset_s
        )

    def replay_group(
        self, asked: Mapping[int, ReplayRequest]
    ) -> dict[int, ReplayedTurn | Exception]:
        """Decode recorded turns in lock-step, each at its seat; with a surface.

        Returns:
            By seat what came of it, or why it failed. Of the group's drafting time it has the part
            of its steps.
        """
        made: dict[int, ReplayedTurn | Exception] = {}
        requests: dict[int, TurnRequest] = {}
        for seat, one in asked.items():
            try:
                reset_s = self._load(seat, one.drafter, one.turn, empty=one.empty)
            except Exception as error:
                made[seat] = error
            else:
                requests[seat] = TurnRequest(
                    one.turn.prompt_ids, one.drafter, one.seed, one.seen, reset_s
                )
        if not requests:
            return made
        batch = BatchEngine(
            RecordedBatch([self._targets[seat] for seat in requests]),
            [GreedyVerifier() for _ in requests],
            eos_ids=self._eos,
            context_length=self._traces.model["context_length"],
            clock=_clock,
        )
        turns = batch.decode([*requests.values()], max_new_tokens=self._limit).turns
        steps = sum(t.n_target_passes for t in turns if not isinstance(t, Exception))
        for seat, turn in zip(requests, turns, strict=True):
            if isinstance(turn, Exception):
                made[seat] = turn
                continue
            share = len(turns) * turn.n_target_passes / max(steps, 1)
            equal = turn.timings.phase_s or {}
            phases = {name: s if name == "setup" else s * share for name, s in equal.items()}
            recorded = asked[seat].turn
            try:
                _check_output(turn, recorded)
                made[seat] = self._predict(turn, recorded, self._targets[seat], phases)
            except Exception as error:
                made[seat] = error
        return made

    def _load(self, seat: int, drafter: Drafter, turn: RecordedTurn, *, empty: bool) -> float:
        """Have a seat say a turn's output; seconds that it took to empty the drafter."""
        start = time.perf_counter()
        if empty:
            drafter.reset()
        reset_s = time.perf_counter() - start
        needs = drafter.needs
        hidden = self._states_of(turn, needs.hidden_layers)
        self._targets[seat].load(turn.output_ids, turn.candidates, hidden)
        if self._surface is None:  # with one, the drafter's own time is measured
            for head in heads_of(drafter):
                head.foresee(len(turn.prompt_ids), hidden)
        if needs.reference:
            drafter.set_reference(turn.output_ids)
        return reset_s

    def replay_turns(self, drafter: Drafter, turns: Iterable[RecordedTurn]) -> list[ReplayedTurn]:
        """Replay turns in their order, keeping the drafter's state as its scope says."""
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

    def step_s(self, drafter: Drafter) -> float:
        """Seconds that a drafter takes for a step's propose and observe: the median over turns.

        The first turn warms up and does not count.
        """
        turns = [turn for group in self._traces.cases().values() for turn in group]
        times = []
        for replayed in self.replay_turns(drafter, turns)[1:]:
            phases = replayed.decoded.timings.phase_s or {}
            steps = max(1, replayed.decoded.n_target_passes)
            times.append((phases.get("draft", 0.0) + phases.get("observe", 0.0)) / steps)
        return float(np.median(times))

    def _predict(
        self,
        decoded: DecodeResult,
        turn: RecordedTurn,
        target: RecordedTarget,
        measured: Mapping[str, float],
        reset_s: float = 0.0,
    ) -> ReplayedTurn:
        """``measured``: seconds of the drafter's work by phase, ``reset_s`` beside them."""
        assert self._surface is not None
        k, width, context = np.array(target.passes, dtype=np.float64).reshape(-1, 3).T
        phases = {
            "prefill": self._surface.prefill_s(len(turn.prompt_ids)),
            "setup": measured.get("setup", 0.0) + reset_s,
            "draft": measured.get("draft", 0.0),
            # The surface's passes contain the verdict and the cache's work.
            "verify": float(self._surface.pass_s(k, width, context).sum()),
            "observe": measured.get("observe", 0.0),
            "other": measured.get("other", 0.0),
        }
        return ReplayedTurn(
            decoded,
            prefill_s=phases["prefill"],
            decode_s=sum(phases.values()) - phases["prefill"],
            setup_s=phases["setup"],
            phase_s=phases,
            covered=self._surface.covered(k, width, context),
            steps=TextSteps(
                np.stack((k, width, context), axis=1),
                phases["prefill"],
                phases["setup"],
                phases["draft"] + phases["observe"] + phases["other"],
            ),
        )


def _clock() -> CpuClock:
    return CpuClock(phases=True)


def _check_output(decoded: DecodeResult, turn: RecordedTurn) -> None:
    if decoded.output_ids != turn.output_ids.tolist():
        raise SpecBenchError(
            f"case {turn.case_id}, turn {turn.turn}: the replay does not end with the recorded "
            "output. Are the traces of another version of this program?"
        )
