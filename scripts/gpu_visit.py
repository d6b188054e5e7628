"""Run the GPU checks part by part, to use a quarter of an hour on a GPU well.

    make gpu-check                                 every part that is not done yet
    make gpu-check ARGS='--visit 1 --seconds 560'  the first visit, within ten minutes
    make gpu-check ARGS='--device cpu'             a trial on any machine, with tiny shapes

After each part --out has parts/NAME.json and a line more in progress.txt. A part whose condition
was met on this GPU, with this torch and the same files that it judges, is not run again.
docs/gpu.md says more. Exit code: 0 where all parts met their condition, 1 where one failed or is
left, 2 where none can run.
"""

import argparse
import contextlib
import importlib.metadata
import json
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
KEPT = PROJECT / "docs/measurements"
sys.path.insert(0, str(PROJECT))  # this checkout, not an installed one
from scripts.gpu_parts import PARTS, Part, read
from specbench.config.removed import refuse_removed
from specbench.errors import ConfigurationError


def check_setup(device: str) -> tuple[dict[str, str], str | None]:
    """Find the GPU and the versions, and say why no part can run, if so."""
    from packaging.requirements import Requirement

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    versions, wrong = {"gpu": "none", "python": sys.version.split()[0]}, []
    for requirement in map(Requirement, [*project["dependencies"], "pytest"]):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[requirement.name] = importlib.metadata.version(requirement.name)
        version = versions.get(requirement.name)
        if not version or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement} (here {version})")
    if wrong:
        return versions, f"missing or of another version: {'; '.join(wrong)}. Type make setup"
    import torch

    versions |= {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if device == "cpu":
        return versions, None
    if not torch.cuda.is_available():
        return versions, (
            f"torch {torch.__version__} sees no GPU: type make setup TORCH_INDEX=URL with a build "
            "for the driver (docs/gpu.md), or make gpu-check ARGS='--device cpu' for a trial."
        )
    return versions | {"gpu": torch.cuda.get_device_name(0)}, None


def earlier(part: Part, out: Path, versions: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Read saved results of the part with this GPU and torch."""
    for folder in [out, *KEPT.glob("*")]:
        result = read(folder / "parts" / f"{part.name}.json")
        old = result.get("versions", {})
        if isinstance(old, dict) and all(old.get(k) == versions[k] for k in ("gpu", "torch")):
            yield result


def keep(part: Part, result: dict[str, Any], out: Path) -> None:
    """Write the result of one part at once, so that a later kill loses nothing."""
    half = out / "parts" / f"{part.name}.half"
    half.write_text(json.dumps(result, indent=1))
    half.replace(half.with_suffix(".json"))
    message = f"{part.name}: {result['why'] or 'condition met'}, {result['seconds']} s"
    with (out / "progress.txt").open("a") as progress:
        progress.write(f"{time.strftime('%H:%M:%S')} {message}\n")
    print(message, flush=True)


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--visit", type=int, choices=sorted({part.visit for part in PARTS}), help="only its parts")
    add("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these")
    add("--seconds", type=float, default=float("inf"), help="begin no part that could end later")
    add("--device", choices=("cuda:0", "cpu"), default="cuda:0", help="cpu: a trial")
    add("--out", type=Path, default=PROJECT / "docs/measurements/gpu", help="folder of results")
    try:
        refuse_removed("scripts.gpu_visit", sys.argv[1:] if argv is None else argv)
    except ConfigurationError as error:
        parser.exit(2, f"error: {error}\n")
    args = parser.parse_args(argv)
    end, out = time.monotonic() + args.seconds, args.out.absolute()
    versions, wrong = check_setup(args.device)
    if wrong:
        print(wrong, file=sys.stderr)
        return 2
    (out / "parts").mkdir(parents=True, exist_ok=True)
    names = args.parts or [part.name for part in PARTS]
    selected = [p for p in PARTS if args.visit in (None, p.visit) and p.name in names]
    saved, left = {part.name: [*earlier(part, out, versions)] for part in selected}, []
    for part in sorted(selected, key=lambda part: all(k["ok"] for k in saved[part.name])):
        code, limit_s = part.source_hash(), part.limit_s * (3 if args.device == "cpu" else 1)
        why: str | None = None
        if args.device == "cpu" and part.needs_gpu:
            print(f"{part.name}: needs a GPU")
        elif any(k["ok"] and k["source_hash"] == code for k in saved[part.name]):
            print(f"{part.name}: done before")
        elif time.monotonic() + limit_s > end:
            print(f"{part.name}: {(why := 'no time is left')}")
        else:
            result = part.run(args.device, limit_s, out / "parts" / part.name)
            result |= {"gpu": versions["gpu"], "versions": versions, "source_hash": code}
            keep(part, result, out)
            why = result["why"]
        left += [part.name] if why else []
    print(f"left or failed: {', '.join(left) or 'none'}; results: {out}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
