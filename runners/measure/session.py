"""The objects that all labels of a run share: model, tokenizer, template, engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runners.job import Job
from runners.measure.blocks import without_reasoning
from runners.measure.method_runs import (
    MethodRun,
    as_method_cannot_run,
    as_needs_not_met,
    describe_files,
    find_artifacts,
    find_heads,
)
from runners.measure.pass_times import time_rows
from specbench.arrays import IntArray
from specbench.config.schema import (
    FLOAT32_WEIGHTS,
    PER_SEQUENCE,
    DraftConfig,
    ModelConfig,
    RunConfig,
    draft_weights,
    packed_bytes,
    verifier_name,
)
from specbench.data.chat_templates import PromptTemplate, TokenIdPrompts
from specbench.decoding.batch import BatchEngine, BatchResult, TurnRequest
from specbench.decoding.device import synchronize
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.lossless import audit_output
from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import AFTER_FINAL_NORM, NO_TOKENS, DraftContext, HeadCache
from specbench.decoding.turn import DecodeResult
from specbench.decoding.verify import GreedyVerifier, build_verifier
from specbench.errors import ConfigurationError, NeedsNotMet, WeightsNotFound
from specbench.kernels.architectures import has_latents, keeps_states, usable_context
from specbench.kernels.cuda_graphs import check_device
from specbench.kernels.weight_forms import is_quantised
from specbench.models import loading
from specbench.models.batch_target import BatchTarget, refuse_one_text_layers
from specbench.models.checkpoints import weights
from specbench.models.checks import self_check
from specbench.models.checks.audit_tolerance import (
    TOKENS,
    AuditTolerance,
    calibrate,
    chosen_prompts,
    fixed_tolerance,
)
from specbench.models.draft.loading import check_same_tokenizer, load_draft_model
from specbench.models.draft.model import latency_ratio
from specbench.models.graph_target import GraphTarget, no_graphs
from specbench.models.heads import eagle3
from specbench.models.heads import folder as head_folder
from specbench.models.heads.drafter import heads_of
from specbench.models.loading import LoadedModel
from specbench.models.target import Target
from specbench.replay import states
from specbench.results.manifest import BASELINE, ModelInfo, RowTimes
from specbench.results.records import EAGER_DRAFT_PASSES, EAGER_PASSES, CaseRecord, Lossless
from specbench.storage.jsonl import JsonObject
from specbench.system import bandwidth

log = logging.getLogger(__name__)

_TAG_TOKENS = 16  # at most, of a tag at a prompt's end with what follows it
_GUESSED = 64  # tokens of the target's output that heads predict when they are checked
# An output is tokenised again in the next turn's prompt, and may then be longer.
_RETOKENISED = 1.25
_ANSWER = "yes"  # placeholder for a later output: some templates refuse an empty one


class Session:
    """Model, engines and prompts of a run, from `load_session`; every drafter is set up.

    ``target`` runs the passes of ``model``, and its buffers hold ``max_len`` tokens.
    """

    def __init__(
        self,
        job: Job,
        runs: Sequence[MethodRun],
        template: PromptTemplate | TokenIdPrompts,
        model: LoadedModel,
        target: Target,
        max_len: int,
    ) -> None:
        config, size = job.config, job.config.batch.size
        assert model.tokenizer is not None  # text is asked
        self._tokenizer, self._template = model.tokenizer, template
        self.tokenizer_hash = loading.tokenizer_hash(model.tokenizer)
        self._runs, self._model, self._target = runs, model, target
        self._max_new_tokens = config.generation.max_new_tokens
        self._max_len, self._max_nodes = max_len, max(run.drafter.needs.max_nodes for run in runs)
        self._batch = max(run.drafter.needs.batch for run in runs)
        self._memory = {run.label: self._memory_of(run) for run in runs}
        self._tolerance = fixed_tolerance(target.dtype)
        self._eager_target = target
        if isinstance(target, GraphTarget) and any(run.drafter.needs.eager for run in runs):
            self._eager_target = Target(model.model, max_len=max_len, max_nodes=self._max_nodes)
        sampling = Sampling.from_config(config.generation)
        limits: dict[str, Any] = {
            "eos_ids": model.eos_ids,
            "context_length": model.context_length,
            "vocab_size": target.vocab_size,
        }
        overlap = config.engine.overlap
        make_engine: Callable[..., Engine] = partial(Engine, **limits, overlap=overlap)
        self._engines = {
            id(run.drafter): make_engine(
                self._eager_target if run.drafter.needs.eager else target,
                build_verifier(
                    run.entry.verifier or config.verifier,
                    sampling,
                    getattr(target, "uniforms", None),
                ),
                phases=config.measure.phases,
            )
            for run in runs
        }
        self._plain_engine = make_engine(target, GreedyVerifier())
        self._plain_drafter = Drafter(name="plain")
        # Labels with the same draft model share it.
        self._drafts = list({id(r.draft[0]): r.draft[0] for r in runs if r.draft}.values())
        self._slots: dict[str, list[MethodRun]] = {run.label: [run] for run in runs}
        self._batch_target = None
        if size > 1:
            for draft_model in self._drafts:
                refuse_one_text_layers(draft_model.target, size)
            draft_bytes = sum(draft.target.token_bytes for draft in self._drafts)
            self._batch_target = BatchTarget(target, size, draft_bytes=draft_bytes)
            verifiers = [build_verifier(config.verifier, sampling) for _ in range(size)]
            self._batch_engine = BatchEngine(
                self._batch_target, verifiers, **limits, phases=config.measure.phases
            )
            clones = {id(d): [d.clone() for _ in range(size - 1)] for d in self._drafts}
            self._drafts += [draft for drafts in clones.values() for draft in drafts]
            for run in runs:
                drafts = clones.get(id(run.draft and run.draft[0]), [None] * (size - 1))
                self._slots[run.label] += [run.clone(draft) for draft in drafts]
        head_cache: HeadCache = {}
        for run in [slot for slots in self._slots.values() for slot in slots]:
            draft = run.draft[0] if run.draft else None
            context = DraftContext(
                vocab_size=target.vocab_size,
                eos_ids=model.eos_ids,
                tokenizer_hash=self.tokenizer_hash,
                max_len=model.context_length,
                artifacts=run.artifacts,
                heads=run.heads,
                head_cache=head_cache,
                seed=config.seed,
                sampling=sampling,
                target=target,
                draft_model=draft,
                budget_shared=config.batch.shared,
                latency_ratio=partial(latency_ratio, target, draft, run.measured)
                if draft
                else None,
            )
            with as_method_cannot_run(run.entry), as_needs_not_met(run.entry):
                run.drafter.setup(context)
            # After `setup`: a head's own configuration may name the states it reads.
            if layers := run.drafter.needs.hidden_layers:
                target.hidden_states.check(layers, f"method={run.label}")
                if isinstance(target, GraphTarget):
                    target.expect(layers)
        if self._batch_target is not None:
            self._batch_target.capture()
        self._overlap = next(iter(self._engines.values())).overlap
        overlapping = [run.label for run in runs if run.drafter.needs.overlap]
        timed = config.measure.phases and self._overlap != "serial"
        self._overlapping = overlapping if timed else None

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._model.context_length

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model has embeddings of."""
        return self._target.vocab_size

    def describe(self) -> ModelInfo:
        """Describe the model for the manifest, without the memory's speed."""
        model = self._model
        return ModelInfo(
            id=model.id,
            revision=model.revision,
            weights_hash=model.weights_hash,
            dtype=model.dtype,
            weights=model.weights,
            device=model.device,
            eos_ids=sorted(model.eos_ids),
            context_length=model.context_length,
            vocab_size=self.vocab_size,
            tokenizer_hash=self.tokenizer_hash,
            template_sha=self._template.sha,
            parameters=sum(p.numel() for p in model.model.parameters()),
            weight_bytes=bandwidth.streamed_bytes(model.model),
            packed=self._target.packed_weights,
            passes=self._target.describe(),
            overlap=self._overlap,
            overlapping=self._overlapping,
            self_check=None if model.self_check is None else model.self_check.to_json(),
            threads=torch.get_num_threads(),
            artefacts=describe_files(self._runs),
            drafts={run.label: run.draft[1] for run in self._runs if run.draft},
            memory=self._memory,
            measured={run.label: dict(run.measured) for run in self._runs if run.measured},
        )

    def remarks(self) -> list[str]:
        """List what a reader of the numbers must know of the prompts and the model's settings."""
        remarks = []
        if self._template.stands_in:
            remarks.append(
                "the tokenizer has no chat template, so prompts are written as Vicuna v1.1's. "
                "Another one: model.template=plain."
            )
        if self._template.ended_in_eos:
            remarks.append(
                "prompts end in the end-of-text token, as the chat template or the question's text "
                "has it there: models may take their answer for finished."
            )
        if has_latents(self._model.model):
            remarks.append(
                "keys and values of the whole text are expanded from latents in every pass, of one "
                "row as of many: drafts cost less here than where they are cached."
            )
        return [*remarks, *self._model.notes]

    def fastest_read(self, earlier: float | None) -> bandwidth.FastestRead:
        """Make the meter of the target's memory; ``earlier``: the speed of an earlier start."""
        size = bandwidth.streamed_bytes(self._model.model)
        return bandwidth.FastestRead(self._target.device, size, earlier, self._model.model)

    def time_rows(self, prompts: Sequence[IntArray], seed: int) -> RowTimes | None:
        """Time passes by their rows, after the prompt of median length that fits."""
        prompts = sorted((p for p in prompts if len(p) < self.context_length), key=len)
        if not prompts:
            return None
        (prompt,) = self._readable([prompts[len(prompts) // 2]])
        return time_rows(self._target, prompt, self.context_length - len(prompt), seed)

    def _readable(self, prompts: Sequence[IntArray]) -> list[IntArray]:
        """Clip prompts to the vocabulary; one with other ids fails when it is decoded."""
        return [prompt.clip(max=self.vocab_size - 1) for prompt in prompts]

    def note_passes(self, described: ModelInfo) -> None:
        """Update what ``described`` (from ``describe``) says of passes.

        Unforeseen shapes may occur in the middle of a run, some of them eagerly.
        """
        described.passes = self._target.describe()
        for run in self._runs:
            if run.draft:
                described.drafts[run.label].passes = run.draft[0].target.describe()

    def render(self, turns: Sequence[tuple[str, str | None]]) -> IntArray:
        """Render a dialogue whose last answer is to be written: ids ``[n_prompt]``."""
        return np.asarray(self._template.render(list(turns)), dtype=np.int64)

    def encode(self, text: str) -> IntArray:
        """Encode bare text, without template and special tokens."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)

    def text(self, output_ids: Sequence[int]) -> str:
        """Decode the text of an output, its reasoning included."""
        return str(self._tokenizer.decode(list(output_ids), skip_special_tokens=True))

    def answer(self, prompt: IntArray, output_ids: Sequence[int]) -> str:
        """Decode an output as the next turn's prompt quotes it: without its reasoning."""
        # The tags are special tokens of some models.
        whole = str(self._tokenizer.decode(list(output_ids)))
        opened = str(self._tokenizer.decode(prompt[-_TAG_TOKENS:])).rstrip().endswith("<think>")
        answer = without_reasoning(whole, opened=opened)
        if answer == whole:
            return self.text(output_ids)
        for special in self._tokenizer.all_special_tokens:
            answer = answer.replace(special, "")
        return answer

    def retokenized(self, output_ids: Sequence[int]) -> int:
        """Count tokens as Spec-Bench's ``speed.py`` does in a baseline's output.

        It counts the text that its ``eval.py`` writes, less one for its models' BOS token.
        """
        # An output of only an end token has no text and, if no BOS is added, no id.
        return max(0, len(self._tokenizer(self.text(output_ids).strip()).input_ids) - 1)

    def decode(
        self,
        prompt: IntArray,
        drafter: Drafter,
        seed: int,
        max_new_tokens: int | None = None,
        seen: IntArray = NO_TOKENS,
    ) -> DecodeResult:
        limit = max_new_tokens or self._max_new_tokens
        self.make_room(len(prompt) + limit)
        engine, before = self._engines[id(drafter)], self._fallbacks()
        result = engine.decode(prompt, drafter, max_new_tokens=limit, seed=seed, seen=seen)
        counted = {k: n - before[k] for k, n in self._fallbacks().items() if n != before[k]}
        return replace(result, drafter={**result.drafter, **counted}) if counted else result

    def for_slot(self, run: MethodRun, slot: int) -> MethodRun:
        """Return the label's run for a slot of a batch; slot 0 has the label's own drafter."""
        return self._slots[run.label][slot]

    def decode_together(
        self, requests: Sequence[TurnRequest], max_new_tokens: int | None = None
    ) -> BatchResult:
        """Decode sequences in lock-step; ``batch.size`` at most, each with its slot's drafter."""
        limit = max_new_tokens or self._max_new_tokens
        self.make_room(max(len(request.prompt) for request in requests) + limit)
        return self._batch_engine.decode(requests, max_new_tokens=limit)

    def _fallbacks(self) -> dict[str, int]:
        """Count the passes of target and drafts that ran eagerly instead of as a graph."""
        return {
            EAGER_PASSES: self._target.eager_passes,
            EAGER_DRAFT_PASSES: sum(draft.target.eager_passes for draft in self._drafts),
        }

    def reset(self, drafter: Drafter) -> float:
        """Reset a drafter and return the seconds it took, which count for the turn that follows."""
        start = time.perf_counter()
        drafter.reset()
        synchronize(self._target.device)
        return time.perf_counter() - start

    def plain(self, prompt: IntArray, max_new_tokens: int | None = None) -> IntArray:
        """Decode the plain greedy output ``[n_new]`` of a prompt, untimed."""
        limit = max_new_tokens or self._max_new_tokens
        self.make_room(len(prompt) + limit)
        result = self._plain_engine.decode(prompt, self._plain_drafter, max_new_tokens=limit)
        return np.asarray(result.output_ids, dtype=np.int64)

    def reserve_audit(self, prompts: Sequence[IntArray]) -> None:
        """Make room for `calibrate_audit`: graphs of growing buffers are captured again."""
        if self._tolerance is None:
            chosen = chosen_prompts(prompts, self.context_length)
            self.make_room(max(map(len, chosen)) + TOKENS)

    def calibrate_audit(
        self, prompts: Sequence[IntArray], earlier: JsonObject | None
    ) -> AuditTolerance:
        """Measure how far from the maximum a near tie may be, for `audit`; untimed.

        Args:
            prompts: of the run; a few are read. ``earlier``: the run's first calibration, which
                holds for all of its records.
        """
        if earlier is not None:
            self._tolerance = AuditTolerance(**earlier)
        elif self._tolerance is None:
            self.reserve_audit(prompts)
            chosen = self._readable(chosen_prompts(prompts, self.context_length))
            targets = dict.fromkeys((self._target, self._eager_target))
            self._tolerance = calibrate(list(targets), chosen)
            log.info("the audit takes for a near tie: %s", self._tolerance)
        return self._tolerance

    def audit(self, record: CaseRecord, reference: Sequence[int]) -> Lossless:
        """Compare a greedy output with plain decoding's for the same prompt."""
        assert self._tolerance is not None  # from calibrate_audit
        output, eos = list(record.output_ids), self._model.eos_ids
        ended = output[-1] in eos or record.finish_reason == "context"
        complete = ended or len(output) == self._max_new_tokens
        return audit_output(
            self._target,
            record.prompt_ids,
            output,
            list(reference),
            self._tolerance.value,
            ended_rightly=complete and not eos.intersection(output[:-1]),
        )

    def states_along(
        self, prompt: IntArray, output: IntArray, layers: tuple[int, ...]
    ) -> dict[int, torch.Tensor]:
        """Return a text's hidden states, untimed; see `specbench.replay.states.states_along`."""
        self.make_room(len(prompt) + len(output))
        return states.states_along(self._target, prompt, output, layers)

    def check_heads(self, runs: Sequence[MethodRun], prompt: IntArray) -> None:
        """Warn of heads that read other layers than they were trained on; untimed.

        ``prompt``: they predict the target's plain output for it.
        """
        heads = [head for run in runs for head in heads_of(run.drafter)]
        several = [head for head in heads if head.layers != (AFTER_FINAL_NORM,)]
        if not several:
            return
        (prompt,) = self._readable([prompt])
        answer = self.plain(prompt, _GUESSED)
        layers = tuple(range(self._target.n_layers + 1))
        states = self.states_along(prompt, answer, layers)
        text = np.concatenate([prompt, answer])[:-1]
        if len(text) > 2:  # a head predicts from the third token on
            for head in several:
                head.check_layers(text, [states[layer] for layer in layers])

    def recover(self, error: Exception, running: str, before: str) -> None:
        """Free what a failed case left; arguments and exceptions are those of `check_device`."""
        devices = [weight.device for weight in self._model.model.parameters()]
        devices += [draft.device for draft in self._drafts]
        for device in dict.fromkeys(devices):
            check_device(device, error, running, before)
        for target in {self._target, self._eager_target}:
            target.cache.clear()
        if self._batch_target is not None:
            self._batch_target.clear()
        for draft in self._drafts:
            draft.target.cache.clear()
        torch.cuda.empty_cache()

    def _memory_of(self, run: MethodRun) -> dict[str, int]:
        """Compute the bytes of weights and cache, by model, that a label needs on its own.

        Labels of a run share models and buffers, so no meter can separate them.
        """
        needs = run.drafter.needs
        rows = (self._max_len + needs.max_nodes + 1) * needs.batch
        sizes = {"target": self._target.memory_bytes(rows)}
        if run.draft is not None:
            rows = self._max_len + (needs.draft_nodes or needs.max_nodes)
            sizes["draft"] = run.draft[0].target.memory_bytes(rows)
        return sizes

    def make_room(self, tokens: int) -> None:
        """Grow the engine's buffers if a sequence may be longer than foreseen; untimed."""
        tokens = min(tokens, self.context_length)
        if tokens <= self._max_len:
            return
        if self._batch_target is not None:
            self._batch_target.reserve(tokens)  # first, since it may refuse
        self._target.reserve(tokens, self._max_nodes, self._batch)
        if self._eager_target is not self._target:
            self._eager_target.reserve(tokens, self._eager_target.max_nodes)
        for draft in self._drafts:
            draft.reserve(tokens)
        self._max_len = tokens


def load_session(
    job: Job,
    runs: Sequence[MethodRun],
    kind: type[Session] = Session,
    more_drafts: Sequence[DraftConfig] = (),
) -> Session:
    """Load what all labels of a run share; see `make_session`."""
    tokenizer = loading.load_tokenizer(job.config)
    template = PromptTemplate.from_config(tokenizer, job.config)
    load = partial(loading.load_model, job.config, tokenizer)
    return make_session(job, runs, tokenizer, template, load, kind, more_drafts)


def make_session(
    job: Job,
    runs: Sequence[MethodRun],
    tokenizer: PreTrainedTokenizerBase,
    template: PromptTemplate | TokenIdPrompts,
    load: Callable[[], LoadedModel],
    kind: type[Session] = Session,
    more_drafts: Sequence[DraftConfig] = (),
) -> Session:
    """Make what all labels of a run share.

    The methods' needs decide which artifacts are resolved (before ``load`` loads weights) and how
    large the engine's buffers are. ``more_drafts`` are checked here and loaded later.

    Raises:
        NeedsNotMet: an artifact is missing and cannot be built here, or a draft model has another
            tokenizer.
        WeightsNotFound: the model's weights are not available.
        ConfigurationError: the model does not decode here as it does in transformers.
    """
    config, budget = job.config, job.config.batch.budget
    if budget != PER_SEQUENCE and not any(run.drafter.needs.verify_cost for run in runs):
        raise ConfigurationError(
            f"batch.budget={budget} weighs all sequences' drafts by verification cost, and no "
            "method of this run does that. Type method=adaptive method.policy=marginal "
            "method.surface=COST/surface.json, or batch.budget=per_sequence."
        )
    # All of it before the weights: a large target takes minutes to load.
    checked: list[DraftConfig] = []
    for run in runs:
        with as_method_cannot_run(run.entry):
            if config.batch.size > 1:
                _check_batch(run, config.batch.size)
            run.artifacts = find_artifacts(config, run, tokenizer)
            run.heads = find_heads(config, run)
            if run.drafter.needs.draft_model and run.entry.draft not in checked:
                _check_draft_tokenizer(run.entry.draft, config, tokenizer)
                checked.append(run.entry.draft)
    for draft in more_drafts:
        _check_draft_tokenizer(draft, config, tokenizer)
    model = load()
    subject = f"{weights.key_of(config.model)}={model.id}"
    self_check.check_tokenizer(model.model, tokenizer, subject)
    max_len = min(_longest_turn(job, template), model.context_length)
    needs = [run.drafter.needs for run in runs]
    max_nodes = max(n.max_nodes for n in needs)
    usable = usable_context(model.model, subject, max_len, max_nodes)
    make = partial(
        make_target,
        config=config,
        max_len=max_len,
        max_nodes=max_nodes,
        batch=max(n.batch for n in needs),
        layouts=sorted({(n.batch, n.max_nodes // n.batch + 1) for n in needs if n.batch > 1}),
    )
    target, check = self_check.checked(model.model, make, subject=subject, longest=max_len)
    if isinstance(target, GraphTarget) and config.engine.exact == "rows":
        target.compare_rows()
    model = replace(
        model,
        context_length=min(model.context_length, usable or model.context_length),
        self_check=check,
        tokenizer=tokenizer,
    )
    _load_drafts(config, runs, target, tokenizer, max_len)
    return kind(job, runs, template, model, target, max_len)


def _check_batch(run: MethodRun, size: int) -> None:
    drafter, entry = run.drafter, run.entry
    remedy = f"Type batch.size=1, or leave {entry.label} out."
    if drafter.needs.overlap:
        raise NeedsNotMet(
            f"method={entry.name} drafts while the target reads its last draft, and with "
            f"batch.size={size} that pass serves all sequences: one device would have to run "
            f"{size} drafters during it. {remedy}"
        )
    if drafter.state_scope == "run":
        raise NeedsNotMet(
            f"method={entry.name} learns from case to case (state_scope=run), and with "
            f"batch.size={size} cases are decoded at once, each with a drafter of its own. Type "
            "state_scope=prompt, and method.state_scope=prompt where it keeps its own. " + remedy
        )


def _check_draft_tokenizer(
    draft: DraftConfig, config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    weights_of_draft = draft_weights(draft, config.model)
    if weights_of_draft and not weights_of_draft.shape and draft.vocabulary == "same":
        check_same_tokenizer(weights_of_draft, tokenizer)


def _longest_turn(job: Job, template: PromptTemplate | TokenIdPrompts) -> int:
    """Estimate the tokens of the longest dialogue with its outputs."""
    longest, limit = 0, job.config.generation.max_new_tokens
    for case in job.cases:
        turns: list[tuple[str, str | None]] = [(user, _ANSWER) for user in case.turns[:-1]]
        answers = len(turns) * limit * _RETOKENISED
        prompt = len(template.render([*turns, (case.turns[-1], None)]))
        longest = max(longest, prompt + int(answers) + limit)
    return longest


def _load_drafts(
    config: RunConfig,
    runs: Sequence[MethodRun],
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    max_len: int,
) -> None:
    """Load the labels' draft models; labels with the same ``pair.draft`` share one."""
    for i, run in enumerate(runs):
        needs = run.drafter.needs
        if not needs.draft_model:
            continue
        max_nodes = needs.draft_nodes or needs.max_nodes
        same = [r.draft for r in runs[:i] if r.draft and r.entry.draft == run.entry.draft]
        if same:
            run.draft = same[0]
            run.draft[0].reserve(max_len, max_nodes)
            continue
        with as_method_cannot_run(run.entry):
            run.draft = load_draft_model(
                run.entry.draft,
                config.model,
                target,
                tokenizer,
                max_len=max_len,
                max_nodes=max_nodes,
                make_target=partial(make_target, config=config, drafts=True),
                weights=config.engine.draft_weights
                if packed_bytes(config.engine.packed)
                else FLOAT32_WEIGHTS,
            )


def make_target(
    model: PreTrainedModel,
    config: RunConfig,
    *,
    max_len: int,
    max_nodes: int,
    batch: int = 1,
    drafts: bool = False,
    layouts: Sequence[tuple[int, int]] = (),
) -> Target:
    """Make the target of the ``engine`` group: graphs on one CUDA device, or eager passes.

    With ``drafts`` it is a draft model's target; ``layouts`` are the batch layouts to capture.
    """
    reason, name = None, config.engine.name
    if name == "graph" or (name == "auto" and model.device.type == "cuda"):
        reason = "its weights are quantised" if is_quantised(model) else no_graphs(model)
        if config.batch.size > 1 and drafts:
            reason = "a draft model's passes for a batch have another number of rows each"
        if has_latents(model):
            reason = "keys and values are expanded from latents"
        if keeps_states(model):
            reason = "layers keep a state"
        if reason is None:
            verifier = verifier_name(config.verifier.name, config.generation.temperature)
            return GraphTarget(
                model,
                max_len=max_len,
                max_nodes=max_nodes,
                batch=batch,
                commits=verifier in ("greedy", "match"),
                sampling=Sampling.from_config(config.generation) if verifier == "match" else None,
                drafts=drafts,
                layouts=layouts,
                fused=config.engine.fused_layers,
                exact=config.engine.exact == "rows",
                folder=Path(config.cache_dir) / "products",
            )
        log.warning("engine=graph runs eagerly: %s", reason)
    if config.engine.exact != "off" and not drafts:
        raise ConfigurationError(
            "`engine.exact` must be off where passes are not CUDA graphs, got "
            f"{config.engine.exact}. {reason or 'This engine is eager'}."
        )
    target = Target(
        model,
        max_len=max_len,
        max_nodes=max_nodes,
        batch=batch,
        reason=reason,
        packed_bytes=packed_bytes(config.engine.packed),
        sequences=config.batch.size if drafts else 1,
    )
    target.draft_weights = config.engine.draft_weights
    return target


class Recorder:
    """Writes the hidden states along plain decoding after each block; untimed.

    Raises:
        ConfigurationError: there is no plain greedy output to record along, or the model has no
            such hidden states.
    """

    def __init__(self, job: Job, session: Session, runs: Sequence[MethodRun]) -> None:
        config = job.config
        if job.baseline is None or not job.greedy:
            raise ConfigurationError(
                f"record={config.record} keeps the hidden states along {BASELINE}'s greedy output: "
                "type baseline=true and generation.temperature=0, or drop record."
            )
        self._job, self._session = job, session
        target, layers = session._target, config.record_layers
        self._n_layers = target.n_layers
        if layers is None:
            layers = [layer for run in runs for layer in run.drafter.needs.hidden_layers]
            layers += _layers_of_heads(config.pair.heads, config.model, self._n_layers)
        target.hidden_states.check(layers, "record_layers")
        indices = {states.index_of(layer, self._n_layers) for layer in [*layers, AFTER_FINAL_NORM]}
        self._layers = tuple(sorted(indices))
        state_bytes = target.embeddings.embedding.shape[1] * target.dtype.itemsize
        log.info(
            "recording the hidden states %s: %.1f kB a token",
            ", ".join(map(str, self._layers)),
            state_bytes * len(self._layers) / 1e3,
        )

    def record(self, finished: Sequence[CaseRecord]) -> None:
        """Record each finished turn of the baseline; a repeated block overwrites it."""
        for record in finished:
            if record.label != self._job.baseline or record.status == "failed" or record.repeat:
                continue
            prompt = np.asarray(record.prompt_ids, dtype=np.int64)
            output = np.asarray(record.output_ids, dtype=np.int64)
            states.write_states(
                states.path_of(self._job.folder, record.stream_index, record.turn),
                self._session.states_along(prompt, output, self._layers),
                n_layers=self._n_layers,
                prompt=prompt,
                output=output,
                tokenizer_hash=self._session.tokenizer_hash,
            )


def _layers_of_heads(heads: Mapping[str, str], model: ModelConfig, n_layers: int) -> list[int]:
    """List the states that the trained heads read whose files are here."""
    layers: list[int] = []
    for name in heads:
        try:
            folder = head_folder.find(name, heads, model)
        except (NeedsNotMet, WeightsNotFound):
            folder = None
        if folder is None:
            log.info("pair.heads.%s is not here: what it reads is recorded by record_layers", name)
        else:
            layers += eagle3.ids_read_by(folder, n_layers)
    return layers
