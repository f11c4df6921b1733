"""For each family of operators, what makes it sound on padded tensors. What is named nowhere has no rule.

A rule gets the operator's arguments in the order of its schema and returns its result for padded tensors, with the
places of the true elements. It may rely on nothing that is in the padding of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from torch_tpu.compile.buckets import padded_layout as layouts
from torch_tpu.compile.buckets.padded_layout import Layout, Unsound, is_padded
from torch_tpu.compile.buckets.padded_tracer import PaddedTracer, is_padded_tensor, layout_of
from torch_tpu.compile.buckets.symbolic_sizes import Number
from torch_tpu.hlo import array as hlo
from torch_tpu.ops.core import registry
from torch_tpu.ops.core.schema import signature

Rule = Callable[[PaddedTracer, Node, list[Any]], Any]
aten = torch.ops.aten
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for overloads of ATen, "mm.default" without its ".default"."""

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


def find(target: Any) -> Rule | None:
    """The rule of an operator; None where padding is not sound, or nobody has thought about it."""
    from torch_tpu.compile.buckets import rules_of_attention, rules_of_batch_norm, rules_of_moves  # noqa: F401

    if not isinstance(target, OpOverload):
        return None
    name = target.overloadpacket.__name__
    own = _RULES.get(name if target._overloadname == "default" else f"{name}.{target._overloadname}")
    if own is not None and target.namespace == "aten":
        return own
    if torch.Tag.nondeterministic_seeded in target.tags or signature(target).is_inplace:
        return None
    return elementwise if torch.Tag.pointwise in target.tags or str(target) in _ELEMENTWISE else None


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """For AOTAutograd: what has no rule, but consists of operators that have one."""
    parts = (aten._transformer_encoder_layer_fwd.default, aten._native_multi_head_attention.default)
    return {func: found for func in parts if (found := registry.decomposition(func)) is not None}


def argument(node: Node, values: list[Any], name: str, default: Any = None) -> Any:
    """The value of an argument by its name in the schema."""
    position = signature(node.target).positions.get(name)
    return default if position is None or values[position] is None else values[position]


def given(node: Node, values: list[Any], name: str, value: Any) -> list[Any]:
    """The values with another for the argument of this name."""
    position = signature(node.target).positions[name]
    return [*values[:position], value, *values[position + 1 :]]


def dims_of(value: Any, rank: int) -> list[int]:
    """Dimensions as operators take them: one, some or (None, empty) all."""
    if value is None or value == []:
        return list(range(rank))
    return [d % max(rank, 1) for d in (value if isinstance(value, (list, tuple)) else [value])]


def without(layout: Layout, dims: Sequence[int], keepdim: bool) -> Layout:
    return tuple((1,) if d in dims else dim for d, dim in enumerate(layout) if keepdim or d not in dims)


def padded_of(t: torch.Tensor, dims: Sequence[int]) -> list[int]:
    layout = layout_of(t)
    return [d for d in dims if layout and is_padded(layout[d])]


# --- elementwise: padding stays in the padding -------------------------------------------------------------------

_ELEMENTWISE = frozenset(
    {
        *("aten._to_copy.default", "aten.copy.default", "aten.detach.default", "aten.alias.default"),
        *("aten.lift_fresh_copy.default", "aten.lift_fresh.default", "prims.convert_element_type.default"),
        *("aten.clone.default", "aten.fill.Scalar", "aten.fill.Tensor", "aten.native_dropout_backward.default"),
    }
)


def elementwise(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    tensors = [v for v in tree_leaves(values) if isinstance(v, torch.Tensor)]
    layout = ctx.broadcast(tensors)
    result = ctx.call(node.target, values)  # type: ignore[arg-type]
    uniform = all(getattr(t, "uniform", not t.dim()) for t in tensors)
    for t in tree_leaves(result):
        ctx.place(t, layout, uniform=uniform)
    return result


# --- reductions: padding becomes what changes nothing ------------------------------------------------------------

NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("sum", "sum.dim_IntList", "nansum", "any", "any.dim", "any.dims", "linalg_vector_norm"), 0),
    **dict.fromkeys(("count_nonzero", "count_nonzero.dim_IntList"), 0),
    **dict.fromkeys(("prod", "prod.dim_int", "all", "all.dim", "all.dims"), 1),
    **dict.fromkeys(("amax", "max", "max.dim", "argmax", "logsumexp"), "lowest"),
    **dict.fromkeys(("amin", "min", "min.dim", "argmin"), "highest"),
}
_POSITIONS = ("argmax", "argmin", "max.dim", "min.dim")


