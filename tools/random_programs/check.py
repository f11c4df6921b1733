"""Checks the programs of some seeds: what a test, or a process of the command, does."""

from __future__ import annotations

from collections.abc import Iterable

from tools.random_programs.generate import generate
from tools.random_programs.results import Result, generator_digest
from tools.random_programs.run import report, run
from tools.random_programs.shrink import shrink


def check(seed: int, mode: str = "strict") -> str | None:
    """The report on the shrunk program of a seed, if it fails."""
    steps = generate(seed).steps
    failure = run(steps, mode)
    if failure is None:
        return None
    return report(*shrink(steps, failure, lambda shorter: run(shorter, mode)))


def check_all(seeds: Iterable[int], mode: str) -> list[Result]:
    """The results of several programs, in a process of its own."""
    import torch

    from torch_tpu import hooks

    torch.set_num_threads(1)
    generator = generator_digest()
    results = [Result(seed, mode, generator, check(seed, mode)) for seed in seeds]
    # Thousands of programs fill the memory.
    hooks.forget_programs()
    return results
