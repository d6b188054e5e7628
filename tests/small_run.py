"""A tiny checkpoint and questions on disk, so that run.py is exercised as users run it."""

import json
import os
import signal
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from specbench.results.conditions import Warned
from specbench.results.records import CaseRecord
from tests.tiny_checkpoint import TINY

ROOT = Path(__file__).parents[1]

_WORDS = """
the a ship harbour book name hour water keel master page line month quay number end begin user
assistant tell me story short and now why is here which red blue seven count from to of
"""

_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["tell me a story", "and now a short one"]},
    {"question_id": 82, "category": "qa", "turns": ["why is the water blue"]},
    {"question_id": 83, "category": "qa", "turns": ["which ship is red and which is blue"]},
    {"question_id": 84, "category": "writing", "turns": ["count from seven", "count to seven"]},
    {"question_id": 85, "category": "rag", "turns": ["the name of the ship is here"]},
]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A two-layer Llama with random weights and a word tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *_WORDS.split()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        **TINY,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def questions(tmp_path_factory) -> Path:
    """Five questions, two of them with two turns."""
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return path


@pytest.fixture(scope="session")
def small(checkpoint, questions, tmp_path_factory) -> list[str]:
    """Overrides for a run of the tiny model on the five questions."""
    cache = tmp_path_factory.mktemp("cache")
    return [
        "method=pld",
        "model=local",
        f"model.path={checkpoint}",
        "model.dtype=float64",
        "model.device=cpu",
        "model.context_length=256",
        "dataset=jsonl",
        f"dataset.path={questions}",
        "generation.max_new_tokens=16",
        "measure.warmup=0",
        # Files must come out alike under any load of this machine.
        "measure.disturbed={steal: null, others: null}",
        f"paths.results={tmp_path_factory.mktemp('results')}",
        f"cache_dir={cache}",
    ]


@pytest.fixture
def signals_arrive():
    """Let a test's processes get signals that this one ignores under ``nohup`` or ``&``."""
    ignored = [s for s in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_IGN]
    for signum in ignored:
        signal.signal(signum, signal.SIG_DFL)
    yield
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)


@pytest.fixture
def environment() -> dict[str, str]:
    """For processes that a test starts: offline, one thread, a terminal of known width."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }


def six_rounds():
    """Time passes in as many rounds as an interval takes: a tiny model's never take a second."""
    from runners.measure import pass_times

    return patch.multiple(pass_times, _ROUNDS_OF_FEW=(6, 6), _ROUNDS=(6, 6))


def in_process(work, job):
    return work(job)


def run_here(overrides, *typed, launch=in_process, **invocation) -> int:
    """Return the exit code of a run in this process; ``typed``: its user's overrides.

    ``launch``: called instead of starting a child process; None starts one.
    """
    # Here, because conftest.py also imports this file where Hydra is not installed.
    from runners.launch import dispatch
    from runners.measure import live
    from specbench.config import compose

    cfg = compose.compose([*overrides, *typed])
    child = dispatch.run_in_child if launch is None else lambda work, job, _: launch(work, job)
    # A run collects garbage, of which the tests' process has much.
    at_rest = patch.object(live, "gc_paused", nullcontext)
    with at_rest, six_rounds(), patch.object(dispatch, "run_in_child", child):
        return dispatch.execute(cfg, dispatch.Invocation(typed, **invocation))[0]


@contextmanager
def interrupted_after(blocks: int):
    """Interrupt the run inside when it writes one more block."""
    from runners.run_folder.resumable_files import ResultFiles

    append, remaining = ResultFiles.append, iter(range(blocks))

    def failing(self, *block):
        if next(remaining, None) is None:
            raise KeyboardInterrupt
        append(self, *block)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ResultFiles, "append", failing)
        yield


def case_record(case_id="a", label="ar", n_new=9, **changes):
    """Make a finished turn; each step committed one token unless ``changes`` differ."""
    committed = changes.setdefault("committed_per_step", [1] * (n_new - 1))
    values = {
        "run_key": "k", "label": label, "method": label, "model": "m", "dataset": "d",
        "task": "qa", "category": "qa", "case_id": case_id, "turn": 0, "repeat": 0,
        "stream_index": 0, "status": "ok", "n_prompt": len(changes.get("prompt_ids", range(20))),
        "n_new": n_new, "n_target_passes": len(committed), "output_ids": [1] * n_new,
        "state_scope": "prompt", "seed": 1,
    }  # fmt: skip
    if not changes.keys() & {"prefill_s", "decode_s", "wall_s", "timing"}:
        values |= {"prefill_s": 0.5, "decode_s": 1.0, "wall_s": 1.5}
    values |= changes
    for name in ("prompt_ids", "output_ids", "committed_per_step"):
        if name in values:
            values[name] = list(values[name])
    return CaseRecord(**values)


_TIMES = {"prefill_s", "decode_s", "drafter_setup_s", "wall_s", "phase_s", "cpu_steal", "gpu"}
_TIMES |= {"cpu_waiting", "cpu_others", "cpu_load", "started_at", "host"}


def without_times(line: dict) -> dict:
    """Drop the fields that differ from run to run: times, hosts, time stamps."""
    return {key: value for key, value in line.items() if key not in _TIMES}


def warning_texts(summary):
    """List the sentences of a summary's warnings."""
    return [Warned(**line).text for line in summary["warnings"]]
