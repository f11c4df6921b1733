"""Dtypes and numbers that the CPU refuses are refused, with its type of exception, at each call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

EagerMode = torch.tpu.EagerMode
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64]


@pytest.fixture(autouse=True, params=[EagerMode.DEFER_NEVER, EagerMode.DEFER_AND_FUSE])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.tpu.set_eager_mode(request.param):
        yield


def _refusal(call: Callable[[], Any]) -> type[Exception] | None:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error)
    return None


Of = Callable[[torch.Tensor, torch.Tensor], Any]
# Of a float32 tensor [2, 3, 4] and one of another dtype.
MIXED: dict[str, Of] = {
    "batch_norm": lambda x, y: F.batch_norm(x, y[0, :, 0], y[0, :, 1], training=False),
    "batch_norm's weight": lambda x, y: F.batch_norm(x, None, None, y[0, :, 0], y[0, :, 1], training=True),
    "instance_norm": lambda x, y: F.instance_norm(x, weight=y[0, :, 0], bias=y[0, :, 1]),
    "instance_norm of it": lambda x, y: F.instance_norm(y, weight=x[0, :, 0], bias=x[0, :, 1]),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,), y[0, 0], y[0, 1]),
    "layer_norm of it": lambda x, y: F.layer_norm(y, (4,), x[0, 0], x[0, 1]),
    "group_norm": lambda x, y: F.group_norm(x, 1, y[0, :, 0], y[0, :, 1]),
    "rms_norm": lambda x, y: F.rms_norm(x, (4,), y[0, 0]),
    "linear": lambda x, y: F.linear(x, y[0]),
    "linear's bias": lambda x, y: F.linear(x, x[0], y[0, :, 0]),
    "matmul": lambda x, y: x @ y.transpose(1, 2),
    "conv1d": lambda x, y: F.conv1d(x, y),
    "conv1d's bias": lambda x, y: F.conv1d(x, x, y[:, 0, 0]),
    "conv_transpose1d": lambda x, y: F.conv_transpose1d(x, y.transpose(0, 1)),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x, y),
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="sum"),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "lerp's weight": lambda x, y: torch.lerp(x, x, y),
    "addmm": lambda x, y: torch.addmm(x[0], x[0], y[0, :, :1].expand(-1, 4)[:1].expand(4, 4)),
    "dot": lambda x, y: torch.dot(x[0, 0], y[0, 0]),
    "index_put": lambda x, y: x.index_put((torch.tensor([0], device=x.device),), y[:1]),
    "index_copy": lambda x, y: x.index_copy(0, torch.tensor([0], device=x.device), y[:1]),
    "scatter": lambda x, y: x.scatter(0, torch.zeros(1, 3, 4, dtype=torch.int64, device=x.device), y),
    "masked_scatter": lambda x, y: x.masked_scatter(x > 0, y),
    "grid_sample": lambda x, y: F.grid_sample(x[None], y[:1, :, :2][None][0][None]),
    "cross_entropy": lambda x, y: F.cross_entropy(x, y),
    "solve": lambda x, y: torch.linalg.solve(x[0, :3, :3] + torch.eye(3, device=x.device), y[0, :3, :3]),
    "cdist": lambda x, y: torch.cdist(x, y),
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, y),
}
# Of one tensor [1, 2, 4, 4].
ALONE: dict[str, Callable[[torch.Tensor], Any]] = {
    "nearest": lambda x: F.interpolate(x, (2, 2), mode="nearest"),
    "bilinear": lambda x: F.interpolate(x, (2, 2), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, (2, 2), mode="bicubic"),
    "area": lambda x: F.interpolate(x, (2, 2), mode="area"),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, 2),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "pixel_shuffle": lambda x: F.pixel_unshuffle(x, 2),
    "unfold": lambda x: F.unfold(x, 2),
    "softmax": lambda x: torch.softmax(x, 1),
    "gelu": F.gelu,
    "bitwise_and": lambda x: x & 1,
    "shift": lambda x: x << 1,
    "logical_not": torch.logical_not,
    "erf": torch.erf,
    "gcd": lambda x: torch.gcd(x, x),
    "svd": torch.linalg.svdvals,
    "inv": lambda x: torch.linalg.inv(x[0, 0] + torch.eye(4, device=x.device, dtype=x.dtype)),
    "median": lambda x: torch.median(x, 0),
    "cummax": lambda x: torch.cummax(x, 0),
    "nansum": torch.nansum,
    "std": torch.std,
    "mean": torch.mean,
    "fft": torch.fft.fft,
    "triu": torch.triu,
    "floor": torch.floor,
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_dtypes(name: str) -> None:
    """An accelerator may do in half precision what the CPU has no kernel for."""
    call = MIXED[name]
    x = torch.full((2, 3, 4), 0.5)
    refused = {}
    for dtype in DTYPES:
        y = torch.ones(2, 3, 4, dtype=dtype)
        known = _refusal(lambda y=y: call(x, y))
        found = _refusal(lambda y=y: call(x.to("tpu"), y.to("tpu")))
        if found is not known:
            refused[dtype] = (found, known)
    assert refused == {}


@pytest.mark.parametrize("name", ["batch_norm's weight", "instance_norm", "instance_norm of it"])
def test_mixed_dtypes_of_compiled_norms(name: str) -> None:
    """They are private operators in a graph."""
    x, y = torch.ones(2, 3, 4, device="tpu"), torch.ones(2, 3, 4, dtype=torch.float64, device="tpu")
    compiled = torch.compile(MIXED[name], backend="tpu")
    with pytest.raises(RuntimeError, match="mixed dtype"):
        compiled(x, y)
    torch.testing.assert_close(compiled(x, x).cpu(), MIXED[name](x.cpu(), x.cpu()))


@pytest.mark.parametrize("name", ALONE)
def test_dtypes_of_one_tensor(name: str) -> None:
    call = ALONE[name]
    differences = {}
    for dtype in DTYPES:
        if dtype is torch.bfloat16:
            continue
        x = torch.ones(1, 2, 4, 4, dtype=dtype)
        known, found = _refusal(lambda x=x: call(x)), _refusal(lambda x=x: call(x.to("tpu")))
        if found is not known:
            differences[dtype] = (found, known)
    assert differences == {}


def test_large_tensors() -> None:
    """These are tried in small."""
    x, w = torch.ones(64, 48, 32, device="tpu"), torch.ones(48, dtype=torch.float64, device="tpu")
    with pytest.raises(RuntimeError, match="mixed dtype"):
        F.instance_norm(x, weight=w, bias=w)
    with pytest.raises(RuntimeError, match=r"dtype|type"):
        F.linear(x, torch.ones(100, 32, dtype=torch.float64, device="tpu"))
    with pytest.raises(NotImplementedError, match="not implemented for 'Float'"):
        x.bitwise_and_(1)
    assert F.linear(x, torch.ones(100, 32, device="tpu")).shape == (64, 48, 100)


NUMBERS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "add": lambda x, v: torch.add(x, x, alpha=v),
    "add of a number": lambda x, v: x.clone().add_(v),
    "sub": lambda x, v: torch.sub(x, x, alpha=v),
    "rsub": lambda x, v: torch.rsub(x, x, alpha=v),
    "addmm": lambda x, v: torch.addmm(x[:, None], x[:, None], x[:1, None], beta=v),
    "addmv": lambda x, v: torch.addmv(x, x[:, None], x[:1], alpha=v),
    "addr": lambda x, v: torch.addr(x[:, None], x, x[:1], alpha=v),
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v),
    "addcdiv": lambda x, v: torch.addcdiv(x, x, x, value=v),
    "lerp": lambda x, v: torch.lerp(x, x, v),
    "fill": lambda x, v: x.clone().fill_(v),
    "masked_fill": lambda x, v: x.masked_fill(x == 1, v),
    "index_fill": lambda x, v: x.index_fill(0, torch.tensor([0], device=x.device), v),
    "clamp": lambda x, v: x.clamp(v),
    "threshold": lambda x, v: F.threshold(x, v, 0),
    "softshrink": lambda x, v: F.softshrink(x, v),
    "huber_loss": lambda x, v: F.huber_loss(x, x, delta=v),
    "smooth_l1_loss": lambda x, v: F.smooth_l1_loss(x, x, beta=v),
    "list": lambda x, v: torch._foreach_add([x], [x], alpha=v),
    "linspace": lambda x, v: torch.linspace(0, v, 3, dtype=x.dtype, device=x.device),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str, dtype: torch.dtype) -> None:
    """Each is judged by itself, also where the program of an earlier one is known."""
    call = NUMBERS[name]
    x = torch.ones(2, dtype=dtype)
    differences = {}
    for number in (1, 2, True, 1.5, 0.5, 300, -1, -1.5, 1e39, math.nan, 1j, 1):
        known = _refusal(lambda number=number: call(x, number))
        found = _refusal(lambda number=number: call(x.to("tpu"), number))
        if found is not known:
            differences[number] = (found, known)
    assert differences == {}


def test_dtypes_that_equal_compares() -> None:
    one = torch.tensor([1.0], device="tpu")
    assert torch.equal(one, torch.tensor([1], device="tpu"))
    assert not torch.equal(one, torch.tensor([2], device="tpu"))


DIMENSIONS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "sum": torch.sum,
    "cumsum": torch.cumsum,
    "sort": torch.sort,
    "argmax": torch.argmax,
    "topk": lambda x, d: x.topk(1, d),
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
    "cat": lambda x, d: torch.cat([x, x], d),
    "index_select": lambda x, d: x.index_select(d, torch.tensor([0], device=x.device)),
    "logsumexp": torch.logsumexp,
    "fft": lambda x, d: torch.fft.fft(x, dim=d),
}


@pytest.mark.parametrize("shape", [(4,), (2, 3), (80, 70)], ids=str)
@pytest.mark.parametrize("name", DIMENSIONS)
def test_dimensions_out_of_range(name: str, shape: tuple[int, ...]) -> None:
    for dim in (-9, -3, 2, 9):
        for device in ("cpu", "tpu"):
            if not -len(shape) <= dim < len(shape):
                with pytest.raises(IndexError, match=r"(?i)dimension"):
                    DIMENSIONS[name](torch.ones(shape, device=device), dim)
