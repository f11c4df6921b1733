"""Optimizer steps over lists of parameters, each one program. Learning rate, betas and the like are data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import cast, compute_dtype
from torch_tpu.ops.core.registry import lower

Arrays = Sequence[Array]
Optional = list[Array | None]


def scaled(grad: Array, dtype: torch.dtype, grad_scale: Array | None) -> Array:
    """A gradient in the dtype of the step, without the loss scale."""
    grad = hlo.convert(grad, dtype)
    return grad if grad_scale is None else grad / hlo.convert(grad_scale, dtype)


def unless_found(found_inf: Array | None, old: Arrays, new: Arrays) -> list[Array]:
    """The old values where some gradient was not finite."""
    new = [hlo.convert(n, o.dtype) for o, n in zip(old, new, strict=True)]
    if found_inf is None:
        return new
    skip = hlo.reshape(found_inf, ()).eq(1)
    return [hlo.select(skip, o, n) for o, n in zip(old, new, strict=True)]


def _step_dtype(parameter: Array) -> torch.dtype:
    return compute_dtype(parameter.dtype)


def _lerp(start: Array, end: Array, weight: ArrayLike) -> Array:
    return start + (end - start) * weight


def _adam(decoupled: bool) -> Callable[..., list[Optional]]:
    def step(
        parameters: Arrays,
        grads: Arrays,
        exp_avgs: Arrays,
        exp_avg_sqs: Arrays,
        max_exp_avg_sqs: Arrays,
        state_steps: Arrays,
        *,
        lr: ArrayLike,
        beta1: ArrayLike,
        beta2: ArrayLike,
        weight_decay: ArrayLike,
        eps: ArrayLike,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Array | None = None,
        found_inf: Array | None = None,
    ) -> list[Optional]:
        """Kingma and Ba, 2015; `decoupled` weight decay is that of Loshchilov and Hutter, 2019."""
        results: list[Optional] = [[], [], [], [], []]
        for i, parameter in enumerate(parameters):
            dtype = _step_dtype(parameter)
            t = hlo.convert(state_steps[i], torch.float64)
            step_size = cast(_wide(lr) / (1 - hlo.power(_wide(beta1), t)), dtype)
            correction = hlo.convert(hlo.sqrt(1 - hlo.power(_wide(beta2), t)), dtype)
            grad = unscaled = scaled(grads[i], dtype, grad_scale)
            value, average, square = cast([parameter, exp_avgs[i], exp_avg_sqs[i]], dtype)
            if maximize:
                grad = -grad
            if decoupled:
                value = value * cast(1 - _wide(lr) * weight_decay, dtype)
            else:
                grad = grad + value * cast(weight_decay, dtype)
            average = _lerp(average, grad, cast(1 - beta1, dtype))
            square = square * cast(beta2, dtype) + grad * grad * cast(1 - beta2, dtype)
            largest = [hlo.maximum(hlo.convert(max_exp_avg_sqs[i], dtype), square)] if amsgrad else []
            denominator = hlo.sqrt(largest[0] if amsgrad else square) / correction + cast(eps, dtype)
            new = [value - step_size * average / denominator, average, square, *largest]
            old = [parameter, exp_avgs[i], exp_avg_sqs[i], *(max_exp_avg_sqs[i : i + 1] if amsgrad else [])]
            value, average, square, *largest = unless_found(found_inf, old, new)
            _collect(
                results, [value, _written_grad(unscaled, grads[i], grad_scale, found_inf), average, square, *largest]
            )
        if not amsgrad:
            results[4] = [None] * len(max_exp_avg_sqs)
        return results

    return step


def _wide(number: ArrayLike) -> Array:
    """A number as a float64 Array."""
    return hlo.as_array(number, torch.float64)


def _written_grad(unscaled: Array, grad: Array, grad_scale: Array | None, found_inf: Array | None) -> Array | None:
    return None if grad_scale is None else unless_found(found_inf, [grad], [unscaled])[0]


def _collect(lists: list[Optional], entries: Sequence[Array | None]) -> None:
    for target, entry in zip(lists, entries, strict=False):
        target.append(entry)


lower("_fused_adam_", "_fused_adam_.tensor_lr", wide=True)(_adam(decoupled=False))
lower("_fused_adamw_", "_fused_adamw_.tensor_lr", wide=True)(_adam(decoupled=True))


@lower("_fused_sgd_", "_fused_sgd_.tensor_lr", wide=True)
def fused_sgd(
    parameters: Arrays,
    grads: Arrays,
    momentum_buffers: Arrays,
    *,
    weight_decay: ArrayLike,
    momentum: ArrayLike,
    lr: ArrayLike,
    dampening: ArrayLike,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> list[Optional]:
    """Without momentum there are no buffers; the first step sets them to the gradient."""
    results: list[Optional] = [[], [], []]
    for i, parameter in enumerate(parameters):
        dtype = _step_dtype(parameter)
        grad = unscaled = scaled(grads[i], dtype, grad_scale)
        value = hlo.convert(parameter, dtype)
        if maximize:
            grad = -grad
        grad = grad + value * cast(weight_decay, dtype)
        old, new = [parameter], []
        if momentum_buffers:
            buffer = hlo.convert(momentum_buffers[i], dtype)
            damped = grad * cast(1 - dampening, dtype)
            buffer = grad if is_first_step else buffer * cast(momentum, dtype) + damped
            grad = grad + buffer * cast(momentum, dtype) if nesterov else buffer
            old, new = [parameter, momentum_buffers[i]], [buffer]
        value, *buffers = unless_found(found_inf, old, [value - grad * cast(lr, dtype), *new])
        _collect(results, [value, _written_grad(unscaled, grads[i], grad_scale, found_inf), *buffers])
    return results


def fused_adagrad(
    parameters: Arrays,
    grads: Arrays,
    state_sums: Arrays,
    state_steps: Arrays,
    *,
    lr: ArrayLike,
    lr_decay: ArrayLike,
    weight_decay: ArrayLike,
    eps: ArrayLike,
    maximize: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> list[Optional]:
    """Duchi, Hazan and Singer, 2011. The caller counts the steps."""
    results: list[Optional] = [[], [], []]
    for i, parameter in enumerate(parameters):
        dtype = _step_dtype(parameter)
        t = hlo.convert(state_steps[i], torch.float64)
        rate = hlo.convert(_wide(lr) / (1 + (t - 1) * _wide(lr_decay)), dtype)
        grad = unscaled = scaled(grads[i], dtype, grad_scale)
        value = hlo.convert(parameter, dtype)
        if maximize:
            grad = -grad
        grad = grad + value * cast(weight_decay, dtype)
        total = hlo.convert(state_sums[i], dtype) + grad * grad
        value = value - rate * grad / (hlo.sqrt(total) + cast(eps, dtype))
        value, total = unless_found(found_inf, [parameter, state_sums[i]], [value, total])
        _collect(results, [value, _written_grad(unscaled, grads[i], grad_scale, found_inf), total])
    return results


lower("_fused_adagrad_.tensor_lr", wide=True)(fused_adagrad)


@lower("_fused_adagrad_", wide=True)
def fused_adagrad_with_steps(
    parameters: Arrays, grads: Arrays, state_sums: Arrays, state_steps: Arrays, **options: ArrayLike
) -> list[Optional]:
    """This overload's schema marks the steps as written, though no kernel writes them."""
    return [*fused_adagrad(parameters, grads, state_sums, state_steps, **options), [None] * len(state_steps)]  # type: ignore[arg-type]
