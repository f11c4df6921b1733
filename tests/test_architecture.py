"""The rules of docs/architecture.md that a parser can check: who imports whom, and the form of every source file."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "torch_tpu"
FILES = sorted(SOURCE.rglob("*.py"))

# Package: the project's own packages it may import besides itself, and everything from outside the standard library.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "metrics": (set(), set()),
    "patching": (set(), set()),
    "runtime": (set(), {"numpy", "jaxlib", "filelock", "platformdirs"}),
    "hlo": (set(), {"numpy", "ml_dtypes", "torch", "jaxlib.mlir"}),
    "tensor": ({"hlo", "runtime"}, {"numpy", "torch"}),
    "ops": ({"hlo"}, {"numpy", "torch"}),
    "eager": ({"hlo", "ops", "runtime", "tensor"}, {"numpy", "torch"}),
    "compile": ({"eager", "hlo", "ops", "runtime", "tensor"}, {"functorch", "numpy", "rich", "sympy", "torch"}),
    "device": ({"compile", "eager", "runtime", "tensor"}, {"numpy", "torch"}),
    "distributed": ({"eager", "hlo", "runtime", "tensor"}, {"numpy", "torch"}),
    "planner": ({"eager", "runtime", "tensor"}, {"numpy", "rich", "torch", "typer"}),
}
# Delayed imports, functions that higher layers provide, counts, the registry of patches, progress, bounded tables.
FOR_ALL = {"delayed", "hooks", "metrics", "patching", "progress", "recent"}
LONGEST = 600
MODULE_NAME = re.compile(r"(torch_tpu|jaxlib|jax)(\.\w+)+")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|Users|root|work|mnt)/\w")


def imported_modules(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Every module a file names: in an import, wherever it stands, or as text for importlib.

    Args:
        names: what `from torch_tpu import …` may mean by a package or module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import in line {node.lineno}"
            assert node.module is not None
            if node.module in ("torch_tpu", "jaxlib"):
                yield from (
                    f"{node.module}.{alias.name}"
                    for alias in node.names
                    if node.module == "jaxlib" or alias.name in names
                )
            else:
                yield node.module
        elif isinstance(node, ast.Constant) and MODULE_NAME.fullmatch(str(node.value)):
            yield str(node.value)


def violations(layer: str, source: str) -> list[str]:
    """The modules that a file of a layer names and may not."""
    own, outside = LAYERS[layer]
    names = {p.stem for p in SOURCE.iterdir()}
    found = []
    for module in imported_modules(ast.parse(source), names):
        top, *rest = module.split(".")
        if top == "torch_tpu":
            allowed = not rest or rest[0] in own | FOR_ALL | {layer}
        else:
            allowed = top in sys.stdlib_module_names or any(f"{module}.".startswith(f"{o}.") for o in outside)
        if not allowed:
            found.append(module)
    return found


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


@pytest.mark.parametrize("path", [p for p in FILES if layer_of(p) in LAYERS], ids=name)
def test_imports_point_downwards(path: Path):
    assert violations(layer_of(path), path.read_text()) == []


def test_layers_have_no_cycle():
    order = list(LAYERS)
    for layer, (own, _) in LAYERS.items():
        assert all(order.index(lower) < order.index(layer) for lower in own)


def module_of(path: Path) -> str:
    parts = ("torch_tpu", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, modules: set[str]) -> set[str]:
    """The modules of this project that a file imports, at once or when a function of it is called.

    What only a type checker imports is left out.
    """
    tree = ast.parse(source)
    unread = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in modules else node.module for name in full)
        elif isinstance(node, ast.Constant) and MODULE_NAME.fullmatch(str(node.value)):
            found.add(str(node.value))
    return found & modules


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others."""
    left = {name: set(others) - {name} for name, others in imports.items()}
    while True:
        importers = set().union(*left.values()) if left else set()
        # Who imports nothing that is left, and who is imported by nobody, is in no circle.
        free = {name for name, others in left.items() if not others & left.keys() or name not in importers}
        if not free:
            return [sorted(left)] if left else []
        left = {name: others - free for name, others in left.items() if name not in free}


# Package: its parts, each with the parts that it may import besides itself. "" is what lies beside the folders.
PARTS: dict[str, dict[str, set[str]]] = {
    "ops": {"core": set(), "tracing": {"core"}, "": {"core", "tracing", "math"}, "math": {"core", ""}},
    "eager": {
        "": set(),
        "program": {""},
        "host": {"", "program"},
        "deferred": {"", "program", "host"},
        "dispatch": {"", "program", "host", "deferred"},
        "kernels": {"", "host", "dispatch"},
        "registration": {"", "host", "dispatch", "kernels"},
    },
    "compile": {
        "program": set(),
        "layers": {"program"},
        "buckets": {"program"},
        "frontend": {"program", "layers", "buckets"},
        "": {"program", "layers", "buckets", "frontend"},
    },
}


