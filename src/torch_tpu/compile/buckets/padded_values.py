"""Tensors whose memory is larger than they are: results of padded programs, and arguments made longer for them.

The next padded program takes such memory as it is. Anybody else gets the true elements, cut out when they ask.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from torch_tpu.compile.buckets.padded_layout import Layout
from torch_tpu.hlo.strided import contiguous_strides, is_dense
from torch_tpu.recent import Recent
from torch_tpu.runtime.client import Buffer
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.storage import Content, Geometry, Value, geometry, new_tensor, value_of
from torch_tpu.tensor.transfer import from_host, host_view

# Up to this many bytes a tensor is cut or padded by the host, which needs no program for each size.
LARGEST_ON_HOST = 2**20


def filler(dtype: torch.dtype) -> float:
    """What arguments are padded with: nothing may depend on it."""
    return 0


Factors = tuple[tuple[tuple[int, int], ...], ...]  # of each dimension, the true and the padded size of each factor


class Padded(Value):
    """A value of which `whole` holds the true elements and padding.

    Attributes:
        layout: where the true elements are, in terms of the graphs that share `family`.
        factors: the same as numbers.
    """

    __slots__ = ("_exact", "factors", "family", "layout", "whole")

    def __init__(self, whole: torch.Tensor, layout: Layout, factors: Factors, family: object, g: Geometry) -> None:
        self.whole = whole
        self.layout = layout
        self.factors = factors
        self.family = family
        self.geometry = g
        self._exact: Buffer | None = None

    @property
    def array(self) -> Buffer:  # type: ignore[override]
        """The true elements."""
        if self._exact is None:
            value = value_of(_cut(self.whole, self.factors).untyped_storage())
            self._exact = value.array
            # Kept for as long as this is, though the buffer is counted by a value of its own.
            _kept[self] = value
        return self._exact

    def give_up(self) -> None:
        raise AssertionError("a value that others refer to is never donated")

    def __del__(self) -> None:
        pass  # its memory is counted by the values it consists of


_kept: weakref.WeakKeyDictionary[Padded, Content] = weakref.WeakKeyDictionary()
# Longer forms of values, by how they are viewed and how long they are; of each value those used lately.
_longer: weakref.WeakKeyDictionary[Content, Recent] = weakref.WeakKeyDictionary()
MOST_LONGER = 16


def padded_tensor(
    whole: torch.Tensor, layout: Layout, factors: Factors, family: object, strides: Sequence[int]
) -> torch.Tensor:
    """A tensor with the true sizes of padded memory."""
    sizes = [math.prod(true for true, _ in dim) for dim in factors]
    if not is_dense(sizes, strides):
        strides = contiguous_strides(sizes)
    return new_tensor(Padded(whole, layout, factors, family, geometry(sizes, strides, whole.dtype)))


def lengthened(
    t: torch.Tensor, shape: Sequence[int], fits: Callable[[Padded], bool]
) -> tuple[torch.Tensor, Layout | None]:
    """A tensor of these sizes with the elements of `t` in front of each dimension.

    Args:
        fits: whether padded memory will do as it is: then it comes back with its own layout.
    """
    value = value_of(t.untyped_storage())
    g = value.geometry
    if isinstance(value, Padded) and t.shape == g.sizes and t.stride() == g.strides and t.dtype is g.dtype:
        if fits(value):
            return value.whole, value.layout
        if all(len(dim) == 1 for dim in value.factors):
            # From one bucket to another: few programs do that, wherever it runs.
            return _resized(value.whole, shape, client().is_host_memory), None
    views = _longer.setdefault(value, Recent(MOST_LONGER))
    key = (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, tuple(shape))
    found = views.find(key)
    return views.keep(key, _resized(t, shape, _by_host(t))) if found is None else found, None


def _by_host(t: torch.Tensor) -> bool:
    return client().is_host_memory or (client().runs and t.numel() * t.element_size() <= LARGEST_ON_HOST)


def _resized(t: torch.Tensor, shape: Sequence[int], by_host: bool) -> torch.Tensor:
    if tuple(t.shape) == tuple(shape):
        return t
    with torch.no_grad():
        t = t.detach()
        amounts = [amount for have, want in zip(t.shape, shape, strict=True) for amount in (want - have, 0)]
        if by_host:
            return from_host(F.pad(host_view(t, "padding to a bucket"), amounts[::-1], value=filler(t.dtype)))
        return F.pad(t, amounts[::-1], value=filler(t.dtype))


def _cut(whole: torch.Tensor, factors: Factors) -> torch.Tensor:
    with torch.no_grad():
        by_host = _by_host(whole)
        t = host_view(whole, "cutting padding off") if by_host else whole
        t = t.reshape([padded for dim in factors for _, padded in dim])
        for d, true in enumerate(true for dim in factors for true, _ in dim):
            t = t.narrow(d, 0, true)
        t = t.reshape([math.prod(true for true, _ in dim) for dim in factors]).contiguous()
        return from_host(t) if by_host else t.clone()