@rule(*NEUTRAL)
def reduction(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    x, target = values[0], node.target
    dims = dims_of(argument(node, values, "dim"), x.dim())
    keepdim = argument(node, values, "keepdim", False)
    name = str(target).removeprefix("aten.").removesuffix(".default")
    padded = padded_of(x, dims)
    if name in _POSITIONS and padded and (len(dims) > 1 or len(layout_of(x)[padded[0]]) > 1):
        raise Unsound("a position among padded elements")
    if name == "linalg_vector_norm" and padded and argument(node, values, "ord", 2) <= 0:
        raise Unsound("a norm that zeros change")
    result = ctx.call(target, [ctx.filled(x, NEUTRAL[name], dims), *values[1:]])  # type: ignore[arg-type]
    for t in tree_leaves(result):
        ctx.place(t, without(layout_of(x), dims, keepdim))
    return result


def mean_of(ctx: PaddedTracer, x: torch.Tensor, dims: list[int], keepdim: bool, dtype: Any = None) -> torch.Tensor:
    """The mean of the true elements, computed in float32 at least."""
    dtype = dtype or x.dtype
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    total = ctx.call(aten.sum.dim_IntList, [ctx.filled(x, 0, dims), dims, keepdim, wide])
    count = ctx.true_size([layout_of(x)[d] for d in dims])
    result = ctx.call(aten._to_copy.default, [ctx.call(aten.div.Tensor, [total, count]), dtype, *[None] * 5])
    return ctx.place(result, without(layout_of(x), dims, keepdim))


@rule("mean", "mean.dim")
def mean(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    dims = dims_of(argument(node, values, "dim"), values[0].dim())
    return mean_of(ctx, values[0], dims, argument(node, values, "keepdim", False), argument(node, values, "dtype"))


@rule("var.correction", "std.correction", "var_mean.correction")
def variance(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    x = values[0]
    dims, keepdim = dims_of(argument(node, values, "dim"), x.dim()), argument(node, values, "keepdim", False)
    centre = mean_of(ctx, x, dims, True)
    layout = layout_of(x)
    squares = ctx.call(aten.square.default, [ctx.call(aten.sub.Tensor, [x, centre, 1])])
    total = ctx.call(aten.sum.dim_IntList, [ctx.filled(ctx.place(squares, layout), 0, dims), dims, keepdim, None])
    count = ctx.call(
        aten.sub.Tensor, [ctx.true_size([layout[d] for d in dims]), argument(node, values, "correction", 1), 1]
    )
    spread = ctx.call(aten.div.Tensor, [total, ctx.call(aten.clamp.default, [count, 0, None])])
    result = without(layout, dims, keepdim)
    if node.target is aten.std.correction:
        spread = ctx.call(aten.sqrt.default, [spread])
    ctx.place(spread, result)
    if node.target is not aten.var_mean.correction:
        return spread
    return spread, ctx.place(ctx.call(aten.reshape.default, [centre, list(spread.shape)]), result)


@rule("_softmax", "_log_softmax")
def softmax(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x, dim, *rest = values
    result = ctx.call(node.target, [ctx.filled(x, "lowest", [dim]), dim, *rest])  # type: ignore[arg-type]
    return ctx.place(result, layout_of(x))


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    grad, result, dim, dtype = values
    layout = ctx.broadcast([grad, result])
    filled = [ctx.filled(t, 0, [dim]) for t in (grad, result)]
    return ctx.place(ctx.call(node.target, [*filled, dim, dtype]), layout)  # type: ignore[arg-type]


# --- along one dimension: a padded one only where what comes before decides --------------------------------------

_FORWARD_ONLY = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")


@rule(*_FORWARD_ONLY, "sort", "sort.stable", "topk", "glu", "roll", "argsort", "argsort.stable", "kthvalue")
def along(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    x, target = values[0], node.target
    chosen = argument(node, values, "dims", argument(node, values, "dim", -1))
    layout = layout_of(x)
    for d in padded_of(x, dims_of(chosen, x.dim())):
        if str(target).removeprefix("aten.").removesuffix(".default") not in _FORWARD_ONLY or len(layout[d]) > 1:
            raise Unsound("along a padded dimension")
    result = ctx.call(target, values)  # type: ignore[arg-type]
    for t in tree_leaves(result):
        shape = [layout[d] if is_padded(layout[d]) else (int(s),) for d, s in enumerate(t.shape)]
        ctx.place(t, tuple(shape))
    return result


# --- rows: sound where the dimensions they work on are not padded ------------------------------------------------

# How many dimensions at the end each works on; of normalisations, as many as their weights have.
_TRAILING: dict[str, int] = {
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), -1),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "upsample_nearest2d"), 2),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest2d.vec", "reflection_pad2d"), 2),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"), 2),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), 3),
}


