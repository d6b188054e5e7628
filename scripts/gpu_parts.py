"""The parts of `gpu_visit.py`: what each runs, how long it may take and what it must show.

The fourth visit trains heads, and goes on at each visit.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

PROJECT = Path(__file__).resolve().parents[1]
CORE = ("specbench/kernels", "specbench/models", "specbench/decoding", "specbench/system")
BENCH = (*CORE, "scripts/bench.py", "conf/model")
CONF = ("conf/method", "conf/model", "conf/pair", "conf/runner")
RUNS = (*CORE, "specbench/draft_structures", "methods", "runners", *CONF, "assets")
NOMINAL = {  # bytes/s of the memory, the longer name first
    "H200": 4.8e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "A100": 2.0e12,
}

# Where this process is killed its end of the pipe closes, and the part's whole group ends, too.
GUARD = "exec 3<&0 </dev/null; { read -ru 3; kill -KILL 0; } & "


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file; an absent or partial one is empty."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        command: for bash, with `command_fields` in it, and {work}, a folder in which it writes
            found.json or a run's folder run/.
        check: says from its result and folder why the condition is not met, or None. It is called
            if the exit code is 0.
        sources: files and folders that the part judges; others may change, and it need not run
            again.
    """

    name: str
    visit: int
    limit_s: int
    command: str
    check: Callable[[Any, Path], str | None]
    sources: tuple[str, ...]
    needs_gpu: bool = False

    def source_hash(self) -> str:
        """Hash the command, and the files that the part judges."""
        digest = sha256(self.command.encode())
        for root in (PROJECT / source for source in self.sources):
            for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
                if path.suffix in (".py", ".yaml", ".json", ".jsonl", ".safetensors"):
                    digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]

    def run(self, device: str, limit_s: float, work: Path) -> dict[str, Any]:
        """Run to its end or limit; returns its result, and ``why`` its condition is not met."""
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        environ["PYTHONPATH"] = os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])
        typed, start = GUARD + self.command.format(**command_fields(device, work)), time.monotonic()
        with (work / "printed.txt").open("w") as out:
            child = subprocess.Popen(
                ["bash", "-c", typed], cwd=PROJECT, env=environ, stdin=subprocess.PIPE, stdout=out,
                stderr=out, process_group=0,
            )  # fmt: skip
            try:
                code = child.wait(limit_s)
                why = f"exit code {code}" if code else None
            except subprocess.TimeoutExpired:
                why = f"not over after {limit_s} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # also what it left running
                    os.killpg(child.pid, signal.SIGKILL)
        result = read(work / "found.json") or read(work / "run/summary.json")
        try:
            why = why or self.check(result, work)
        except Exception as error:  # a result that no check foresaw costs its own part only
            why = f"its result cannot be read: {type(error).__name__}: {error}"
        seconds = round(time.monotonic() - start, 1)
        return {"ok": why is None, "why": why, "seconds": seconds, "found": result}


def command_fields(device: str, work: Path) -> dict[str, str]:
    """Fill the {names} of commands: models and sizes, tiny ones in a trial on a CPU."""
    trial = device == "cpu"
    on, python = f"engine=graph model.device={device}", shlex.quote(sys.executable)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny = " ".join(["smollm2_135m", *(f"model.shape_config.{k}={v}" for k, v in shape.items())])
    methods = {p.stem for p in (PROJECT / "conf/method").glob("[!_]*.yaml")} - {"ar", "cacheback"}
    labels = ["pld", "eagle2", "sps"] if trial else sorted(methods)
    pytest = f"{python} -m pytest -q -c /dev/null --rootdir . --import-mode=importlib"
    large = f"model={tiny if trial else 'vicuna7b'} model.shape=true {on}"
    folder, few = shlex.quote(str(work)), "dataset.limit=1 generation.max_new_tokens=4 " * trial
    return {
        "python": python,
        "work": folder,
        "out": f"--out={folder}/found.json",
        "device": device,
        "pytest": f"{pytest} -p no:cacheprovider",
        "large": f"{large} model.dtype={'float32' if trial else 'bfloat16'}",
        "grid": f"[{'32,64' if trial else '128,448,960'}]",
        "rows": f"[{'1,2,4' if trial else '1,2,4,8,16,32,48,64,96,128'}]",
        "sizes": "--trial --repeats=1" if trial else "--repeats=3",
        "labels": ",".join(labels),
        "lessons": ".cache/heads_smollm2_135m_live",
        "run": f"{python} run.py model=smollm2_135m {on} generation.max_new_tokens=64",
        "end": f"{few}engine.eager_baseline=false output_dir={folder}/run",
    }


