"""A plan as one self-contained HTML page, with pictures of the memory over the step and of the roofline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from torch_tpu.planner.figures import Plan
from torch_tpu.planner.terminal import NOT_MEASURED, duration, size

_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#9c6b4e")
_WIDTH, _HEIGHT, _LEFT, _TOP = 860, 300, 84, 20
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1b1e23; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } th { color: #667; font-weight: 500; }
.fits { color: #17803d; } .over { color: #b3261e; } .note { color: #667; } svg { width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: #445; }
"""


def page(plan: Plan, command: str) -> str:
    """The page.

    Args:
        command: what was planned, in the user's words.
    """
    title = f"{escape(command)} on one device of {escape(plan.target)}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1><p class={'fits' if plan.fits else 'over'}><b>{escape(plan.verdict)}</b></p>",
        f"<p class=note>{escape(plan.device)}. The last of {plan.steps} × {escape(plan.step)}. {NOT_MEASURED}</p>",
        _table(("step", ""), _summary(plan)),
        "<h2>Advice</h2><ul>",
        *(f"<li>{escape(a)}</li>" for a in plan.advice),
        "</ul>" if plan.advice else "<li>None.</li></ul>",
        "<h2>Memory over the step</h2>",
        _memory_picture(plan),
        _table(("at the peak", "bytes", "share"), _parts(plan)),
        _table(("values at the peak", "count", "bytes", "made at"), _held(plan)),
        "<h2>Roofline</h2>",
        _roofline(plan),
        "<h2>Programs</h2>",
        _table(("costliest line", "runs", "each", "TFLOP", "HBM", "bound by", "temporaries"), _programs(plan)),
        "<h2>Costliest operations</h2>",
        _table(("operator", "kind", "time", "share", "HBM", "line"), _operations(plan)),
    ]
    return "\n".join(parts)


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join(
        "<tr>" + "".join(f"<td{' class=n' if 0 < k < len(row) - 1 else ''}>{escape(c)}</td>" for k, c in enumerate(row))
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _summary(plan: Plan) -> Iterator[Sequence[str]]:
    yield "predicted time", f"{duration(plan.seconds)} (the compiler's own total: {duration(plan.compiler_seconds)})"
    yield "FLOPs", f"{plan.flops / 1e12:,.4g} TFLOP, {plan.utilisation:.1%} of the bfloat16 peak"
    yield "HBM traffic", size(plan.bytes)
    yield "bound by", plan.bound
    if plan.tokens:
        yield "tokens", f"{plan.tokens:,} a step, {plan.tokens_per_second:,.0f} a second"
    if plan.samples:
        yield "samples", f"{plan.samples:,} a step, {plan.samples_per_second:,.1f} a second"


def _parts(plan: Plan) -> Iterator[Sequence[str]]:
    for name, nbytes in plan.memory.parts.items():
        yield name, size(nbytes), f"{nbytes / max(plan.memory.peak, 1):.0%}"
    yield "together", size(plan.memory.peak), f"of {size(plan.memory.limit)}"


def _held(plan: Plan) -> Iterator[Sequence[str]]:
    for held in plan.memory.held:
        yield f"{held.role}: {held.dtype}{list(held.shape)}", f"{held.count:,}", size(held.bytes), held.line


def _programs(plan: Plan) -> Iterator[Sequence[str]]:
    for p in plan.programs:
        figures = (duration(p.seconds), f"{p.flops / 1e12:,.3g}", size(p.bytes), p.bound, size(p.temporary_bytes))
        yield p.name, f"{p.runs:,}", *((p.refused, "", "", "", "") if p.refused else figures)


def _operations(plan: Plan) -> Iterator[Sequence[str]]:
    for o in plan.operations:
        yield o.operator or o.kind, o.kind, duration(o.seconds), f"{o.share:.1%}", size(o.bytes), o.line


# --- pictures ----------------------------------------------------------------------------------------------------


def _memory_picture(plan: Plan) -> str:
    """Stacked bytes by role for each program of the step, and the limit."""
    steps = plan.memory.over_step
    if not steps:
        return ""
    top = max(plan.memory.limit, plan.memory.peak) * 1.05
    wide = (_WIDTH - _LEFT - 10) / len(steps)

    def y(nbytes: float) -> float:
        return _TOP + _HEIGHT * (1 - nbytes / top)

    names = [n for n in steps[0] if any(s[n] for s in steps)]
    shapes = []
    below = [0.0] * len(steps)
    for name, color in zip(names, _COLORS, strict=False):
        above = [b + max(s[name], 0) for b, s in zip(below, steps, strict=True)]
        points = [(_LEFT + (k + side) * wide, y(v)) for k, v in enumerate(above) for side in (0, 1)]
        points += [(_LEFT + (k + side) * wide, y(below[k])) for k in reversed(range(len(steps))) for side in (1, 0)]
        shapes.append(f"<polygon fill='{color}' points='{_points(points)}'><title>{name}</title></polygon>")
        below = above
    limit = y(plan.memory.limit)
    shapes.append(
        f"<line x1={_LEFT} x2={_WIDTH - 10} y1={limit:.1f} y2={limit:.1f} stroke='#b3261e' stroke-dasharray='5 4'/>"
        f"<text x={_LEFT + 4} y={limit - 4:.1f}>limit {size(plan.memory.limit)}</text>"
    )
    marks = [top * k / 4 for k in range(5)]
    shapes += [f"<text x={_LEFT - 6} y={y(m) + 4:.1f} text-anchor=end>{size(m)}</text>" for m in marks]
    shapes.append(f"<text x={_LEFT} y={_TOP + _HEIGHT + 18}>programs of the step, in order ({len(steps):,})</text>")
    return _svg(shapes, list(zip(names, _COLORS, strict=False)))


def _roofline(plan: Plan) -> str:
    """FLOP/s that each program is predicted to reach over its FLOPs per byte, under what the device allows."""
    shown = [p for p in plan.programs if p.flops and p.bytes and p.seconds]
    if not shown:
        return "<p>No program has floating-point operations.</p>"
    ridge = plan.peak_flops / plan.bandwidth
    xs = [p.flops / p.bytes for p in shown]
    low, high = min(*xs, ridge) / 4, max(*xs, ridge) * 4
    floor = min(min(p.flops / p.seconds for p in shown), low * plan.bandwidth) / 2
    ceiling = plan.peak_flops * 2

    def x(v: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 10) * math.log(v / low) / math.log(high / low)

    def y(v: float) -> float:
        return _TOP + _HEIGHT * (1 - math.log(v / floor) / math.log(ceiling / floor))

    roof = [(x(low), y(low * plan.bandwidth)), (x(ridge), y(plan.peak_flops)), (x(high), y(plan.peak_flops))]
    shapes = [f"<polyline fill=none stroke='#445' stroke-width=2 points='{_points(roof)}'/>"]
    shapes.append(
        f"<text x={x(ridge) + 4:.1f} y={y(plan.peak_flops) - 6:.1f}>{plan.peak_flops / 1e12:,.0f} TFLOP/s</text>"
    )
    longest = max(p.seconds * p.runs for p in shown)
    for p in shown:
        radius = 3 + 9 * math.sqrt(p.seconds * p.runs / longest)
        tip = f"{p.runs} × {duration(p.seconds)}, {escape(p.name)}"
        shapes.append(
            f"<circle cx={x(p.flops / p.bytes):.1f} cy={y(p.flops / p.seconds):.1f} r={radius:.1f} fill='#4269d0' "
            f"fill-opacity=.6><title>{tip}</title></circle>"
        )
    for k in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        shapes.append(f"<text x={x(10**k):.1f} y={_TOP + _HEIGHT + 16} text-anchor=middle>{10**k:g}</text>")
    for k in range(math.ceil(math.log10(floor)), math.floor(math.log10(ceiling)) + 1):
        rate = f"{10 ** (k - 12):g} TFLOP/s" if k >= 12 else f"{10 ** (k - 9):g} GFLOP/s"
        shapes.append(f"<text x={_LEFT - 6} y={y(10**k) + 4:.1f} text-anchor=end>{rate}</text>")
    shapes.append(f"<text x={_WIDTH - 10} y={_TOP + _HEIGHT + 32} text-anchor=end>FLOP per byte of HBM traffic</text>")
    return _svg(shapes, [])


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


def _svg(shapes: Sequence[str], legend: Sequence[tuple[str, str]]) -> str:
    entries = [
        f"<rect x={_LEFT + k * 112} y={_TOP + _HEIGHT + 28} width=10 height=10 fill='{color}'/>"
        f"<text x={_LEFT + 14 + k * 112} y={_TOP + _HEIGHT + 37}>{name}</text>"
        for k, (name, color) in enumerate(legend)
    ]
    return f"<svg viewBox='0 0 {_WIDTH} {_TOP + _HEIGHT + 48}'>{''.join([*shapes, *entries])}</svg>"
