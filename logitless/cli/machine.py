"""Collects facts about this machine, for the results of benchmarks and for bug reports."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path

import torch


def device(kind: str) -> dict[str, str | None]:
    """Returns the name and other properties of a device. `kind` is "cuda" or "cpu"."""
    if kind == "cpu":
        return {"name": cpu_name(), "threads": f"{torch.get_num_threads()} threads"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": f"compute capability {properties.major}.{properties.minor}",
        "processors": f"{properties.multi_processor_count} multiprocessors",
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "driver": f"driver {driver() or 'unknown'}",
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.+)$", info.read_text() if info.exists() else "", re.M)
    return models[0] if models else f"{platform.machine()} CPU"


def driver() -> str | None:
    """Returns the version of the GPU driver, or None if the version is unknown."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    printed = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return printed.splitlines()[0] if printed else None


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "CUDA": torch.version.cuda,
    }


def installed(module: str) -> str | None:
    """Returns the version of a module's package, or None if the version is unknown."""
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        # The name of a package can differ from the name of its module. Examples are the modules
        # `fla` and `quack`.
        names = importlib.metadata.packages_distributions().get(module, ())
        return next(map(importlib.metadata.version, names), None)


def commit() -> str | None:
    """Returns the commit of this checkout, with a note if the package has uncommitted changes."""
    git = ("git", "-C", str(Path(__file__).parent))
    if not output_of(*git, "ls-files", Path(__file__).name):  # the package is not in a git checkout
        return None
    head = output_of(*git, "rev-parse", "--short=12", "HEAD")
    changed = output_of(*git, "status", "--porcelain", "--untracked-files=no", "..")
    return f"{head} with changes" if head and changed else head


def output_of(*command: str) -> str | None:
    """Returns the output of a command, or None if the command fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def slug(name: str) -> str:
    """Converts the name of a device to a folder name: 'NVIDIA H200' becomes 'h200'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")
