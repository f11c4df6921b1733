"""Calls of the backward operators that are told by a mask which gradients are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn import functional

aten = torch.ops.aten
Draw = Callable[..., torch.Tensor]


class MASK:
    """Stands where the mask goes."""


class Call(NamedTuple):
    """Arguments on the CPU with `MASK` among them.

    Attributes:
        reference: what the CPU computes the gradients with; None: the same operator.
        absent: gradients that nobody can want, because there is no such input.
    """

    note: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = MappingProxyType({})
    reference: Callable[..., Any] | None = None
    absent: frozenset[int] = frozenset()


# What the device has no kernel of, or nobody calls on it.
_OTHERS = "a kernel of one other backend"
_NESTED = "PyTorch calls it on nested tensors and on backends that take the whole operator over"
NOT_HERE: dict[str, str] = {
    "_cudnn_rnn_backward": _OTHERS,
    "_scaled_dot_product_efficient_attention_backward": _OTHERS,
    "_sparse_mm_reduce_impl_backward": "of sparse layouts",
    "linear_backward": _NESTED,
    "matmul_backward": _NESTED,
    "miopen_rnn_backward": _OTHERS,
    "mkldnn_linear_backward": _OTHERS,
    "mps_convolution_backward": _OTHERS,
    "mps_convolution_transpose_backward": _OTHERS,
}


def masked_operators() -> dict[str, int]:
    """Every operator of ATen that takes a mask of gradients, and how many it has; what only has `out=` left out."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        masks = [a for a in schema.arguments if a.name.endswith("mask") and str(a.type) == "List[bool]" and a.N]
        if schema.name.startswith("aten::") and masks and not schema.overload_name.endswith("out"):
            found[schema.name.removeprefix("aten::")] = masks[0].N
    return found


def _convolution(draw: Draw) -> Iterator[tuple[str, tuple[Any, ...], bool]]:
    """grad_output, input, weight, and what follows; whether transposed."""
    yield "1-d", (draw(2, 4, 5), draw(2, 3, 7), draw(4, 3, 3), [1], [0], [1], False, [0], 1), False
    yield "2-d", (draw(2, 4, 3, 3), draw(2, 3, 5, 5), draw(4, 3, 3, 3), [2, 2], [1, 1], [1, 1], False, [0, 0], 1), False
    yield (
        "groups",
        (draw(1, 4, 4, 4), draw(1, 2, 5, 5), draw(4, 1, 2, 2), [1, 1], [0, 0], [1, 1], False, [0, 0], 2),
        False,
    )
    yield (
        "transposed",
        (draw(1, 2, 7, 7), draw(1, 3, 3, 3), draw(3, 2, 3, 3), [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
        True,
    )


def _outputs(args: tuple[Any, ...], transposed: bool) -> int:
    return int(args[0].shape[1])


def convolution_backward(draw: Draw) -> Iterator[Call]:
    for note, args, transposed in _convolution(draw):
        yield Call(note, (*args[:3], [_outputs(args, transposed)], *args[3:], MASK))


def convolution_backward_overrideable(draw: Draw) -> Iterator[Call]:
    for note, args, transposed in _convolution(draw):

        def reference(*given: Any, count: int = _outputs(args, transposed)) -> Any:
            return aten.convolution_backward(*given[:3], [count], *given[3:])

        yield Call(note, (*args, MASK), reference=reference)


def convolution_double_backward(draw: Draw) -> Iterator[Call]:
    for note, args, transposed in _convolution(draw):
        output, given, weight = args[:3]
        changes = draw(*given.shape), draw(*weight.shape), draw(_outputs(args, transposed))
        yield Call(note, (*changes, output, weight, given, *args[3:], MASK))
        yield Call(f"{note} of the input", (changes[0], None, None, output, weight, given, *args[3:], MASK))


def slow_conv2d_backward(draw: Draw) -> Iterator[Call]:
    yield Call("", (draw(2, 4, 3, 3), draw(2, 3, 5, 5), draw(4, 3, 3, 3), [3, 3], [1, 1], [0, 0], MASK))


def native_layer_norm_backward(draw: Draw) -> Iterator[Call]:
    for shape in ((3, 4, 5), (6, 5)):
        x, size = draw(*shape), [shape[-1]]
        for weight, bias in ((draw(*size), draw(*size)), (draw(*size), None), (None, None)):
            _, mean, rstd = aten.native_layer_norm(x, size, weight, bias, 1e-5)
            yield Call(
                _given(weight, bias),
                (draw(*shape), x, size, mean, rstd, weight, bias, MASK),
                absent=_absent(weight, bias),
            )


def native_group_norm_backward(draw: Draw) -> Iterator[Call]:
    x = draw(2, 6, 4, 3)
    for weight in (draw(6), None):
        _, mean, rstd = aten.native_group_norm(x, weight, weight, 2, 6, 12, 3, 1e-5)
        yield Call(
            _given(weight), (draw(2, 6, 4, 3), x, mean, rstd, weight, 2, 6, 12, 3, MASK), absent=_absent(weight, weight)
        )


def native_batch_norm_backward(draw: Draw) -> Iterator[Call]:
    for x, weight, mean, variance, train in _batch_norms(draw):
        _, saved_mean, saved_invstd = aten.native_batch_norm(x, weight, None, mean, variance, train, 0.1, 1e-5)
        saved = (saved_mean, saved_invstd) if train else (None, None)
        note = f"{_given(weight)} {'training' if train else 'evaluation'}"
        yield Call(note, (draw(*x.shape), x, weight, mean, variance, *saved, train, 1e-5, MASK))


def batch_norm_backward(draw: Draw) -> Iterator[Call]:
    for x, weight, mean, variance, train in _batch_norms(draw):
        if weight is None:
            continue
        _, *saved = aten.native_batch_norm(x, weight, None, mean, variance, train, 0.1, 1e-5)
        saved = saved if train else [x.new_empty(0), x.new_empty(0)]
        reserve = torch.empty(0, dtype=torch.uint8)
        yield Call(f"training {train}", (draw(*x.shape), x, weight, mean, variance, *saved, train, 1e-5, MASK, reserve))


def batch_norm_impl_index_backward(draw: Draw) -> Iterator[Call]:
    for x, weight, mean, variance, train in _batch_norms(draw):
        _, *saved = aten.native_batch_norm(x, weight, None, mean, variance, train, 0.1, 1e-5)
        reserve = torch.empty(0, dtype=torch.uint8)
        yield Call(
            f"training {train}", (0, x, draw(*x.shape), weight, mean, variance, *saved, train, 1e-5, MASK, reserve)
        )


def _batch_norms(draw: Draw) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, bool]]:
    for shape in ((5, 3), (2, 3, 4), (2, 3, 2, 4)):
        for train in (True, False):
            for weight in (draw(3), None):
                yield draw(*shape), weight, draw(3), draw(3).abs() + 0.5, train


