"""vLLM's side of a custom_class drafter, without vLLM: its scheduler and the rows of its batch.

Written after vLLM 0.32 (`v1/core/sched/scheduler.py`, `v1/worker/gpu_input_batch.py` and
`gpu_model_runner.py`): running requests first and in order, then waiting ones; a token budget, so
prompts are read in pieces; blocks of keys, and the last running request preempted when they run
out; what is not scheduled leaves the rows, new ones take the smallest free row, the last ones slide
down. Behind a row's text stand the drafts being verified. No drafts are asked for in a step in
which some text comes near the longest.
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
    blocks: int = 0
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


class Rows:
    """`InputBatch`: what a drafter is shown."""

    def __init__(self, n, max_model_len):
        self.requests: list[Request | None] = []
        self.max_num_reqs = n
        self.token_ids_cpu = np.zeros((n, max_model_len), dtype=np.int32)
        self.num_tokens_no_spec = np.zeros(n, dtype=np.int32)

    def update(self, scheduled, spec):
        """`_update_states`: rows of what is scheduled now, and the drafts behind them."""
        for row, request in enumerate(self.requests):
            if request is not None and request not in scheduled:
                self.requests[row] = None
        present = [request for request in self.requests if request is not None]
        for request in scheduled:
            if request in present:
                continue
            row = next((i for i, held in enumerate(self.requests) if held is None), None)
            if row is None:
                row = len(self.requests)
                self.requests.append(None)
            self.requests[row] = request
            self.token_ids_cpu[row, : len(request.text)] = request.text
            self.num_tokens_no_spec[row] = len(request.text)
        self._condense(spec)
        for row, request in enumerate(self.requests):
            request.rows.add(row)
            start, drafted = self.num_tokens_no_spec[row], spec.get(id(request), [])
            self.token_ids_cpu[row, start : start + len(drafted)] = drafted

    def _condense(self, spec):
        while None in self.requests:
            if self.requests[-1] is None:
                self.requests.pop()
                continue
            empty, last = self.requests.index(None), len(self.requests) - 1
            n = self.num_tokens_no_spec[last]
            self.token_ids_cpu[empty, :n] = self.token_ids_cpu[last, :n]
            self.num_tokens_no_spec[empty] = n
            self.requests[empty] = self.requests.pop()


class Engine:
    """Steps over waiting and running requests with a drafter in the place of vLLM's."""

    def __init__(self, drafter, config, *, budget, block, blocks):
        self.drafter, self.k = drafter, config.speculative_config.num_speculative_tokens
        self.max_num_seqs = config.scheduler_config.max_num_seqs
        self.max_model_len = config.model_config.max_model_len
        self.budget, self.block, self.free = budget, block, blocks
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.rows = Rows(self.max_num_seqs, self.max_model_len)
        self.steps = 0

    def run(self, requests):
        self.waiting = list(requests)
        while self.waiting or self.running:
            self.step()
            assert self.steps < 100_000

    def step(self):
        self.steps += 1
        scheduled, spec = self._schedule()
        if not scheduled:
            return
        self.rows.update(scheduled, spec)
        sampled, longest = [], 0  # with the drafts being verified, `max_seq_len`
        for row, request in enumerate(self.rows.requests):
            drafted = spec.get(id(request), [])
            request.computed += scheduled[request]
            longest = max(longest, request.computed)
            if request.computed < len(request.text):  # a piece of the prompt
                sampled.append([])
                continue
            said = self._verified(request, drafted)
            if drafted:
                request.steps.append((len(drafted), len(said) - 1))
            request.computed -= len(drafted) - (len(said) - 1)  # rejected ones are read again
            start = self.rows.num_tokens_no_spec[row]
            self.rows.token_ids_cpu[row, start : start + len(said)] = said
            self.rows.num_tokens_no_spec[row] = start + len(said)
            sampled.append(said)
        shown = list(self.rows.requests)
        asked = longest + self.k <= self.max_model_len
        if asked:
            drafts = self.drafter.propose(
                sampled, self.rows.num_tokens_no_spec, self.rows.token_ids_cpu, slot_mappings={}
            )
        else:
            drafts = [[0] * self.k for _ in shown]
        assert len(drafts) == len(shown)
        self._update_from_output(shown, sampled, drafts, asked)

    def _update_from_output(self, shown, sampled, drafts, asked):
        for request, said, draft in zip(shown, sampled, drafts, strict=True):
            assert len(draft) <= self.k and all(type(token) is int for token in draft)
            for token in said:  # the worker's row may hold more than the request
                request.output.append(token)
                if request.finished:
                    break
            if request.finished:
                self.running.remove(request)
                self.free += request.blocks
            elif said:
                request.spec = draft
                if asked:
                    request.drafts[len(request.text)] = draft

    def _verified(self, request, drafted):
        said, text = [], list(request.text)
        for token in [*drafted, None]:
            said.append(request.rule(text))
            text.append(said[-1])
            if said[-1] != token:
                break
        return said

    def _schedule(self):
        budget, scheduled, spec, preempted = self.budget, {}, {}, False
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for one before it
            n = min(len(request.text) + len(request.spec) - request.computed, budget)
            n = min(n, self.max_model_len - 1 - request.computed)
            if n <= 0:
                continue
            while not self._allocate(request, n):
                last = self.running.pop()
                budget += scheduled.pop(last, 0)
                spec.pop(id(last), None)
                self._preempt(last)
                preempted = True
                if last is request:
                    break
            if request not in self.running:
                break
            scheduled[request] = n
            budget -= n
            fits = n + request.computed - len(request.text)
            if request.spec and fits > 0:
                spec[id(request)] = request.spec[:fits]
            request.spec = []
        while self.waiting and budget and not preempted and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            n = min(len(request.text) - request.computed, budget)
            if not self._allocate(request, n):
                break
            self.running.append(self.waiting.pop(0))
            scheduled[request] = n
            budget -= n
        return scheduled, spec

    def _allocate(self, request, n):
        more = -(-(request.computed + n) // self.block) - request.blocks
        if more > self.free:
            return False
        self.free -= max(more, 0)
        request.blocks += max(more, 0)
        return True

    def _preempt(self, request):
        self.free += request.blocks
        request.blocks = request.computed = 0
        request.spec = []
        request.preempted += 1
        self.waiting.insert(0, request)


def config(k=8, seqs=7, longest=160, vocab=40, knobs=None):
    """`VllmConfig`: what of it the adapter reads."""
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
    """What is imported of vLLM."""
    names = ("vllm", "vllm.v1", "vllm.v1.spec_decode", "vllm.v1.spec_decode.custom_class_proposer")
    found = {name: ModuleType(name) for name in names}
    found["vllm"].__version__ = version
    if maker:
        found[names[-1]].create_custom_proposer = lambda vllm_config: None
    return found
