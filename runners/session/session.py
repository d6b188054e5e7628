"""What all labels of a run share: model, tokenizer, template, engine."""

from __future__ import annotations

import json
import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from runners.session.build import batch_layouts, build_verifier, make_target
from specbench.artifacts import resolve
from specbench.config.draft import draft_node
from specbench.data.chat_templates import PromptTemplate
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.lossless import audit_output
from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import DraftContext
from specbench.decoding.verify import GreedyVerifier, Verifier
from specbench.models import loading, weights
from specbench.models.draft_loading import check_same_tokenizer, load_draft_model
from specbench.models.graph_target import GraphTarget
from specbench.models.target import Target
from specbench.replay.recording import top_candidates
from specbench.results.manifest import DraftInfo, ModelInfo
from specbench.system import bandwidth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runners.job import Job
    from runners.session.method_runs import MethodRun
    from specbench.arrays import IntArray
    from specbench.decoding.engine import DecodeResult
    from specbench.models.draft_model import DraftModel
    from specbench.results.records import CaseRecord, Lossless

log = logging.getLogger(__name__)

# An answer is tokenised again in the next turn's prompt, and may then be longer than it was.
_RETOKENISED = 1.25


class Session:
    """Model, engine and prompts of a run, loaded once.

    Args:
        job: what is run.
        contenders: their needs decide which artifacts are resolved (before weights are loaded)
            and how large the engine's buffers are; each drafter is set up.

    Raises:
        NeedsNotMet: an artifact is missing and cannot be built here, or a draft model has another
            tokenizer.
        WeightsNotFound: the model's weights are not to be had.
    """

    def __init__(self, job: Job, contenders: Sequence[MethodRun]) -> None:
        config = OmegaConf.create(dict(job.config))
        self._max_new_tokens = int(config.generation.max_new_tokens)
        self._sampling = Sampling.from_config(config.generation)
        self._tokenizer = loading.load_tokenizer(config)
        self._tokenizer_hash = loading.tokenizer_hash(self._tokenizer)
        self._template = PromptTemplate.from_config(self._tokenizer, config)
        self._files = {c.label: self._artifacts(config, c) for c in contenders}
        # Before the weights: a large target takes minutes to load.
        for draft in self._drafts_asked_for(config, contenders):
            node = draft_node(draft, config.model)
            if node is not None and not node["shape"]:
                check_same_tokenizer(node, self._tokenizer)
        self._model = loading.load_model(config, self._tokenizer)
        self._max_nodes = max(c.drafter.needs.max_nodes for c in contenders)
        self._batch = max(c.drafter.needs.batch for c in contenders)
        self._max_len = self._cap(self._longest_turn(job))
        self._target = make_target(
            self._model.model,
            config,
            max_len=self._max_len,
            max_nodes=self._max_nodes,
            batch=self._batch,
            layouts=batch_layouts(contenders),
        )
        self._draft_models: dict[str, tuple[DraftModel, dict[str, Any]]] = {}
        self._drafts = {
            c.label: self._load_draft(config, c) for c in contenders if c.drafter.needs.draft_model
        }
        self._memory = {c.label: self._memory_of(c) for c in contenders}
        self._measured = {c.label: c.measured for c in contenders}
        self._on_gpu = self._target.device.type == "cuda"
        verifier = build_verifier(config.verifier, self._sampling)
        phases = bool(config.measure.phases)
        self._engine = self._make_engine(config, self._target, verifier, phases=phases)
        self._overlapping = (
            [c.label for c in contenders if c.drafter.needs.overlap]
            if phases and self._engine.overlap != "serial"
            else None
        )
        self._plain_engine = self._make_engine(config, self._target, GreedyVerifier(), phases=False)
        self._eager_engine, self._eager_target = self._engine, self._target
        if isinstance(self._target, GraphTarget) and any(c.drafter.needs.eager for c in contenders):
            self._eager_target = Target(
                self._model.model, max_len=self._max_len, max_nodes=self._max_nodes
            )
            self._eager_engine = self._make_engine(
                config, self._eager_target, verifier, phases=phases
            )
        self._plain_drafter = Drafter(name="plain")
        for contender in contenders:
            contender.drafter.setup(
                DraftContext(
                    vocab_size=self._target.vocab_size,
                    eos_ids=self._model.eos_ids,
                    tokenizer_hash=self._tokenizer_hash,
                    max_len=self._model.context_length,
                    artifacts=self._files[contender.label],
                    seed=int(config.seed),
                    sampling=self._sampling,
                    target=self._target,
                    draft_model=self._draft_of(contender.label),
                    measured=contender.measured,
                )
            )

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer can have together."""
        return self._model.context_length

    def describe(self) -> ModelInfo:
        """The manifest's part about the model, but for ``copy_bytes_per_s``."""
        model = self._model
        return ModelInfo(
            id=model.id,
            revision=model.revision,
            weights_hash=model.weights_hash,
            dtype=model.dtype,
            device=model.device,
            eos_ids=sorted(model.eos_ids),
            context_length=model.context_length,
            vocab_size=self._target.vocab_size,
            tokenizer_hash=self._tokenizer_hash,
            template_sha=self._template.sha,
            parameters=sum(p.numel() for p in model.model.parameters()),
            weight_bytes=bandwidth.streamed_bytes(model.model),
            packed=self._target.packed_weights,
            passes=self._target.describe(),
            overlap=self._engine.overlap,
            overlapping=self._overlapping,
            threads=torch.get_num_threads(),
            artefacts={
                label: {name: resolve.describe(path) for name, path in files.items()}
                for label, files in self._files.items()
                if files
            },
            drafts={
                label: DraftInfo.from_json(self._draft_models[key][1])
                for label, key in self._drafts.items()
            },
            memory=self._memory,
            measured={label: dict(found) for label, found in self._measured.items() if found},
        )

    def measure_copy_bandwidth(self) -> float:
        """Bytes per second of a copy within the memory of the target's device."""
        return bandwidth.copy_bandwidth(self._target.device)

    def note_passes(self, described: ModelInfo) -> None:
        """Bring what ``described`` (of ``describe``) says of passes up to date.

        Shapes that nobody foresaw run in the middle of a run, and some of them eagerly.
        """
        described.passes = self._target.describe()
        for label, draft in described.drafts.items():
            draft.passes = self._draft_models[self._drafts[label]][0].passes

    def render(self, turns: Sequence[tuple[str, str | None]]) -> IntArray:
        """``[n_prompt]`` ids of a dialogue whose last answer is to be written."""
        return np.asarray(self._template.render(list(turns)), dtype=np.int64)

    def encode(self, text: str) -> IntArray:
        """Ids of bare text, without template and special tokens."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)

    def text(self, output_ids: Sequence[int]) -> str:
        """The text of an answer, as the next turn's prompt quotes it."""
        return str(self._tokenizer.decode(list(output_ids), skip_special_tokens=True))

    def decode(
        self, prompt: IntArray, drafter: Drafter, seed: int, max_new_tokens: int | None = None
    ) -> DecodeResult:
        """Decode a prompt in the measured engine."""
        limit = max_new_tokens or self._max_new_tokens
        self._reserve(len(prompt) + limit)
        engine = self._eager_engine if drafter.needs.eager else self._engine
        return engine.decode(prompt, drafter, max_new_tokens=limit, seed=seed)

    def reset(self, drafter: Drafter) -> float:
        """Empty a drafter and return the seconds it took, which belong to the turn that follows."""
        start = time.perf_counter()
        drafter.reset()
        self._synchronize()
        return time.perf_counter() - start

    def plain(self, prompt: IntArray, max_new_tokens: int | None = None) -> IntArray:
        """``[n_new]`` the plain greedy output of a prompt, untimed."""
        limit = max_new_tokens or self._max_new_tokens
        self._reserve(len(prompt) + limit)
        result = self._plain_engine.decode(prompt, self._plain_drafter, max_new_tokens=limit)
        return np.asarray(result.output_ids, dtype=np.int64)

    def audit(self, record: CaseRecord, reference: Sequence[int]) -> Lossless:
        """Compare a greedy output with plain decoding's for the same prompt."""
        output = list(record.output_ids)
        eos = self._model.eos_ids
        complete = (
            output[-1] in eos
            or len(output) == self._max_new_tokens
            or record.finish_reason == "context"
        )
        return audit_output(
            self._target,
            record.prompt_ids,
            output,
            list(reference),
            ended_rightly=complete and not eos.intersection(output[:-1]),
        )

    def likeliest(self, record: CaseRecord, top: int) -> list[list[int]]:
        """The ``top`` likeliest ids at each position of a record's output, untimed."""
        prompt = np.asarray(record.prompt_ids, dtype=np.int64)
        output = np.asarray(record.output_ids, dtype=np.int64)
        self._reserve(len(prompt) + len(output))
        return top_candidates(self._target, prompt, output, top).tolist()

    def recover(self) -> None:
        """Give back what a failed case left allocated."""
        for target in {self._target, self._eager_target}:
            target.cache.clear()
        for draft, _ in self._draft_models.values():
            draft.clear()
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._target.device)

    def _make_engine(
        self, config: DictConfig, target: Target, verifier: Verifier, *, phases: bool
    ) -> Engine:
        return Engine(
            target,
            verifier,
            eos_ids=self._model.eos_ids,
            context_length=self._model.context_length,
            overlap=config.engine.overlap,
            phases=phases,
        )

    def _artifacts(self, config: DictConfig, contender: MethodRun) -> Mapping[str, Path]:
        needed = contender.drafter.needs.artifacts
        per_model = any(artifact.per_model for artifact in needed)
        return resolve.resolve(
            needed,
            tokenizer=self._tokenizer,
            bundled=bool(config.model.embedded),
            cache_dir=Path(config.cache_dir),
            model_key=weights.identity(config) if per_model else None,
        )

    def _drafts_asked_for(
        self, config: DictConfig, contenders: Sequence[MethodRun]
    ) -> list[Mapping[str, Any]]:
        """The ``pair.draft`` nodes that will be loaded, each once."""
        asked = [c.entry.draft for c in contenders if c.drafter.needs.draft_model]
        return [draft for i, draft in enumerate(asked) if draft not in asked[:i]]

    def _load_draft(self, config: DictConfig, contender: MethodRun) -> str:
        """Load a contender's draft model, or make room in one that is there; returns its key."""
        needs = contender.drafter.needs
        key = json.dumps(contender.entry.draft, sort_keys=True)
        max_nodes = needs.draft_nodes or needs.max_nodes
        if key in self._draft_models:
            self._draft_models[key][0].reserve(self._max_len, max_nodes)
        else:
            self._draft_models[key] = load_draft_model(
                contender.entry.draft,
                config.model,
                self._target,
                self._tokenizer,
                max_len=self._max_len,
                max_nodes=max_nodes,
                make_target=partial(make_target, config=config, drafts=True),
            )
        return key

    def _memory_of(self, contender: MethodRun) -> dict[str, int]:
        """Bytes of weights and cache, by model, that a label needs where it runs alone.

        Labels of a run share models and buffers, so no meter could tell them apart.
        """
        needs, draft = contender.drafter.needs, self._draft_of(contender.label)
        rows = (self._max_len + needs.max_nodes + 1) * needs.batch
        found = {"target": self._target.memory_bytes(rows)}
        if draft is not None:
            rows = self._max_len + (needs.draft_nodes or needs.max_nodes)
            found["draft"] = draft.memory_bytes(rows)
        return found

    def _draft_of(self, label: str) -> DraftModel | None:
        return self._draft_models[self._drafts[label]][0] if label in self._drafts else None

    def _longest_turn(self, job: Job) -> int:
        """Tokens of the longest dialogue with its answers, as far as it can be told beforehand."""
        longest = 0
        for case in job.cases:
            turns = [(user, "") for user in case.turns[:-1]]
            answers = len(turns) * self._max_new_tokens * _RETOKENISED
            prompt = len(self.render([*turns, (case.turns[-1], None)]))
            longest = max(longest, prompt + int(answers) + self._max_new_tokens)
        return longest

    def _cap(self, tokens: int) -> int:
        return min(tokens, self._model.context_length)

    def _reserve(self, tokens: int) -> None:
        """Grow the engine's buffers where a prompt turned out longer than foreseen; untimed."""
        if self._cap(tokens) > self._max_len:
            self._max_len = self._cap(tokens)
            self._target.reserve(self._max_len, self._max_nodes, self._batch)
            if self._eager_target is not self._target:
                self._eager_target.reserve(self._max_len, self._eager_target.max_nodes)
            for draft, _ in self._draft_models.values():
                draft.reserve(self._max_len)
