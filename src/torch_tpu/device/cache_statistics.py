"""How often a call found its program, under the names that `torch.tpu` has for it in TorchTPU. `metrics` knows more."""

from __future__ import annotations

import sys

from torch_tpu import metrics


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
    # Asked of `sys.modules`: a process that never used the device has no programs, and stays without jaxlib.
    execute = sys.modules.get("torch_tpu.eager.program.launch")
    if execute is not None:
        execute.clear_plans()


FUNCTIONS = (_get_cache_hits, _get_cache_misses, _get_cache_requests, _get_cache_stats, _clear_cache)