def fused_rms_norm_backward(draw: Draw) -> Iterator[Call]:
    x = draw(3, 4, 5)
    for weight in (draw(5), None):
        rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

        def reference(grad: Any, x: Any, size: Any, rstd: Any, weight: Any, mask: Any) -> Any:
            return _by_autograd(lambda x, w: functional.rms_norm(x, size, w, 1e-5), (x, weight), grad, mask)

        yield Call(_given(weight), (draw(3, 4, 5), x, [5], rstd, weight, MASK), reference=reference)


def grid_sampler_2d_backward(draw: Draw) -> Iterator[Call]:
    yield from _grid_sampler(draw, (4, 5), (3, 3), (0, 1, 2))


def grid_sampler_3d_backward(draw: Draw) -> Iterator[Call]:
    yield from _grid_sampler(draw, (3, 4, 5), (2, 3, 3), (0, 1))


def _grid_sampler(draw: Draw, size: tuple[int, ...], out: tuple[int, ...], modes: tuple[int, ...]) -> Iterator[Call]:
    for mode in modes:
        for padding, corners in ((0, False), (1, True), (2, False)):
            grid = draw(2, *out, len(size)).tanh() * 0.9
            yield Call(
                f"mode {mode} padding {padding}",
                (draw(2, 3, *out), draw(2, 3, *size), grid, mode, padding, corners, MASK),
            )


def attention_backward(draw: Draw) -> Iterator[Call]:
    q, k, v = draw(2, 2, 4, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8)
    for bias in (draw(2, 2, 4, 6), draw(1, 1, 4, 6), None):
        scores = q @ k.mT / 8**0.5 + (0 if bias is None else bias)
        out, logsumexp = scores.softmax(-1) @ v, scores.logsumexp(-1).float()
        none, random = torch.empty(0, dtype=torch.int32), torch.zeros((), dtype=torch.int64)

        def reference(grad: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any, *rest: Any) -> Any:
            def attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
                return functional.scaled_dot_product_attention(q, k, v, bias)

            return _by_autograd(attention, (q, k, v, bias), grad, mask)

        yield Call(
            "no bias" if bias is None else f"bias {list(bias.shape)}",
            (draw(2, 2, 4, 8), q, k, v, bias, MASK, out, logsumexp, none, none, 4, 6, 0.0, False, random, random),
            reference=reference,
        )


def _by_autograd(
    function: Callable[..., Any], inputs: tuple[torch.Tensor | None, ...], grad: torch.Tensor, mask: list[bool]
) -> list[torch.Tensor | None]:
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    present = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(function(*leaves), present, grad))
    every = [None if t is None else next(found) for t in leaves]
    return [g if wanted else None for g, wanted in zip(every, mask, strict=True)]


def _given(*optional: torch.Tensor | None) -> str:
    names = [name for name, value in zip(("weight", "bias"), optional, strict=False) if value is not None]
    return " and ".join(names) or "no weight"


def _absent(*optional: torch.Tensor | None) -> frozenset[int]:
    """Places of gradients, after the input's, of what is None."""
    return frozenset(i for i, value in enumerate(optional, 1) if value is None)


# By operator and overload.
CALLS: dict[tuple[str, str], Callable[[Draw], Iterator[Call]]] = {
    ("_batch_norm_impl_index_backward", ""): batch_norm_impl_index_backward,
    ("_convolution_double_backward", ""): convolution_double_backward,
    ("_fused_rms_norm_backward", ""): fused_rms_norm_backward,
    ("_scaled_dot_product_fused_attention_overrideable_backward", ""): attention_backward,
    ("_slow_conv2d_backward", "output_mask"): slow_conv2d_backward,
    ("batch_norm_backward", ""): batch_norm_backward,
    ("convolution_backward", ""): convolution_backward,
    ("convolution_backward_overrideable", ""): convolution_backward_overrideable,
    ("grid_sampler_2d_backward", ""): grid_sampler_2d_backward,
    ("grid_sampler_3d_backward", ""): grid_sampler_3d_backward,
    ("native_batch_norm_backward", ""): native_batch_norm_backward,
    ("native_group_norm_backward", ""): native_group_norm_backward,
    ("native_layer_norm_backward", ""): native_layer_norm_backward,
}
