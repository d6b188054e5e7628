"""MAT of methods on recorded greedy outputs, without running the model.

    python scripts/replay_mat.py RUN 'cacheback label=dual' 'cacheback label=dynamic table=dynamic'

RUN is the folder of a greedy run with its baseline `ar`. Steps are exactly the live run's for
methods of tokens alone; others are refused. Ratios are against the first entry, paired over the
same cases, with a 95 % interval (bootstrap over cases, stratified by task).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra.utils
import numpy as np
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from specbench import artefacts, models, weights
from specbench.clock import NullClock
from specbench.config import compose, with_parts
from specbench.engine import Engine
from specbench.errors import ConfigurationError, SpecBenchError
from specbench.recorded import RecordedTarget
from specbench.records import CASES, MANIFEST, CaseRecord, read_records
from specbench.statistics.bootstrap import Resamples, log_interval, strata_of
from specbench.structs import DraftContext
from specbench.verify import GreedyVerifier

if TYPE_CHECKING:
    from specbench.drafter import Drafter

console = Console(width=110)


def read_run(folder: Path) -> tuple[dict[str, Any], list[CaseRecord]]:
    """Manifest and baseline records of a run."""
    if not (folder / MANIFEST).is_file():
        raise ConfigurationError(f"{folder} is no run folder: it has no {MANIFEST}.")
    manifest = json.loads((folder / MANIFEST).read_text())
    found, _ = read_records(folder / CASES)
    plain = [r for r in found if r.label == "ar" and r.status == "ok" and r.repeat == 0]
    if not plain:
        raise ConfigurationError(f"{folder} has no finished `ar` records to replay.")
    return manifest, plain


def drafter_of(
    entry: str, config: Any, tokenizer: Any, context: DraftContext
) -> tuple[str, Drafter]:
    """`NAME knob=value ...` as a drafter that is set up; other knobs are its yaml's."""
    name, *knobs = entry.split()
    given = OmegaConf.to_container(OmegaConf.from_dotlist(knobs))
    node = OmegaConf.to_container(compose([f"method={name}", "pair=none"]).method, resolve=True)
    assert isinstance(node, dict) and isinstance(given, dict)
    node |= given
    label = str(node.pop("label", None) or name)
    drafter: Drafter = hydra.utils.instantiate(with_parts(node), _convert_="all")
    if not drafter.needs.tokens_only:
        raise ConfigurationError(f"method={name} needs the model and cannot be replayed.")
    files = artefacts.resolve(
        drafter.needs.artefacts,
        tokenizer=tokenizer,
        embedded=bool(config.model.embedded),
        cache_dir=Path(config.cache_dir),
        model_key=weights.identity(config),
    )
    drafter.setup(
        DraftContext(
            vocab_size=context.vocab_size,
            eos_ids=context.eos_ids,
            tokenizer_hash=context.tokenizer_hash,
            max_len=context.max_len,
            artefacts=files,
        )
    )
    return label, drafter


def play(
    drafter: Drafter, context: DraftContext, plain: list[CaseRecord], limit: int
) -> np.ndarray:
    """`[cases, 2]` new tokens after the first, and steps, of each record."""
    target = RecordedTarget(context.vocab_size, drafter.needs.max_nodes)
    engine = Engine(target, GreedyVerifier(), eos_ids=context.eos_ids, clock=NullClock)
    counts = []
    drafter.reset()
    for record in plain:
        if drafter.state_scope == "turn" or (drafter.state_scope == "prompt" and record.turn == 0):
            drafter.reset()
        target.load(np.array(record.output_ids, dtype=np.int64))
        result = engine.decode(np.array(record.prompt_ids), drafter, max_new_tokens=limit)
        if result.output_ids != list(record.output_ids):
            raise SpecBenchError(f"{record.case_id}: the replay does not give the recorded output.")
        counts.append((len(result.output_ids) - 1, result.n_target_passes))
    return np.array(counts, dtype=float)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("entries", nargs="+", metavar="'METHOD knob=value ...'")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()

    manifest, plain = read_run(args.run)
    recorded = OmegaConf.create(manifest["config"])
    config = compose([f"model={recorded.model.name}"])
    tokenizer = models.load_tokenizer(config)
    context = DraftContext(
        vocab_size=len(tokenizer),
        eos_ids=frozenset(manifest["model"]["eos_ids"]),
        tokenizer_hash=models.tokenizer_hash(tokenizer),
        max_len=manifest["model"]["context_length"],
    )
    cases = list(dict.fromkeys(r.case_id for r in plain))
    tasks = [next(r.task for r in plain if r.case_id == case) for case in cases]
    place = np.array([cases.index(r.case_id) for r in plain])
    limit = int(recorded.generation.max_new_tokens)

    table = Table(
        "label", "MAT", "MAT / first [95 %]",
        title=f"{len(plain)} recorded turns of {len(cases)} cases, {limit} new tokens at most",
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    first_steps: np.ndarray | None = None
    resamples = Resamples(strata_of(tasks), seed=0)
    for entry in args.entries:
        label, drafter = drafter_of(entry, config, tokenizer, context)
        per_turn = play(drafter, context, plain, limit)
        totals = np.zeros((len(cases), 2))
        np.add.at(totals, place, per_turn)
        tokens, steps = totals.T
        row: dict[str, Any] = {"label": label, "entry": entry, "mat": tokens.sum() / steps.sum()}
        if first_steps is None:
            first_steps = steps
        ratio = first_steps.sum() / steps.sum()
        drawn = resamples.totals(np.column_stack([first_steps, steps]))
        row["mat_ratio"] = ratio
        row["mat_ratio_ci"] = log_interval(
            ratio, drawn[:, 0] / drawn[:, 1], resamples.degrees_of_freedom
        )
        low, high = row["mat_ratio_ci"] or (float("nan"), float("nan"))
        table.add_row(label, f"{row['mat']:.3f}", f"{ratio:.3f} [{low:.3f}, {high:.3f}]")
        rows.append(row)
    console.print(table)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps({"command": sys.argv, "cases": cases, "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpecBenchError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
