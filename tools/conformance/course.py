"""How the steps of an optimizer's run differ from the plain ones, for the axes of the conformance run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tools.conformance import offsets, placement

# What a number of an optimizer is multiplied by in each step.
FACTORS = (1.0, 0.5, 0.75)


@dataclass(frozen=True)
class Course:
    """One run.

    Attributes:
        seed: of the gradients.
        turn: which of several places parameters and gradients have in longer storages; None: storages of their own.
        in_one_storage: whether all parameters are views of one storage, and all gradients.
        absent: which parameters get no gradient, for each step.
        other_numbers: whether the learning rate and other numbers change from step to step.
    """

    seed: int = 5
    turn: int | None = None
    in_one_storage: bool = False
    absent: tuple[frozenset[int], ...] = ()
    other_numbers: bool = False

    def placed(self, values: Sequence[torch.Tensor], device: str) -> list[torch.Tensor]:
        """Copies on a device, where this run wants them."""
        if self.in_one_storage:
            base = torch.cat([v.flatten() for v in values] + [torch.full((3,), 99.0).to(values[0].dtype)]).to(device)
            parts = base.split([v.numel() for v in values] + [3])
            return [part.view(v.shape).detach() for part, v in zip(parts, values, strict=False)]
        if self.turn is not None:
            at = offsets.OFFSETS
            values = [placement.in_storage(v, at[(i + self.turn) % len(at)]) for i, v in enumerate(values)]
            return [t.detach() for t in placement.copied(values, device)]
        return [v.to(device) for v in values]

    def has_gradient(self, step: int, parameter: int) -> bool:
        return step >= len(self.absent) or parameter not in self.absent[step]

    def set_numbers(self, optimizer: torch.optim.Optimizer, step: int, first: list[dict[str, Any]]) -> None:
        """Gives the optimizer the numbers of a step; `first` keeps those it was made with."""
        if not self.other_numbers:
            return
        if not first:
            first.extend({k: _fixed(v) for k, v in group.items() if _is_number(v)} for group in optimizer.param_groups)
        for group, numbers in zip(optimizer.param_groups, first, strict=True):
            for name, value in numbers.items():
                if isinstance(group[name], torch.Tensor):
                    group[name].fill_(value * FACTORS[step])
                elif isinstance(value, tuple):
                    group[name] = tuple(v * FACTORS[step] for v in value)
                else:
                    group[name] = value * FACTORS[step]


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(type(v) is float for v in value)
    return type(value) is float or (isinstance(value, torch.Tensor) and not value.dim())


def _fixed(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
