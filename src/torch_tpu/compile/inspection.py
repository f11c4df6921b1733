"""`torch_tpu.compile.debug`: what `torch.compile` makes of a call, as FX graph, StableHLO and optimised HLO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.syntax import Syntax
from rich.table import Table
from torch._functorch import config as functorch_config
from torch.utils._pytree import tree_leaves

from torch_tpu import hooks
from torch_tpu.compile import backend
from torch_tpu.compile.program import graph_program
from torch_tpu.eager.program.plan import Plan
from torch_tpu.eager.program.plan_table import Unsupported
from torch_tpu.runtime.analysis import Analysis


@dataclass(frozen=True)
class Program:
    """One program of a compiled function.

    Attributes:
        name: as in `metrics.report()`: such as "graph 0 of forward, backward".
        fx: the graph of ATen operators, as Python.
        stablehlo: what it was lowered to.
        hlo: what XLA made of that.
        analysis: bytes of memory, operations and the compiler's other estimates (`runtime.analysis.Analysis`).
        reason: why it has no program and runs operator by operator; then the fields above but `fx` are empty.
    """

    name: str
    fx: str
    stablehlo: str = ""
    hlo: str = ""
    analysis: Analysis | None = None
    reason: str = ""

    def summary(self) -> str:
        a = self.analysis
        if a is None:
            return f"runs operator by operator: {self.reason}"
        cost = f"{a.flops:,.0f} flops, {a.bytes_accessed:,.0f} bytes accessed"
        return (
            f"{a.argument_bytes:,} bytes of arguments, {a.output_bytes:,} of results ({a.alias_bytes:,} of them in the "
            f"memory of arguments), {a.temporary_bytes:,} temporary; "
            f"{'the plug-in reports no cost' if math.isnan(a.flops) else cost}"
        )


@dataclass(frozen=True)
class Inspection:
    """The programs of a call in the order in which they were made: `str` shows them one by one, rich side by side.

    Attributes:
        result: what the call returned.
    """

    programs: tuple[Program, ...]
    result: Any

    @property
    def fx(self) -> str:
        return self._joined("fx")

    @property
    def stablehlo(self) -> str:
        return self._joined("stablehlo")

    @property
    def hlo(self) -> str:
        return self._joined("hlo")

    @property
    def memory(self) -> dict[str, int]:
        """Bytes over all programs: argument, output, alias and temporary; the temporary ones of the greediest."""
        found = [p.analysis for p in self.programs if p.analysis is not None]
        return {
            "argument": sum(a.argument_bytes for a in found),
            "output": sum(a.output_bytes for a in found),
            "alias": sum(a.alias_bytes for a in found),
            "temporary": max((a.temporary_bytes for a in found), default=0),
        }

    @property
    def cost(self) -> dict[str, float]:
        """Floating-point operations and bytes accessed of all programs, as XLA counts them (NaN: it does not say)."""
        found = [p.analysis for p in self.programs if p.analysis is not None]
        return {"flops": sum(a.flops for a in found), "bytes accessed": sum(a.bytes_accessed for a in found)}

    def _joined(self, field: str) -> str:
        if len(self.programs) == 1:
            text: str = getattr(self.programs[0], field)
            return text
        return "\n\n".join(f"# {p.name}\n{getattr(p, field)}" for p in self.programs)

    def __str__(self) -> str:
        parts = []
        for p in self.programs:
            parts.append(f"=== {p.name}: {p.summary()}")
            parts += [f"--- {title}\n{text}" for title, text in _columns(p) if text]
        return "\n".join(parts)

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for p in self.programs:
            table = Table(title=f"{p.name}: {p.summary()}", expand=True)
            for title, _ in _columns(p):
                table.add_column(title, ratio=1, overflow="fold")
            lexers = ("python", "text", "text")
            table.add_row(
                *(
                    Syntax(text, lexer, word_wrap=True, background_color="default")
                    for (_, text), lexer in zip(_columns(p), lexers, strict=True)
                )
            )
            yield table


def _columns(program: Program) -> list[tuple[str, str]]:
    return [("FX", program.fx), ("StableHLO", program.stablehlo), ("optimised HLO", program.hlo)]


def inspect(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Inspection:
    """Compiles `fn` again and really calls it once: tensors that it writes are changed.

    Where results have gradients, the backward program is made too; no `.grad` is touched.

    Args:
        fn: a function or module. `args` and `kwargs` hold at least one tensor on the device, unless `fn` does.

    Raises:
        Exception: what the call raises.
    """
    programs: list[Program] = []

    def record(program: graph_program.GraphProgram, plan: Plan | Unsupported) -> None:
        programs.append(_describe(program, plan))

    # Code of its own, so that Dynamo finds nothing compiled for it and counts no recompilation; and not of a file of
    # this package, which Dynamo leaves alone.
    scope: dict[str, Any] = {"__name__": "debug", "fn": fn}
    exec(compile("def debug(*args, **kwargs):\n    return fn(*args, **kwargs)", "debug", "exec"), scope)
    before, hooks.graph_program_made = hooks.graph_program_made, record
    try:
        # An entry of AOTAutograd's cache has no lines of the script.
        with functorch_config.patch(enable_autograd_cache=False):
            result = torch.compile(scope["debug"], backend=backend.compile_graph)(*args, **kwargs)
            _make_backward(result, [fn, args, kwargs])
    finally:
        hooks.graph_program_made = before
    return Inspection(tuple(programs), result)


def _make_backward(result: Any, given: list[Any]) -> None:
    roots = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    modules = [m for m in tree_leaves(given) if isinstance(m, torch.nn.Module)]
    leaves = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)] + [
        p for m in modules for p in m.parameters()
    ]
    leaves = [t for t in leaves if t.requires_grad]
    if roots and leaves:
        seeds = [torch.ones_like(t) for t in roots]
        torch.autograd.grad(roots, leaves, seeds, retain_graph=True, allow_unused=True)


def _describe(program: graph_program.GraphProgram, plan: Plan | Unsupported) -> Program:
    fx = program.graph.print_readable(print_output=False)
    if isinstance(plan, Unsupported):
        return Program(program.title, fx, reason=plan.reason)
    analysis = plan.compiled().analysis()
    return Program(program.title, fx, str(plan.module), analysis.hlo, analysis)
