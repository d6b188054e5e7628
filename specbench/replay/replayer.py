"""Drafters replayed on recorded outputs by the engine's own loop: steps, predicted times."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specbench.artifacts import resolve
from specbench.config.schema import ModelConfig
from specbench.decoding.composite import Composite
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import DecodeResult, Engine
from specbench.decoding.structs import DraftContext, Needs
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import NeedsNotMet, SpecBenchError
from specbench.models import loading
from specbench.replay.cost_surface import CostSurface
from specbench.replay.recorded_target import PathLearner, RecordedTarget
from specbench.replay.traces import Traces, Turn
from specbench.system.clock import CpuClock

EXACT, APPROXIMATE = "exact", "approximate"


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """A turn that was replayed.

    Attributes:
        decoded: steps as the live run takes them; its timings are those of the replay itself.
        prefill_s, decode_s, setup_s: predicted by the surface, drafting measured; 0 without one.
        phase_s: the same by phase; None without a surface.
        covered: share of the passes that lie inside the surface's grid; 1 without one.
    """

    decoded: DecodeResult
    prefill_s: float = 0.0
    decode_s: float = 0.0
    setup_s: float = 0.0
    phase_s: Mapping[str, float] | None = None
    covered: float = 1.0


class Replayer:
    """Prepares drafters for recorded outputs and replays them.

    Args:
        surface: predicts what target passes cost; None: steps only.
        model: the configuration's model node, for files that must be built in ``cache_dir``.
        seed: the run's.
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
        self._traces = traces
        self._surface = surface
        self._model = model
        self._cache_dir = cache_dir
        self._limit = int(traces.config["generation"]["max_new_tokens"])
        self._eos = frozenset(traces.model["eos_ids"])
        self._target = RecordedTarget(int(traces.model["vocab_size"]), 0)
        self._engine = Engine(
            self._target,
            GreedyVerifier(),
            eos_ids=self._eos,
            context_length=traces.model["context_length"],
            clock=lambda: CpuClock(phases=True),
        )
        self._tokenizer = resolve.NamedTokenizer(
            traces.model["tokenizer_hash"], lambda: loading.load_tokenizer(model)
        )
        self._seed = seed

    def prepare(self, drafter: Drafter) -> Drafter:
        """Set a drafter up, wrapped where it learns from logits.

        Raises:
            NeedsNotMet: it needs the model, or a file that cannot be built here.
        """
        kind = replay_kind(drafter, self._traces)
        needs = drafter.needs
        self._target.reserve(needs.max_nodes)
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
                    model_key=self._model_key(),
                ),
                seed=self._seed,
            )
        )
        if kind == EXACT:
            return drafter
        return PathLearner(
            name=drafter.name,
            version=drafter.version,
            state_scope=drafter.state_scope,
            inner=drafter,
            target=self._target,
        )

    def _model_key(self) -> str:
        """As ``models.checkpoints.weights.model_key`` names the model, without its files."""
        model = self._traces.model
        return model.get("weights_hash") or f"{model.get('id')}@{model.get('revision')}"

    def replay_turn(
        self, drafter: Drafter, turn: Turn, *, empty: bool, seed: int | None = None
    ) -> ReplayedTurn:
        """Decode a recorded turn.

        Args:
            drafter: from `prepare`.
            turn: its output is what the target will say.
            empty: reset the drafter first; the time counts as its setup.
            seed: the turn's; None takes the recorded one.

        Raises:
            CaseFailed: the draft is malformed.
            SpecBenchError: the engine does not end with the recorded output.
        """
        start = time.perf_counter()
        if empty:
            drafter.reset()
        reset_s = time.perf_counter() - start
        self._target.load(turn.output_ids, turn.candidates)
        if drafter.needs.reference:
            drafter.set_reference(turn.output_ids)
        decoded = self._engine.decode(
            turn.prompt_ids,
            drafter,
            max_new_tokens=self._limit,
            seed=turn.seed if seed is None else seed,
        )
        if decoded.output_ids != turn.output_ids.tolist():
            raise SpecBenchError(
                f"case {turn.case_id}, turn {turn.turn}: the replay does not end with the recorded "
                "output. Are the traces of another version of this program?"
            )
        return self._predict(decoded, turn, reset_s) if self._surface else ReplayedTurn(decoded)

    def replay_turns(self, drafter: Drafter, turns: Iterable[Turn]) -> list[ReplayedTurn]:
        """Replay turns in their order, keeping the drafter's state as its scope says."""
        drafter.reset()
        return [self.replay_turn(drafter, t, empty=drafter.starts_empty(t.turn)) for t in turns]

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

    def _predict(self, decoded: DecodeResult, turn: Turn, reset_s: float) -> ReplayedTurn:
        assert self._surface is not None
        k, width, context = np.array(self._target.passes, dtype=np.float64).reshape(-1, 3).T
        measured = decoded.timings.phase_s or {}
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
        )


def replay_kind(drafter: Drafter, traces: Traces) -> str:
    """``exact`` or ``approximate``.

    Raises:
        NeedsNotMet: the drafter needs the model; says what to do.
    """
    if _tokens_suffice(drafter):
        return EXACT
    needs = drafter.needs
    not_recorded = needs.hidden_layers or needs.draft_model or needs.overlap
    if isinstance(drafter, Composite) or not_recorded or not needs.logits:
        raise NeedsNotMet(
            f"method={drafter.name} needs {_wanted(needs)}, which a recorded output does not have: "
            "it cannot be replayed. Run it live (runner=offline), or leave it out."
        )
    if needs.prompt_logits:
        raise NeedsNotMet(
            f"method={drafter.name} learns from the prompt's logits, which are not recorded. Type "
            "method.learn_prompt=false, or run it live (runner=offline)."
        )
    wanted = getattr(drafter, "k", 1)
    if traces.top < wanted:
        raise NeedsNotMet(
            f"method={drafter.name} learns from the {wanted} likeliest tokens at each position, "
            f"and {traces.path} holds {traces.top}. Record them: run ar there with record=true."
        )
    return APPROXIMATE


def _tokens_suffice(drafter: Drafter) -> bool:
    if isinstance(drafter, Composite):
        return all(_tokens_suffice(part) for part in drafter.parts)
    if drafter.needs.hidden_layers:
        return False
    # The reference output is what the traces are.
    return drafter.needs.tokens_only or drafter.needs.reference


def _wanted(needs: Needs) -> str:
    """What of the model a drafter asked for, in words."""
    kinds = {
        "a draft model": needs.draft_model,
        "hidden states": bool(needs.hidden_layers),
        "logits": needs.logits or needs.prompt_logits,
    }
    found = [word for word, asked in kinds.items() if asked]
    return " and ".join(found) or "the target's choices at its own draft nodes"
