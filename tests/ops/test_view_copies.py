"""Copies of views."""

from __future__ import annotations

import pytest
import torch

from tools.compare import check

aten = torch.ops.aten
X = torch.arange(24.0).reshape(2, 3, 4)
Z = torch.complex(X[0], -X[1])

CASES = {
    "slice": (lambda x: aten.slice_copy(x, 1, 1, 3, 2), X),
    "select": (lambda x: aten.select_copy(x, -1, 2), X),
    "split": (lambda x: aten.split_copy(x, 3, 2), X),
    "detach": (aten.detach_copy, X.mT),
    "lift": (aten.lift_fresh_copy, X),
    "real": (aten.view_as_real_copy, Z),
    "complex": (aten.view_as_complex_copy, torch.view_as_real(Z).clone()),
    "conj": (aten._conj_copy, Z),
    "neg": (aten._neg_view_copy, X),
    "reshape": (lambda x: aten._reshape_alias_copy(x, [6, 4], [4, 1]), X),
    "view": (lambda x: aten.view_copy(x, [4, 6]), X),
    "dtype": (lambda x: aten.view_copy.dtype(x, torch.int32), X),
    "unbind": (lambda x: aten.unbind_copy(x, 1), X),
    "expand": (lambda x: aten.expand_copy(x[:, :1], [2, 5, 4]), X),
    "diagonal": (lambda x: aten.diagonal_copy(x, 1, 1, 2), X),
    "as_strided": (lambda x: aten.as_strided_copy(x, [2, 2], [1, 3], 5), X),
    "unfold": (lambda x: aten.unfold_copy(x, 2, 2, 1), X),
}


@pytest.mark.parametrize("name", CASES)
def test_copies(name: str) -> None:
    """The result shares no memory with the input: writing it leaves the input as it was."""
    function, x = CASES[name]

    def copy_and_write(x: torch.Tensor) -> object:
        result = function(x)
        for r in result if isinstance(result, (list, tuple)) else [result]:
            r.add_(1)
        return result

    check(copy_and_write, x)


def test_out() -> None:
    check(lambda x, out: aten.slice_copy(x, 0, 1, 2, out=out), X, torch.zeros(1, 3, 4))
    check(lambda x, out: aten.view_as_real_copy(x, out=out), Z, torch.zeros(3, 4, 2))
