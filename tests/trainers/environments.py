"""Virtual environments with the newest release of each trainer, beside the PyTorch that is here.

Each environment is a folder in `.venv-trainers`. It sees the packages of `.venv-trainers` itself,
and holds the trainer, and those packages of its requirements that our tests import, in the versions
that the trainer asks for. PyTorch is never among them: it would be a build for CUDA.
"""

import json
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

HERE = Path(sys.prefix)
PINNED = ("torch", "triton")


class Trainer(NamedTuple):
    package: str
    # Names of its requirements, or full requirements that it does not state.
    needs: str = ""


TRAINERS = {
    "trl": Trainer("trl", "accelerate datasets transformers peft"),
    "transformers": Trainer("transformers", "huggingface-hub tokenizers lightning"),
    "axolotl": Trainer(
        "axolotl",
        "packaging huggingface_hub peft tokenizers transformers accelerate datasets trl kernels"
        " liger-kernel bitsandbytes addict fire pydantic PyYAML requests einops colorama numba"
        " python-dotenv schedulefree art axolotl-contribs-lgpl axolotl-contribs-mit posthog"
        " mistral-common evaluate optimum torchao fastcore wandb",
    ),
    "verl": Trainer(
        "verl", "transformers tensordict accelerate peft datasets codetiming dill hydra-core"
        " ray[default] torchdata pylatexenc pandas",
    ),
    "torchtitan": Trainer(
        "torchtitan", "spmd_types torch_checkpointing torchdata datasets tyro einops pillow"
    ),
    "ms-swift": Trainer(
        "ms-swift", "transformers trl peft accelerate datasets addict dacite json-repair modelscope"
        " nltk openai oss2 rouge simplejson tiktoken attrdict binpacking einops importlib-metadata"
        " matplotlib pandas aiohttp fastapi uvicorn",
    ),
    "nemo-automodel": Trainer("nemo-automodel", "transformers datasets torchdata torchao"),
}  # fmt: skip


class Environment(NamedTuple):
    trainer: str
    version: str
    python: Path


def prepare(name: str) -> Environment:
    """Installs the newest release. Raises CalledProcessError if pip cannot."""
    trainer, folder = TRAINERS[name], HERE / name
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (base,) = HERE.glob("lib/python*/site-packages")
        (site / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")
    done = folder / "installed.json"
    install(python, "--no-deps", "--upgrade", trainer.package)
    version = call(python, "from importlib.metadata import version as v", f"v({trainer.package!r})")
    if not done.exists() or json.loads(done.read_text()) != [version, trainer.needs]:
        stated = call(python, "from importlib.metadata import requires as r",
                      f"r({trainer.package!r})")  # fmt: skip
        install(python, *wanted(trainer.needs.split(), stated))
        done.write_text(json.dumps([version, trainer.needs]))
    return Environment(name, version, python)


def wanted(needs: list[str], stated: list[str]) -> list[str]:
    """The needed requirements as the trainer states them, or by their bare names."""
    found = {canonical(line): line for line in stated if "extra ==" not in line}
    return [found.get(canonical(need), need) for need in needs]


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def install(python: Path, *packages: str) -> None:
    from importlib.metadata import version

    pins = HERE / "pins.txt"
    pins.write_text("".join(f"{p}=={version(p).partition('+')[0]}\n" for p in PINNED))
    command = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    subprocess.run([*map(str, command), "--constraint", str(pins), *packages], check=True)


def call(python: Path, statement: str, expression: str):
    code = f"import json\n{statement}\nprint(json.dumps({expression}))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)
