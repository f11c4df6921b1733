"""Runs the same PyTorch code on the CPU and on the device and compares everything a user can see of the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tools.samples import spread_of_operator
from tools.wider import has_half, rounded, widened
from torch_tpu import hooks, metrics
from torch_tpu.eager.program import plan, plan_tracing, stored_plans


def to_device(value: Any, device: str = "tpu") -> Any:
    """Every tensor of a nest as a leaf on `device` with the same strides, requires_grad kept."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return torch.device(device) if isinstance(leaf, torch.device) else leaf
        moved = leaf.detach().clone().to(device)
        if moved.stride() != leaf.stride() and leaf.numel():
            base = leaf.detach().as_strided((leaf.untyped_storage().nbytes() // leaf.element_size(),), (1,), 0)
            moved = base.clone().to(device).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        return moved.requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


def seed_generators() -> None:
    """What `torch.manual_seed(0)` does to the CPU and the device.

    For each kind of device that isn't there it keeps a stack trace, which costs a quarter of a small comparison.
    """
    torch.default_generator.manual_seed(0)
    torch.tpu.manual_seed_all(0)


@contextlib.contextmanager
def forms_for_tpus() -> Iterator[list[tuple[str, str]]]:
    """Programs have the form for TPUs inside, though XLA:CPU runs them. Yields their operators and StableHLO."""
    programs = []
    trace = plan_tracing.make_plan

    def make_plan(call: plan.Call) -> plan.Plan:
        made = trace(call, "tpu")
        programs.append((call.name, str(made.module)))
        return made

    hooks.forget_programs()
    try:
        with (
            mock.patch.object(plan_tracing, "make_plan", make_plan),
            # XLA:CPU's own programs are on disk under the same names.
            mock.patch.object(stored_plans, "keeps_operators", False),
        ):
            yield programs
    finally:
        hooks.forget_programs()


@contextlib.contextmanager
def no_fallback() -> Iterator[None]:
    """Fails if an operator ran on the CPU inside the block."""
    before = {k: v for k, v in metrics.counters().items() if k.startswith("fallback::")}
    yield
    after = {k: v for k, v in metrics.counters().items() if k.startswith("fallback::")}
    new = {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}
    assert not new, f"ran on the CPU: {new}"


class Mismatch(AssertionError):
    """A difference between two results; `kind` says in what: "values", "dtype", "shape", "strides", ..."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NoGradient(Exception):
    """The CPU can't differentiate what was called."""


def assert_same(
    got: Any, want: Any, *, strides: bool = True, rtol: float | None = None, atol: float | None = None
) -> None:
    """Values (torch.testing's tolerances by default), dtype, shape and strides of every tensor in two nests."""
    got_leaves, want_leaves = tree_leaves(got), tree_leaves(want)
    if len(got_leaves) != len(want_leaves):
        raise Mismatch("structure", f"{len(got_leaves)} results instead of {len(want_leaves)}")
    for i, (g, w) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        if not isinstance(w, torch.Tensor):
            if g != w and (g == g or w == w):
                raise Mismatch("values", f"result {i}: {g!r} instead of {w!r}")
            continue
        if g.dtype is not w.dtype:
            raise Mismatch("dtype", f"result {i}: dtype {g.dtype} instead of {w.dtype}")
        if g.shape != w.shape:
            raise Mismatch("shape", f"result {i}: shape {tuple(g.shape)} instead of {tuple(w.shape)}")
        if strides and w.numel() > 1 and _strides(g) != _strides(w):
            raise Mismatch("strides", f"result {i}: strides {g.stride()} instead of {w.stride()}")
        try:
            torch.testing.assert_close(g.detach().cpu(), w.detach(), rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            raise Mismatch("values", f"result {i}: {error}") from None


def _strides(t: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have any effect."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def check(
    function: Callable[..., Any],
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    strides: bool = True,
    allow_fallback: bool = False,
    **kwargs: Any,
) -> None:
    """`function(*args, **kwargs)` on CPU tensors equals itself on device copies; so do the leaves' gradients.

    Arguments written in place are compared as well. In half precision a result may also be that of the next wider
    dtype, rounded once: what the CPU's own kernels give differs from processor to processor.
    """
    host_args, host_kwargs = to_device((args, kwargs), "cpu")
    device_args, device_kwargs = to_device((args, kwargs))
    want = function(*host_args, **host_kwargs)

    def same(got: Any, want: Any, of_wide: Callable[[Any, Any], Any], strides: bool) -> None:
        try:
            assert_same(got, want, strides=strides, rtol=rtol, atol=atol)
        except Mismatch as mismatch:
            if mismatch.kind != "values" or not has_half((args, kwargs)):
                raise
            wide = widened(to_device((args, kwargs), "cpu"), torch.bfloat16)
            results = of_wide(function(*wide[0], **wide[1]), wide)
            assert_same(got, rounded(results, got), strides=False, rtol=rtol, atol=atol)

    with contextlib.nullcontext() if allow_fallback else no_fallback():
        got = function(*device_args, **device_kwargs)
        for leaf in tree_leaves(got):
            if isinstance(leaf, torch.Tensor):
                assert leaf.device.type == "tpu", f"a result is on {leaf.device}"
        same(got, want, lambda results, _: results, strides)
        seeds = gradient_seeds(want)
        want_grads = gradients_of_cpu(want, (host_args, host_kwargs), seeds)
        got_grads = gradients(got, (device_args, device_kwargs), [s.to("tpu") for s in seeds])

        def of_wide(results: Any, wide: Any) -> Any:
            return gradients(results, wide, widened(seeds, torch.bfloat16))

        same(_as_where(got_grads, want_grads), want_grads, of_wide, False)
    same((device_args, device_kwargs), (host_args, host_kwargs), lambda _, wide: wide, True)


def check_gradients(
    got: Any, want: Any, device_args: Any, host_args: Any, rtol: float | None, atol: float | None
) -> None:
    """The gradients of two nests of results with respect to the leaves of their arguments, for the same seeds.

    Raises:
        NoGradient: where PyTorch has none on the CPU.
    """
    seeds = gradient_seeds(want)
    want_grads = gradients_of_cpu(want, host_args, seeds)
    got_grads = gradients(got, device_args, [s.to("tpu") for s in seeds])
    assert_same(_as_where(got_grads, want_grads), want_grads, strides=False, rtol=rtol, atol=atol)


def gradients_of_cpu(want: Any, host_args: Any, seeds: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of the CPU's results.

    Raises:
        NoGradient: where PyTorch has none.
    """
    try:
        return gradients(want, host_args, seeds)
    except Exception as error:
        raise NoGradient(str(error)) from error


def _as_where(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients, None in the places where the CPU's are."""
    for g, w in zip(got, want, strict=True):
        if (g is None) != (w is None):
            raise Mismatch("structure", f"the gradient is {g}, on the CPU {w}")
    return got


def gradient_seeds(results: Any) -> list[torch.Tensor]:
    """What a backward pass through these results starts from."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.dtype)
        for t in _differentiable(results)
        if t.grad_fn is not None
    ]


def gradients(results: Any, arguments: Any, seeds: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of results with respect to the leaves among the arguments."""
    leaves = [t for t in _differentiable(arguments) if t.is_leaf]
    roots = [t for t in _differentiable(results) if t.grad_fn is not None]
    return list(torch.autograd.grad(roots, leaves, seeds, allow_unused=True)) if leaves and roots else []


def _differentiable(nest: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(nest) if isinstance(t, torch.Tensor) and t.requires_grad]


def check_opinfo(
    name: str,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    *,
    variant: str = "",
    samples: int = 12,
    grad: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    strides: bool = True,
    skip: Callable[[Any], bool] = lambda sample: False,
) -> None:
    """An operator on the sample inputs of PyTorch's own test database (`op_db`), spread over all of them."""
    infos = [i for i in _database() if i.name == name and i.variant_test_name == variant]
    assert infos, f"op_db has no {name} {variant}"
    for info in infos:
        for dtype in dtypes:
            if dtype not in info.supported_dtypes("cpu"):
                continue
            wants_grad = grad and info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
            torch.manual_seed(0)
            all_samples = [s for s in info.sample_inputs("cpu", dtype, requires_grad=wants_grad) if not skip(s)]
            for sample in spread_of_operator(all_samples, samples):
                try:
                    check(info.op, sample.input, *sample.args, rtol=rtol, atol=atol, strides=strides, **sample.kwargs)
                except Exception as error:
                    raise AssertionError(f"{name} {variant} {dtype}: {sample.summary()}\n{error}") from error


def _database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)
