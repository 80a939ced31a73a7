"""The folder listing is the architecture: imports go one way, and each question has one place."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT, TESTS

PACKAGE = ROOT / "logitless"
FLOORS = (  # from the lowest; a room imports from lower floors alone
    ("contract",),
    ("eager",),
    ("kernels",),
    ("core",),
    ("heads", "targets"),
    ("losses", "parallel"),
    ("contrastive", "lazy"),
    ("nn", "store"),
    ("integrations",),
    ("__init__", "hf"),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
# Rooms that export nothing.
INNER = ("core", "heads", "targets", "losses", "parallel", "contrastive", "lazy")

# Imports inside functions: which file imports from which room, and why not at its head.
INSIDE_FUNCTIONS = {
    ("core/choose_backend.py", "kernels"): "Triton takes long to import, and a CPU needs none",
    ("cli/teacher.py", "store"): "other subcommands start without the store",
    ("cli/teacher_size.py", "store"): "other subcommands start without the store",
}
# Files that may ask what kind of logits something is, besides core/source.py, and why.
BOUNDARY = {
    "parallel/checks.py": "arguments of VocabShard",
    "parallel/dtensor.py": "arguments beside logits may be DTensors too",
    "lazy/by_rows.py": "an input of a formula may be a head",
    "lazy/fused_head.py": "a head returns lazy logits, or whatever its own forward returns",
    "lazy/logits.py": "PyTorch calls its functions with anything",
    "lazy/losses.py": "arguments beside lazy logits may be lazy too",
    "lazy/ops.py": "arguments beside lazy logits may be lazy too",
    "lazy/recipe.py": "an input of a formula may be a head",
    "lazy/rows.py": "an index may be anything",
    "lazy/torch_functions.py": "PyTorch calls its functions with anything",
}


class Import(NamedTuple):
    file: str  # relative to the package
    module: str
    target: str  # a module of the package
    inside: bool  # of a function

    @property
    def rooms(self) -> tuple[str, str]:
        return room_of(self.module), room_of(self.target)


def room_of(module: str) -> str:
    _, *rest = module.split(".")
    return rest[0] if rest else "__init__"


def module_of(path: Path) -> str:
    parts = ("logitless", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


def file_of(module: str) -> str:
    return MODULES[module].relative_to(PACKAGE).as_posix()


def targets_of(node: ast.Import | ast.ImportFrom, module: str) -> list[str]:
    """The modules of the package that a statement imports, or imports names of."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in MODULES]
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
    name = ".".join(filter(None, [*above, node.module]))
    named = [f"{name}.{alias.name}" for alias in node.names]
    return sorted({n if n in MODULES else name for n in named if n in MODULES or name in MODULES})


def imports_of(module: str) -> list[Import]:
    found = []

    def walk(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if for_types and module == "logitless":
                continue  # logitless.store is imported at first use
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                targets = targets_of(child, module)
                found.extend(Import(file_of(module), module, t, inside) for t in targets)
            walk(child, inside or isinstance(child, ast.FunctionDef))

    walk(trees()[module], False)
    return found


@functools.cache
def imports() -> list[Import]:
    return [one for module in MODULES for one in imports_of(module)]


def test_imports_are_seen():
    assert {room for one in imports() for room in one.rooms} == FLOOR.keys()


def test_every_import_goes_to_a_lower_floor():
    up = {
        (one.file, one.rooms[1])
        for one in imports()
        if one.rooms[0] != one.rooms[1] and FLOOR[one.rooms[0]] <= FLOOR[one.rooms[1]]
    }
    assert up == set()


def test_imports_inside_functions_have_a_reason():
    inside = {
        (one.file, one.rooms[1]) for one in imports() if one.inside and len(set(one.rooms)) > 1
    }
    assert inside == INSIDE_FUNCTIONS.keys()


def test_no_file_imports_itself_through_others():
    imported: dict[str, set[str]] = {module: set() for module in MODULES}
    for one in imports():
        imported[one.module].add(one.target)

    def reached(module: str) -> set[str]:
        found, left = set(), set(imported[module])
        while left:
            found |= left
            left = set().union(*(imported[m] for m in left)) - found
        return found

    assert {file_of(m) for m in MODULES if m in reached(m)} == set()


def test_inner_rooms_export_nothing():
    for room in INNER:
        body = trees()[f"logitless.{room}"].body
        assert [type(node) for node in body] == [ast.Expr], f"{room}/__init__.py is a docstring"
        assert ast.get_docstring(trees()[f"logitless.{room}"])


def test_examples_import_nothing_of_the_command():
    text = {path.name: path.read_text() for path in (ROOT / "examples").rglob("*.py")}
    assert {name for name, source in text.items() if "logitless.cli" in source} == set()


# --- what kind of logits something is

KINDS = {
    "LinearLogits", "VocabShard", "LazyLogits", "DTensor", "Logits", "Source", "Head", "Shard",
}  # fmt: skip
TRAITS = {  # attributes that one kind of logits has
    "evaluate", "evaluate_in_place", "capture", "as_teacher", "materialize", "placements",
    "recipe", "hidden", "ranks",
}  # fmt: skip


def names_in(node: ast.AST) -> set[str]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def asks_for_a_kind(node: ast.AST) -> bool:
    """hasattr(x, "placements"), getattr(x, "recipe", None), isinstance or type against a kind."""
    if isinstance(node, ast.Compare):
        names = names_in(node)
        return bool(names & {"type", "__class__"}) and bool(names & KINDS)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id == "isinstance":
        return bool(names_in(node) & KINDS)
    asked = node.args[1:2]
    question = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
    return question and isinstance(asked[0], ast.Constant) and asked[0].value in TRAITS


def test_the_kind_of_logits_is_asked_in_one_place():
    asking = {
        file_of(m) for m, tree in trees().items() if any(map(asks_for_a_kind, ast.walk(tree)))
    }
    assert asking - {"core/source.py"} == BOUNDARY.keys()


# --- the tests themselves


def test_no_test_imports_another():
    """What tests share is in tests/support and tests/differential."""
    imported = re.compile(r"^\s*(?:from|import) .*\btest_\w+", re.MULTILINE)
    found = [line for path in TESTS.rglob("*.py") for line in imported.findall(path.read_text())]
    assert found == []


def test_tests_stand_in_rooms():
    """A room of the package, or the kinds of tests that belong to none."""
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    others = {"benchmarks", "clients", "differential", "docs", "gpu", "support", "trainers"}
    assert {f for f in folders if not f.endswith(".py")} <= {*FLOOR} | others
    assert {f for f in folders if f.endswith(".py")} == {
        "test_architecture.py", "test_contract.py", "test_init.py", "test_nn.py",
    }  # fmt: skip
