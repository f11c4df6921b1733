"""The pages say what is so: links resolve, examples run, variables, commands and messages are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer

import torch_tpu
from torch_tpu import cli

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(Path(torch_tpu.__file__).parent.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
USER_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "user").glob("*.md"))]
VARIABLES = ROOT / "docs" / "user" / "environment-variables.md"
TROUBLE = ROOT / "docs" / "user" / "troubleshooting.md"


def ids(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in set(re.findall(r"\]\(([^)\s]+)\)", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    """From the index of the pages one reaches each of them."""
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve() for link in re.findall(r"\]\((\S+?)\)", index.read_text())
    }
    pages = {page for page in PAGES if page.parent != ROOT and page != index}
    assert {str(page.relative_to(ROOT)) for page in pages - linked} == set()


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60


# --- examples ----------------------------------------------------------------------------------------------------


def examples() -> Iterator[tuple[Path, int, str]]:
    for page in USER_PAGES:
        text = page.read_text()
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield page, text[: found.start()].count("\n") + 1, found[1]


EXAMPLES = list(examples())


@pytest.mark.parametrize(
    ("page", "line", "code"), EXAMPLES, ids=[f"{page.relative_to(ROOT)}:{line}" for page, line, _ in EXAMPLES]
)
def test_examples_run(page: Path, line: int, code: str) -> None:
    before = torch.tpu.eager_mode
    try:
        # The empty lines give errors the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), {"__name__": "__main__"})
    finally:
        torch.tpu.eager_mode = before


def test_there_are_examples() -> None:
    assert {page.name for page, *_ in EXAMPLES} >= {"README.md", "getting-started.md", "eager-modes.md", "compile.md"}


# --- names -------------------------------------------------------------------------------------------------------


def variables(text: str) -> set[str]:
    return set(re.findall(r"\bTORCH_TPU_[A-Z_]*[A-Z]\b", text))


def test_every_environment_variable_has_its_row() -> None:
    read = variables("\n".join(source.read_text() for source in SOURCES))
    rows = {
        row for row in re.findall(r"^\| `(\w+)`", VARIABLES.read_text(), re.MULTILINE) if row.startswith("TORCH_TPU")
    }
    assert rows == read


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_pages_name_what_there_is(page: Path) -> None:
    text = page.read_text()
    if page.name == "CHANGELOG.md":
        return  # of versions that are gone, too
    rows = variables(VARIABLES.read_text())
    assert variables(text) - rows == set()
    group = typer.main.get_command(cli.app)
    commands = set(group.commands)
    assert set(re.findall(r"`torch-tpu ([a-z]+)", text)) - commands == set()
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z][\w-]*)", text)) - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_pages_name_files_that_exist(page: Path) -> None:
    if page.name == "renames.md":
        return  # it has old names
    named = re.findall(r"(?<![\w/])((?:[\w.-]+/)+[\w-]+\.(?:py|md|txt|toml))\b", page.read_text())
    packages = (ROOT, Path(torch_tpu.__file__).parent, page.parent)
    assert {file for file in named if not any((folder / file).exists() for folder in packages)} == set()


def texts() -> list[str]:
    """Every string of the sources, with … for what is put into it."""
    found = []
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_of_the_page_are_those_of_the_code() -> None:
    table = TROUBLE.read_text().partition("## Messages")[2].partition("##")[0]
    messages = [
        message
        for row in re.findall(r"^\| (`.+?) \| ", table, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", row)
    ]
    assert len(messages) > 20
    known = texts()
    missing = []
    for message in messages:
        parts = [
            p.strip()
            for p in re.split(r"…|=|'|(?:at )?FILE:LINE|OPERATOR|tpu:1|torch\.sparse_coo|TORCH_TPU_\w+", message)
        ]
        for part in (p for p in parts if len(p) > 9):
            if not any(part in text for text in known):
                missing.append(part)
    assert missing == []
