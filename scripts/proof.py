"""Check that this checkout measures the same as an earlier one.

    git worktree add ../before 466cf286 && ln -s "$PWD"/.venv "$PWD"/.cache ../before
    python -m scripts.proof golden|speed|typed --before ../before

golden: all methods on four questions, decoded, sampled, in a batch, replayed and served, by both;
speed: passes, a run and its start, in turns; typed: what users type. The earlier checkout's results
are kept below ``--keep``. Exit code 1: they differ.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.cli import parser_of
from specbench.config.removed import REMOVED, Removed
from specbench.paths import PROJECT
from specbench.storage import jsonl

BEFORE, NOW = "before", "now"
FIELDS = ("output_ids", "accepted_per_step", "n_drafted", "finish_reason", "n_new", "text")

METHODS = (
    "pld,ngram_mod,ngram_map,suffix_decoding,suffix_else_head,choose,adaptive,sam,sam_eagle2,rest,"
    "ssd,cacheback,ngrammys,token_recycling,logitspec,racer,lookahead,jacobi,medusa,hydra,eagle,"
    "eagle2,eagle3,sps,opt_tree,ouroboros,card,random_drafts,{method: pearl, gamma: 3}"
)  # PEARL's own gamma is by the clock
REPLAYED = (
    "ngram_mod,ngram_map,suffix_decoding,adaptive,sam,sam_eagle2,rest,ssd,cacheback,ngrammys,"
    "medusa,hydra,eagle,eagle2,eagle3,union,suffix_else_head"
)
QUESTIONS = {"demo_01", "demo_05", "demo_07", "demo_09"}
LIVE = [
    "method=union", f"compare=[{METHODS}]", "dataset=jsonl",
    "dataset.path=<keep>/questions.jsonl", "dataset.order=file",
]  # fmt: skip
QUIET = [
    "measure.warmup=0", "measure.exclusive=false",
    "measure.disturbed.shortest_s=1e9",  # nothing is judged, here and in earlier checkouts
]  # fmt: skip
SCENARIOS: Mapping[str, Sequence[str]] = {
    "greedy": [*LIVE, "record=states", "generation.max_new_tokens=20"],
    "published": [*LIVE, "seed=1", "budgets=published", "generation.max_new_tokens=10"],
    "sampled": [*LIVE, "generation=sampling", "generation.temperature=1", "dataset.limit=2",
                "generation.max_new_tokens=8"],
    "batch": [*LIVE, "batch.size=4", "generation.max_new_tokens=8"],
    "replay": ["runner=replay", "runner.traces=<side>/greedy", "method=pld",
               f"compare=[{REPLAYED}]",
               "runner.surface=surfaces/smollm2_135m-cpu-epyc-1thread.json"],
    "served": ["runner=serve", "server=openai", "server.base_url=<url>", "server.speculation=toy",
               "server.plain_url=<plain>", "dataset=jsonl", "dataset.path=<keep>/questions.jsonl"],
}  # fmt: skip


class Toy(BaseHTTPRequestHandler):
    """Answer like an OpenAI server: twelve words for each question, one an event."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send("application/json", [{"data": [{"id": "toy"}]}], "", self.path == "/v1/models")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seed = sum(json.dumps(request["messages"]).encode())
        chunks = [{"content": f"w{(seed + 7 * number) % 97} "} for number in range(12)]
        ends: list[tuple[object, str | None]] = [*((c, None) for c in chunks), ({}, "length")]
        events: list[Any] = [{"choices": [{"delta": d, "finish_reason": r}]} for d, r in ends]
        events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 12}})
        self._send("text/event-stream", [*events, "[DONE]"], "data: ", True)

    def _send(self, kind: str, values: list[Any], before: str, is_known: bool) -> None:
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Type", kind)
        self.end_headers()
        for value in values:
            time.sleep(0.002)
            text = value if isinstance(value, str) else json.dumps(value)
            self.wfile.write(f"{before}{text}\n\n".encode())
            self.wfile.flush()


