"""Which sample inputs of PyTorch's test database are taken where not all of them are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def spread(samples: Sequence[T], most: int) -> list[T]:
    """At most so many (0: all) samples, spread over all of them."""
    if not most or len(samples) <= most:
        return list(samples)
    return [samples[i * len(samples) // most] for i in range(most)]


def spread_of_operator(samples: Sequence[Any], most: int) -> list[Any]:
    """The same for samples of an operator, of which one at least has elements: a result without any says little."""
    chosen = spread(samples, most)
    return chosen if any(map(has_elements, chosen)) else spread(with_elements(samples), most)


def with_elements(samples: Sequence[Any]) -> list[Any]:
    """Those that have elements in all their tensors; all samples, if none has."""
    return [sample for sample in samples if has_elements(sample)] or list(samples)


def has_elements(sample: Any) -> bool:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return all(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
