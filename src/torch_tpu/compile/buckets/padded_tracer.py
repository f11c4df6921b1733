"""Traces a graph for padded sizes: each operator by the rule of its family, which keeps padding out of the result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from torch_tpu.compile.buckets import padded_layout as layouts
from torch_tpu.compile.buckets.padded_layout import Dim, Extent, Layout, Unsound, is_padded
from torch_tpu.compile.buckets.padded_random import Draw, PaddedRng
from torch_tpu.compile.buckets.symbolic_sizes import Number, Sizes
from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.random_bits import Rng
from torch_tpu.ops.core.schema import bind, unbind
from torch_tpu.ops.tracing import program_scalars
from torch_tpu.ops.tracing.subgraph import GraphTracer, tensor
from torch_tpu.ops.tracing.tracer import Tracer, Unknown


class RuleError(RuntimeError):
    """A rule failed otherwise than by saying that it doesn't apply."""


def layout_of(t: torch.Tensor) -> Layout:
    """The layout of a meta tensor of a padded graph."""
    found: Layout | None = getattr(t, "places", None)
    return tuple((int(size),) for size in t.shape) if found is None else found


class PaddedTracer(GraphTracer):
    """Runs a graph on meta tensors of padded sizes. Their layout is noted as `places`, and as `uniform` whether all
    elements are equal.

    Padding may hold anything, NaN too, so it is replaced (`filled`) where an operator would mix it with true elements.
    """

    def __init__(
        self, tracer: Tracer, graph: GraphModule, sizes: Sizes, rule_of: Callable[[Any], Callable[..., Any] | None]
    ) -> None:
        """
        Args:
            rule_of: the rule of an operator (`rules.find`), None where there is none.
        """
        super().__init__(tracer, graph)
        self.sizes = sizes
        self._rule_of = rule_of
        self._masks: dict[Dim, Array] = {}
        self._rng: PaddedRng | None = None
        state = tracer.rng
        tracer.rng = lambda: self.rng(state)

    def rng(self, state: Callable[[], Rng]) -> PaddedRng:
        """The program's source of random numbers."""
        if self._rng is None:
            self._rng = PaddedRng.like(state(), self.sizes)
        return self._rng

    @property
    def draws(self) -> Sequence[Draw]:
        """What the program draws."""
        return () if self._rng is None else self._rng.draws

    def run_node(self, n: Node) -> Any:
        value = n.meta.get("val")
        if n.op == "output" or n.op == "placeholder":
            return super().run_node(n)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return Number(value.node.expr)
        if n.op != "call_function" or n.target is operator.getitem:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        given = tree_leaves((args, kwargs))
        symbolic = any(isinstance(v, torch.Tensor) and _has_symbols(v) for v in tree_leaves(value))
        if not symbolic and not any(isinstance(v, Number) or is_padded_tensor(v) for v in given):
            return super().run_node(n)
        self.at = n
        rule = self._rule_of(n.target)
        if rule is None:
            raise Unsound(f"{n.target} of a padded size")
        target: Any = n.target
        args, kwargs = tree_map(self._settled, (args, kwargs))
        try:
            result = rule(self, n, bind(target, args, kwargs))
        except NotImplementedError as error:  # Unsound, or no lowering
            raise Unsound(f"{n.target}: {error}") from error
        except Exception as error:
            name = f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"
            raise RuleError(
                f"internal error of torch_tpu: the rule {name} for {n.target} with sizes in buckets failed with "
                f"{type(error).__name__}: {error}. Without options={{'buckets': …}} the graph has a program for each "
                "shape."
            ) from error
        self._verify(n, result)
        return result

    def _verify(self, n: Node, result: Any) -> None:
        """A rule's result has the true sizes that FX notes, and the padded sizes of its layout."""
        several = isinstance(result, (list, tuple))
        for t, like in zip(result, n.meta["val"], strict=False) if several else [(result, n.meta["val"])]:
            if not isinstance(t, torch.Tensor) or not isinstance(like, torch.Tensor):
                continue
            layout, noted = layout_of(t), [self.sizes.extent(size) for size in like.shape]
            if not any(map(is_padded, layout)) and all(map(layouts.is_static, noted)):
                continue  # Statistics that nobody asks for may be empty on one device and not on another.
            if noted != [layouts.size_of(dim) for dim in layout] or tuple(t.shape) != self.shape(layout):
                raise Unsound(f"{n.target}: a result {layouts.describe(layout)} of padded sizes {list(t.shape)}")

    def _settled(self, value: Any) -> Any:
        """An argument for meta kernels; a number that does not vary as Python's."""
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, Number):
            known = self.sizes.extent(value.expression)
            return known if isinstance(known, int) else value
        return value

    # --- what rules are made of ----------------------------------------------------------------------------------

    def call(self, func: OpOverload, values: Sequence[Any]) -> Any:
        """The operator on padded tensors; `values` are in the order of its schema."""
        values = [self.number(v) if isinstance(v, Number) else v for v in values]
        args, kwargs = unbind(func, list(values))
        if any(isinstance(v, Unknown) for v in tree_leaves((args, kwargs))):
            return program_scalars.call(self.tracer, func, args, kwargs)
        with self.tracer:
            return func(*args, **kwargs)

    def draw(self, func: OpOverload, values: Sequence[Any], layout: Layout) -> Any:
        """`call` of an operator that draws as many random numbers as `layout` has true elements."""
        rng = self.tracer.rng()
        assert isinstance(rng, PaddedRng)
        with rng.drawing(layout):
            return self.call(func, values)

    def number(self, value: Number) -> Unknown:
        """A symbolic number as one that the program computes."""
        return Unknown(self.sizes.true(value.expression))

    def length(self, value: Any) -> Any:
        """A size among an operator's arguments, padded."""
        return self.sizes.padded(self.sizes.extent(value.expression)) if isinstance(value, Number) else value

    def shape(self, layout: Layout) -> tuple[int, ...]:
        """The padded sizes of a layout."""
        return tuple(self.sizes.padded(layouts.size_of(dim)) for dim in layout)

    def place(self, result: Any, layout: Layout, *, uniform: bool = False) -> Any:
        """Notes where a result's true elements are."""
        result.places = layout
        result.uniform = uniform
        return result

    def made(self, array: Array, layout: Layout, strides: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor of these elements."""
        result: torch.Tensor = self.place(tensor(self.tracer, array, strides), layout)
        return result

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> Layout:
        """The layout of an elementwise result. Uniform tensors have true elements everywhere."""
        firm = [layout_of(t) for t in tensors if not getattr(t, "uniform", False)]
        result = layouts.broadcast(firm)
        for t in tensors:
            if getattr(t, "uniform", False):
                layout = layout_of(t)
                result = (*layout[: max(len(layout) - len(result), 0)], *result)
                offset = len(result) - len(layout)
                dims = [layout[d - offset] if d >= offset and dim == (1,) else dim for d, dim in enumerate(result)]
                result = tuple(dims)
        return result

    def filled(self, t: torch.Tensor, value: Any, dims: Sequence[int] | None = None) -> torch.Tensor:
        """`t` with `value` in the padding of some dimensions; "lowest" and "highest" are those of its dtype."""
        layout = layout_of(t)
        chosen = range(t.dim()) if dims is None else [d % t.dim() for d in dims]
        padded = [d for d in chosen if is_padded(layout[d])]
        if not padded:
            return t
        array = self.tracer.read(t)
        if isinstance(value, str):
            value = hlo.lowest(t.dtype) if value == "lowest" else hlo.highest(t.dtype)
        for d in padded:
            mask = self.mask(layout[d])
            mask = hlo.reshape(mask, [mask.size if k == d else 1 for k in range(t.dim())])
            array = hlo.select(mask, array, hlo.constant(value, t.dtype))
        return self.made(array, layout, t.stride())

    def mask(self, dim: Dim) -> Array:
        """Which places of a dimension are true."""
        if dim not in self._masks:
            place = hlo.iota((self.sizes.padded(layouts.size_of(dim)),), 0, torch.int32)
            inside, stride = None, 1
            for factor in reversed(dim):
                size = self.sizes.padded(factor)
                if not layouts.is_static(factor):
                    coordinate = hlo.divide(place, stride) if stride > 1 else place
                    coordinate = hlo.remainder(coordinate, size) if size * stride < place.size else coordinate
                    true = coordinate < hlo.convert(self.sizes.true(factor), torch.int32)
                    inside = true if inside is None else inside & true
                stride *= size
            assert inside is not None
            self._masks[dim] = inside
        return self._masks[dim]

    def true_size(self, dims: Sequence[Dim]) -> torch.Tensor:
        """How many true elements dimensions have together, as a 0-d tensor of int64."""
        count = hlo.constant(1, torch.int64)
        for dim in dims:
            count = count * self.sizes.true(layouts.size_of(dim))
        return self.made(count, ())

    def window(self, t: torch.Tensor, dim: int, start: int | Array, length: Extent) -> torch.Tensor:
        """`length` places of a dimension from `start` on, the true ones in front.

        Args:
            start: counted from the front, at most the true size less `length`.
        """
        layout = layout_of(t)
        _single(layout[dim])
        size, taken = t.shape[dim], self.sizes.padded(length)
        array = self.tracer.read(t)
        spare = taken if isinstance(start, Array) else max(start + taken - size, 0)
        if spare:
            # Padded lengths may reach past the end, where XLA would move the window instead.
            array = hlo.pad(array, 0, [0] * t.dim(), [spare if d == dim else 0 for d in range(t.dim())])
        if isinstance(start, Array):
            zero = hlo.constant(0, torch.int64)
            starts = [start if d == dim else zero for d in range(t.dim())]
            array = hlo.dynamic_slice(array, starts, [taken if d == dim else s for d, s in enumerate(t.shape)])
        else:
            array = hlo.slice_in_dim(array, start, start + taken, dim=dim)
        return self.made(array, replaced(layout, dim, (length,)))

    def inserted(self, into: Array, t: torch.Tensor, dim: int, start: int | Array) -> Array:
        """`into` with all of `t` at a place of a dimension; `into` must be long enough for it."""
        zero = hlo.constant(0, torch.int64)
        at = start if isinstance(start, Array) else hlo.constant(start, torch.int64)
        return hlo.dynamic_update_slice(into, self.tracer.read(t), [at if d == dim else zero for d in range(t.dim())])

    def start(self, value: Any, dim: Dim) -> int | Array:
        """A place along a dimension, as slices give it, counted from the front."""
        if value is None:
            return 0
        if isinstance(value, int) and value >= 0:
            return value
        size = self.sizes.true(layouts.size_of(dim))
        place = self.sizes.true(value.expression) if isinstance(value, Number) else hlo.constant(value, torch.int64)
        place = hlo.select(place < 0, place + size, place)
        return hlo.clamp(hlo.constant(0, torch.int64), place, size)


def replaced(layout: Layout, dim: int, by: Dim) -> Layout:
    return (*layout[:dim], by, *layout[dim + 1 :])


def _single(dim: Dim) -> None:
    if len(dim) > 1 and is_padded(dim):
        raise Unsound(f"positions in a merged dimension {layouts.describe((dim,))}")


def is_padded_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(map(is_padded, layout_of(value)))


def _has_symbols(value: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in value.shape)
