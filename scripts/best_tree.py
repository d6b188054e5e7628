"""The draft tree that a finished run's acceptance speaks for, as a file for ``method.tree``.

    python run.py method=token_recycling method.levels=[8,16,16,8] output_dir=RUN
    python scripts/best_tree.py RUN tree.json --label token_recycling --nodes 8
    python run.py method=token_recycling method.levels=null method.tree=tree.json

For methods that fill a fixed tree: token_recycling, medusa, hydra, eagle. The run's tree should be
wider and deeper than the one wanted: what it did not draft is taken as never accepted. The tree is
the one that Sequoia's dynamic program chooses (arXiv 2402.12374): most tokens per step. With a
measured surface (runner=cost) it has as many nodes, up to --nodes, as give most tokens per second
at --context cached tokens; drafting counts as free.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

import hydra.utils

from analysis.runs.cli import parser_of, reporting_errors
from specbench.arrays import FloatArray
from specbench.config.entries import method_node
from specbench.draft_structures.sequoia_tree import best_tree, count_acceptance, worth_of
from specbench.draft_structures.static_tree import StaticTree
from specbench.errors import ConfigurationError, ResultsError, unknown_name
from specbench.replay.cost_surface import CostSurface
from specbench.results.jsonl_schema import read_steps
from specbench.results.manifest import RunManifest
from specbench.results.records import DONE, STEPS
from specbench.storage import jsonl


def acceptance_of(run: Path, label: str, by_level: bool) -> tuple[StaticTree, FloatArray]:
    """Find the tree of a label, and the share of its children accepted, ``[levels, ranks]``.

    Args:
        by_level: separate shares for each level; else pooled over levels, as in Sequoia.

    Raises:
        ResultsError: the run is not finished, or has no steps with ranks.
        ConfigurationError: no such label, or its method fills no fixed tree.
    """
    if not (run / DONE).is_file():
        raise ResultsError(f"{run} holds no finished run (no {DONE}). Repeat the run's command.")
    labels = RunManifest.read(run).labels
    if label not in labels:
        raise unknown_name("--label", label, labels)
    info = labels[label]
    method = info.method or label
    knobs = {key: value for key, value in info.knobs.items() if key != "name"}
    drafter = hydra.utils.instantiate(method_node(method, knobs), _convert_="all")
    tree = getattr(drafter, "shape", None)
    if tree is None or knobs.get("tree") in ("by_model", "dynamic"):
        raise ConfigurationError(
            f"{label} of {run} fills no fixed tree that its settings name. Run token_recycling, "
            "medusa, hydra or eagle with method.levels=[...] or method.tree=NAME."
        )
    traces = [t for t in read_steps(run / STEPS) if t.label == label and t.sources]
    steps = [
        (drafted, ranks or [], committed > len(ranks or []))
        for t in traces
        for drafted, committed, ranks in zip(t.drafted, t.committed, t.sources or (), strict=True)
    ]
    if not steps:
        raise ResultsError(
            f"{run / STEPS} has no ranks of accepted nodes for {label}: it was written by an "
            "earlier version, or by a replay without steps. Repeat the run."
        )
    accepted, offered = count_acceptance(tree, steps)
    if not by_level:
        accepted, offered = (
            np.broadcast_to(counts.sum(0), counts.shape) for counts in (accepted, offered)
        )
    return tree, accepted / np.maximum(offered, 1)


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("run", type=Path, help="folder of a finished run")
    add("out", type=Path, help="the tree's file, FILE.json")
    add("--label", required=True, help="whose steps count, as the run's table calls it")
    add("--nodes", type=int, required=True, help="nodes at most, the root not counted")
    add("--depth", type=int, help="levels at most (default: the run's tree's)")
    add("--by-level", action="store_true", help="acceptance per level, which heads need")
    add("--surface", type=Path, help="surface.json of this machine: choose the number of nodes")
    add("--context", type=int, default=256, help="cached tokens of the surface's passes (256)")
    options = parser.parse_args()
    for key in ("nodes", "depth"):
        if (value := getattr(options, key)) is not None and value < 1:
            raise ConfigurationError(f"--{key}={value} must be at least 1.")
    old, acceptance = acceptance_of(options.run, options.label, options.by_level)
    acceptance_used = acceptance[: options.depth]
    sizes = range(1, options.nodes + 1) if options.surface else [options.nodes]
    trees = [best_tree(acceptance_used, size) for size in sizes]
    chosen = 0
    if options.surface:
        rows = np.array([1.0 + len(tree) for tree, _ in trees])
        batch_sizes, context = np.ones(len(rows)), np.full(len(rows), float(options.context))
        seconds = CostSurface.read(options.surface).pass_s(batch_sizes, rows, context)
        chosen = int(np.argmax(np.array([worth for _, worth in trees]) / seconds))
    tree, worth = trees[chosen]
    about = {
        "run": options.run.name,
        "label": options.label,
        "acceptance": np.round(acceptance_used, 4).tolist(),
        "tokens_per_step": round(worth, 4),
        "paths": [list(path) for path in tree.paths],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    jsonl.write_json(options.out, about)
    print(
        f"{len(tree)} nodes in levels of {tree.level_sizes}: {worth:.2f} tokens a step by this "
        f"acceptance; the run's {len(old)} nodes in levels of {old.level_sizes}: "
        f"{worth_of(old, acceptance):.2f}. {options.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
