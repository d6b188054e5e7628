"""What runner=hf loads besides: a stock copy of the model, its assistant, counted passes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from runners.job import Job
from runners.session.loading import load_session
from runners.session.method_runs import MethodRun
from runners.session.session import Session
from runners.session.speculation import Peer
from specbench.arrays import IntArray
from specbench.config.schema import HfConfig, RunConfig
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import NO_TOKENS
from specbench.decoding.turn import DecodeResult
from specbench.errors import CaseFailed, NeedsNotMet
from specbench.models import loading
from specbench.models.draft.loading import load_draft_model
from specbench.results.manifest import ModelInfo
from specbench.system.clock import Clock, make_clock


def load_transformers_session(job: Job, runs: Sequence[MethodRun]) -> TransformersSession:
    """As `load_session`, with a copy of the model that transformers' own loops run on."""
    peers = [run.drafter for run in runs if isinstance(run.drafter, Peer)]
    assisted = any(peer.loop == "assisted" for peer in peers)
    drafts = [job.config.pair.draft] if assisted else []
    session = load_session(job, runs, TransformersSession, drafts)
    assert isinstance(session, TransformersSession)
    session.add_loops(job.config, assisted)
    return session


class TransformersSession(Session):
    """Decodes with transformers where the method is a :class:`runners.session.speculation.Peer`."""

    def add_loops(self, config: RunConfig, assisted: bool) -> None:
        """Load the copy of the model, and the assistant where a loop needs one."""
        assert isinstance(config.runner, HfConfig)
        self._knobs = config.runner.hf
        # A copy of its own: ours has another attention, and packed linears.
        self._stock = loading.load_model(config, self._tokenizer).model
        self._stock_clock = make_clock(str(self._stock.device))
        self._eos = sorted(self._model.eos_ids)
        # What the model's publisher would sample or penalise with is not asked here.
        self._stock.generation_config = GenerationConfig(
            eos_token_id=self._eos, pad_token_id=self._eos[0] if self._eos else 0
        )
        self._assistant = self._load_assistant(config) if assisted else None

    def decode(
        self,
        prompt: IntArray,
        drafter: Drafter,
        seed: int,
        max_new_tokens: int | None = None,
        seen: IntArray = NO_TOKENS,
    ) -> DecodeResult:
        if not isinstance(drafter, Peer):
            return super().decode(prompt, drafter, seed, max_new_tokens, seen)
        asked = max_new_tokens or self._max_new_tokens
        limit = min(asked, self.context_length - len(prompt))
        if limit <= 0:
            raise CaseFailed(
                "prompt_too_long",
                f"the prompt has {len(prompt)} tokens and the context {self.context_length}",
            )
        text = torch.from_numpy(prompt)[None].to(self._stock.device)
        options = self._options(drafter.loop)
        passes = _Passes(self._stock, self._stock_clock)
        drafts = _Counter(self._assistant if drafter.loop == "assisted" else None)
        with passes.watched(), drafts.watched():
            out = self._stock.generate(  # type: ignore[operator]  # typed as a buffer there
                text,
                attention_mask=torch.ones_like(text),
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=limit,
                    eos_token_id=self._eos,
                    pad_token_id=self._stock.generation_config.pad_token_id,
                ),
                **options,
            )
        output = self._cut(out[0, len(prompt) :].tolist(), limit)
        if output and output[-1] in self._model.eos_ids:
            reason = "eos"
        else:
            reason = "context" if limit < asked else "length"
        return passes.result(len(prompt), output, reason, drafts.report())

    def describe(self) -> ModelInfo:
        model = super().describe()
        model.peers = {"attention": self._stock.config._attn_implementation, "packed": False}
        return model

    def _options(self, loop: str) -> dict[str, Any]:
        """Arguments of ``generate``; what one turn adapted is forgotten."""
        knobs = self._knobs
        if loop == "prompt_lookup":
            chosen = {
                "prompt_lookup_num_tokens": knobs.prompt_lookup_num_tokens,
                "max_matching_ngram_size": knobs.max_matching_ngram_size,
            }
            return {key: value for key, value in chosen.items() if value is not None}
        if loop == "generate":
            return {}
        assert self._assistant is not None
        options: dict[str, Any] = {
            "num_assistant_tokens": knobs.num_assistant_tokens,
            "num_assistant_tokens_schedule": knobs.schedule,
            "assistant_confidence_threshold": knobs.confidence,
        }
        # The heuristic schedule writes what it came to into the assistant's own configuration.
        self._assistant.generation_config = GenerationConfig(
            pad_token_id=self._stock.generation_config.pad_token_id,
            **{key: value for key, value in options.items() if value is not None},
        )
        return {"assistant_model": self._assistant}

    def _load_assistant(self, config: RunConfig) -> PreTrainedModel:
        draft, _ = load_draft_model(
            config.pair.draft, config.model, self._target, self._tokenizer, max_len=1, max_nodes=1
        )
        network = draft.network
        network.set_attn_implementation(config.model.attention)
        sizes = [m.config.get_text_config().vocab_size for m in (network, self._stock)]
        if sizes[0] != sizes[1]:
            raise NeedsNotMet(
                f"the draft model has a vocabulary of {sizes[0]} and the model one of {sizes[1]}: "
                "transformers refuses the two. Type "
                "'runner.hf.loops=[generate,prompt_lookup]'."
            )
        return network

    def _cut(self, output: list[int], limit: int) -> list[int]:
        """Up to the first end token and the limit, whatever ``generate`` returned behind them."""
        ends = [i for i, token in enumerate(output) if token in self._model.eos_ids]
        return output[: min([limit, *(i + 1 for i in ends[:1])])]


