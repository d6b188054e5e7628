"""What a GPU must show, part by part, each in a process of its own with a time limit.

    make gpu-check                          every part, quick numerics first
    make gpu-check ARGS=--quick             five minutes: numerics, bandwidth, loops without the
                                            compiled one, kernels
    make gpu-check ARGS='--minutes 8'       as many parts as fit; call it again for the rest
    make gpu-check ARGS=--dry-run           the parts, their limits and commands; runs nothing

A part that is done at this commit is kept, so a call goes on where the last one stopped; parts of
another commit, GPU, driver or torch are measured again. Parts:

    numerics-quick  one architecture: float32, float64 exact, bfloat16 and float16 near ties
    bandwidth       copies and reads of the device's memory
    loops MODEL     generate, generate with a compiled static cache, our eager and graph engines,
                    the latter also without fused layers, side by side; and CUDA-event times
                    against the wall clock
    kernels MODEL   time by family of kernels of a pass over 1 and 64 rows
    rows MODEL      runner=cost: passes over 1 to 128 rows, contexts off the edges of key buckets
    methods         every method on the bundled model in float32: must be equal; a first table
    steps           the same on text that fills draft trees, with measure=phases: what is left
                    outside the target's pass
    numerics        all tests marked gpu

Models have random weights, but for methods and steps. Writes parts/*.json and gpu_check.md to
--out, runs to results/gpu_check-COMMIT. --device cpu --models tiny runs the same code on any
machine; its numbers say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))  # this checkout, not an installed one
MODELS = "vicuna7b,llama3_1b,smollm2_135m"
CONTEXTS = "128,448,960,1900"  # buckets of keys end at 256, 512, 1024, 2048
ROWS = "1,2,4,8,16,32,48,64,96,128"
_SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
          "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
TINY = ["model=smollm2_135m", *(f"model.shape_config.{k}={v}" for k, v in _SHAPE.items())]
_QUICK = "half or (llama and not window and (exact or captured))"
# Fields of nvidia-smi that are looked at every few seconds while a part runs.
_FIELDS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"
_IDLE = 0x3  # bits that slow nothing: idle, and clocks set by a user
_NEXT = (
    "python run.py model=vicuna7b dataset=specbench method=cacheback "
    "'compare=[pld,token_recycling,sam]'   (docs/gpu.md)"
)


@dataclass(frozen=True)
class Part:
    name: str
    limit_s: int
    command: list[str]
    run: Path | None = None  # of run.py: the folder with the numbers


def preflight() -> tuple[str, list[str]]:
    """Versions in a line, and what is missing or too old or new."""
    words, wrong = [f"Python {sys.version.split()[0]}"], []
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return words[0], ["packaging"]
    wanted = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    for requirement in map(Requirement, [*wanted, "pytest"]):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(str(requirement))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement} (here {version})")
        if requirement.name in ("torch", "transformers"):
            words.append(f"{requirement.name} {version}")
    with contextlib.suppress(ImportError):
        import torch

        cuda = torch.cuda.is_available()
        cudnn = torch.backends.cudnn.version() if cuda else None
        words += [f"built for CUDA {torch.version.cuda}", f"cuDNN {cudnn}"]
        words.append("a GPU is visible" if cuda else "torch sees no GPU")
    driver = smi("name,driver_version,power.limit,ecc.mode.current,mig.mode.current")
    return ", ".join([*words, *(driver[:1] or ["no nvidia-smi"])]), wrong


def smi(fields: str) -> list[str]:
    """A line of nvidia-smi for each GPU; none without it."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def parts(args: argparse.Namespace, code: str) -> list[Part]:
    """What is to be run, in order."""
    runs, python = PROJECT / "results" / f"gpu_check-{code}-{args.device}", sys.executable
    # Not the project's settings, which name plugins that a machine may not have.
    pytest = [python, "-m", "pytest", "-q", "-rs", "-m", "gpu", "-c", os.devnull, "--rootdir", "."]
    pytest += ["--import-mode=importlib", "-p", "no:cacheprovider", "tests/models/test_gpu.py"]
    engine = ["engine=graph", f"model.device={args.device}"]

    def model(name: str) -> list[str]:
        dtype = "bfloat16" if args.device != "cpu" else "float32"
        chosen = TINY if name == "tiny" else [f"model={name}"]
        return [*chosen, *engine, "model.shape=true", f"model.dtype={dtype}"]

    def bench(kind: str, limit_s: int, name: str = "", *options: str) -> Part:
        label = f"{kind} {name}".strip()
        overrides = model(name) if name else [f"model.device={args.device}"]
        sizes = [f"--tokens={args.tokens}", f"--repeats={2 if args.quick else args.repeats}"]
        command = [python, "-m", "scripts.bench", "gpu", kind.partition("-")[0], *overrides]
        out = file_of(args.out, label, ".found.json")
        return Part(label, limit_s, [*command, *sizes, *options, f"--out={out}"])

    def run(name: str, limit_s: int, *overrides: str) -> Part:
        folder = runs / name.replace(" ", "-")
        return Part(name, limit_s, [python, "run.py", *overrides, f"output_dir={folder}"], folder)

    first = args.models[0]
    plan = [Part("numerics-quick", 90, [*pytest, "-k", _QUICK]), bench("bandwidth", 60)]
    if args.quick:
        return [*plan, bench("loops-quick", 90, first, "--no-static"), bench("kernels", 60, first)]
    grid = [f"runner.{axis}=[]" for axis in ("batch_k", "batch_w", "batch_contexts")]
    grid += [f"runner.contexts=[{args.contexts}]", f"runner.tree_rows=[{ROWS}]"]
    grid += [f"runner.passes={args.repeats}", "runner=cost", "baseline=false"]
    for name in args.models:
        plan += [bench("loops", 300, name), bench("kernels", 90, name)]
        plan.append(run(f"rows {name}", 420, *model(name), *grid))
    every = sorted(p.stem for p in (PROJECT / "conf/method").glob("[!_]*.yaml"))
    shipped = PROJECT / "assets/heads_smollm2_135m"
    absent = [h for h in ("medusa", "hydra", "eagle", "eagle3") if not (shipped / h).is_dir()]
    others = ",".join(m for m in every if m not in ("ar", "cacheback", *absent))
    table = ["model=smollm2_135m", *engine, "model.dtype=float32", "generation.max_new_tokens=64"]
    table += ["method=cacheback", f"compare=[{others}]"]
    # Each word is followed by several others: look-ups find enough to fill their trees.
    full = ["measure=phases", "dataset=jsonl", "dataset.path=scripts/bench/branching.jsonl"]
    return [
        *plan,
        run("methods", 480, *table, "dataset=demo"),
        run("steps", 480, *table, *full),
        Part("numerics", 480, pytest),
    ]


