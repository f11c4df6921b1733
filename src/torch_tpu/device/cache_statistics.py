"""Statistics of the program cache, under TorchTPU's names in `torch.tpu`. `torch_tpu.metrics` has more."""

from __future__ import annotations

from torch_tpu import hooks, metrics


def _get_cache_hits() -> int:
    """Calls whose program this process had."""
    return int(metrics.counters().get("compile_cache_hit", 0))


def _get_cache_misses() -> int:
    """Calls for which a program was made, or read from disk."""
    return int(metrics.counters().get("program", 0))


def _get_cache_requests() -> int:
    return _get_cache_hits() + _get_cache_misses()


def _get_cache_stats() -> dict[str, int]:
    return {"requests": _get_cache_requests(), "hits": _get_cache_hits(), "misses": _get_cache_misses()}


def _clear_cache() -> None:
    """Forgets the programs of this process, not those on disk (`torch-tpu cache clear`)."""
    hooks.forget_programs()


FUNCTIONS = (_get_cache_hits, _get_cache_misses, _get_cache_requests, _get_cache_stats, _clear_cache)