def part_of(module: str, package: str) -> str | None:
    """The part of a package that a module belongs to; None for the package itself and for modules of others."""
    top, *rest = module.split(".")[1:] or [""]
    return None if top != package or not rest else rest[0] if len(rest) > 1 else ""


@pytest.mark.parametrize("package", PARTS)
def test_parts_of_a_package_import_those_below(package: str):
    parts = PARTS[package]
    folders = {p.parent.name for p in (SOURCE / package).glob("*/__init__.py")}
    assert folders == parts.keys() - {""}
    modules = {module_of(p) for p in FILES}
    wrong = []
    for path in FILES:
        own = part_of(module_of(path), package)
        for module in imports_of(path.read_text(), modules) if own is not None else ():
            other = part_of(module, package)
            if other is not None and module.count(".") > 1 and other != own and other not in parts[own]:
                wrong.append(f"{module_of(path)} imports {module}")
    assert wrong == []


def test_no_two_files_have_one_name():
    """Those of `device/public` are named as PyTorch's are."""
    names = [p.name for p in FILES if not p.name.startswith("__") and "public" not in p.parts]
    assert [n for n in set(names) if names.count(n) > 1] == []


def test_no_two_classes_have_one_name():
    """Those that files keep for themselves apart, and the two kinds of plan (docs/glossary.md)."""
    found = re.findall(r"^class ([A-Z]\w*)", "\n".join(p.read_text() for p in FILES), re.M)
    assert {name for name in found if found.count(name) > 1} == {"Plan"}


def test_the_page_lists_every_package_and_part():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+(?:/\w+)?)/` \|.*\|(.*)\|$", page, re.M))
    assert rows.keys() == {*LAYERS, "demo", *(f"{p}/{part}" for p, parts in PARTS.items() for part in parts if part)}
    for package, (own, _) in LAYERS.items():
        if own:
            assert set(re.findall(r"`(\w+)`", rows[package])) & LAYERS.keys() == own


def test_no_file_imports_itself_through_others():
    modules = {module_of(p) for p in FILES}
    assert circles({module_of(p): imports_of(p.read_text(), modules) for p in FILES}) == []


def test_a_circle_is_found():
    modules = {"torch_tpu.a", "torch_tpu.b", "torch_tpu.c"}
    a = "from torch_tpu import b"
    b = "def f():\n    from torch_tpu.a import g"
    c = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch_tpu import c\nimport torch_tpu.a"
    imports = {f"torch_tpu.{n}": imports_of(s, modules) for n, s in zip("abc", (a, b, c), strict=True)}
    assert circles(imports) == [["torch_tpu.a", "torch_tpu.b"]]


def test_every_package_is_known():
    """A new package has to be given its place."""
    packages = {p.parent.name for p in SOURCE.glob("*/__init__.py")}
    assert packages == {*LAYERS, "demo"}


@pytest.mark.parametrize(
    ("layer", "source", "module"),
    [
        ("ops", "from torch_tpu.eager import copy", "torch_tpu.eager"),
        ("ops", "from torch_tpu import runtime", "torch_tpu.runtime"),
        ("ops", "def f():\n    from jaxlib.mlir import ir", "jaxlib.mlir"),
        ("hlo", "from jaxlib import xla_client", "jaxlib.xla_client"),
        ("runtime", "import torch.nn", "torch.nn"),
        ("runtime", "import jax", "jax"),
        ("tensor", "importlib.import_module('torch_tpu.device.streams')", "torch_tpu.device.streams"),
    ],
)
def test_a_wrong_import_is_found(layer: str, source: str, module: str):
    assert violations(layer, source) == [module]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nobody_imports_jax(path: Path):
    modules = imported_modules(ast.parse(path.read_text()), set())
    assert [m for m in modules if m.split(".")[0] == "jax"] == []


@pytest.mark.parametrize("path", FILES, ids=name)
def test_form(path: Path):
    text = path.read_text()
    statement = next(iter(ast.parse(text).body))
    assert statement.lineno == 1
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring, "the file does not say what it is for"
    assert text.splitlines()[0].strip('"').strip(), "the first line does not say what the file is for"
    assert len(text.splitlines()) <= LONGEST


def test_no_path_of_one_machine():
    """Neither in the source nor in tests and documentation."""
    files = [
        *FILES,
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "tools").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*.*"),
        ROOT / "Makefile",
    ]
    read = {p: p.read_text() for p in files if p.suffix in ("", ".py", ".md", ".toml", ".txt") and p.is_file()}
    assert [str(p) for p, text in read.items() if MACHINE_PATH.search(text)] == []
    assert MACHINE_PATH.search("see " + "/".join(["", "home", "someone", "x.py"]))