def code_of(git: Any, versions: str) -> str:
    """A commit's eight digits, and a name for what else makes numbers others: changes, versions.

    Runs are kept in a folder of this name, for one goes on only where all of it is the same.
    """
    rest = hashlib.sha256(f"{git.get('changes')} {versions}".encode()).hexdigest()[:4]
    return f"{(git['commit'] or 'none')[:8]}-{rest}"


def file_of(out: Path, name: str, ending: str) -> Path:
    return out / "parts" / f"{name.replace(' ', '-')}{ending}"


def read(path: Path) -> Any:
    """A JSON file's content; nothing where there is none, or half of one."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}


def kept(args: argparse.Namespace, part: Part, git: Any, versions: str) -> dict[str, Any] | None:
    """What an earlier call found, of this code, command, GPU and software."""
    earlier: dict[str, Any] = read(file_of(args.out, part.name, ".json"))
    measured = tuple(earlier.get(key) for key in ("git", "command", "versions"))
    return earlier if measured == (git, part.command[1:], versions) else None


def measure(args: argparse.Namespace, part: Part, git: Any, versions: str) -> dict[str, Any]:
    """Run a part, watch the GPU meanwhile, and keep what it printed and found or left."""
    log, found = (file_of(args.out, part.name, ending) for ending in (".log", ".found.json"))
    log.parent.mkdir(parents=True, exist_ok=True)
    found.unlink(missing_ok=True)  # of another commit
    # Packages may lie where the caller's variable says.
    places = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"PYTHONPATH": places, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    start, samples, timed_out = time.monotonic(), [], False
    with log.open("w") as errors, log.with_suffix(".out").open("w+") as out:
        process = subprocess.Popen(part.command, cwd=PROJECT, stdout=out, stderr=errors,
                                   env=environ, start_new_session=True)  # fmt: skip
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
                break
            samples += smi(_FIELDS)
            if time.monotonic() - start > part.limit_s:
                timed_out = True
                os.killpg(process.pid, signal.SIGKILL)
        out.seek(0)
        printed = out.read()
    lines = [line for line in (log.read_text() + "\n" + printed).splitlines() if line.strip()]
    result = {"last_line": lines[-1] if lines else "", "printed": printed, **read(found)}
    if part.run:
        files = {name: read(part.run / name) for name in ("summary.json", "surface.json")}
        result |= {name: content for name, content in files.items() if content}
        with contextlib.suppress(OSError, ValueError):
            result["nodes_per_step"] = nodes_per_step(part.run / "cases.jsonl")
    nothing = "pytest" in part.command and " passed" not in result["last_line"]
    whole = {
        "part": part.name,
        "git": git,
        "versions": versions,
        "command": part.command[1:],
        "exit": process.returncode or int(nothing),  # tests that were all skipped show nothing
        "timed_out": timed_out,
        "seconds": round(time.monotonic() - start, 1),
        "device": args.device,
        "gpu": smi("name,driver_version,power.limit"),
        "watched": watched(samples),
        "result": result,
    }
    file_of(args.out, part.name, ".json").write_text(json.dumps(whole, indent=1))
    return whole


def nodes_per_step(cases: Path) -> dict[str, float]:
    """How full the draft trees of each label were."""
    nodes, steps = Counter[str](), Counter[str]()
    for record in map(json.loads, cases.read_text().splitlines()):
        nodes[record["label"]] += record["n_drafted"]
        steps[record["label"]] += record["n_target_passes"]
    return {label: nodes[label] / max(1, steps[label]) for label in steps}


def watched(samples: list[str]) -> str:
    """Ranges of clocks, power and temperature, and whether anything throttled."""
    rows = [[cell.strip() for cell in line.split(",")] for line in samples]
    words = []
    for i, unit in enumerate(("MHz SM", "MHz memory", "W", "°C")):
        numbers = [float(r[i]) for r in rows if re.fullmatch(r"[\d.]+", r[i])]
        words += [f"{min(numbers):.0f}-{max(numbers):.0f} {unit}"] if numbers else []
    reasons = {int(r[4], 16) & ~_IDLE for r in rows if r[4].startswith("0x")} - {0}
    words += [f"THROTTLED {','.join(map(hex, sorted(reasons)))}"] if reasons else []
    return ", ".join(words)


def report(path: Path, found: dict[str, dict[str, Any]], versions: str, git: Any) -> None:
    """``gpu_check.md``: what each part printed, and what the GPU did meanwhile."""
    lines = ["# GPU check", "", versions, ""]
    lines.append(f"Code: {git['commit']}{' and changes' * git['dirty']}")
    if any(part["device"] == "cpu" for part in found.values()):
        lines += ["", "**A trial on a CPU: the numbers say nothing.**"]
    for name, part in found.items():
        result = part["result"]
        lines += ["", f"## {name.capitalize()}", "", f"{part['state']} in {part['seconds']:.0f} s"]
        lines[-1] += f"; the GPU meanwhile: {part['watched'] or 'not watched'}"
        if part["state"] != "done":
            lines.append(f"Its last line: {result['last_line']}")
        for row in result.get("summary.json", {}).get("rows", []):
            if row["task"] == "overall" and row["phase_share"]:
                shares = row["phase_share"]
                inside = sum(s for p, s in shares.items() if p not in ("prefill", "setup"))
                outside = 1 - shares.get("verify", 0.0) / inside if inside else 0.0
                nodes = result["nodes_per_step"].get(row["label"], 0.0)
                lines.append(f"- {row['label']}: {nodes:.1f} nodes a step, {outside:.1%} of a step "
                             "outside the target's pass")  # fmt: skip
        lines += ["", "```", result["printed"].rstrip(), "```"]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add, names = parser.add_argument, {p.stem for p in (PROJECT / "conf/model").glob("*.yaml")}
    add("--out", type=Path, default=PROJECT / "docs/measurements/gpu", help="folder of the report")
    add("--models", default=MODELS, help="names of conf/model, or tiny; commas between")
    add("--only", default="", help="kinds of parts, e.g. loops,rows")
    add("--quick", action="store_true", help="numerics, bandwidth, loops and kernels: 5 minutes")
    add("--minutes", type=float, default=float("inf"), help="begin no part that could end later")
    add("--dry-run", action="store_true", help="show the parts and stop")
    add("--anyway", action="store_true", help="whatever the versions are")
    add("--device", default="cuda:0", help="or cpu, for a trial")
    add("--tokens", type=int, default=128, help="new tokens of a loop; over 100 for the clock")
    add("--repeats", type=int, default=5)
    add("--contexts", default=CONTEXTS)
    args = parser.parse_args(argv)
    args.models = args.models.split(",")
    if unknown := [name for name in args.models if name not in names | {"tiny"}]:
        parser.error(f"--models: {unknown[0]!r} is not one of tiny, {', '.join(sorted(names))}")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", args.contexts):
        parser.error("--contexts: type whole numbers from 1 with commas between, e.g. 128,448")
    args.out = args.out.absolute()
    return args


def main(argv: list[str] | None = None) -> int:
    """0 where every part is done, 1 where one failed or is left, 2 where nothing can run."""
    args = arguments(argv)
    versions, wrong = preflight()
    print(versions)
    if wrong:
        print(f"missing or of another version: {'; '.join(wrong)}. Type: pip install -e .")
    no_gpu = args.device.startswith("cuda") and "no GPU" in versions
    if no_gpu:
        print("torch sees no GPU: its CUDA may be newer than the driver. --device cpu is a trial.")
    if not args.dry_run and (no_gpu or (wrong and not args.anyway)):
        return 2
    from specbench.system.environment import git_state

    git = git_state() or {"commit": None, "dirty": True}
    plan = [p for p in parts(args, code_of(git, versions))
            if not args.only or p.name.split()[0] in args.only.split(",")]  # fmt: skip
    end, found = time.monotonic() + 60 * args.minutes, {}
    for part in plan:
        earlier = kept(args, part, git, versions)
        if earlier is not None and not earlier["exit"]:
            state = "done"
        elif args.dry_run or time.monotonic() + part.limit_s > end:
            state = "to do"
        else:
            earlier = measure(args, part, git, versions)
            state = "TIMED OUT" if earlier["timed_out"] else "FAILED" if earlier["exit"] else "done"
        if earlier is not None:
            found[part.name] = earlier | {"state": state}
        print(f"{state:9} {part.name:22} at most {part.limit_s:3} s", flush=True)
        if args.dry_run:
            print(" " * 10 + " ".join(["python", *part.command[1:]]))
        elif found:
            report(args.out / "gpu_check.md", found, versions, git)
    left_over = [p.name for p in plan if found.get(p.name, {}).get("state") != "done"]
    if args.dry_run:
        print(f"at most {sum(p.limit_s for p in plan) / 60:.0f} minutes in all; nothing was run")
    else:
        print(f"report: {args.out}/gpu_check.md")
    typed = " ".join(w for w in (sys.argv[1:] if argv is None else argv) if w != "--dry-run")
    again = f"python -m scripts.gpu_check {typed}   (left: {', '.join(left_over)})"
    print(f"next: {again if left_over else _NEXT}")
    return 1 if left_over and not args.dry_run else 0


if __name__ == "__main__":
    sys.exit(main())
