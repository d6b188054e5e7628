"""Our drafters inside vLLM, against vLLM without one and beside our engine, on the same prompts.

Needs vLLM and this project in one environment (docs/engines.md), and a run of ours in which some
methods drafted chains, each request with a state of its own::

    python run.py runner=replay runner.traces=PLAIN state_scope=turn method=pld method.num_tokens=8
    python -m scripts.bench vllm RUN --model FOLDER --out vllm.json

Every label drafts for vLLM with its knobs of that run. Counts are vLLM's own, of the steps of each
request that had a draft. A request's steps are the same where vLLM accepted in each what our engine
did. The last step is left out: vLLM drafts beyond a request's limit, our engine does not.
"""

import argparse
import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from analysis.runs.load import load_runs
from scripts.bench import print_table
from specbench.results.lines import StepTrace, read_steps
from specbench.results.records import STEPS, CaseRecord

_LEFT_OUT = ("_target_", "paper_scope", "version")  # what is no choice of the run
# Drafted and accepted tokens of a request's steps that had a draft.
Steps: TypeAlias = list[tuple[int, int]]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, help="folder of a run of our engine, or of a replay")
    add("--model", type=Path, required=True, help="folder of the weights that it ran with")
    add("--tokens", type=int, default=8, help="num_speculative_tokens (default: 8)")
    add("--rows", type=int, default=3, help="requests at once (default: 3)")


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    (run,) = load_runs([options.run])
    asked = [record for record in run.records if record.label == run.baseline]
    traces = {trace.key: trace for trace in read_steps(run.path / STEPS)}
    most = run.max_new_tokens or max(record.n_new for record in asked)
    plain, _ = _answers(options, asked, most)
    sizes = f"--tokens {options.tokens} --rows {options.rows}"
    results: dict[str, Any] = {
        "command": f"python -m scripts.bench vllm RUN --model FOLDER {sizes}",
        "vllm": str(importlib.import_module("vllm").__version__),
        "model": run.model,
        "dataset": run.dataset,
        "requests": len(asked),
        "rows": options.rows,
        "num_speculative_tokens": options.tokens,
        "max_new_tokens": most,
        "plain_equal_to_ours": _equal(plain, [record.output_ids for record in asked]),
        "methods": {},
    }
    for label in run.labels:
        if label == run.baseline:
            continue
        knobs = _typed(run.knobs(label))
        outputs, theirs = _answers(options, asked, most, knobs)
        own = [traces[*record.key[:3], label] for record in asked]
        results["methods"][label] = {
            "knobs": knobs,
            "equal_to_plain": _equal(outputs, plain),
            "same_steps": sum(map(same_steps, theirs, own)),
            "in_vllm": counts(theirs, options.tokens),
            "here": counts(map(_steps, own), options.tokens),
        }
        yield results


def _typed(knobs: dict[str, Any]) -> dict[str, Any]:
    """Recorded knobs as a user types them: a method inside them by its name."""
    found = {k: v for k, v in knobs.items() if k not in _LEFT_OUT}
    for key, value in found.items():
        if isinstance(value, dict) and "_target_" in value:
            part = _typed(value)
            del part["state_scope"]  # the whole's
            found[key] = {"method": part.pop("name"), **part}
    return found


def _answers(
    options: argparse.Namespace,
    asked: Sequence[CaseRecord],
    most: int,
    knobs: dict[str, Any] | None = None,
) -> tuple[list[list[int]], list[Steps]]:
    """Greedy answers of a new vLLM to these prompts, and their steps where a method drafts."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    vllm = importlib.import_module("vllm")
    drafting: dict[str, Any] = {}
    if knobs is not None:
        drafting = {
            "speculative_config": {
                "method": "custom_class",
                "model": f"specbench.engines.vllm.{knobs['name']}",
                "num_speculative_tokens": options.tokens,
            },
            "additional_config": {"specbench": knobs},
            "per_request_spec_decode_metrics": "detailed",
        }
    prompts = [{"prompt_token_ids": record.prompt_ids} for record in asked]
    longest = max(record.n_prompt for record in asked) + most
    llm = vllm.LLM(
        model=str(options.model),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=options.rows,
        max_model_len=longest + 2 * (options.tokens + 1),  # nearer to it vLLM asks for no drafts
        **drafting,
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=most, detokenize=False)
    said = [answer.outputs[0] for answer in llm.generate(prompts, sampling, use_tqdm=False)]
    llm.llm_engine.engine_core.shutdown()
    noted = [one.spec_decode_metrics for one in said if knobs is not None]
    steps = [[*zip(n.per_step_drafted, n.per_step_accepted, strict=True)] for n in noted]
    return [[*one.token_ids] for one in said], steps


def _steps(trace: StepTrace) -> Steps:
    steps = zip(trace.drafted, trace.committed, strict=True)
    return [(drafted, committed - 1) for drafted, committed in steps if drafted]


def same_steps(theirs: Steps, trace: StepTrace) -> bool:
    """Whether vLLM accepted in each step but the last what our engine did."""
    last = len(trace.committed) - 1
    ours = [n - 1 for n, d in zip(trace.committed[:last], trace.drafted, strict=False) if d]
    accepted = [accepted for _, accepted in theirs]
    return ours in (accepted, accepted[:-1])  # in the last one vLLM may have had no draft


def counts(requests: Iterable[Steps], tokens: int) -> dict[str, Any]:
    """Drafts and tokens of all requests, and by position how many of the drafts were accepted."""
    steps = [step for request in requests for step in request]
    return {
        "drafts": len(steps),
        "drafted": sum(drafted for drafted, _ in steps),
        "accepted": sum(accepted for _, accepted in steps),
        "accepted_by_position": [sum(n > at for _, n in steps) for at in range(tokens)],
    }


def _equal(outputs: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    return sum(a == b for a, b in zip(outputs, others, strict=True))


def show(results: dict[str, Any]) -> None:
    requests = results["requests"]
    rows = [
        (
            label,
            f"{found['equal_to_plain']}/{requests}",
            f"{found['same_steps']}/{requests}",
            *(
                f"{found[where]['accepted']} of {found[where]['drafted']} in "
                f"{found[where]['drafts']}"
                for where in ("in_vllm", "here")
            ),
        )
        for label, found in results["methods"].items()
    ]
    columns = ("method", "answers of plain vLLM", "same steps", "accepted in vLLM", "here")
    print_table(f"Drafters of ours in vLLM {results['vllm']}", columns, rows)
