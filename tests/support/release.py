"""Builds the wheel and the source archive, checks both, and tries the wheel outside of the clone.

    python -m tests.support.release                 builds into dist/, checks, and tries the wheel
    python -m tests.support.release --build-only    builds into dist/, and checks

The wheel is built from the source archive. The trial installs the wheel into a fresh virtual
environment in a temporary folder, first without extras and then with one extra after the other. The
versions of all packages are those of requirements/dev.txt. All commands of the trial run in the
temporary folder, which has README.md and tests/support/ of the source archive, and no folder
`logitless`. Nothing is uploaded.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from tests.support.paths import ROOT

DIST = ROOT / "dist"
# Per extra, in the order of installation: the commands of `logitless` that must work. All extras
# except dev are tried. `make test` needs the packages of dev, and installs pinned versions.
COMMANDS = {
    "": ("--version", "doctor", "explain --rows 64 --width 64 --vocab 1000"),
    "teacher": ("teacher --help",),
    "remote": ("teacher --help",),
    "parquet": ("teacher --help",),
}
# Commands that must exit without an extra, and must name the extra.
REFUSED = {"teacher": "teacher capture --model m --data d --out o"}
MODULE = r"logitless\.integrations\.[a-z]+"
# Files that the archive of sources must have beside the package. pip builds a wheel from these.
SOURCES = ("pyproject.toml", "hatch_build.py", "README.md", "CHANGELOG.md", "LICENSE", "Makefile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build-only", action="store_true", help="do not try the wheel")
    args = parser.parse_args()
    wheel, archive = build()
    problems = check(wheel, archive)
    if problems:
        raise SystemExit("\n".join(problems))
    if not args.build_only:
        with tempfile.TemporaryDirectory(prefix="logitless-release-") as folder:
            try_wheel(wheel, archive, Path(folder))
    print(f"\nwheel and source archive are right: {shown(wheel)}, {shown(archive)}")


def build() -> tuple[Path, Path]:
    """The paths of the wheel and of the source archive, both built anew."""
    shutil.rmtree(DIST, ignore_errors=True)
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    (wheel,), (archive,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, archive


def check(wheel: Path, archive: Path) -> list[str]:
    """Prints the contents and sizes. Returns a sentence for each problem."""
    call(sys.executable, "-m", "twine", "check", "--strict", wheel, archive)
    with zipfile.ZipFile(wheel) as file:
        print(f"\n{shown(wheel)}, {len(file.infolist())} files:")
        for info in file.infolist():
            print(f"  {info.file_size:>9,}  {info.filename}")
        names = file.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        description = file.read(metadata).decode()
    with tarfile.open(archive) as file:
        sources = [name.partition("/")[2] for name in file.getnames()]
    print(f"\n{shown(archive)}, {len(sources)} files")
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return [
        *problems_of_wheel(names, [name for name in tracked if name.startswith("logitless/")]),
        *problems_of_sources(sources, tracked),
        *problems_of_description(description),
        *problems_of_integrations(names),
    ]


def problems_of_wheel(names: list[str], package: list[str]) -> list[str]:
    """The wheel must have the files of the package, the licence and the metadata, and no others."""
    about = [name for name in names if re.match(r"logitless-[^/]+\.dist-info/", name)]
    missing = [
        *sorted({*package, "logitless/py.typed"} - {*names}),
        *(
            end
            for end in ("/METADATA", "/licenses/LICENSE", "/entry_points.txt")
            if not any(name.endswith(end) for name in about)
        ),
    ]
    others = sorted({*names} - {*package} - {*about})
    return [
        *(f"The wheel must have {name}, which is missing." for name in missing),
        *(f"The wheel must have the files of the package only, got {name}." for name in others),
    ]


def problems_of_integrations(names: list[str]) -> list[str]:
    """Configurations of trainers name modules of ours, which the wheel must have."""
    pages = (ROOT / "docs/trainers.md", ROOT / "docs/recipes/configured.md")
    text = "".join(page.read_text() for page in pages)
    files = {f"{name.replace('.', '/')}.py" for name in re.findall(MODULE, text)}
    return [f"The docs name {file}, which the wheel must have." for file in files - {*names}]


def problems_of_sources(names: list[str], tracked: list[str]) -> list[str]:
    """The archive must have files that git tracks only, and everything that a build needs."""
    return [
        *(
            f"The source archive must have {name}, which is missing."
            for name in SOURCES
            if name not in names
        ),
        *(
            f"The source archive must have files that git tracks only, got {name}."
            for name in names
            if name not in (*tracked, "PKG-INFO")
        ),
    ]


def problems_of_description(metadata: str) -> list[str]:
    """An index shows the long description without the repository, so relative links are broken."""
    message = Parser().parsestr(metadata)
    needed = [line for line in message.get_all("Requires-Dist", []) if "extra ==" not in line]
    text = message.get_payload()
    assert isinstance(text, str)
    links = re.findall(r"\]\(((?!\w+://|#)[^)\s]+)\)", re.sub(r"(?ms)^```.*?^```$", "", text))
    return [
        *(f"The long description must have no relative links, got {link}." for link in links),
        *(
            f"The metadata must have {field}, which is missing."
            for field in ("Summary", "Requires-Python", "License-Expression", "Classifier")
            if field not in message
        ),
        # Trainers pin PyTorch themselves: any other bound of ours would not install beside one.
        *(
            f"The wheel must need only torch and triton, with lower bounds, got {line}."
            for line in needed
            if not re.fullmatch(r"(torch|triton)>=[\d.]+(;.*)?", line)
        ),
    ]


def try_wheel(wheel: Path, archive: Path, folder: Path) -> None:
    """Installs the wheel into an environment in `folder`, and runs the library there."""
    with tarfile.open(archive) as file:
        for member in file.getmembers():
            name = member.name.partition("/")[2]
            if member.isfile() and (name == "README.md" or name.startswith("tests/support/")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(file.extractfile(member).read())
    (folder / "tests/__init__.py").touch()  # the clone's own file imports pytest
    (folder / "versions.txt").write_text(versions())
    call(sys.executable, "-m", "venv", folder / "environment")
    scripts = folder / "environment/bin"

    def run(*command: object) -> None:
        call(scripts / str(command[0]), *command[1:], cwd=folder)

    extras: list[str] = []  # installed so far
    for extra, commands in COMMANDS.items():
        wanted = f"{wheel}[{extra}]" if extra else wheel
        run("python", "-m", "pip", "install", "--quiet", "-c", "versions.txt", wanted)
        run("python", "-m", "pip", "check")
        run("python", "-c", "import logitless")
        extras += filter(None, [extra])
        run("python", "-m", "tests.support.installed", *extras)
        if not extra:
            for name, command in REFUSED.items():
                refused(scripts / "logitless", name, command, folder)
        for command in commands:
            run("logitless", *command.split())


def versions() -> str:
    """The pinned versions of requirements/dev.txt, as constraints of pip, which take no extras."""
    files = (ROOT / "requirements/dev.txt", ROOT / "requirements/tests.txt")
    lines = [line for file in files for line in file.read_text().splitlines() if "==" in line]
    return "".join(re.sub(r"\[.*?\]", "", line) + "\n" for line in lines)


def refused(script: Path, extra: str, command: str, folder: Path) -> None:
    done = subprocess.run(
        [script, *command.split()], cwd=folder, env=environment(), capture_output=True, text=True
    )
    print(f"\n$ logitless {command}\n{done.stderr}", end="", flush=True)
    if done.returncode == 0 or f"[{extra}]" not in done.stderr:
        raise SystemExit(f"logitless {command} must name the extra {extra}, got the output above.")


def call(*command: object, cwd: Path = ROOT) -> None:
    """Prints a command and runs the command. A command that fails ends the release."""
    words = [str(word) for word in command]
    print(f"\n$ {' '.join([Path(words[0]).name, *words[1:]])}", flush=True)
    done = subprocess.run(words, cwd=cwd, env=environment())
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} must end with status 0, got {done.returncode}.")


def environment() -> dict[str, str]:
    """The environment variables without those that would let Python import the clone."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def shown(path: Path) -> str:
    return f"{path.name} ({path.stat().st_size / 1000:,.0f} kB)"


if __name__ == "__main__":
    main()