def golden(options: argparse.Namespace) -> int:
    """Compare all labels of all scenarios; the earlier checkout's are run once."""
    servers = {name: ThreadingHTTPServer(("127.0.0.1", 0), Toy) for name in ("url", "plain")}
    for server in servers.values():
        threading.Thread(target=server.serve_forever, daemon=True).start()
    urls = {name: f"http://127.0.0.1:{s.server_port}/v1" for name, s in servers.items()}
    lines = (PROJECT / "assets" / "demo.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [line for line in lines if json.loads(line)["question_id"] in QUESTIONS]
    options.keep.mkdir(parents=True, exist_ok=True)
    jsonl.write_text(options.keep / "questions.jsonl", "\n".join(questions) + "\n")
    differences = 0
    for name in options.scenarios or SCENARIOS:
        sides = {}
        for side, checkout in ((BEFORE, options.before), (NOW, PROJECT)):
            folder = options.keep / side / name
            if side == NOW or not (folder / "DONE").exists():
                substitutions = {"keep": options.keep, "side": options.keep / side, **urls}
                arguments = [*SCENARIOS[name], *QUIET]
                for key, value in substitutions.items():
                    arguments = [argument.replace(f"<{key}>", str(value)) for argument in arguments]
                shutil.rmtree(folder, ignore_errors=True)
                _run(checkout, ["run.py", *arguments, f"output_dir={folder}"])
            sides[side] = _turns(folder)
        differences += _compare_turns(name, *sides.values())
    return int(differences > 0)


def _turns(folder: Path) -> dict[tuple[object, ...], dict[str, Any]]:
    lines = (folder / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {
        (r["label"], r["case_id"], r["turn"], r["repeat"]): r | (r.get("served") or {})
        for r in records
    }


def _compare_turns(name: str, before: dict[Any, Any], now: dict[Any, Any]) -> int:
    wrong: Counter[tuple[str, str]] = Counter()
    for key in before.keys() | now.keys():
        if key not in before or key not in now:
            wrong[key[0], "new" if key in now else "gone"] += 1
            continue
        for field in FIELDS:
            if before[key].get(field) != now[key].get(field):
                wrong[key[0], field] += 1
    labels = {key[0] for key in before}
    tokens = sum(turn["n_new"] for turn in before.values())
    failed = sum(turn["status"] != "ok" for turn in now.values())
    print(
        f"{name}: {len(labels)} labels, {len(before)} turns, {tokens} tokens, {failed} failed; "
        f"{len(wrong)} differences"
    )
    for (label, field), count in sorted(wrong.items()):
        print(f"    {label}: {field} in {count} turns")
    return len(wrong)


BENCH = ["run.py", "method=cacheback", "compare=[pld]", "dataset.limit=4", "measure.warmup=0",
         "generation.max_new_tokens=32"]  # fmt: skip
START = ["run.py", "method=pld", "dataset.limit=1", "generation.max_new_tokens=8"]
PASSES = """
import sys, time
sys.path.insert(0, ".")
import numpy as np
from runners.measure.pass_times import pass_s, random_tree
from specbench.config.compose import compose, to_config
from specbench.models.loading import load_model, load_tokenizer
from specbench.models.target import Target
config = to_config(compose([]))
model = load_model(config, load_tokenizer(config)).model
target = Target(model, max_len=512, max_nodes=64, packed_bytes=2 << 30)
rng = np.random.default_rng(0)
prompt = rng.integers(100, 1000, 256)
start = time.perf_counter()
target.prefill(prompt)
print("prompt of 256 tokens, ms", 1e3 * (time.perf_counter() - start))
trees = {rows: random_tree(rows - 1, 49152, rng) for rows in (1, 2, 4, 8, 16, 64)}
times = {rows: [] for rows in trees}
for number in range(12):
    for rows, tree in trees.items():
        times[rows].append(pass_s(target, tree, 256))
for rows, seconds in times.items():
    print(f"pass of {rows} rows, ms", 1e3 * np.median(seconds[2:]))
"""


def speed(options: argparse.Namespace) -> int:
    """Compare milliseconds, tokens/s and seconds, the checkouts taking turns to go first.

    Exit code 1: this checkout is slower by more than 2 % (at tokens/s: has fewer).
    """
    measured: dict[str, dict[str, list[float]]] = {}
    sides = [(BEFORE, options.before), (NOW, PROJECT)]
    for number in range(options.turns):
        for side, checkout in sides[:: -1 if number % 2 else 1]:
            values: dict[str, Any] = {}
            for line in _run(checkout, ["-c", PASSES]).splitlines():
                quantity, _, value = line.rpartition(" ")
                values[quantity] = value
            for name, arguments in (("bench", BENCH), ("start", START)):
                folder = options.keep / "speed" / f"{os.getpid()}-{side}-{name}-{number}"
                start = time.perf_counter()
                _run(checkout, [*arguments, f"output_dir={folder}"])
                values[f"{name} as a whole, s"] = time.perf_counter() - start
                rows = json.loads((folder / "summary.json").read_text())["rows"]
                if name == "bench":
                    values |= {f"tokens/s of {row['label']}": row["tokens_per_s"] for row in rows}
            for name, value in values.items():
                measured.setdefault(name, {}).setdefault(side, []).append(float(value))
    worse = 0
    for name, by_side in measured.items():
        old, new = (statistics.median(by_side[side]) for side, _ in sides)
        slower = new < 0.98 * old if name.startswith("tokens/s") else new > 1.02 * old
        worse += slower
        print(f"{name:32} {old:9.2f} {new:9.2f}  {new / old:.3f}{' SLOWER' * slower}")
    return int(worse > 0)


def typed(options: argparse.Namespace) -> int:
    """Check that removed commands, options and keys are in the table of removed names."""
    missing = 0
    for kind, read in (("commands", _commands), ("options", _options), ("keys", _keys)):
        old, new = read(options.before), read(PROJECT)
        print(f"{kind}: {len(old)} before, {len(new)} now")
        for name in sorted(old - new):
            answer = next((str(row) for row in REMOVED if _answers(row, name)), "")
            # A line of a page may go or read otherwise while all its words work.
            answer = answer or ("reworded?" if kind == "commands" else "NOT ANSWERED")
            missing += answer == "NOT ANSWERED"
            print(f"  - {name}: {answer}")
        print(*(f"  + {name}\n" for name in sorted(new - old)), sep="", end="")
    return int(missing > 0)


def _answers(row: Removed, line: str) -> bool:
    terms = re.split(r"[\s'=]+", line) if row.kind != "key" else re.split(r"[\s'+~]+", line)
    if row.kind == "key":
        return any(row.name in (word, word.partition("=")[0]) for word in terms)
    return set(row.name.split()) <= {*terms} and (row.kind != "target" or terms[0] == "make")


def _commands(checkout: Path) -> set[str]:
    pages = [*checkout.glob("*.md"), *(checkout / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.S | re.M)
    joined = re.sub(r" *\\\n *", " ", "".join(blocks))
    lines = {line.split(" #")[0].strip() for line in joined.splitlines() if line[:1] != "#"}
    makefile = (checkout / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):.*?## ", makefile, re.M)
    return (lines | {f"make {target}" for target in targets}) - {""}


def _options(checkout: Path) -> set[str]:
    conf = checkout / "conf"
    files = {path.relative_to(conf) for path in conf.rglob("[!_]*.yaml")}
    return {f"{path.parent}={path.stem}" for path in files}


KEYS = """
import sys
sys.path.insert(0, ".")
from omegaconf import OmegaConf
from specbench.config.compose import compose, option_names
def walk(node, prefix=""):
    for key in node:
        name = f"{prefix}{key}"
        print(name)
        if not OmegaConf.is_missing(node, key) and OmegaConf.is_dict(node[key]):
            walk(node[key], name + ".")
walk(compose([]))
for method in option_names("method"):
    walk(compose([f"method={method}"]).method, "method.")
"""


def _keys(checkout: Path) -> set[str]:
    return set(_run(checkout, ["-c", KEYS]).splitlines())


def _run(checkout: Path, arguments: Sequence[str]) -> str:
    """Run ``python ARGUMENTS`` in a checkout; returns its output. A run may end with 1.

    Raises:
        RuntimeError: it ended otherwise.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=checkout, env=variables, capture_output=True, text=True
    )
    if done.returncode not in (0, 1) or (arguments[0] == "-c" and done.returncode):
        raise RuntimeError(f"{checkout}: {shlex.join(arguments)[:200]}\n{done.stderr[-3000:]}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    proofs: Mapping[str, Callable[[argparse.Namespace], int]]
    proofs = {proof.__name__: proof for proof in (golden, speed, typed)}
    add = parser.add_argument
    add("proof", choices=proofs)
    add("--before", type=Path, required=True, metavar="CHECKOUT", help="of 466cf286")
    add("--keep", type=Path, default=PROJECT / ".cache" / "proof", help="results, outside git")
    add("--scenarios", nargs="+", choices=SCENARIOS, help="of golden; default: all")
    add("--turns", type=int, default=3, help="of speed")
    options = parser.parse_args(argv)
    options.before, options.keep = options.before.resolve(), options.keep.resolve()
    return proofs[options.proof](options)


if __name__ == "__main__":
    sys.exit(main())