def _wrong(*conditions: tuple[bool, str]) -> str | None:
    return "; ".join(message for holds, message in conditions if not holds) or None


def _any(result: Any, work: Path) -> str | None:
    return None  # the exit code says it


def _bandwidth(result: Any, work: Path) -> str | None:
    if result["trial"]:
        return None
    gpu, *_ = result["environment"]["hardware"]["gpus"]
    nominal = next((v for k, v in NOMINAL.items() if k in gpu["name"]), None)
    if nominal is None:
        return f"nominal speed unknown: {gpu['name']}. Add it to NOMINAL"
    best = max(result["rows"]["read"]["bytes_per_s"])
    return _wrong((best > 0.85 * nominal, f"the fastest read, {best / 1e9:.0f} GB/s, is slow"))


def _tests(result: Any, work: Path) -> str | None:
    cases = [*ElementTree.parse(work / "tests.xml").iter("testcase")]
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    passed = [c for c in cases if not len(c)]
    names = [c.get("name", "") for c in passed if "captured_drafts" in c.get("name", "")]
    heads = " ".join(name for name in names if re.search("eagle|medusa|hydra", name))
    lacks = [d for d in ("float64", "float32", "bfloat16") if d not in heads]
    return _wrong(
        (not failed and len(passed) >= 60, f"{len(failed)} failed, {len(passed)} passed"),
        (not lacks, f"no heads in {', '.join(lacks)}"),
    )


def _loops(result: Any, work: Path) -> str | None:
    off = max(abs(share - 1) for share in result["clock_over_wall"])
    static = json.loads((work / "static.json").read_text())
    rows, failed = result["rows"] | static["rows"], result["failed"] | static["failed"]
    rates = {name: statistics.median(row["tokens_per_s"] or [0]) for name, row in rows.items()}
    return _wrong(
        (not failed, f"failed: {failed}"),
        (result["trial"] or off <= 0.01, f"the clock is off by {off:.1%}"),
        (result["trial"] or rates["graph"] >= 1.2 * rates["static"], f"tokens/s: {rates}"),
    )


def _kernels(result: Any, work: Path) -> str | None:
    off = [abs(sum(row["us"].values()) / row["wall_us"] - 1) for row in result["rows"].values()]
    return _wrong((result["trial"] or max(off) <= 0.05, f"sums are {max(off):.1%} off the wall"))


def _rows(result: Any, work: Path) -> str | None:
    surface = json.loads((work / "run/surface.json").read_text())
    samples = [point for line in surface["tree"]["samples_s"] for point in line]
    spread = max((max(s) - min(s)) / statistics.median(s) for s in samples)
    on_gpu, eager = surface["model"]["device"] != "cpu", surface["model"]["passes"].get("eager")
    return _wrong(
        (not on_gpu or not eager, f"not captured: {eager}"),
        (not on_gpu or spread < 0.02, f"samples of one point differ by {spread:.1%}"),
    )


def _memcheck(result: Any, work: Path) -> str | None:
    printed = (work / "printed.txt").read_text()
    if not shutil.which("compute-sanitizer"):
        return "this machine has no compute-sanitizer, which comes with CUDA's toolkit"
    errors = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", printed)]
    kernel = r"Invalid __global__ (?:write|read)[^\n]*\n[^\n]*(nvjet|splitK)"
    refused = bool(re.search(kernel, printed, re.I)) and "first exit code: 9\n" in printed
    return _wrong(
        (refused, "no invalid access of a split product without the mend"),
        (errors[1:] == [0], f"errors: {errors}"),
    )


def _equal(result: Any, work: Path) -> str | None:
    """Require that nothing is left out and all outputs equal AR decoding's."""
    rows = [row for row in result["rows"] if row["task"] == "overall"]
    counted = {row["label"]: row["lossless"] for row in rows}
    other = {k: v for k, v in counted.items() if sum(v.values()) != v["equal"]}
    left = json.loads((work / "run/manifest.json").read_text()).get("left_out")
    return _wrong((not other, f"outputs: {other}"), (not left, f"left out: {left}"))


def _no_bug(result: Any, work: Path) -> str | None:
    bugs = [row["label"] for row in result["rows"] if (row["lossless"] or {}).get("bug")]
    return _wrong((not bugs, f"bugs: {bugs}"))


def _cases(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "run/cases.jsonl").read_text().splitlines()]


def _same(result: Any, work: Path) -> str | None:
    """Require that all labels draw plain sampling's tokens: sampled runs have no audit."""
    drawn: dict[Any, list[Any]] = {}
    for case in _cases(work):
        drawn.setdefault((case["case_id"], case["turn"]), []).append(case["output_ids"])
    other = [key for key, texts in drawn.items() if any(text != texts[0] for text in texts)]
    return _wrong((not other, f"other tokens than plain sampling's: {other}"))