@rule(*_TRAILING)
def rows(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    x, target = values[0], node.target
    layout = layout_of(x)
    name = str(target).removeprefix("aten.").removesuffix(".default")
    trailing = _TRAILING[name] if _TRAILING[name] > 0 else len(values[1])
    if any(map(is_padded, layout[len(layout) - trailing :])):
        raise Unsound("over a padded dimension")
    leading = layout[: len(layout) - trailing]
    result = ctx.call(target, _lengths(ctx, values))  # type: ignore[arg-type]
    for t in tree_leaves(result):
        if isinstance(t, torch.Tensor):
            ctx.place(t, (*leading, *((int(s),) for s in t.shape[len(leading) :])))
    return result


def _lengths(ctx: PaddedTracer, values: list[Any]) -> list[Any]:
    """The values with padded sizes."""
    return [[ctx.length(v) for v in value] if isinstance(value, list) else ctx.length(value) for value in values]


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def norm_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    """The gradients of the weights are sums over rows."""
    x = values[1]
    layout, length = layout_of(x), len(values[2])
    if any(map(is_padded, layout[len(layout) - length :])):
        raise Unsound("over a padded dimension")
    filled = [ctx.filled(v, 0) if is_padded_tensor(v) else v for v in values]
    return _gradients(ctx, node, _lengths(ctx, filled), {0: layout})


@rule("native_group_norm", "_native_batch_norm_legit_no_training")
def per_sample(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    """Of a batch that is padded, each sample by itself."""
    layout = layout_of(values[0])
    if any(map(is_padded, layout[1:])) and node.target is aten.native_group_norm.default:
        raise Unsound("over a padded dimension")
    result = ctx.call(node.target, _lengths(ctx, values))  # type: ignore[arg-type]
    ctx.place(result[0], layout)
    for t in result[1:]:
        if node.target is aten.native_group_norm.default:
            ctx.place(t, (layout[0], *((int(s),) for s in t.shape[1:])))
    return result


@rule("native_group_norm_backward")
def group_norm_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    layout = layout_of(values[1])
    if any(map(is_padded, layout[1:])):
        raise Unsound("over a padded dimension")
    filled = [ctx.filled(v, 0) if is_padded_tensor(v) else v for v in values]
    return _gradients(ctx, node, _lengths(ctx, filled), {0: layout})


def _gradients(ctx: PaddedTracer, node: Node, values: list[Any], padded: dict[int, Layout]) -> Any:
    """Runs a backward operator; `padded` are the layouts of those results that are padded."""
    result = ctx.call(node.target, values)  # type: ignore[arg-type]
    for i, layout in padded.items():
        if isinstance(result[i], torch.Tensor):
            ctx.place(result[i], layout)
    return result


# --- matrix products: zeros where a padded dimension is contracted -----------------------------------------------

# Where the two factors stand among the arguments.
_FACTORS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}


@rule(*_FACTORS)
def product(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    first = _FACTORS[node.target.overloadpacket.__name__]  # type: ignore[union-attr]
    a, b = values[first : first + 2]
    left, right = layout_of(a), layout_of(b)
    inner = max(b.dim() - 2, 0)
    if layouts.broadcast([(left[-1],), (right[inner],)]) != (left[-1],):
        raise Unsound(f"of {layouts.describe(left)} and {layouts.describe(right)}")
    values = list(values)
    values[first : first + 2] = ctx.filled(a, 0, [-1]), ctx.filled(b, 0, [inner])
    batch = layouts.broadcast([left[:-2], right[:-2]]) if b.dim() > 2 else ()
    layout = (*batch, *left[len(batch) : -1], *right[inner + 1 :])
    if first and layouts.broadcast([layout_of(values[0]), layout]) != layout:
        raise Unsound(f"a sum with {layouts.describe(layout_of(values[0]))}")
    return ctx.place(ctx.call(node.target, values), layout)  # type: ignore[arg-type]


# --- convolutions: zeros beyond the edge, as their own padding ---------------------------------------------------


@rule("convolution", "convolution_overrideable")
def convolution(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x, weight = values[:2]
    if is_padded_tensor(weight):
        raise Unsound("of padded weights")
    result = ctx.call(node.target, [ctx.filled(x, 0, range(1, x.dim())), *_lengths(ctx, values[1:])])  # type: ignore[arg-type]
    sizes = ctx.sizes.layout(node.meta["val"].shape)
    return ctx.place(result, (layout_of(x)[0], *sizes[1:]))


@rule("convolution_backward", "convolution_backward_overrideable")
def convolution_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    grad, x, weight = values[:3]
    if is_padded_tensor(weight):
        raise Unsound("of padded weights")
    filled = [ctx.filled(grad, 0), ctx.filled(x, 0), *values[2:]]
    return _gradients(ctx, node, _lengths(ctx, filled), {0: layout_of(x)})


# --- losses ------------------------------------------------------------------------------------------------------

_ELEMENTWISE_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
_NONE, _MEAN = 0, 1


@rule(*_ELEMENTWISE_LOSSES, "binary_cross_entropy_with_logits")
def loss(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    each = elementwise(ctx, node, given(node, values, "reduction", _NONE))
    reduction_ = argument(node, values, "reduction", _MEAN)
    dims = list(range(each.dim()))
    if reduction_ == _NONE:
        return each
    if reduction_ == _MEAN:
        return mean_of(ctx, each, dims, False)
    return ctx.place(ctx.call(aten.sum.dim_IntList, [ctx.filled(each, 0), dims, False, None]), ())


@rule(*(f"{name}_backward" for name in _ELEMENTWISE_LOSSES))
def loss_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    layout = ctx.broadcast(values[1:3])
    if argument(node, values, "reduction", _MEAN) == _MEAN:
        grad = ctx.call(aten.div.Tensor, [values[0], ctx.true_size(layout)])
        values = [ctx.place(grad, layout_of(values[0])), *values[1:]]
    # Their meta kernels give what the reduction asks for, which is elementwise here.
    return elementwise(ctx, node, given(node, values, "reduction", _NONE))


def _labels(ctx: PaddedTracer, node: Node, values: list[Any], x: torch.Tensor, target: torch.Tensor) -> list[Any]:
    """The values with scores of 0 and labels that are ignored in the padding."""
    if any(map(is_padded, layout_of(x)[1 if x.dim() > 1 else 0 :][:1])):
        raise Unsound("over padded classes")
    ignored = argument(node, values, "ignore_index", -100)
    if isinstance(ignored, Number):
        raise Unsound("of a label that varies")
    values = given(node, values, "self", ctx.filled(x, 0))
    return given(node, values, "target", ctx.filled(target, ignored))


@rule("nll_loss_forward", "nll_loss2d_forward")
def class_loss(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    x, target, _, reduction_, _ = values
    result = ctx.call(node.target, _labels(ctx, node, values, x, target))  # type: ignore[arg-type]
    ctx.place(result[0], layout_of(target) if reduction_ == _NONE else ())
    return result


@rule("nll_loss_backward", "nll_loss2d_backward")
def class_loss_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    grad, x, target = values[:3]
    values = _labels(ctx, node, values, x, target)
    values = given(node, values, "grad_output", ctx.filled(grad, 0))
    return ctx.place(ctx.call(node.target, values), layout_of(x))  # type: ignore[arg-type]


# --- random numbers ----------------------------------------------------------------------------------------------


@rule("native_dropout", "bernoulli", "bernoulli.p", "rand_like", "randn_like", "uniform", "normal_functional")
def random_like(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    layout = layout_of(values[0])
    result = ctx.draw(node.target, values, layout)  # type: ignore[arg-type]
    for t in tree_leaves(result):
        ctx.place(t, layout)
    return result


@rule("rand", "randn")
def random(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    layout = ctx.sizes.layout(node.meta["val"].shape)
    values = given(node, values, "size", list(ctx.shape(layout)))
    return ctx.place(ctx.draw(node.target, values, layout), layout)  # type: ignore[arg-type]


# --- tensors out of nothing --------------------------------------------------------------------------------------


@rule("full", "zeros", "ones", "empty.memory_format", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
@rule("empty_strided", "new_empty_strided")
def constants(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    layout = ctx.sizes.layout(node.meta["val"].shape)
    names = signature(node.target).positions
    shape = list(ctx.shape(layout))
    if node.target in (aten.empty_strided.default, aten.new_empty_strided.default):
        # How it lies in memory means nothing inside of a program.
        dtype = node.meta["val"].dtype
        return ctx.place(ctx.call(aten.full.default, [shape, 0, dtype, None, torch.device("meta"), None]), layout)
    values = given(node, values, "size", shape) if "size" in names else values
    return ctx.place(ctx.call(node.target, values), layout, uniform=True)  # type: ignore[arg-type]


@rule("full_like", "zeros_like", "ones_like", "empty_like")
def constants_like(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    return ctx.place(ctx.call(node.target, values), layout_of(values[0]), uniform=True)  # type: ignore[arg-type]


@rule("arange", "arange.start", "arange.start_step")
def arange(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    layout = ctx.sizes.layout(node.meta["val"].shape)
    start, step = argument(node, values, "start", 0), argument(node, values, "step", 1)
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point or isinstance(step, float):
        raise Unsound("in floating point")
    numbers = [
        ctx.sizes.true(v.expression) if isinstance(v, Number) else hlo.constant(v, torch.int64) for v in (start, step)
    ]
    place = hlo.iota(ctx.shape(layout), 0, torch.int64)
    return ctx.made(hlo.convert(place * numbers[1] + numbers[0], dtype), layout)


@rule("tril", "triu")
def triangle(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    layout = layout_of(values[0])
    if any(len(dim) > 1 for dim in layout[-2:]):
        raise Unsound("of a merged dimension")
    return ctx.place(ctx.call(node.target, values), layout)  # type: ignore[arg-type]
