"""Padding by a constant, by reflection, by the edge, and around."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tools.compare import check, check_opinfo
from torch_tpu import metrics

f32, bf16, i64, b8, c64 = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "replicate_negative", "circular"])
def test_sample_inputs(mode: str) -> None:
    check_opinfo("nn.functional.pad", (f32,), variant=mode, samples=10)
    check_opinfo("nn.functional.pad", (i64, c64), variant=mode, samples=2)
    # In a gradient the CPU rounds each sum of two elements to bfloat16, the device the whole sum.
    check_opinfo("nn.functional.pad", (bf16,), variant=mode, samples=2, rtol=0.02, atol=0.03)


def test_constant_pad_cuts_and_widens() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            F.pad(x, (1, -2), value=2.5),
            F.pad(x, (-1, 3, 2, -1)),
            F.pad(x, (0, 0)),
            F.pad(x[:0], (1, 1, 2, 0), value=3),
            F.pad(x, (1, 1, 1, 1, 0, 2), value=float("inf")),
        ]

    check(run, torch.randn(2, 3, 4, requires_grad=True))
    check(lambda x: F.pad(x, (1, 2), value=1), torch.tensor([[True, False]]))
    check(lambda x: F.pad(x, (1, 2), value=1), torch.tensor([[3, 4]]).to(torch.uint8))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_unequal_and_negative_edges(mode: str, spatial: int) -> None:
    widths = [(2, 1), (0, 2), (1, 2)][:spatial]
    cut = [(-1, 2), (1, -2), (0, 1)][:spatial]
    shape = (2, 3, 4, 5, 6)[: 1 + spatial] if spatial == 3 else (2, 3, 4, 5)[: 1 + spatial]

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        results = [F.pad(x, [w for pair in widths for w in pair], mode=mode)]
        results.append(F.pad(x[None], [w for pair in cut for w in pair], mode=mode))
        return results

    check(run, torch.randn(shape, requires_grad=True))


def test_padding_keeps_channels_last() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        # Not for the other modes: PyTorch's meta kernels call their results contiguous.
        return [F.pad(x, (1, 2, 0, 1)), F.pad(x, (1, 2, 0, 1, 1, 1))]

    check(run, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))


def test_number_to_pad_with_does_not_recompile() -> None:
    x = torch.ones(2, 2, device="tpu")
    F.pad(x, (1, 1), value=2.0)
    before = metrics.counters().get("program", 0)
    assert [F.pad(x, (1, 1), value=v).cpu()[0, 0].item() for v in (3.0, -1.5)] == [3.0, -1.5]
    assert metrics.counters().get("program", 0) == before


def test_reflection_wider_than_the_input() -> None:
    with pytest.raises(RuntimeError, match="Padding size should be less than the corresponding input dimension"):
        F.pad(torch.ones(1, 2, 3, device="tpu"), (3, 0), mode="reflect")
