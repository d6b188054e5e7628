"""A run without a model: the real engine and block runner on a target that is a formula."""

import time

import numpy as np

from runners.job import Entry, Job
from runners.measure.blocks import BlockRunner
from runners.measure.live import EngineSource
from runners.measure.method_runs import MethodRun
from specbench.config.schema import (
    DatasetConfig,
    GenerationConfig,
    MeasureConfig,
    ModelConfig,
    NoiseConfig,
    RunConfig,
    VerifierConfig,
)
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import NO_TOKENS, Needs
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import CaseFailed
from specbench.results.records import Lossless

VOCAB = 23
EOS = 22
NEW_TOKENS = 12
# Nothing is disturbed, whatever the machine does.
MEASURE = MeasureConfig(disturbed=NoiseConfig(None, None, 0.0))


class FormulaScores:
    logits = hidden = verified = None

    def __init__(self, sequences):
        self._choices = np.array([FormulaTarget.next_token(text) for text in sequences])
        self.depths = np.array([len(text) - len(sequences[0]) for text in sequences])

    def greedy(self):
        return self._choices


class FormulaTarget:
    """The next token is a fixed function of the last three; never the end token."""

    device = "cpu"

    @staticmethod
    def next_token(text):
        a, b, c = ([0, 0, *text])[-3:]
        return (3 * a + 5 * b + 7 * c + 1) % (VOCAB - 1)

    def prefill(self, prompt, *, all_logits=False, hidden_layers=()):
        self.text = [int(token) for token in prompt]
        return FormulaScores([self.text])

    def forward(self, root, tree, *, hidden_layers=()):
        self._root = root
        sequences = [[*self.text, int(root)]]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            sequences.append([*sequences[parent + 1], int(token)])
        return FormulaScores(sequences)

    def commit(self, tree, path):
        self.text += [int(self._root), *(int(tree.tokens[i]) for i in path)]

    def free_rows(self):
        return 1000


class ToySession:
    """Stands in for ``runners.measure.session.Session``: words are tokens, times are zero."""

    context_length = 1 << 20

    def __init__(self):
        self.engine = Engine(FormulaTarget(), GreedyVerifier(), eos_ids=frozenset({EOS}))
        self.plain_calls = 0
        self.audits = []

    def render(self, turns):
        ids = []
        for user, answer in turns:
            ids += [len(word) % (VOCAB - 1) for word in user.split()]
            ids += [int(word) for word in (answer or "").split()]
        return np.asarray(ids, dtype=np.int64)

    def text(self, ids):
        return " ".join(str(i) for i in ids)

    def answer(self, prompt, ids):
        return self.text(ids)

    def retokenized(self, ids):
        return len(ids) - 1

    def decode(self, prompt, drafter, seed, max_new_tokens=None, seen=NO_TOKENS):
        limit = max_new_tokens or NEW_TOKENS
        return self.engine.decode(prompt, drafter, max_new_tokens=limit, seed=seed, seen=seen)

    def plain(self, prompt, max_new_tokens=None):
        self.plain_calls += 1
        result = self.decode(prompt, Drafter(name="plain"), 0, max_new_tokens)
        return np.asarray(result.output_ids)

    def reset(self, drafter):
        start = time.perf_counter()
        drafter.reset()
        return time.perf_counter() - start

    def audit(self, record, reference):
        self.audits.append((record.label, record.case_id, record.turn))
        same = list(record.output_ids) == list(reference)
        return Lossless(verdict="equal") if same else Lossless(verdict="bug", first_diff=0, gap=1.0)

    def recover(self, error, running, before):
        pass


class Recorder(Drafter):
    """Notes what it is shown; ``journal`` is shared with others to see the order."""

    def __init__(self, name, journal=None, **options):
        super().__init__(name=name, state_scope=options.pop("scope", "prompt"))
        self.journal = [] if journal is None else journal
        self.seen = []
        self.resets = 0
        self.fail_at = set(options.pop("fail_at", ()))
        self.reset_s = options.pop("reset_s", 0.0)
        self.turns = 0
        self._needs = Needs(**options)

    @property
    def needs(self):
        return self._needs

    def reset(self):
        self.resets += 1
        self.seen.clear()
        time.sleep(self.reset_s)

    def begin(self, state):
        self.journal.append(self.name)
        self.seen.append(("begin", state.tokens.tolist()))
        self.turns += 1
        if self.turns - 1 in self.fail_at:
            raise CaseFailed("made_up", "failed on purpose")

    def observe(self, state, outcome):
        self.seen.append(("observe", outcome.committed.tolist(), outcome.finished))

    def end(self, state):
        self.seen.append(("end", state.tokens.tolist()))


def make_job(folder, labels, cases, **changes):
    config = RunConfig(
        model=ModelConfig(name="toy"),
        dataset=DatasetConfig(name="toys", dialogue=changes.pop("dialogue", "ar")),
        generation=GenerationConfig(temperature=changes.pop("temperature", 0.0)),
        verifier=VerifierConfig(name="auto"),
        measure=changes.pop("measure", MEASURE),
        repeats=changes.pop("repeats", 1),
    )
    entries = tuple(Entry(label, {"name": label}) for label in labels)
    return Job(
        config=config,
        overrides=(),
        identity={},
        run_key="k",
        folder=folder,
        entries=entries,
        cases=tuple(cases),
        **changes,
    )


def make_runner(job, drafters, done=None, session=None):
    session = session or ToySession()
    runs = {e.label: MethodRun(e, d) for e, d in zip(job.entries, drafters, strict=True)}
    done = [] if done is None else done
    return BlockRunner(job, runs, EngineSource(job, session), done), session, done


def run_all(job, drafters, done=None, stop_after=None):
    """Run a job's remaining blocks; returns records and errors."""
    runner, session, done = make_runner(job, drafters, done)
    present = {record.key for record in done}
    errors = []
    for block in job.blocks()[:stop_after]:
        if not block.record_keys(job.labels) <= present:
            result = runner.run([block])
            done.extend(result.records)
            errors.extend(result.errors)
    return done, errors, session
