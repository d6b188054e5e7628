"""What a GPU must show, part by part, so that a quarter of an hour on one is used well.

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


def what_is_here(device: str) -> tuple[dict[str, str], str | None]:
    """The GPU and the versions; and why no part can run, with what to type."""
    from packaging.requirements import Requirement

    wanted = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    here, wrong = {"gpu": "none", "python": sys.version.split()[0]}, []
    for requirement in map(Requirement, [*wanted, "pytest"]):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            here[requirement.name] = importlib.metadata.version(requirement.name)
        version = here.get(requirement.name)
        if not version or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement} (here {version})")
    if wrong:
        return here, f"missing or of another version: {'; '.join(wrong)}. Type make setup"
    import torch

    here |= {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if device == "cpu":
        return here, None
    if not torch.cuda.is_available():
        return here, (
            f"torch {torch.__version__} sees no GPU: type make setup TORCH_INDEX=URL with a build "
            "for the driver (docs/gpu.md), or make gpu-check ARGS='--device cpu' for a trial."
        )
    return here | {"gpu": torch.cuda.get_device_name(0)}, None


def earlier(part: Part, out: Path, here: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Results of the part that are kept, of this GPU and torch."""
    for place in [out, *KEPT.glob("*")]:
        found = read(place / "parts" / f"{part.name}.json")
        theirs = found.get("versions", {})
        if isinstance(theirs, dict) and all(theirs.get(k) == here[k] for k in ("gpu", "torch")):
            yield found


def keep(part: Part, result: dict[str, Any], out: Path) -> None:
    """Write what one part gave, so that a kill at any later moment costs nothing of it."""
    half = out / "parts" / f"{part.name}.half"
    half.write_text(json.dumps(result, indent=1))
    half.replace(half.with_suffix(".json"))
    said = f"{part.name}: {result['why'] or 'condition met'}, {result['seconds']} s"
    with (out / "progress.txt").open("a") as progress:
        progress.write(f"{time.strftime('%H:%M:%S')} {said}\n")
    print(said, flush=True)


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--visit", type=int, choices=sorted({part.visit for part in PARTS}), help="only its parts")
    add("--seconds", type=float, default=float("inf"), help="begin no part that could end later")
    add("--device", choices=("cuda:0", "cpu"), default="cuda:0", help="cpu: a trial")
    add("--out", type=Path, default=PROJECT / "docs/measurements/gpu", help="folder of results")
    try:
        refuse_removed("scripts.gpu_visit", sys.argv[1:] if argv is None else argv)
    except ConfigurationError as error:
        parser.exit(2, f"error: {error}\n")
    args = parser.parse_args(argv)
    end, out = time.monotonic() + args.seconds, args.out.absolute()
    here, wrong = what_is_here(args.device)
    if wrong:
        print(wrong, file=sys.stderr)
        return 2
    (out / "parts").mkdir(parents=True, exist_ok=True)
    asked = [part for part in PARTS if args.visit in (None, part.visit)]
    kept, left = {part.name: [*earlier(part, out, here)] for part in asked}, []
    for part in sorted(asked, key=lambda part: all(k["ok"] for k in kept[part.name])):
        code, limit_s = part.source_hash(), part.limit_s * (3 if args.device == "cpu" else 1)
        why: str | None = None
        if args.device == "cpu" and part.needs_gpu:
            print(f"{part.name}: needs a GPU")
        elif any(k["ok"] and k["source_hash"] == code for k in kept[part.name]):
            print(f"{part.name}: done before")
        elif time.monotonic() + limit_s > end:
            print(f"{part.name}: {(why := 'no time is left')}")
        else:
            result = part.run(args.device, limit_s, out / "parts" / part.name)
            result |= {"gpu": here["gpu"], "versions": here, "source_hash": code}
            keep(part, result, out)
            why = result["why"]
        left += [part.name] if why else []
    print(f"left or failed: {', '.join(left) or 'none'}; results: {out}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
