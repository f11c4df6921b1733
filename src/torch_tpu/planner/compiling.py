"""Compiles programs for a topology, a few at a time. What the compiler refuses is an answer too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from torch_tpu.runtime.analysis import Analysis
from torch_tpu.runtime.client import client_errors
from torch_tpu.runtime.topology import AheadOfTimeProgram

WORKERS = 2
# The two ways in which libtpu 0.0.52 says that a program needs more memory than there is.
_USED = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", re.IGNORECASE),
    re.compile(r"memory required[^(]*\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Refusal:
    """A program that the compiler refuses.

    Attributes:
        needs, limit: bytes of HBM, where it needs more than there is; else 0.
    """

    message: str
    needs: int = 0
    limit: int = 0


Answer = Analysis | Refusal


def analyse(
    programs: Iterable[AheadOfTimeProgram], progress: Callable[[int, int], None]
) -> dict[AheadOfTimeProgram, Answer]:
    """The compiler's answer for each program.

    Args:
        progress: called with how many are done and how many there are.
    """
    unique = list(dict.fromkeys(programs))
    progress(0, len(unique))
    answers: dict[AheadOfTimeProgram, Answer] = {}
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = {pool.submit(_answer, p): p for p in sorted(unique, key=_size, reverse=True)}
        try:
            for done in as_completed(waiting):
                answers[waiting[done]] = done.result()
                progress(len(answers), len(unique))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return answers


def _size(program: AheadOfTimeProgram) -> int:
    return sum(1 for f in program.module.body.operations for _ in f.regions[0].blocks[0].operations)


def _answer(program: AheadOfTimeProgram) -> Answer:
    try:
        return program.analysis()
    except client_errors() as error:
        return refusal(str(error))


def refusal(message: str) -> Refusal:
    """The reason in an error of the compiler."""
    used = next(filter(None, (words.search(message) for words in _USED)), None)
    if used is None:
        return Refusal(message.strip().splitlines()[0][:500])
    needs, limit = (int(float(used[k]) * _UNITS[used[k + 1].upper()]) for k in (1, 3))
    return Refusal(message.strip().splitlines()[0][:500], needs, limit)
