"""Which ranks of a group have ended: a receive of what nobody sends fails when the other process is gone."""

from __future__ import annotations

import datetime
from functools import partial
from typing import Any

import torch

from torch_tpu.distributed import waiters

# Of no send of the user's.
_TAG = 2**31 - 17
_FOREVER = datetime.timedelta(days=365)


class Lifelines:
    """Watches the ranks of one group, each from the first question about it on."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._watched: set[int] = set()
        self._ends: dict[int, str] = {}

    def end_of(self, rank: int) -> str:
        """What says that this rank of the group has ended; "" as long as nothing does."""
        if rank not in self._watched:
            self._watched.add(rank)
            waiters.run(partial(self._watch, rank))
        return self._ends.get(rank, "")

    def _watch(self, rank: int) -> None:
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            self._gloo.recv([nothing], rank, _TAG).wait(_FOREVER)
        except Exception as error:
            self._ends[rank] = str(error)
