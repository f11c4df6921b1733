"""Kernels of PyTorch that read memory of the host, given device tensors: they answer instead of ending the process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.compare import check

aten = torch.ops.aten


def _directions(dimension: int) -> torch.Tensor:
    return aten._sobol_engine_initialize_state_(torch.zeros(dimension, 30, dtype=torch.int64), dimension)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (aten._reshape_from_tensor, (torch.arange(6.0), torch.tensor([2, 3]))),
        (aten._rowwise_prune, (torch.randn(4, 3), torch.tensor([True, False, True, True]), torch.int64)),
        (aten._sobol_engine_draw, (torch.zeros(2, dtype=torch.int64), 4, _directions(2), 2, 1, torch.float32)),
        (aten._sobol_engine_ff_, (torch.zeros(2, dtype=torch.int64), 4, _directions(2), 2, 0)),
        (aten._sobol_engine_initialize_state_, (torch.zeros(3, 30, dtype=torch.int64), 3)),
        (aten._sobol_engine_scramble_, (_directions(2), torch.ones(2, 30, 30, dtype=torch.int64).tril(), 2)),
        (aten.choose_qparams_optimized, (torch.randn(16), 16, 20, 0.1, 8)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_on_the_cpu(function, args, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "allow")
    check(function, *args, allow_fallback=True)


def test_saturation_at_half_precision() -> None:
    check(aten._saturate_weight_to_fp16, torch.tensor([[1e6, -1e6], [2.0, 65504.0]]))


def test_packed_weights_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"fbgemm_pack_gemm_matrix_fp16.*\.cpu\(\)"):
        torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(4, 4, device="tpu"))
    x = torch.ones(4, 4, device="tpu")
    with pytest.raises(NotImplementedError, match=r"fbgemm_linear_int8_weight_fp32_activation.*packed"):
        torch.fbgemm_linear_int8_weight_fp32_activation(x, x.char(), x, x, 1.0, 0, x)


def test_from_file(tmp_path: Path) -> None:
    values = torch.arange(6, dtype=torch.int32)
    path = tmp_path / "values"
    path.write_bytes(values.numpy().tobytes())
    read = torch.from_file(str(path), size=6, dtype=torch.int32, device="tpu")
    assert read.device.type == "tpu"
    assert read.tolist() == values.tolist()
    with pytest.raises(NotImplementedError, match="shared=False"):
        torch.from_file(str(path), shared=True, size=6, dtype=torch.int32, device="tpu")


def test_lazy_clone_is_a_copy() -> None:
    x = torch.arange(3.0, device="tpu")
    copy = torch._lazy_clone(x)
    x.zero_()
    assert copy.tolist() == [0.0, 1.0, 2.0]
