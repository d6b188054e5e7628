"""vLLM's side of a custom_class drafter, without vLLM: steps over requests, rows of a batch.

As in vLLM 0.32 prompts are read in pieces; a request that is preempted comes back later and is read
again; what is not scheduled leaves the rows, the last rows slide down into free ones, and new
requests come behind them. Behind a row's text stand the drafts being verified. No drafts are asked
for in a step in which some text comes near the longest. Which requests are scheduled and preempted
is drawn, and not by memory.
"""

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import numpy as np

EOS = 1


@dataclass(eq=False)
class Request:
    """One request; ``rule`` gives the token after a text, which is all that there is of a model."""

    prompt: list[int]
    max_tokens: int
    rule: object
    output: list[int] = field(default_factory=list)
    computed: int = 0
    spec: list[int] = field(default_factory=list)
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by the text's length
    preempted: int = 0
    rows: set[int] = field(default_factory=set)
    ignore_eos: bool = False
    steps: list[tuple[int, int]] = field(default_factory=list)  # drafted, accepted; where drafted

    @property
    def text(self):
        return self.prompt + self.output

    @property
    def finished(self):
        ended = EOS in self.output and not self.ignore_eos
        return ended or len(self.output) >= self.max_tokens


class Engine:
    """Runs requests with a drafter in the place of vLLM's.

    ``pressure``: chance that a step preempts the last running request and verifies part of drafts.
    """

    def __init__(self, drafter, config, pressure=0.0):
        self.drafter, self.k = drafter, config.speculative_config.num_speculative_tokens
        self.max_num_seqs = config.scheduler_config.max_num_seqs
        self.max_model_len = config.model_config.max_model_len
        self.pressure, self.random = pressure, np.random.default_rng(0)
        self.rows: list[Request] = []

    def run(self, requests):
        waiting, running = list(requests), []
        while waiting or running:
            while waiting and len(running) < self.max_num_seqs:
                running.append(waiting.pop(0))
            tight = self.random.random() < self.pressure
            if tight and len(running) > 1:
                last = running.pop()
                last.computed, last.spec, last.preempted = 0, [], last.preempted + 1
                waiting.insert(0, last)
            late = self.random.integers(len(running)) if len(running) > 1 else None
            self.step([r for i, r in enumerate(running) if i != late], tight)
            running = [request for request in running if not request.finished]

    def step(self, scheduled, tight):
        for row in reversed(range(len(self.rows))):
            if self.rows[row] not in scheduled:
                self.rows[row] = self.rows[-1]
                self.rows.pop()
        self.rows += [request for request in scheduled if request not in self.rows]
        ids = np.zeros((self.max_num_seqs, self.max_model_len), dtype=np.int32)
        lengths = np.zeros(self.max_num_seqs, dtype=np.int32)
        sampled, longest = [], 0
        for row, request in enumerate(self.rows):
            request.rows.add(row)
            drafted = request.spec[: self.k // 2] if tight else request.spec
            request.spec = []
            request.computed += int(self.random.integers(1, 32))
            tokens = []
            if request.computed >= len(request.text):  # else a piece of the prompt
                tokens = self.verified(request, drafted)
                request.computed = self.max_model_len  # until it is preempted
                longest = max(longest, len(request.text) + len(drafted))
                request.steps += [(len(drafted), len(tokens) - 1)] if drafted else []
            row_ids = [*request.text, *tokens, *drafted[len(tokens) :]][: self.max_model_len]
            ids[row, : len(row_ids)] = row_ids
            lengths[row] = len(request.text) + len(tokens)
            sampled.append(tokens)
        drafting = longest + self.k <= self.max_model_len
        drafts = [[0] * self.k for _ in self.rows]
        if drafting:
            drafts = self.drafter.propose(sampled, lengths, ids, slot_mappings={})
        for request, tokens, draft in zip(self.rows, sampled, drafts, strict=True):
            assert len(draft) <= self.k and all(type(token) is int for token in draft)
            for token in tokens:  # the worker's row may hold more than the request
                request.output.append(token)
                if request.finished:
                    break
            if tokens and not request.finished:
                request.spec = draft[: self.max_model_len - len(request.text) - 1]
                if drafting:
                    request.drafts[len(request.text)] = draft

    def verified(self, request, drafted):
        tokens, text = [], list(request.text)
        for token in [*drafted, None]:
            tokens.append(request.rule(text))
            text.append(tokens[-1])
            if tokens[-1] != token:
                break
        return tokens


def config(k=8, seqs=7, longest=160, vocab=40, knobs=None):
    """Fake the part of `VllmConfig` that the adapter reads."""
    return SimpleNamespace(
        additional_config={"specbench": knobs or {}},
        use_v2_model_runner=False,
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, async_scheduling=False),
        model_config=SimpleNamespace(
            max_model_len=longest,
            tokenizer="none",
            hf_config=SimpleNamespace(eos_token_id=EOS),
            get_vocab_size=lambda: vocab,
            try_get_generation_config=dict,
        ),
    )


def modules(version="0.32.0", maker=True):
    """Fake the imported modules of vLLM."""
    names = ("vllm", "vllm.v1", "vllm.v1.spec_decode", "vllm.v1.spec_decode.custom_class_proposer")
    fakes = {name: ModuleType(name) for name in names}
    fakes["vllm"].__version__ = version
    if maker:
        fakes[names[-1]].create_custom_proposer = lambda vllm_config: None
    return fakes
