"""Reports about wrong numbers: integers, types, NaN, ties, empty tensors, indices, products, function transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tools.compare import assert_same, check

NAN, INF = float("nan"), float("inf")


def test_exact_quotients() -> None:
    """Integer division through a rounded reciprocal: tenstorrent/tt-xla#4568, pytorch/pytorch#42896."""
    for divisor in (3, 7, 14, 49, 1540):
        check(
            lambda n, d=divisor: [(n * d) // d, ((n * d).float() / float(d)).floor(), n * d % d], torch.arange(1, 300)
        )
        assert (torch.tensor(divisor * 28, device="tpu") // divisor).item() == 28
        assert (divisor * 38 // torch.tensor(divisor, device="tpu")).item() == 38
    assert [int(side // 14) for side in torch.tensor([392, 532], device="tpu")] == [28, 38]


def test_bytes_wrap() -> None:
    """uint8 arithmetic widened or refused: pytorch/xla#861, pytorch/xla#869, pytorch/pytorch#110854."""

    def run(x: torch.Tensor) -> Any:
        results = [x.sign(), x.abs(), x + 100, x - 1, x.square(), x * 2, -x, ~x, x >> 1, x << 1, x > 199, x.max()]
        return [*results, x.argmin(), x.float().mean(), x / 2, torch.bitwise_xor(x, 15), x[:1, None] @ x[None, :1]]

    check(run, torch.tensor([103, 0, 1, 87, 200, 255], dtype=torch.uint8))
    check(lambda x: [x.abs(), -x, x + 1], torch.tensor([-128, 127], dtype=torch.int8))
    check(lambda x: [x + 1, x * 2], torch.tensor([2**31 - 1], dtype=torch.int32))


def test_wide_integers() -> None:
    """64-bit integers cut to 32 bits: pytorch/xla#2548, pytorch/xla#1657, pytorch/xla#1965."""
    values = torch.tensor([2**33, -(2**33), 5, 2**33 + 1, -1, 2**62])

    def run(x: torch.Tensor) -> Any:
        ordered = x.sort()
        results = [*ordered, x.max(), x.argmin(), x.median(), x.kthvalue(2)[0], x + 1, x // 3, x % 1000003]
        results += [x * 6364136223846793005 + 1442695040888963407, x >> 31, x & 0xFFFFFFFF, x.unique()]
        results += [x == 2**33 + 1, torch.searchsorted(ordered[0], x), x.cumsum(0), x[:3].prod(), x - 2**53]
        return [*results, torch.arange(2**40, 2**40 + 3, device=x.device)]

    check(run, values)
    assert (torch.tensor(2**53 + 1, device="tpu") - 2**53).item() == 1


def test_equal_rows_of_every_dtype() -> None:
    """A comparison fused into a reduction: openxla/xla#9431."""
    row = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1])
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16):
        rows = torch.stack([row, row, row.flip(0)]).to(dtype)
        check(lambda x, y: [(x == y).all(-1), (x != y).any(-1), (x == y).sum(1)], row.to(dtype), rows)
        on_device = rows.to("tpu")
        assert torch.equal(on_device[0], on_device[1])
        assert not torch.equal(on_device[0], on_device[2])


def test_join_promotes() -> None:
    """cat keeps the first dtype: pytorch/xla#3608."""
    whole, part = torch.tensor([[1, 2]]), torch.tensor([[0.5]])

    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        results = [torch.cat([a, b], 1), torch.cat([a.int(), a]), torch.cat([b.half(), b.bfloat16()])]
        results += [
            torch.cat([a.bool(), a.to(torch.uint8)]),
            torch.cat([b.new_empty(0), b]),
            torch.hstack([b, a.double()]),
        ]
        return [*results, torch.where(a > 1, a, b), torch.stack([a, a.float()])]

    check(run, whole, part)


def test_nan_is_the_largest() -> None:
    """NaN ignored by extremes and sort: pytorch/xla#2419."""
    x = torch.tensor([[1.0, NAN, 3.0, NAN], [2.0, 5.0, 4.0, 5.0]])

    def run(x: torch.Tensor) -> Any:
        results = [x.argmax(1), x.argmin(1), x.max(), x.min(), x.max(1), x.min(1), x.sort(1), x.nansum(), x.cummax(1)]
        return [*results, x.sort(1, descending=True)[0], x.topk(3, 1)[0], x.aminmax(dim=1)]

    check(run, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_passes_through(dtype: torch.dtype) -> None:
    """Clamps that turn NaN into a bound: pytorch/xla#2330, tensorflow#119628, pytorch/pytorch#93784."""

    def run(x: torch.Tensor) -> Any:
        zero, one = torch.zeros_like(x), torch.ones_like(x)
        clamps = [x.clamp(0, 1), x.clamp(min=0), x.clamp(max=1), x.clamp(zero, one), x.maximum(zero), zero.minimum(x)]
        layers = [F.relu, F.relu6, F.hardtanh, F.hardsigmoid, F.leaky_relu, F.gelu, F.softplus, F.hardswish, torch.tanh]
        others = [torch.fmax(x, zero), x.nan_to_num(7.0, posinf=8.0), x.sign(), x.floor()]
        return clamps + [layer(x) for layer in layers] + others

    # bfloat16 of a result that XLA and the CPU round from float32 differently in its last of eight bits
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
    check(run, torch.tensor([NAN, -2.0, 0.5, 9.0, INF, NAN]).to(dtype), **tolerance)


def test_stable_sort() -> None:
    """Equal keys in an order of their own: pytorch/pytorch#120874."""
    keys = torch.randint(0, 5, (3, 400))
    check(lambda x: [torch.sort(x, dim=1, stable=True, descending=d) for d in (False, True)], keys)
    check(lambda z: torch.argsort(z, stable=True), torch.tensor([0.0, -0.0, 0.0, -0.0]))


def test_tensors_without_elements() -> None:
    """Operators that abort at a size of zero: pytorch/xla#880, #607, #8610, #890, #893."""

    def run(e: torch.Tensor, i: torch.Tensor, z: torch.Tensor, v: torch.Tensor) -> Any:
        results = [torch.gather(e, 0, i), e.index_select(0, i.view(-1)), torch.cummax(z, -1), z.cumsum(1), z.sort(1)]
        results += [z.topk(0, 1), z.sum(1), z.prod(1), z.sum(), z.all(), z.any(), z.mean(1), z.logsumexp(1), z.t() @ z]
        results += [z @ z.t(), v[:, 1:1], torch.cat([v[:, 1:1], v], 1), F.linear(v.new_empty(0, 4), v.new_ones(5, 4))]
        results += [torch.trapz(v.new_empty(0, 2), x=v.new_tensor([1.0, 2.0]), dim=1), z.new_empty(0, 3).stride()]
        return results

    empty = torch.empty(0, 1, 2, 0)
    check(run, empty, empty.long(), torch.rand(3, 0), torch.randn(2, 3, 4))
    assert torch.randn(3, 0, device="tpu").shape == torch.randint(6, (3, 0), device="tpu").shape == (3, 0)


def test_indices_of_32_bits() -> None:
    """An index that must be int64: pytorch/xla#6711, pytorch/xla#9094."""

    def run(x: torch.Tensor, i: torch.Tensor) -> Any:
        written = x.clone()
        written[i] = 0
        return x[i], written, x.index_select(0, i), F.embedding(i, x), x[i > 1]

    check(run, torch.arange(12.0).reshape(4, 3), torch.tensor([3, 0, 3, 1], dtype=torch.int32))


@pytest.mark.parametrize("accumulate", [True, False])
def test_values_broadcast_over_the_indexed_block(accumulate: bool) -> None:
    """index_put with a smaller value: pytorch/pytorch#144539."""
    x, at = torch.arange(48).reshape(6, 4, 2), torch.tensor([[5, 0, 3], [1, 2, 4]])
    check(lambda x, i, v: torch.index_put(x, [i], v, accumulate=accumulate), x, at, torch.tensor([-7, 1000]))


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4], [0, 0, 4], [4, 3, 2, 1, 0]])
def test_gradient_of_a_middle_index(positions: list[int]) -> None:
    """A gather's gradient that loses rows of a large batch: jax-ml/jax#39025."""

    def run(x: torch.Tensor, i: torch.Tensor) -> Any:
        wide = i.view(1, -1, 1).expand(x.shape[0], -1, x.shape[2])
        return x[:, i, :], x.index_select(1, i), x.gather(1, wide)

    check(run, torch.randn(64, 5, 7, requires_grad=True), torch.tensor(positions))


def test_sizes_that_depend_on_data() -> None:
    """unique and kin through the host: pytorch/xla#3297, pytorch/xla#4511."""

    def run(t: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> Any:
        results = [t.unique(return_inverse=True, return_counts=True), t.unique(dim=0, return_inverse=True)]
        results += [torch.unique_consecutive(t.view(-1), return_counts=True), t.abs().view(-1).bincount(minlength=9)]
        results += [torch.bincount(t[0].abs(), weights=s), t.abs()[:, 0].bincount(), torch.histc(s, 4, 0, 4)]
        results += [torch.searchsorted(s, v), torch.searchsorted(s, v, right=True), torch.isin(t, t[1, :2])]
        return [*results, torch.bucketize(v[2], s)]

    keys = torch.tensor([1.0, 3.0, 3.0, 7.0])
    check(run, torch.randint(-3, 6, (5, 4)), keys, torch.tensor([0.0, 1.0, 3.0, 8.0, NAN]))


def test_permutations() -> None:
    """randperm with repeats: pytorch/xla#562."""
    for n in (0, 1, 2, 3, 1000, 70000):
        p = torch.randperm(n, device="tpu")
        assert p.dtype is torch.int64
        assert torch.equal(p.cpu().sort().values, torch.arange(n))
    assert not torch.equal(torch.randperm(500, device="tpu").cpu(), torch.randperm(500, device="tpu").cpu())
    assert torch.randperm(5, dtype=torch.int32, device="tpu").dtype is torch.int32


@pytest.mark.parametrize(("alpha", "beta"), [(1, 0.5), (2, 0), (0, 1), (-0.25, 3)])
def test_scaled_products(alpha: float, beta: float) -> None:
    """alpha and beta taken for one, NaN times a beta of zero: pytorch/pytorch#93601."""

    def run(m: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        scale = {"alpha": alpha, "beta": beta}
        results = [
            torch.addmm(m, a, b, **scale),
            m.clone().addmm_(a, b, **scale),
            torch.addmv(m[:, 0], a, b[:, 0], **scale),
        ]
        results += [torch.baddbmm(m[None], a[None], b[None], **scale), torch.addmm(m * NAN, a, b, beta=0)]
        return [*results, torch.addr(m, a[:, 0], b[0], **scale)]

    check(run, torch.randn(2, 3), torch.randn(2, 4), torch.randn(4, 3))
    whole = torch.arange(6).reshape(2, 3)
    check(
        lambda m, i: [torch.addmm(m, i, i.t(), beta=2, alpha=3), i.int() @ i.t().int()], torch.ones(2, 2).long(), whole
    )


def test_float32_products_keep_float32() -> None:
    """Products of bfloat16 halves: pytorch/xla#7050, pytorch/xla#8811, pytorch/xla#8625."""
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    x, y = a.to("tpu"), b.to("tpu")
    products = [x @ y.t(), torch.einsum("ik,jk->ij", x, y), F.linear(x, y), torch.tensordot(x, y, dims=([1], [1]))]
    products += [torch.addmm(torch.zeros(48, device="tpu"), x, y.t()), torch.bmm(x[None], y.t()[None])[0]]
    exact = a.double() @ b.double().t()
    for product in products:
        # 64 products of numbers near 1 in float32; bfloat16 would be off by 1e-1.
        assert (product.cpu().double() - exact).abs().max().item() < 5e-5
    image, weight = torch.randn(1, 8, 9, 9), torch.randn(4, 8, 3, 3)
    error = F.conv2d(image.to("tpu"), weight.to("tpu")).cpu().double() - F.conv2d(image.double(), weight.double())
    assert error.abs().max().item() < 5e-5


# Each at and beside its edges.
EDGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    F.relu, F.relu6, F.hardtanh, F.hardswish, F.hardsigmoid, torch.abs, F.softshrink, F.hardshrink, F.leaky_relu, F.elu,
    F.selu, F.celu, F.silu, F.mish, F.softplus, torch.sinc, torch.round, torch.sign, torch.norm, torch.amax,
    lambda t: t.clamp(-1, 1), lambda t: torch.maximum(t, t.new_zeros(())), lambda t: torch.minimum(t, t.flip(0)),
    lambda t: (t * 0).norm(), lambda t: torch.where(t > 0, t, t * t), lambda t: F.huber_loss(t, t * 0), torch.max,
    lambda t: F.smooth_l1_loss(t, t * 0), lambda t: F.threshold(t, 0.5, 9.0), lambda t: torch.prod(t[2:6]),
    lambda t: t.cummax(0)[0], lambda t: torch.fmod(t, 2.0), lambda t: torch.cdist(t[None, :, None], t[None, :, None]),
    lambda t: F.normalize(t * 0, dim=0), lambda t: torch.atan2(t, t.flip(0)), lambda t: torch.hypot(t, t * 0),
    lambda t: F.cosine_similarity(t, t.flip(0), dim=0), lambda t: F.log_softmax(t, 0), lambda t: t.pow(2).sum().sqrt(),
]  # fmt: skip


def test_subgradients() -> None:
    """Gradients that differ where a function has a corner: pytorch/pytorch#93784, pytorch/xla#1326."""
    x = torch.tensor([-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0], requires_grad=True)
    for function in EDGES:
        check(function, x)


def test_transforms() -> None:
    """vmap, jvp and jacobians on another device: pytorch/functorch#882, pytorch/pytorch#182842."""

    def scalar(a: torch.Tensor) -> torch.Tensor:
        return (a**3).sum() * a[0]

    def run(x: torch.Tensor) -> Any:
        tangents = vmap(lambda a, b: jvp(torch.sin, (a,), (b,)))(x, torch.ones_like(x))
        jacobians = [jacrev(scalar)(x[0]), jacfwd(scalar)(x[0]), grad(scalar)(x[0]), hessian(scalar)(x[0])]
        y, pull = vjp(torch.exp, x)
        picked = vmap(lambda a, i: a[i], in_dims=(0, None))(x, torch.tensor(1, device=x.device))
        return tangents, jacobians, pull(torch.ones_like(y)), picked

    check(run, torch.randn(5, 3), strides=False)
    noise = vmap(lambda a: torch.randn(2, device="tpu") + a.sum() * 0, randomness="different")(
        torch.ones(5, device="tpu")
    )
    assert noise.unique().numel() == 10


def test_gradients_per_sample() -> None:
    """grad inside vmap over a module: pytorch/functorch#882."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to("tpu")
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(5, 3).to("tpu")

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return functional_call(module, parameters, (sample[None],)).square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    module(x).square().sum().backward()
    for name, p in module.named_parameters():
        assert each[name].shape == (5, *p.shape)
        assert p.grad is not None
        assert_same(each[name].sum(0), p.grad.cpu(), strides=False, rtol=1e-4, atol=1e-5)  # five sums in another order