def _phases(result: Any, work: Path) -> str | None:
    cases = _cases(work)
    launched = sorted({c["label"] for c in cases if (c["drafter"] or {}).get("launched_drafts")})
    late = []
    for label in sorted({c["label"] for c in cases}):
        first, *others = [c["drafter_setup_s"] for c in cases if c["label"] == label]
        late += [label] if others and first > 2 * statistics.median(others) + 1e-3 else []
    on_gpu = bool(cases[0]["gpu"])
    return _wrong(
        (not on_gpu or not launched, f"drafts not captured: {launched}"),
        (not on_gpu or not late, f"set up in the first turn: {late}"),
    )


def _energy(result: Any, work: Path) -> str | None:
    cases = _cases(work)
    power = sum(c["energy_j"] for c in cases) / sum(c["wall_s"] for c in cases)
    watched = statistics.mean(c["gpu"][0]["power_w"] for c in cases)
    return _wrong((abs(power / watched - 1) <= 0.1, f"{power:.0f} W, watched {watched:.0f} W"))


def _passes(result: Any, work: Path) -> str | None:
    if not (ms := result["rows"]["triton"]).keys() >= {"1/128", "64/128", "1/960"}:
        return None  # a trial
    share, equal = result["read_ms"] / ms["1/128"], re.match(r"(\d+) of (\d+) ", result["exact"])
    return _wrong(
        (share >= 0.7, f"one row reads at {share:.0%}"),
        (ms["1/960"] <= 1.05 * ms["1/128"], f"960/128: {ms['1/960'] / ms['1/128']:.2f}"),
        (ms["64/128"] <= 1.16 * ms["1/128"], f"64/1: {ms['64/128'] / ms['1/128']:.2f}"),
        (bool(equal and equal[1] == equal[2]), f"exact: {result['exact'] or 'not compared'}"),
    )


def _drafts(result: Any, work: Path) -> str | None:
    row = result["rows"]["eagle2"]
    took, launched = row["draft_ms"], row.get("launched_drafts", 0)
    return _wrong((result["trial"] or took <= 1.7, f"a draft takes {took:.2f} ms"),
                  (not launched, f"{launched} drafts launched"))  # fmt: skip


def lessons_learnt(result: Any, work: Path) -> str | None:
    """Require that each head's held-out loss fell, and that the pieces hold all heads."""
    pieces = b"".join(path.read_bytes() for path in sorted(work.glob("live.tgz.*")))
    with tarfile.open(fileobj=io.BytesIO(pieces)) as archive:
        cards = [n for n in archive.getnames() if n.endswith("training.json")]
        facts = [json.load(cast(IO[bytes], archive.extractfile(name))) for name in cards]
    losses = {f["name"]: [float(p.split()[-1]) for p in f["curve"].values()] for f in facts}
    idle = [name for name, curve in losses.items() if curve[-1] >= curve[0]]
    return _wrong((len(cards) >= 4 and not idle, f"learnt nothing: {idle}, of {[*losses]}"))


