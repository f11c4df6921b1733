"""Tensors as views at chosen places of bigger storages, and copies of nests that keep places and what is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

# Elements around a placed tensor: room for its offset, and for a program that looks at the wrong place.
SPARE = 12
ROWS = 4


def in_storage(t: torch.Tensor, offset: int) -> torch.Tensor:
    """A leaf with the same values, sizes and strides, `offset` elements into a storage that holds other values too."""
    if not _can_be_placed(t):
        return t
    span = span_of(t)
    base = _filler(t, (span + SPARE,))
    base[offset : offset + span] = t.detach().as_strided((span,), (1,))
    return base.as_strided(t.shape, t.stride(), offset).detach().requires_grad_(t.requires_grad)


def in_row(t: torch.Tensor, row: int) -> torch.Tensor:
    """A leaf with the same values that is row `row` of a stack of `ROWS`; another layout stays as it is."""
    if not _can_be_placed(t) or not t.is_contiguous():
        return t
    base = _filler(t, (ROWS, *t.shape))
    base[row] = t.detach()
    return base[row].detach().requires_grad_(t.requires_grad)


def in_one_storage(first: torch.Tensor, second: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Leaves like two tensors of one dtype in one storage; the second begins `offset` elements after the first.

    Where they overlap, the second has the first one's values.
    """
    spans = span_of(first), span_of(second)
    base = _filler(first, (max(spans[0], offset + spans[1]) + SPARE,))
    base[offset : offset + spans[1]] = second.detach().as_strided((spans[1],), (1,))
    base[: spans[0]] = first.detach().as_strided((spans[0],), (1,))
    views = (base.as_strided(t.shape, t.stride(), at) for t, at in ((first, 0), (second, offset)))
    one, other = (v.detach().requires_grad_(t.requires_grad) for v, t in zip(views, (first, second), strict=True))
    return one, other


def span_of(t: torch.Tensor) -> int:
    """How many elements of its storage a tensor reaches over."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


def _can_be_placed(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and t.numel() > 0 and not t.is_conj() and not t.is_neg()


def _filler(t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Memory whose values show in any result that they get into."""
    if t.dtype is torch.bool:
        return torch.full(shape, not t.detach().flatten()[0])
    value = float("nan") if t.dtype.is_floating_point or t.dtype.is_complex else 99
    return torch.full(shape, value, dtype=t.dtype)


def copied(nest: Any, device: str = "tpu") -> Any:
    """Every tensor of a nest as a leaf on `device`, at its place in a copy of its storage. What is shared stays so."""
    return tree_map(Copies(device), nest)


class Copies:
    """Copies tensors to a device, each storage and each tensor once."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._wholes: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []

    def __call__(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return torch.device(self.device) if isinstance(leaf, torch.device) else leaf
        if id(leaf) not in self._copies:
            self._alive.append(leaf)
            self._copies[id(leaf)] = self._copy(leaf).requires_grad_(leaf.requires_grad)
        return self._copies[id(leaf)]

    def _copy(self, leaf: torch.Tensor) -> torch.Tensor:
        plain = leaf.detach()
        if plain.layout is not torch.strided or not plain.numel():
            return plain.clone().to(self.device)
        key = plain.untyped_storage()._cdata
        if key not in self._wholes:
            self._wholes[key] = _whole(plain).clone().to(self.device)
        whole = self._wholes[key]
        if whole.dtype is not plain.dtype:
            whole = whole.view(-1).view(plain.dtype)
        copy = whole.as_strided(plain.shape, plain.stride(), plain.storage_offset()).detach()
        copy = copy.conj() if plain.is_conj() else copy
        return torch._neg_view(copy) if plain.is_neg() else copy


def whole_storages(nest: Any) -> list[torch.Tensor]:
    """All that the storages of a nest's tensors hold."""
    found: dict[int, torch.Tensor] = {}

    def look(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
            found.setdefault(leaf.untyped_storage()._cdata, _flat(leaf.detach()))
        return leaf

    tree_map(look, nest)
    return list(found.values())


def _whole(t: torch.Tensor) -> torch.Tensor:
    """A tensor over all of a storage: in rows if it is one of `in_row`, else flat, else the tensor itself."""
    count = t.untyped_storage().nbytes() // t.element_size()
    if t.numel() == count and t.is_contiguous() and not t.is_conj() and not t.is_neg():
        return t
    if t.is_contiguous() and count == ROWS * t.numel() and t.storage_offset() % t.numel() == 0:
        return _flat(t).view(ROWS, *t.shape)
    return _flat(t)


def _flat(t: torch.Tensor) -> torch.Tensor:
    if t.is_conj():
        t = t.conj()
    if t.is_neg():
        t = torch._neg_view(t)
    return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)


CallSite = Callable[[torch.Tensor, int], torch.Tensor]
