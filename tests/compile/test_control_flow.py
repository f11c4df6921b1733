"""Control flow inside a compiled function: one program, forward and backward, equal to the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import map as map_over
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.compiler import nested_compile_region

from tests.compile.programs import by_operator, check_compiled, compiled, plans_of

X, W = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.eye(3) * 0.7 + 0.1


# --- cond --------------------------------------------------------------------------------------------------------


def either(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: torch.sin(x @ w), lambda x: x * 2, (x,))


@pytest.mark.parametrize("sign", [1, -1])
def test_cond_with_a_closure(sign: int) -> None:
    check_compiled(either, X.abs() * sign, W)


def test_only_one_branch_of_cond_runs() -> None:
    """The other one's index is out of range; the same index raises where its branch is taken."""

    def pick(x: Tensor, i: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x, i: x[i], lambda x, i: x[i - i], (x, i))

    function, i = compiled(pick), torch.tensor([9], device="tpu")
    assert function(-torch.ones(3, device="tpu"), i).tolist() == [-1.0]
    before = by_operator()
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        function(torch.ones(3, device="tpu"), i)
    assert by_operator() == before


def test_cond_inside_cond() -> None:
    def nested(x: Tensor, w: Tensor) -> Tensor:
        inner = lambda x: torch.cond(x.max() > 2, lambda x: x - w[0], lambda x: x @ w, (x,))  # noqa: E731
        return torch.cond(x.sum() > 0, inner, torch.tanh, (x,))

    for factor in (0.1, 10.0):
        check_compiled(nested, X.abs() * factor, W)


# --- loops -------------------------------------------------------------------------------------------------------


def test_while_loop_that_depends_on_data() -> None:
    def double(x: Tensor) -> Any:
        return while_loop(
            lambda i, x: x.sum() < 100, lambda i, x: (i + 1, x * 2), (torch.zeros((), device=x.device), x)
        )

    check_compiled(double, X.abs(), gradients=False)


def test_while_loop_carries_python_numbers() -> None:
    def add_up(x: Tensor) -> Any:
        return while_loop(lambda i, x: 2 * i < x.shape[0] + 4, lambda i, x: (i + 1, x + i), (0, x))[1]

    check_compiled(add_up, X, gradients=False)


def test_a_number_that_a_loop_computes_is_returned() -> None:
    def halvings(x: Tensor) -> Any:
        return while_loop(lambda n, x: x.max() > 1, lambda n, x: (n + 3, x / 2), (0, x))

    count, x = compiled(halvings)(torch.full((2,), 10.0, device="tpu"))
    assert (count, x.tolist()) == (12, [0.625, 0.625])


def test_gradient_of_a_while_loop_with_a_counter() -> None:
    def repeat(x: Tensor, w: Tensor) -> Any:
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, torch.sin(x @ w) + x), (start, x))[1]

    check_compiled(repeat, X, W, reference=lambda x, w: [x := torch.sin(x @ w) + x for _ in range(5)][-1])


def test_gradient_of_a_while_loop_that_depends_on_data() -> None:
    """The loop runs between programs, because its number of steps is a size."""

    def grow(x: Tensor, w: Tensor) -> Tensor:
        return while_loop(lambda x: x.sum() < 100, lambda x: (torch.relu(x @ w) * 2 + 1,), (x.abs() + 0,))[0] * 3

    def reference(x: Tensor, w: Tensor) -> Tensor:
        x = x.abs()
        while x.sum() < 100:
            x = torch.relu(x @ w) * 2 + 1
        return x * 3

    before = by_operator()
    host, device = ([t.detach().clone().to(d).requires_grad_() for t in (X, W)] for d in ("cpu", "tpu"))
    want, got = reference(*host), compiled(grow)(*device)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
    assert by_operator() == before + 1
    want.sum().backward()
    got.sum().backward()
    torch.testing.assert_close([t.grad.cpu() for t in device], [t.grad for t in host], rtol=1e-4, atol=1e-3)


def test_an_index_out_of_bounds_in_a_loop_raises_the_first() -> None:
    def read(table: Tensor) -> Any:
        start = torch.zeros((), dtype=torch.int64, device=table.device), table.sum() * 0
        return while_loop(lambda i, s: i < 20, lambda i, s: (i + 4, s + table[i.reshape(1)][0]), start)[1]

    with pytest.raises(IndexError, match="index 12 is out of bounds"):
        compiled(read)(torch.ones(10, device="tpu"))


def recurrent(x: Tensor, w: Tensor, start: Tensor) -> Any:
    return scan(lambda h, row: (torch.tanh(h @ w + row), h * 2), start, x)


def test_scan_is_a_recurrent_layer() -> None:
    check_compiled(recurrent, X, W, torch.ones(3))


@pytest.mark.parametrize("options", [{"dim": 1}, {"reverse": True}])
def test_scan_along_another_dimension_and_backwards(options: dict[str, Any]) -> None:
    def sums(x: Tensor) -> Any:
        rows = x.shape[0] if options.get("dim") else x.shape[1]
        return scan(lambda c, row: (c + row, c * row), x.new_zeros(rows), x, **options)

    check_compiled(sums, X)