_WARM = (
    "import torch, methods.token_recycling, specbench.decoding.tree\n"
    "import specbench.draft_structures.lookahead\n"
    "x = torch.ones(4, device='cuda'); g = torch.cuda.CUDAGraph()\n"
    "with torch.cuda.graph(g): y = 2 * x + 1\n"
    "g.replay(); torch.cuda.synchronize(); assert y.tolist() == [3.0] * 4"
)
# The folder of texts and heads in pieces, for a machine that is lent and takes large files from
# nobody; each replaces its last state at once, so that a kill costs a minute.
PACK = (
    "pack() {{ tar cz --exclude='*.partial' -C {lessons} . | split -b 15M -d -a 1 - {work}/$1. && "
    "for f in {work}/$1.*; do mv $f {work}/live.tgz.${{f##*.}}; done; }}; "
)
_GPU_TESTS = "tests/fake_cuda/test_decoding.py"
_TESTED = (*CORE, "methods", "tests/fake_cuda", "tests/conftest.py", "tests/models/heads")
_BENCH = "{python} -m scripts.bench gpu "
_SAMPLED = "{run} model.dtype=float32 generation.temperature=1 dataset.limit=6 verifier="
PARTS = (
    Part("env", 1, 20, f"nvidia-smi -q; {{python}} -c {shlex.quote(_WARM)}", _any, (), True),
    Part(
        "bandwidth", 1, 20, _BENCH + "bandwidth model.device={device} {sizes} {out}", _bandwidth,
        ("specbench/system/bandwidth.py",),
    ),
    Part(
        "crash", 1, 90, "{python} -m scripts.gpu_crash all {out}", _any,
        ("scripts/gpu_crash.py", *CORE, "conf/model"), True,
    ),
    Part(
        "tests", 1, 170,
        "{pytest} -p xdist -n 8 -m gpu tests/fake_cuda tests/models/test_gpu.py "
        "--junitxml={work}/tests.xml",
        _tests,
        (
            *_TESTED, "runners", "tests/models/test_gpu.py", "tests/contract", "tests/small_run.py",
            "tests/tiny_checkpoint.py", "assets/demo.jsonl",
        ),
        True,
    ),
    Part(
        "loops", 1, 90,
        _BENCH + "loops {large} {sizes} {out} && "
        + _BENCH + "static {large} {sizes} --out={work}/static.json",
        _loops, BENCH,
    ),
    Part("kernels", 1, 60, _BENCH + "kernels {large} {sizes} {out}", _kernels, BENCH),
    Part(
        "rows", 1, 60,
        "{python} run.py {large} runner=cost runner.contexts={grid} runner.tree_rows={rows} "
        "runner.batch_contexts=[] runner.batch_k=[] runner.batch_w=[] runner.passes=3 "
        "baseline=false output_dir={work}/run",
        _rows,
        (*CORE, "runners/cost.py", "runners/measure/pass_times.py", "conf/model", "conf/runner"),
    ),
    Part(
        "order", 3, 60,
        f"TORCH_CUDA_SANITIZER=1 {{pytest}} {_GPU_TESTS} -k "
        "'late_drafts or captured_drafts and float32 and (eagle2 or sps or token_recycling)'",
        _any, _TESTED, True,
    ),
    Part(
        "memcheck", 3, 90,
        "command -v compute-sanitizer || exit 0; "
        "checked='compute-sanitizer --tool memcheck --report-api-errors no'; "
        "FIX=0 $checked --error-exitcode 9 {python} -m scripts.gpu_crash clear_empty; "
        f"echo first exit code: $?; $checked {{pytest}} {_GPU_TESTS} -k 'eagle2 and float32'",
        _memcheck, ("scripts/gpu_crash.py", "conf/model", *_TESTED), True,
    ),
    Part(
        "methods", 2, 240, "{run} model.dtype=float32 method=cacheback 'compare=[{labels}]' {end}",
        _equal, RUNS,
    ),
    Part(
        "phases", 2, 60,
        "{run} model.dtype=float32 budgets=published measure=phases method=suffix_decoding "
        "'compare=[cacheback,pld,token_recycling,medusa,hydra,eagle,eagle2,eagle3,sps]' "
        "dataset=jsonl dataset.path=assets/branching.jsonl {end}",
        _phases, RUNS,
    ),
    Part(
        "half", 2, 60,
        "{run} model.dtype=bfloat16 dataset.limit=6 method=cacheback "
        "'compare=[pld,token_recycling,suffix_decoding,medusa,eagle2,eagle3,sps]' {end}",
        _no_bug, RUNS,
    ),
    Part(
        "match", 2, 40, _SAMPLED + "match method=pld 'compare=[eagle2,token_recycling]' {end}",
        _same, RUNS,
    ),
    Part("rejection", 2, 40, _SAMPLED + "rejection method=sps {end}", _any, RUNS),
    Part("block", 2, 40, _SAMPLED + "block method=sps {end}", _any, RUNS),
    Part(
        "batch", 2, 45,
        "{run} model.dtype=float32 batch.size=4 dataset.limit=8 method=pld "
        "'compare=[suffix_decoding,token_recycling,medusa,eagle2]' {end}",
        _equal, RUNS,
    ),
    Part(
        "energy", 2, 35,
        "{run} model.dtype=float32 measure=energy dataset.limit=6 method=pld "
        "'compare=[eagle2]' {end}",
        _energy, RUNS, True,
    ),
    Part(
        "parity", 3, 120,
        "{pytest} -p xdist -n 8 tests/kernels/test_row_kernels.py --junitxml={work}/tests.xml",
        _any, ("specbench/kernels", "tests/kernels/test_row_kernels.py"), True,
    ),
    Part("passes", 3, 120, _BENCH + "passes {large} {sizes} {out}", _passes, BENCH),
    Part("drafts", 3, 60, _BENCH + "heads {large} {sizes} {out}", _drafts, BENCH),
    Part(
        "heads", 4, 540,
        PACK + "(while sleep 60; do pack half; done) & loop=$!; "
        "{python} -m scripts.training heads --minutes=8 --device={device}; "
        "code=$?; kill $loop; pack last; rm -f {work}/half.*; exit $code",
        lessons_learnt, ("scripts/training",), True,
    ),
)  # fmt: skip
