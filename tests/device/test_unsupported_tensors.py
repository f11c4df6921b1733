"""Kinds of tensors the device has not: sparse, quantized, of the CPU's own layouts. The error says what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

SPARSE = r"no .*sparse.* tensors.*CPU.*to_dense\(\)"
GRADIENT = r"no .*sparse.* tensors.*test_unsupported_tensors\.py:\d+.*sparse=False"
QUANTIZED = "no .*(quantized|qint8).* tensors.*CPU"


def ones(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.ones(*shape, device="tpu", requires_grad=grad)


def longs(*values: Any) -> torch.Tensor:
    return torch.tensor(values, device="tpu")


def looked_up(layer: nn.Module, ids: torch.Tensor) -> None:
    layer.to("tpu")(ids).sum().backward()


def csr() -> torch.Tensor:
    return torch.eye(2).to_sparse_csr()


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "embedding": (GRADIENT, lambda: looked_up(nn.Embedding(4, 3, sparse=True), longs(1))),
    "embedding bag": (GRADIENT, lambda: looked_up(nn.EmbeddingBag(4, 3, sparse=True), longs([1]))),
    "functional": (GRADIENT, lambda: F.embedding(longs(1), ones(4, 3, grad=True), sparse=True).sum().backward()),
    "gather": (GRADIENT, lambda: torch.gather(ones(2, 2, grad=True), 1, longs([0]), sparse_grad=True).sum().backward()),
    "to_sparse": (SPARSE, lambda: ones(2, 3).to_sparse()),
    "to_sparse of a parameter": (SPARSE, lambda: ones(2, 3, grad=True).to_sparse().sum().backward()),
    "to_sparse dimensions": (SPARSE, lambda: ones(2, 3).to_sparse(1)),
    "to_sparse_csr": (SPARSE, lambda: ones(2, 3).to_sparse_csr()),
    "to_sparse_csc": (SPARSE, lambda: ones(2, 3).to_sparse_csc()),
    "to_sparse_bsr": (SPARSE, lambda: ones(2, 3).to_sparse_bsr((1, 1))),
    "coo": (SPARSE, lambda: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), device="tpu")),
    "coo of tensors": (SPARSE, lambda: torch.sparse_coo_tensor(longs([0, 1]), ones(2), (3,))),
    "empty coo": (SPARSE, lambda: torch.sparse_coo_tensor((3,), device="tpu")),
    "csr": (SPARSE, lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), device="tpu")),
    "csr of tensors": (SPARSE, lambda: torch.sparse_csr_tensor(longs(0, 1), longs(0), ones(1), (1, 1))),
    "csc": (SPARSE, lambda: torch.sparse_csc_tensor([0, 1], [0], [1.0], (1, 1), device="tpu")),
    "compressed": (
        SPARSE,
        lambda: torch.sparse_compressed_tensor(longs(0, 1), longs(0), ones(1), (1, 1), layout=torch.sparse_csr),
    ),
    "moved": (SPARSE, lambda: torch.eye(2).to_sparse().to("tpu")),
    "moved csr": (SPARSE, lambda: csr().to("tpu").matmul(ones(2, 2))),
    "layout": (SPARSE, lambda: torch.zeros(3, layout=torch.sparse_coo, device="tpu")),
    "layout of another": (SPARSE, lambda: torch.zeros_like(ones(3), layout=torch.sparse_coo)),
    "sparse product": (SPARSE, lambda: torch.sparse.mm(torch.eye(2).to_sparse(), ones(2, 2))),
    "sparse product of csr": (SPARSE, lambda: torch.sparse.mm(csr(), ones(2, 2))),
    "sampled product": (SPARSE, lambda: torch.sparse.sampled_addmm(csr(), ones(2, 2), ones(2, 2))),
    "softmax": (SPARSE, lambda: torch.sparse.softmax(ones(2, 2), 0)),
    "diagonals": (SPARSE, lambda: torch.sparse.spdiags(ones(1, 3), longs(0), (3, 3))),
    "mask": (SPARSE, lambda: ones(2, 2).sparse_mask(torch.eye(2).to_sparse())),
    "quantize": (QUANTIZED, lambda: torch.quantize_per_tensor(ones(2), 0.1, 0, torch.qint8)),
    "quantize channels": (
        QUANTIZED,
        lambda: torch.quantize_per_channel(ones(2, 2), ones(2), longs(0, 0), 0, torch.qint8),
    ),
    "quantize dynamically": (QUANTIZED, lambda: torch.quantize_per_tensor_dynamic(ones(2), torch.qint8, False)),
    "moved quantized": (QUANTIZED, lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8).to("tpu")),
    "quantized of integers": (QUANTIZED, lambda: torch._make_per_tensor_quantized_tensor(ones(2).char(), 0.1, 0)),
    "mkldnn": ("no .*mkldnn tensors.*strided", lambda: ones(2).to_mkldnn()),
}


@pytest.mark.parametrize("policy", ["warn", "error"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_way_round(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error whatever the policy of fallbacks, and no warning that something runs on the CPU before it."""
    monkeypatch.setenv("TORCH_TPU_FALLBACK", policy)
    said, call = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, that some layouts are in beta
        warnings.filterwarnings("error", "aten::")
        with pytest.raises(NotImplementedError, match=said) as raised:
            call()
    assert len(str(raised.value)) < 400
    assert ones(2).sum().item() == 2


def test_the_way_round_works() -> None:
    ids = torch.tensor([1, 3, 1])
    known, ours = nn.Embedding(4, 3), nn.Embedding(4, 3)
    ours.load_state_dict(known.state_dict())
    ours.to("tpu")
    known(ids).square().sum().backward()
    ours(ids.to("tpu")).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad.cpu(), known.weight.grad)
