"""The page docs/operators.md: how the device answers each ATen overload. Written from a fresh look, and read back."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping

import torch

from tools.operators.reach import Answer, Kind

COMMAND = "python -m tools.operators --output docs/operators.md"
_KINDS = {kind.title: kind for kind in Kind}
_LINE = re.compile(r"- `(\S+)`: (.+)")


def page(answers: Mapping[str, Answer]) -> str:
    """The page, in Markdown."""
    parts = [_head(answers), _fallbacks(answers), _impossible(answers), _table(answers)]
    return "\n\n".join(parts) + "\n"


def read(text: str) -> dict[str, Kind]:
    """What a page says of each overload."""
    found = {}
    for name, rest in (match.groups() for match in map(_LINE.fullmatch, text.splitlines()) if match):
        for group in rest.split("; "):
            title, _, overloads = group.removesuffix(")").partition(" (")
            for overload in overloads.split(", "):
                found[name if overload == "default" else f"{name}.{overload}"] = _KINDS[title]
    return found


def totals(kinds: Mapping[str, Kind]) -> dict[Kind, int]:
    counted = Counter(kinds.values())
    return {kind: counted[kind] for kind in Kind}


def _head(answers: Mapping[str, Answer]) -> str:
    counted = totals({name: answer.kind for name, answer in answers.items()})
    everything = len(answers)
    answered = sum(count for kind, count in counted.items() if kind.is_answered)
    lines = [
        "# Operators",
        "",
        f"Made by `{COMMAND}` (or `make operators`); don't edit it. `tests/test_operators_doc.py` finds a stale one.",
        "",
        f"How the device answers the {everything:,} overloads under `aten::` that the dispatcher of PyTorch "
        f"{torch.__version__.partition('+')[0]} knows: {answered:,} of them ({answered / everything:.1%}) by itself. "
        "(What TorchScript has besides under that name works on Python's numbers, lists and strings.) The classes come "
        "from the functions that choose kernels at run time. Of what is made of other operators, a small call is "
        "traced, and counted as answered if all of these are. Whether the results are right, and in which dtypes, "
        "`make conformance` says.",
        "",
        "| answered by | overloads | share | that is |",
        "|---|---:|---:|---|",
        *(f"| {k.title} | {n:,} | {n / everything:.1%} | {k.meaning} |" for k, n in counted.items()),
    ]
    return "\n".join(lines)


def _fallbacks(answers: Mapping[str, Answer]) -> str:
    return _by_reason("On the CPU", answers, Kind.FALLBACK)


def _impossible(answers: Mapping[str, Answer]) -> str:
    return _by_reason("Not possible", answers, Kind.NOT_POSSIBLE)


def _by_reason(title: str, answers: Mapping[str, Answer], kind: Kind) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, answer in answers.items():
        if answer.kind is kind:
            by_reason[answer.reason].append(name)
    lines = [f"## {title}", "", "| reason | overloads | which |", "|---|---:|---|"]
    for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {reason} | {len(names)} | {' '.join(f'`{n}`' for n in sorted(names))} |")
    return "\n".join(lines)


def _table(answers: Mapping[str, Answer]) -> str:
    by_name: dict[str, dict[Kind, list[str]]] = defaultdict(lambda: defaultdict(list))
    for full, answer in answers.items():
        name, _, overload = full.partition(".")
        by_name[name][answer.kind].append(overload or "default")
    lines = ["## Every operator", "", "Behind each class the overloads it answers.", ""]
    for name in sorted(by_name):
        groups = (f"{k.title} ({', '.join(sorted(by_name[name][k]))})" for k in Kind if k in by_name[name])
        lines.append(f"- `{name}`: {'; '.join(groups)}")
    return "\n".join(lines)
