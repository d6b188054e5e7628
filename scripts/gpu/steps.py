"""Where a step's time goes, host and device, for every method; what one drafts from are toys.

The share outside the target's pass is counted twice. By phases, everything between the draft and
the verdict is the pass: the host's filling of buffers, the copies to the device, the launch. By
replays, the pass is what the device does between two events around nothing but replays of the same
shapes, so all the host's work before it counts as outside, unless other work hides it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from scripts.gpu import methods
from scripts.gpu.measurements import draft_model, load
from scripts.gpu.progress import Progress
from scripts.gpu.toys import TOKENIZER, ToyFiles
from specbench.arrays import IntArray
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftContext, DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import first_line
from specbench.models.graph_target import GraphTarget
from specbench.models.static_pass import StaticPass

STEP_METHODS = ("cacheback", "token_recycling")  # first: the bound outside the pass is on these two
WORDS, SUCCESSORS = 30, 5  # of a prompt: enough branches to fill a tree of 96 nodes
TOY_TEXTS = 100  # each as long as a prompt: whatever pair an answer ends with is found
METHOD_S = 20.0  # a method is not begun with less time left
_REPLAYS = 5  # in a row between two events
_SERIES = 3


class WatchedTarget(GraphTarget):
    """A graph target that remembers which shape each of its passes had.

    Attributes:
        chosen: one entry a pass; None where it ran eagerly.
    """

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.chosen: list[StaticPass | None] = []
        super().__init__(model, **options)

    def _choose(
        self, tree: DraftTree, in_rows: bool, hidden_layers: tuple[int, ...]
    ) -> StaticPass | None:
        step = super()._choose(tree, in_rows, hidden_layers)
        self.chosen.append(step)
        return step


def steps(check: Progress, name: str, drafting: str) -> dict[str, Any]:
    """Where a step's time goes, by method; what one reads from a file is a toy here."""
    order = (*STEP_METHODS, *(m for m in methods.names() if m not in STEP_METHODS))
    built = {m: methods.build(m, **methods.TIMED.get(m, {})) for m in order}
    # A head is trained for one model, and a toy of a large one's would take gigabytes.
    drafters = {m: drafter for m, drafter in built.items() if not drafter.needs.heads}
    model, small = load(check, name), load(check, drafting)
    needs = [drafter.needs for drafter in drafters.values()]
    target = WatchedTarget(
        model, capture=check.device.type == "cuda", max_len=WORDS * SUCCESSORS + check.args.tokens,
        max_nodes=max(n.max_nodes for n in needs), batch=max(n.batch for n in needs),
    )  # fmt: skip
    random = np.random.default_rng(0)
    words = random.choice(np.arange(3, 200), WORDS, replace=False)
    for each in (model, small):
        say_only(each, words)
    prompts = [branching(words, random) for _ in range(2)]
    found = {}
    with tempfile.TemporaryDirectory(prefix="specbench-toys-") as folder:
        # Not branching ones: an answer may repeat a word, which those never do.
        texts = [random.choice(words, WORDS * SUCCESSORS) for _ in range(TOY_TEXTS)]
        toys = ToyFiles(Path(folder), model, texts)
        for method, drafter in drafters.items():
            if check.left_s < METHOD_S:
                check.missing[f"steps {method}"] = f"{check.left_s:.0f} s were left"
                continue
            try:
                found[method] = {
                    "setting": methods.setting(drafter, methods.TIMED.get(method, {})),
                    **_phases(check, drafter, target, prompts, small, toys.files(drafter)),
                }
            except Exception as error:
                traceback.print_exc()
                check.missing[f"steps {method}"] = first_line(error)
            drafter.close()  # before the files go, which it may have mapped
    return found


def branching(words: IntArray, random: np.random.Generator) -> IntArray:
    """A text in which each of the words is followed by about ``SUCCESSORS`` different ones."""
    return np.concatenate([random.permutation(words) for _ in range(SUCCESSORS)])


