"""What this machine has: facts for a benchmark's record and for a bug report."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path

import torch


def device(kind: str) -> dict[str, str | None]:
    """Name first, then what else identifies it. `kind` is "cuda" or "cpu"."""
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
    """The GPU driver's version, or None where nothing tells it."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    answer = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else None


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "CUDA": torch.version.cuda,
    }


def installed(module: str) -> str | None:
    """The version of what a module is imported from, or None where that is unknown."""
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:  # or it has a name of its own: fla, quack
        names = importlib.metadata.packages_distributions().get(module, ())
        return next(map(importlib.metadata.version, names), None)


def commit() -> str | None:
    """Commit of the checkout this file is tracked in, marked when the package differs from it."""
    git = ("git", "-C", str(Path(__file__).parent))
    if not ask(*git, "ls-files", Path(__file__).name):  # installed, perhaps inside another checkout
        return None
    found = ask(*git, "rev-parse", "--short=12", "HEAD")
    changed = ask(*git, "status", "--porcelain", "--untracked-files=no", "..")
    return f"{found} with changes" if found and changed else found


def ask(*command: str) -> str | None:
    """What a command prints, or None where it isn't there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def slug(name: str) -> str:
    """'NVIDIA H200' as 'h200', for a folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")
