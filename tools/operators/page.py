"""The page docs/operators.md: how the device answers each ATen overload, and in which file. It can be read back."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping

import torch
from torch._ops import OpOverload

from tools.operators.reach import Answer, Kind, overload
from torch_tpu.device import autograd_kernels, nested, pinned, sdpa
from torch_tpu.eager.kernel_table import HANDWRITTEN
from torch_tpu.eager.kernels import recurrent_layers
from torch_tpu.ops.core import derived, registry
from torch_tpu.ops.core.schema import signature

COMMAND = "python -m tools.operators --output docs/operators.md"
_KINDS = {kind.title: kind for kind in Kind}
_LINE = re.compile(r"- `(\S+)`: ([^\[]+?)(?: — (\[.+))?")
# Kernels that stand in none of the tables of kernels: they are registered for dispatch keys besides the device's.
_REGISTERED_DIRECTLY = {
    **dict.fromkeys(("_efficientzerotensor", "_has_compatible_shallow_copy_type"), autograd_kernels),
    **dict.fromkeys(("_fused_sdp_choice", "scaled_dot_product_attention"), sdpa),
    **dict.fromkeys(("_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned"), nested),
    **dict.fromkeys(("is_pinned", "_pin_memory"), pinned),
    **dict.fromkeys(("lstm", "gru", "rnn_relu", "rnn_tanh"), recurrent_layers),
}
_FILE = re.compile(r"\[(\S+)\]\(\.\./src/torch_tpu/\1\)")


def page(answers: Mapping[str, Answer]) -> str:
    """The page, in Markdown."""
    parts = [_head(answers), _fallbacks(answers), _impossible(answers), _table(answers)]
    return "\n\n".join(parts) + "\n"


def read(text: str) -> dict[str, Kind]:
    """What a page says of each overload."""
    found = {}
    for name, rest, _ in (match.groups() for match in map(_LINE.fullmatch, text.splitlines()) if match):
        for group in rest.split("; "):
            title, _, overloads = group.removesuffix(")").partition(" (")
            for short in overloads.split(", "):
                found[name if short == "default" else f"{name}.{short}"] = _KINDS[title]
    return found


def read_files(text: str) -> dict[str, list[str]]:
    """The files that a page names for each operator, below the package's folder."""
    rows = (match.groups() for match in map(_LINE.fullmatch, text.splitlines()) if match)
    return {name: _FILE.findall(links) for name, _, links in rows if links}


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
        "(TorchScript has further operators under that name, on Python's numbers, lists and strings.) The classes come "
        "from the functions that choose kernels at run time. An operator that calls others counts as answered if a "
        "small call of it, traced here, reaches only answered ones. `make conformance` compares results with the CPU.",
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
        name, _, short = full.partition(".")
        by_name[name][answer.kind].append(short or "default")
    named = files(answers)
    lines = [
        "## Every operator",
        "",
        "Behind each class the overloads it answers, then the file that answers them.",
        "",
    ]
    for name in sorted(by_name):
        groups = (f"{k.title} ({', '.join(sorted(by_name[name][k]))})" for k in Kind if k in by_name[name])
        links = ", ".join(f"[{file}](../src/torch_tpu/{file})" for file in named.get(name, ()))
        lines.append(f"- `{name}`: {'; '.join(groups)}{f' — {links}' if links else ''}")
    return "\n".join(lines)


def files(answers: Mapping[str, Answer]) -> dict[str, list[str]]:
    """The files that answer each operator, below the package's folder; an operator that is PyTorch's own has none."""
    found: dict[str, set[str]] = defaultdict(set)
    for full, answer in answers.items():
        module = _module(full, overload(full)) if answer.kind.is_answered else None
        if module is not None:
            found[full.partition(".")[0]].add(module.removeprefix("torch_tpu.").replace(".", "/") + ".py")
    return {name: sorted(those) for name, those in found.items()}


def _module(name: str, func: OpOverload) -> str | None:
    """The module that answers an overload: of a derived form, the one that answers the operator it is derived from."""
    if name in HANDWRITTEN:
        return HANDWRITTEN[name].__module__
    if (packet := name.partition(".")[0]) in _REGISTERED_DIRECTLY:
        return _REGISTERED_DIRECTLY[packet].__name__
    own = registry.module_of(func)
    if own is not None:
        return own
    twin = derived.foreach_element(func)
    if twin is None and (signature(func).is_out or signature(func).is_inplace):
        twin = derived.functional(func)
    return None if twin is None else _module(registry.name_of(twin), twin)
