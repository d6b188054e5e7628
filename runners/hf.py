"""runner=hf: transformers' own decoding loops as peers, interleaved with ours case by case.

    python run.py runner=hf method=pld                     # ar, pld, hf_generate, hf_prompt_lookup
    python run.py runner=hf method=sps pair=random_draft   # and hf_assisted, with the same draft

The peers run on a copy of the model as transformers loads it, without our attention, cache and
packed linears. Prompts, limit, end tokens, clock, audit and files are the same as in every run.

What a number means here: passes are counted by hooks on the model's forward; the assistant's pass
over the prompt is not among them, as in our own methods (``draft_forwards``). ``prefill_s`` is the
first pass. Assisted generation and prompt lookup draft before it, so their first pass reads the
prompt and verifies a draft at once: it counts as a step too where it commits more than its one
token. ``decode_s`` is everything else that ``generate`` does; what happens before the first pass is
also given as ``drafter_setup_s``.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import GenerationConfig, PreTrainedModel

from runners.job import Entry, Job
from runners.measure.live import run_live
from runners.measure.method_runs import MethodRun
from runners.measure.session import Session, load_session
from runners.runner import Runner
from specbench.arrays import IntArray
from specbench.config.schema import LOOPS, HfConfig, RunConfig, draft_weights
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import NO_TOKENS
from specbench.decoding.turn import DecodeResult, StopRules
from specbench.errors import ConfigurationError, NeedsNotMet, WeightsNotFound
from specbench.models import loading
from specbench.models.draft.loading import ID_MAP_FILE, load_draft_model
from specbench.results.manifest import ModelInfo
from specbench.system.clock import make_clock

log = logging.getLogger(__name__)
_NAME = "hf:"  # prefix of the method names of transformers' loops

Call: TypeAlias = tuple[int, int]  # tokens cached before a forward call, and its query tokens


class Hf(Runner):
    """``runner=hf``."""

    def run(self, job: Job) -> int:
        return run_live(replace(job, entries=(*job.entries, *_peers(job))), load_with_loops)


def _peers(job: Job) -> list[Entry]:
    assert isinstance(job.config.runner, HfConfig)
    if not job.greedy:
        # Assisted generation drafts greedily at any temperature, so its ratio test would be given a
        # distribution that its drafts were not drawn from.
        raise NeedsNotMet(
            "runner=hf decodes only greedily, but generation.temperature="
            f"{job.config.generation.temperature}. Type generation.temperature=0."
        )
    knobs = job.config.runner.hf
    loops = list(knobs.loops or LOOPS)
    reason = _no_assistant(job) if "assisted" in loops else ""
    if reason and knobs.loops:
        raise NeedsNotMet(f"runner.hf.loops names assisted, but {reason}.")
    if reason:
        log.warning("hf_assisted is left out: %s", reason)
        loops.remove("assisted")
    if taken := {f"hf_{loop}" for loop in loops} & {*job.labels}:
        raise ConfigurationError(f"the label {min(taken)!r} is taken by runner=hf: rename yours.")
    drafts_nothing = {"_target_": "methods.ar.Autoregressive", "state_scope": "turn"}
    return [Entry(f"hf_{loop}", drafts_nothing | {"name": _NAME + loop}) for loop in loops]


def _no_assistant(job: Job) -> str:
    """Explain why the run's draft model cannot assist; empty where it can."""
    node = job.config.pair.draft
    weights = draft_weights(node, job.config.model)
    if weights is None:
        return "no draft model is named: type pair.draft.path=FOLDER or pair=random_draft"
    mapped = node.vocabulary != "same" or (Path(weights.id) / ID_MAP_FILE).is_file()
    if mapped and not weights.shape:
        return (
            f"the draft {weights.id} has a vocabulary of its own, and transformers hands ids from "
            "one model to the other as they are: type pair.draft.path=FOLDER with the model's own "
            "vocabulary, or pair=random_draft"
        )
    try:
        loading.model_files_present(weights)
    except WeightsNotFound as error:
        return str(error).rstrip(".")
    return ""


def load_with_loops(job: Job, runs: Sequence[MethodRun]) -> TransformersSession:
    """Load a session as `load_session`, with a copy of the model for transformers' own loops."""
    assisted = any(run.entry.name == "hf:assisted" for run in runs)
    session = load_session(
        job, runs, TransformersSession, [job.config.pair.draft] if assisted else []
    )
    assert isinstance(session, TransformersSession)
    session.add_loops(job.config, assisted)
    return session