def say_only(model: PreTrainedModel, words: IntArray) -> None:
    """Make a model of random weights answer in these ids alone.

    Elsewhere in its vocabulary an answer would share no word with the prompt, as a real one does,
    and nothing that looks into the text would draft. The head's other rows become 0, so that their
    logits lie below the largest of the words'; the pass does the same work.
    """
    head: Any = model.get_output_embeddings()
    others = np.ones(len(head.weight), dtype=np.bool_)
    others[words] = False
    head.weight[torch.from_numpy(others).to(head.weight.device)] = 0


def _phases(
    check: Progress,
    drafter: Drafter,
    target: WatchedTarget,
    prompts: list[IntArray],
    small: PreTrainedModel,
    files: dict[str, Path],
) -> dict[str, Any]:
    needs, tokens = drafter.needs, check.args.tokens
    draft = None
    if needs.draft_model:
        draft = draft_model(
            check, small, "graph", nodes=needs.draft_nodes or needs.max_nodes,
            text=len(prompts[0]) + tokens, vocab=target.vocab_size,
        )  # fmt: skip
    drafter.setup(
        DraftContext(
            vocab_size=target.vocab_size, eos_ids=frozenset(), max_len=target.cache.max_len,
            target=target, draft_model=draft, artifacts=files, tokenizer_hash=TOKENIZER,
        )
    )  # fmt: skip
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset(), phases=True)
    drafter.reset()
    for prompt in prompts:  # the last one counts
        if drafter.paper_scope != "run":
            drafter.reset()
        if needs.reference:
            plain = engine.decode(prompt, Drafter(name="ar"), max_new_tokens=tokens)
            drafter.set_reference(np.array(plain.output_ids))
        target.chosen.clear()
        result = engine.decode(prompt, drafter, max_new_tokens=tokens)
    count = max(1, result.n_target_passes)
    times = {
        p: s for p, s in (result.timings.phase_s or {}).items() if p not in ("prefill", "setup")
    }
    inside = sum(times.values())
    replays = replays_s(check, target)
    by_phases = 1 - times.get("verify", 0.0) / inside
    by_replays = None if replays is None else 1 - replays / inside
    return {
        "engine": target.describe()["engine"],
        "steps": result.n_target_passes,
        # Auxiliary nodes among them: they take rows of the pass as well.
        "nodes_per_step": (result.n_drafted + result.n_aux) / count,
        "most_nodes": needs.max_nodes,
        "us_per_step": {phase: 1e6 * s / count for phase, s in times.items()},
        "replay_us_per_step": None if replays is None else 1e6 * replays / count,
        "shares": {phase: s / inside for phase, s in times.items()},
        "outside_by_phases": by_phases,
        "outside_by_replays": by_replays,
        # The stricter of both is what a bound is held against.
        "outside_the_pass": by_phases if by_replays is None else max(by_phases, by_replays),
    }


def replays_s(check: Progress, target: WatchedTarget) -> float | None:
    """Seconds that the device needs for the last turn's passes alone, each by its shape.

    None where one of them had no fixed shape.
    """
    total = 0.0
    for step, count in Counter(target.chosen).items():
        if step is None:
            return None
        total += count * replay_s(check, target, step)
    return total


@torch.inference_mode()
def replay_s(check: Progress, target: WatchedTarget, step: StaticPass) -> float:
    """Seconds of a pass of this shape, loaded as it last was: the median of several series.

    On a GPU by events around replays in a row, so that no launch is waited for; on a CPU by the
    host's clock around the device's part.
    """
    times: list[float] = []
    for _ in range(_SERIES):
        check.wait()
        step.run()  # on a GPU it runs while the first event is queued behind it
        if check.device.type == "cuda":
            with target.on_device():
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                for _ in range(_REPLAYS):
                    step.run()
                last.record()
            check.wait()
            times.append(1e-3 * first.elapsed_time(last) / _REPLAYS)
        else:
            start = time.perf_counter()
            for _ in range(_REPLAYS):
                step.run()
            times.append((time.perf_counter() - start) / _REPLAYS)
    return statistics.median(times)
