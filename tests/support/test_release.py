"""`make release`: the rules find what is wrong with a package; the trial runs without extras."""

import subprocess
import sys

import logitless as ll
from hatch_build import index_page
from tests.support import installed, release
from tests.support.pages import python_of
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()
PACKAGE = ["logitless/__init__.py", "logitless/py.typed"]
ABOUT = [
    f"logitless-{ll.__version__}.dist-info/{name}"
    for name in ("METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE")
]


def test_the_wheel_has_the_package_alone_and_all_of_it():
    whole = [*PACKAGE, *ABOUT]
    assert release.problems_of_wheel(whole, PACKAGE) == []
    for name in ("tests/test_init.py", "results/a.json", "docs/a.png", "logitless/a.log"):
        (problem,) = release.problems_of_wheel([*whole, name], PACKAGE)
        assert problem == f"The wheel must have the files of the package only, got {name}."
    for name in (*PACKAGE, ABOUT[0], *ABOUT[2:]):
        (problem,) = release.problems_of_wheel([n for n in whole if n != name], PACKAGE)
        assert "which is missing" in problem


def test_the_archive_has_what_git_tracks():
    tracked = [*release.SOURCES, *PACKAGE]
    assert release.problems_of_sources([*tracked, "PKG-INFO"], tracked) == []
    (problem,) = release.problems_of_sources([*tracked, "notes.txt"], tracked)
    assert "notes.txt" in problem
    (problem,) = release.problems_of_sources(tracked[1:], tracked)
    assert "pyproject.toml" in problem


def metadata(text: str) -> str:
    fields = ("Summary", "Requires-Python", "License-Expression", "Classifier")
    return "".join(f"{field}: x\n" for field in fields) + "\n" + text


def test_requirements_leave_trainers_their_versions():
    lines = ("torch>=2.9", 'triton>=3.5; sys_platform == "linux"', 'rich; extra == "teacher"')
    right = "".join(f"Requires-Dist: {line}\n" for line in lines)
    assert release.problems_of_description(right + metadata("")) == []
    for line in ("torch<3,>=2.9", "torch==2.13.0", "transformers>=5"):
        (problem,) = release.problems_of_description(f"Requires-Dist: {line}\n" + metadata(""))
        assert line in problem


def test_the_wheel_has_the_modules_that_configurations_name():
    whole = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("logitless/**/*.py")]
    assert release.problems_of_integrations(whole) == []
    problems = release.problems_of_integrations([n for n in whole if "integrations/verl" not in n])
    assert problems == ["The docs name logitless/integrations/verl.py, which the wheel must have."]


def test_the_long_description_has_no_relative_links():
    assert release.problems_of_description(metadata(index_page(README))) == []
    problems = release.problems_of_description(metadata(README))
    refused = "The long description must have no relative links, got "
    assert all(problem.startswith(refused) for problem in problems)
    assert any("memory-by-length.png" in problem for problem in problems)
    assert release.problems_of_description("Summary: x\n\ntext")[0].startswith("The metadata must")


def test_the_long_description_keeps_everything_else():
    page = index_page(README)
    assert [block for block in python_of("README.md") if block not in page] == []
    kept = "[a](https://a.b/c) ![d](https://e.f/g.png)\n"
    assert index_page(kept) == kept
    assert index_page("([how](docs/a.md#b))") == "(how: docs/a.md)"
    assert index_page("[a/](a)") == "a"
    assert index_page("[a](docs/a.md) ![p q](docs/a.png)") == (
        "docs/a.md *Picture in the repository: p q.*"
    )


def test_the_trial_works_without_optional_packages(tmp_path):
    """The library, its commands and README run where only torch and triton can be imported."""
    absent = [*installed.OPTIONAL, "numpy", "safetensors", "peft", "hypothesis"]
    code = f"""
import sys, warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
sys.modules.update(dict.fromkeys({absent}))
from tests.support import installed
installed.main()
from logitless.cli import main
assert main(["doctor", "--device", "cpu"]) == 0
"""
    command = [sys.executable, "-c", code]
    environment = release.environment() | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    count = sum("transformers" not in block for block in python_of("README.md"))
    assert f"{count} blocks of README and the smoke test work" in done.stdout


def test_every_extra_is_tried():
    text = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    text = text.split("[project.scripts]")[0]
    extras = [line.partition(" = ")[0] for line in text.splitlines() if " = [" in line]
    assert [*release.COMMANDS] == ["", *(extra for extra in extras if extra != "dev")]