class _Passes:
    """The target's passes of one turn: when the first began and ended, and how long each was."""

    def __init__(self, model: PreTrainedModel, clock: Clock) -> None:
        self._model, self._clock = model, clock
        self._cached: list[int] = []  # tokens in the cache before each pass
        self._rows: list[int] = []
        self._before_s = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        start = time.perf_counter()

        def before(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
            cache = kwargs.get("past_key_values")
            self._cached.append(0 if cache is None else int(cache.get_seq_length()))
            self._rows.append(int(kwargs["input_ids"].shape[1]))
            if len(self._cached) == 1:
                self._clock.begin()  # waits for what the assistant still does
                self._before_s = time.perf_counter() - start

        def after(*_: Any) -> None:
            if len(self._cached) == 1:
                self._clock.prefill_done()
                self._clock.setup_done()

        hooks = [
            self._model.register_forward_pre_hook(before, with_kwargs=True),
            self._model.register_forward_hook(after),
        ]
        try:
            yield
            self._clock.finish_begin()
            self._timings = self._clock.end().with_setup(self._before_s)
        finally:
            for hook in hooks:
                hook.remove()

    def result(
        self, n_prompt: int, output: list[int], reason: str, drafter: dict[str, int]
    ) -> DecodeResult:
        """The turn's counts.

        A pass sees all committed tokens but the last in the cache, so what it committed shows at
        the next one. A pass launched ahead of a stop that was not yet known commits nothing.
        """
        total = n_prompt + len(output)
        ends = [min(cached + 1, total) for cached in self._cached[1:]] + [total]
        accepted = [ends[0] - n_prompt - 1]
        accepted += [end - begin for begin, end in itertools.pairwise(ends)]
        drafted = [self._rows[0] - n_prompt, *(rows - 1 for rows in self._rows[1:])]
        steps = [(a, d) for a, d in zip(accepted, drafted, strict=True) if a > 0]
        return DecodeResult(
            output_ids=output,
            finish_reason=reason,
            committed_per_step=[a for a, _ in steps],
            drafted_per_step=[d for _, d in steps],
            depth_per_step=[d for _, d in steps],
            sources_per_step=None,
            n_aux=0,
            drafter={
                "target_forwards": len(self._rows),
                "drafted_with_prompt": drafted[0],
                **drafter,
            },
            timings=self._timings,
        )


class _Counter:
    """Passes of the assistant, counted as a ``DraftModel`` counts its own.

    The pass over the prompt is in neither number: it is the one with nothing in the cache.
    """

    def __init__(self, model: PreTrainedModel | None) -> None:
        self._model, self._forwards, self._tokens = model, 0, 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        if self._model is None:
            yield
            return
        hook = self._model.register_forward_pre_hook(self._one_more, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _one_more(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            self._forwards += 1
            self._tokens += int(kwargs["input_ids"].shape[1])

    def report(self) -> dict[str, int]:
        if self._model is None:
            return {}
        return {"draft_forwards": self._forwards, "draft_tokens": self._tokens}
