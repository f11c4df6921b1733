"""Counts of what the backend did: programs made and run, cache hits, operators that fell back to the CPU.

Names: `program` (a new one was traced), `compile` (XLA compiled it) or `disk_cache_hit` (it was on disk),
`compile_seconds`, `compile_cache_hit` (this process had it), `disk_cache_read_error`, `disk_cache_write_error`,
`execute`, `graph_by_operator` (a compiled graph that no program can express ran), `fallback::<operator>`,
`host_to_device_bytes`, `device_to_host_bytes`; in fused mode `fused_program` and `flush::<cause>`.
"""

from __future__ import annotations

from collections import Counter

_counters: Counter[str] = Counter()
_seconds: dict[str, float] = {"compile_seconds": 0.0}


def count(name: str, amount: int = 1) -> None:
    _counters[name] += amount


def add_seconds(name: str, seconds: float) -> None:
    _seconds[name] = _seconds.get(name, 0.0) + seconds


def counters() -> dict[str, int | float]:
    """Every counter that is not zero; `*_seconds` are wall time."""
    return {**{k: v for k, v in _counters.items() if v}, **{k: v for k, v in _seconds.items() if v}}


def reset() -> None:
    _counters.clear()
    for name in _seconds:
        _seconds[name] = 0.0


def report() -> str:
    """The counters as text, fallbacks last and most frequent first."""
    lines = ["torch_tpu metrics"]
    ordinary = sorted((k, v) for k, v in counters().items() if not k.startswith("fallback::"))
    fallbacks = Counter({k: v for k, v in _counters.items() if k.startswith("fallback::") and v})
    for name, value in ordinary:
        lines.append(f"  {name:<28} {value:.3f}" if isinstance(value, float) else f"  {name:<28} {value:,}")
    lines.append(f"  {'operators on the CPU':<28} {len(fallbacks)}")
    for name, value in fallbacks.most_common():
        lines.append(f"    {name.removeprefix('fallback::'):<40} {value:,}")
    return "\n".join(lines)