class TransformersSession(Session):
    """Decodes with transformers' own loop for the labels of these loops."""

    def add_loops(self, config: RunConfig, assisted: bool) -> None:
        """Load the copy of the model, and the assistant where a loop needs one."""
        assert isinstance(config.runner, HfConfig)
        self._knobs = config.runner.hf
        self._stock: Any = loading.load_model(config, self._tokenizer).model
        self._clock = make_clock(str(self._stock.device))
        self._rules = StopRules(self._model.eos_ids, self.context_length, self.vocab_size)
        eos = sorted(self._model.eos_ids)
        self._ends = {"eos_token_id": eos, "pad_token_id": eos[0] if eos else 0}
        # Without the sampling and penalties of the model's publisher.
        self._stock.generation_config = GenerationConfig(**self._ends)
        self._assistant = self._load_assistant(config) if assisted else None

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

    def decode(
        self,
        prompt: IntArray,
        drafter: Drafter,
        seed: int,
        max_new_tokens: int | None = None,
        seen: IntArray = NO_TOKENS,
    ) -> DecodeResult:
        if not drafter.name.startswith(_NAME):
            return super().decode(prompt, drafter, seed, max_new_tokens, seen)
        requested = max_new_tokens or self._max_new_tokens
        limit = self._rules.limit(prompt, requested)
        ids = torch.from_numpy(prompt)[None].to(self._stock.device)
        options = self._options(drafter.name.removeprefix(_NAME))
        passes: list[Call] = []
        drafts: list[Call] = []
        start, before_s = time.perf_counter(), 0.0

        def begin(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
            nonlocal before_s
            passes.append(_call_of(kwargs))
            if len(passes) == 1:
                self._clock.begin()  # waits for what the assistant still does
                before_s = time.perf_counter() - start

        def end(*_: Any) -> None:
            if len(passes) == 1:
                self._clock.prefill_done()
                self._clock.setup_done()

        def draft(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
            drafts.append(_call_of(kwargs))

        with ExitStack() as hooks:
            hooks.enter_context(self._stock.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.enter_context(self._stock.register_forward_hook(end))
            if assistant := options.get("assistant_model"):
                hooks.enter_context(assistant.register_forward_pre_hook(draft, with_kwargs=True))
            knobs = {"do_sample": False, "max_new_tokens": limit, **self._ends}
            out = self._stock.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(**knobs),
                **options,
            )
            self._clock.finish_begin()
            timings = self._clock.end().with_setup(before_s)
        # Up to the first end token and the limit; tokens after them do not count.
        output = out[0, len(prompt) :][:limit].tolist()
        ends = [i for i, token in enumerate(output, 1) if token in self._model.eos_ids]
        output = output[: ends[0]] if ends else output
        reason = "eos" if ends else "context" if limit < requested else "length"
        counts = {"target_forwards": len(passes), "drafted_with_prompt": passes[0][1] - len(prompt)}
        if assistant:
            further = [n_rows for cached, n_rows in drafts if cached]  # after the prompt's pass
            counts |= {"draft_forwards": len(further), "draft_tokens": sum(further)}
        steps = _steps(passes, len(prompt), output)
        drafted = [n_drafted for _, n_drafted in steps]
        return DecodeResult(
            output_ids=output,
            finish_reason=reason,
            committed_per_step=[n_committed for n_committed, _ in steps],
            drafted_per_step=drafted,
            depth_per_step=drafted,
            sources_per_step=None,
            n_aux=0,
            drafter=counts,
            timings=timings,
        )

    def describe(self) -> ModelInfo:
        model = super().describe()
        model.peers = {"attention": self._stock.config._attn_implementation, "packed": False}
        return model

    def _options(self, loop: str) -> dict[str, Any]:
        """Make the arguments of ``generate``; what one turn adapted is forgotten."""
        knobs = self._knobs
        if loop == "prompt_lookup":
            names = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
            return {name: n for name in names if (n := getattr(knobs, name)) is not None}
        if loop == "generate":
            return {}
        assert self._assistant is not None
        options = {
            "num_assistant_tokens": knobs.num_assistant_tokens,
            "num_assistant_tokens_schedule": knobs.schedule,
            "assistant_confidence_threshold": knobs.confidence,
        }
        # The heuristic schedule writes its state into the assistant's own configuration.
        self._assistant.generation_config = GenerationConfig(
            pad_token_id=self._ends["pad_token_id"],
            **{name: value for name, value in options.items() if value is not None},
        )
        return {"assistant_model": self._assistant}


def _call_of(kwargs: Mapping[str, Any]) -> Call:
    cache = kwargs.get("past_key_values")
    cached = 0 if cache is None else int(cache.get_seq_length())
    return cached, int(kwargs["input_ids"].shape[1])


def _steps(passes: Sequence[Call], n_prompt: int, output: Sequence[int]) -> list[tuple[int, int]]:
    """Count the tokens that each step committed and drafted.

    A pass sees all committed tokens but the last in the cache, so the next pass shows what it
    committed. A pass launched before a stop was known commits nothing.
    """
    total = n_prompt + len(output)
    ends = [min(cached + 1, total) for cached, _ in passes[1:]] + [total]
    committed = [ends[0] - n_prompt - 1, *(end - start for start, end in itertools.pairwise(ends))]
    drafted = [passes[0][1] - n_prompt, *(n_rows - 1 for _, n_rows in passes[1:])]
    return [(c, d) for c, d in zip(committed, drafted, strict=True) if c > 0]