def test_scan_of_several_tensors_with_an_integer_carry() -> None:
    def walk(x: Tensor, y: Tensor) -> Any:
        def step(carry: Any, rows: Any) -> Any:
            count, total = carry
            return (count + 1, total + rows[0] * count), {"sum": total + rows[1].sum(), "count": count + 0}

        return scan(step, (torch.zeros((), dtype=torch.int64, device=x.device), x.new_zeros(3)), (x, y))

    check_compiled(walk, X, torch.arange(8).reshape(4, 2), gradients=False)


def test_scan_with_cond_inside() -> None:
    def step(c: Tensor, row: Tensor) -> Any:
        c = torch.cond(row.sum() > 0, lambda c, r: c + r, lambda c, r: c * r, (c, row))
        return c, c.clone()

    check_compiled(lambda x: scan(step, x.new_ones(3), x), X, gradients=False)


@pytest.mark.parametrize("length", [1, 7])
def test_associative_scan(length: int) -> None:
    def prefix(x: Tensor, y: Tensor) -> Any:
        # h' = a h + b, as state-space models have it.
        return associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (x, y), 0, combine_mode="generic")

    def reference(x: Tensor, y: Tensor) -> Any:
        a, b = [x[0]], [y[0]]
        for i in range(1, length):
            a.append(a[-1] * x[i])
            b.append(x[i] * b[-1] + y[i])
        return torch.stack(a), torch.stack(b)

    x, y = torch.rand(length, 3), torch.rand(length, 3)
    check_compiled(prefix, x, y, reference=reference)


def test_map() -> None:
    check_compiled(lambda x, w: map_over(lambda row, w: torch.sin(row @ w), x, w), X, W)


# --- regions compiled once -----------------------------------------------------------------------------------------


def test_a_nested_region_becomes_one_function() -> None:
    @nested_compile_region
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w) + x

    def model(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(6):
            x = layer(x, w)
        return x

    check_compiled(model, X, W)
    text = str(plans_of(lambda: compiled(model)(X.to("tpu"), W.to("tpu")))[-1].module)
    assert text.count("stablehlo.tanh") == 1
    assert text.count("call @") == 6


# --- autocast ------------------------------------------------------------------------------------------------------


def either_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: torch.sin(x @ w), lambda x: x @ w * 2, (x,))


@pytest.mark.parametrize("function", [either_product, lambda x, w: recurrent(x, w, x[0] * 0)[1]])
def test_regions_run_under_autocast(function: Any) -> None:
    """The products inside are bfloat16's, as in eager."""

    def cast(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return function(x, w)

    check_compiled(cast, X.abs(), W, rtol=2e-2, atol=2e-2)
    products = plans_of(lambda: compiled(cast)(X.abs().to("tpu"), W.to("tpu")))[-1]
    assert "tensor<3x3xbf16>" in str(products.module)


# --- random numbers ------------------------------------------------------------------------------------------------


def noisy_scan(x: Tensor) -> Any:
    return scan(lambda c, row: (c + torch.rand_like(row), row * torch.rand_like(row)), x.new_zeros(3), x)


def noisy_cond(x: Tensor) -> Tensor:
    branch = lambda x: x * torch.rand_like(x)  # noqa: E731
    return torch.cond(x.sum() > 0, branch, lambda x: branch(x) - 7, (x,)) + torch.rand_like(x)


@nested_compile_region
def noisy_region(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize(
    "function", [noisy_scan, noisy_cond, lambda x: noisy_region(noisy_region(x) + 1) + torch.rand_like(x)]
)
def test_random_numbers_are_those_of_eager(function: Any) -> None:
    x = X.abs().to("tpu")
    torch.manual_seed(3)
    want = function(x), torch.rand(2, device="tpu")
    before = by_operator()
    torch.manual_seed(3)
    got = compiled(function)(x), torch.rand(2, device="tpu")
    torch.testing.assert_close(got, want)
    assert by_operator() == before


def test_branches_that_draw_differently_run_between_programs() -> None:
    def uneven(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.rand_like, lambda x: torch.rand_like(x) + torch.rand_like(x), (x,))

    x = X.abs().to("tpu")
    torch.manual_seed(3)
    want = torch.rand_like(x)
    torch.manual_seed(3)
    before = by_operator()
    assert compiled(uneven)(x).tolist() == want.tolist()
    assert by_operator() == before + 1


def test_negative_powers_of_integers_inside_a_branch() -> None:
    """XLA:CPU has other code for small programs, of which one form has 0 for these."""

    def power(use: torch.Tensor, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.cond(use, lambda x, n: x**n, lambda x, n: x * n, (x, n))

    args = torch.tensor(True), torch.tensor([1, -1, 2, -1]), torch.tensor([-1, -3, -2, -2])
    got = torch.compile(power)(*(a.to("tpu") for a in args))
    assert got.tolist() == [1, -1, 0, 1]
