"""What a draft model is worth: MAT on recorded answers, and the time of a pass."""

import argparse
import functools
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from scripts.draft_model.folder import read_draft, write_card
from specbench.config.compose import compose, typed
from specbench.decoding.structs import DraftTree
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.models.draft.loading import ID_MAP_FILE, read_id_map
from specbench.models.draft.model import DraftModel
from specbench.models.target import Target
from specbench.results.manifest import BASELINE
from specbench.results.records import CASES, read_records


def draft_ids(ids: torch.Tensor, largest: int) -> torch.Tensor:
    """The draft's id of each id of the target up to ``largest``; 0 stands for all left out."""
    draft_id = torch.zeros(max(int(ids.max()), largest) + 1, dtype=torch.long)
    draft_id[ids[1:]] = torch.arange(1, len(ids))
    return draft_id


@torch.inference_mode()
def matches_on(
    draft: PreTrainedModel, tokens: torch.Tensor, first: int, ids: torch.Tensor
) -> np.ndarray:
    """For each token of an answer after its first: whether the draft's likeliest token is it.

    A draft of any length is accepted up to the first miss, and up to there what it was drafted from
    is the text itself: one pass over the text tells what every step would have accepted.
    ``tokens`` are the target's ids of prompt and answer, whose first token is at ``first``.
    """
    rows = draft_ids(ids, int(tokens.max()))[tokens.long()][None, :-1].to(draft.device)
    hidden = draft.model(input_ids=rows, use_cache=False).last_hidden_state[0, first:]
    logits = draft.lm_head(hidden)
    logits[:, 0] = -torch.inf
    return (ids[logits.argmax(-1).cpu()] == tokens[first + 1 :]).numpy()


def steps_of(right: np.ndarray) -> int:
    """Steps of greedy decoding with chains: each commits the right guesses in front, and one more.

    ``right [tokens, chain]`` bool: whether the guess i of a chain that begins at token j is right.
    """
    steps = at = 0
    while at < len(right):
        hits = right[at, : len(right) - at]
        at += (len(hits) if hits.all() else int(hits.argmin())) + 1
        steps += 1
    return steps


def pooled_mat(matches: list[np.ndarray], draft_len: int) -> float:
    """New tokens after the first over steps, over all texts; NaN where there is no step."""
    steps = 0
    for match in matches:
        padded = np.concatenate([match, np.zeros(draft_len, dtype=bool)])
        chains = np.lib.stride_tricks.sliding_window_view(padded, draft_len)
        steps += steps_of(chains[: len(match)])
    return sum(map(len, matches)) / steps if steps else float("nan")


def evaluate(options: argparse.Namespace) -> None:
    """MAT of the written draft on the recorded `ar` outputs of a run; goes into the card too."""
    records, _ = read_records(options.evaluate / CASES)
    plain = [r for r in records if r.label == BASELINE and r.status != "failed" and r.repeat == 0]
    if not plain:
        raise ConfigurationError(f"{options.evaluate} has no finished `ar` records.")
    draft = read_draft(options.out)
    ids = load_file(options.out / ID_MAP_FILE)["ids"]
    by_task: dict[str, list[np.ndarray]] = {}
    for record in plain:
        tokens = torch.tensor([*record.prompt_ids, *record.output_ids])
        matches = matches_on(draft, tokens, len(record.prompt_ids), ids)
        by_task.setdefault(str(record.task), []).append(matches)
    by_task["overall"] = [m for of_task in by_task.values() for m in of_task]
    scores: dict[str, str] = {}
    for task, turns in by_task.items():
        scores[task] = (
            f"MAT {pooled_mat(turns, options.draft_len):.3f}, agreement "
            f"{np.concatenate(turns).mean():.3f}, {len(turns)} turns"
        )
        print(f"{task:16} {scores[task]}")
    write_card(options.out, {f"{plain[0].dataset}_chains_of_{options.draft_len}": scores})


def pass_times(folder: Path, context: int = 256, repeats: int = 60) -> tuple[float, float]:
    """Median seconds of a one-token pass of target and draft, taken in turns, linears packed.

    The draft's is a whole step as methods take it: ids translated, one node fed, logits over its
    own ids.
    """
    cfg = typed(compose(["model=smollm2_135m"]))
    packed = functools.partial(
        Target,
        max_len=context + 8,
        max_nodes=1,
        packed_bytes=2_000_000_000,
        cache_dir=Path(cfg.cache_dir),
    )
    target = packed(loading.load_model(cfg).model)
    network, ids = packed(read_draft(folder)), read_id_map(folder)
    draft = DraftModel(network, target_vocab=target.vocab_size, id_map=ids, max_nodes=1)
    tokens = np.random.default_rng(0).integers(3, target.vocab_size, context)
    target.prefill(tokens)
    draft.begin(tokens)
    node, above = tokens[:1], np.array([-1])
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        start = time.perf_counter()
        target.forward(int(tokens[0]), DraftTree.empty())
        middle = time.perf_counter()
        draft.extend(node, above, own=True)
        times[0].append(middle - start)
        times[1].append(time.perf_counter() - middle)
        draft.drop_nodes()
    return statistics.median(times[0]), statistics.median(times[1])
