"""A plan as text for the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_tpu.planner.figures import Plan

NOT_MEASURED = "Times are the TPU compiler's cost model and published bandwidths; nothing ran and nothing was measured."
MOST_PROGRAMS = 12


def show(plan: Plan, console: Console) -> None:
    color = "green" if plan.fits else "red"
    console.print(f"[bold]One device of {plan.target}[/] ({plan.device}): [{color}]{escape(plan.verdict)}[/]")
    ended = f"; the script was ended {plan.ended}" if plan.ended else ""
    console.print(f"The last of {plan.steps} × {plan.step}{escape(ended)}. {NOT_MEASURED}\n")
    for table in (_summary(plan), _memory(plan), _held(plan), _programs(plan), _operations(plan)):
        if table.row_count:
            console.print(table)
            console.print()
    for sentence in plan.advice:
        console.print(f"• {escape(sentence)}")


def _summary(plan: Plan) -> Table:
    table = Table("step", "", box=None, pad_edge=False)
    table.add_row(
        "predicted time", f"{duration(plan.seconds)} (the compiler's own total: {duration(plan.compiler_seconds)})"
    )
    table.add_row("FLOPs", f"{plan.flops / 1e12:,.4g} TFLOP, {plan.utilisation:.1%} of the bfloat16 peak")
    table.add_row("bytes", f"{size(plan.bytes)} from and to HBM")
    table.add_row("bound by", plan.bound)
    if plan.tokens:
        table.add_row("tokens", f"{plan.tokens:,} a step, {plan.tokens_per_second:,.0f} a second")
    if plan.samples:
        table.add_row("samples", f"{plan.samples:,} a step, {plan.samples_per_second:,.1f} a second")
    table.add_row("programs", f"{sum(p.runs for p in plan.programs):,} runs of {len(plan.programs)} programs")
    table.add_row("compiling", f"{duration(plan.compile_seconds)} of compiler time, all programs together")
    return table


def _memory(plan: Plan) -> Table:
    table = Table("HBM at the peak", "", "", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for name, nbytes in plan.memory.parts.items():
        if nbytes:
            table.add_row(name, size(nbytes), f"{nbytes / max(plan.memory.peak, 1):.0%}")
    table.add_row("[bold]together[/]", f"[bold]{size(plan.memory.peak)}[/]", f"of {size(plan.memory.limit)}")
    return table


def _held(plan: Plan) -> Table:
    table = Table("largest values", "count", "bytes", "made at", box=None, pad_edge=False)
    for held in plan.memory.held[:10]:
        table.add_row(
            escape(f"{held.role}: {held.dtype}{list(held.shape)}"), f"{held.count:,}", size(held.bytes), line(held.line)
        )
    return table


def _programs(plan: Plan) -> Table:
    names = ("program (costliest line)", "runs", "each", "TFLOP", "HBM bytes", "bound by", "temporaries")
    table = Table(*names, box=None, pad_edge=False)
    for p in plan.programs[:MOST_PROGRAMS]:
        if p.refused:
            table.add_row(line(p.name), f"{p.runs:,}", "[red]refused[/]", "", "", "", escape(p.refused[:120]))
        else:
            table.add_row(
                *(line(p.name), f"{p.runs:,}", duration(p.seconds), f"{p.flops / 1e12:,.3g}", size(p.bytes)),
                *(p.bound, size(p.temporary_bytes)),
            )
    return table


def _operations(plan: Plan) -> Table:
    table = Table("costliest operations", "what", "time", "of the step", "HBM bytes", "where", box=None, pad_edge=False)
    for o in plan.operations:
        table.add_row(
            *(escape(o.operator or o.kind), o.kind, duration(o.seconds), f"{o.share:.1%}", size(o.bytes), line(o.line))
        )
    return table


def line(place: str) -> str:
    """`file:line` with the last two parts of the path."""
    name, _, number = place.rpartition(":")
    return escape(f"{'/'.join(Path(name).parts[-2:])}:{number}") if name else escape(place)


def size(nbytes: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes:,.0f} B"


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:,.2f} {unit}"
    return f"{seconds * 1e6:,.1f} µs"
