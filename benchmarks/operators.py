"""Time of common operators beside CPU PyTorch: `python benchmarks/operators.py [--only REGEX] [--json] [--check]`.

Both run in this process with the same number of threads, in alternating rounds; a call is timed until its result is
there. Prints the ratio for each operator, worst first. `--check` exits with 1 if the median ratio is above 1.5 or the
worst above 5.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

MEDIAN_LIMIT, WORST_LIMIT = 1.5, 5.0
ROUNDS = 7
ROUND_SECONDS = 0.02

Call = Callable[[], object]


@dataclass
class Make:
    """Makes the same arguments on any device; `grad` makes them require gradients."""

    device: str
    grad: bool = False

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._placed(torch.randn(shape).to(dtype))

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape).to(self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return self._placed(torch.rand(shape))

    def positive_definite(self, n: int) -> torch.Tensor:
        root = torch.randn(n, n)
        return self._placed(root @ root.T / n + torch.eye(n))

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.to(self.device)

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device).requires_grad_(self.grad)


Case = Callable[[Make], Call]
CASES: dict[str, Case] = {}


def forward(name: str, function: Callable[..., Any], arguments: Callable[[Make], Sequence[Any]]) -> None:
    def case(make: Make) -> Call:
        given = arguments(make)
        return lambda: function(*given)

    CASES[name] = case


def backward(name: str, function: Callable[..., Any], arguments: Callable[[Make], Sequence[Any]]) -> None:
    """Only the gradients of the floating-point arguments and parameters; the forward pass is kept."""

    def case(make: Make) -> Call:
        make.grad = True
        given = arguments(make)
        result = function(*given)
        leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
        leaves += [p for m in given if isinstance(m, torch.nn.Module) for p in m.parameters()]
        seed = torch.randn(result.shape).to(result)
        return lambda: torch.autograd.grad(result, leaves, seed, retain_graph=True)

    CASES[f"{name}, backward"] = case


def both(name: str, function: Callable[..., Any], arguments: Callable[[Make], Sequence[Any]]) -> None:
    forward(name, function, arguments)
    backward(name, function, arguments)


def apply(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    result = module(x)
    return result[0] if isinstance(result, tuple) else result


BF16 = torch.bfloat16


def elementwise() -> None:
    forward("add 2048×1024", torch.add, lambda t: (t(2048, 1024), t(2048, 1024)))
    forward("multiply and add, bf16 2048×1024", torch.addcmul, lambda t: [t(2048, 1024, dtype=BF16) for _ in range(3)])
    forward("where(x > 0) 2048×1024", lambda x, y: torch.where(x > 0, x, y), lambda t: (t(2048, 1024), t(2048, 1024)))
    forward("convert to bf16 2048×1024", lambda x: x.to(BF16), lambda t: (t(2048, 1024),))
    forward("transpose, contiguous 2048×1024", lambda x: x.t().contiguous(), lambda t: (t(2048, 1024),))
    forward("sin 2048×1024", torch.sin, lambda t: (t(2048, 1024),))
    forward("erf 2048×1024", torch.erf, lambda t: (t(2048, 1024),))
    both("gelu 1024×1024", F.gelu, lambda t: (t(1024, 1024),))
    both("silu 1024×1024", F.silu, lambda t: (t(1024, 1024),))
    forward("gelu, bf16 1024×1024", F.gelu, lambda t: (t(1024, 1024, dtype=BF16),))


def normalization() -> None:
    both("softmax 4096×1024", lambda x: torch.softmax(x, -1), lambda t: (t(4096, 1024),))
    both("log_softmax 512×32000", lambda x: torch.log_softmax(x, -1), lambda t: (t(512, 32000),))
    forward("softmax, bf16 4096×1024", lambda x: torch.softmax(x, -1), lambda t: (t(4096, 1024, dtype=BF16),))
    both(
        "layer_norm 4096×768",
        lambda x, w, b: F.layer_norm(x, (768,), w, b),
        lambda t: (t(4096, 768), t(768), t(768)),
    )
    both("rms_norm 4096×768", lambda x, w: F.rms_norm(x, (768,), w), lambda t: (t(4096, 768), t(768)))
    both("group_norm 16×64×32×32", lambda x, w: F.group_norm(x, 8, w), lambda t: (t(16, 64, 32, 32), t(64)))
    both(
        "batch_norm, training 16×64×32×32",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        lambda t: (t(16, 64, 32, 32), t(64), t(64)),
    )
    forward(
        "batch_norm, evaluation 16×64×32×32",
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
        lambda t: (t(16, 64, 32, 32), t(64), t.uniform(64), t(64), t(64)),
    )


def products() -> None:
    forward("matmul 1024×1024×1024", torch.mm, lambda t: (t(1024, 1024), t(1024, 1024)))
    forward("matmul 256×256×256", torch.mm, lambda t: (t(256, 256), t(256, 256)))
    forward("matmul, bf16 512×512×512", torch.mm, lambda t: (t(512, 512, dtype=BF16), t(512, 512, dtype=BF16)))
    forward("matrix · vector 2048×2048", torch.mv, lambda t: (t(2048, 2048), t(2048)))
    both("linear 1024×768→3072", F.linear, lambda t: (t(1024, 768), t(3072, 768), t(3072)))
    forward("addmm 512×512×2048", torch.addmm, lambda t: (t(2048), t(512, 512), t(512, 2048)))
    forward("bmm 48×256×64×256", torch.bmm, lambda t: (t(48, 256, 64), t(48, 64, 256)))
    forward("bmm 48×256×256×64", torch.bmm, lambda t: (t(48, 256, 256), t(48, 256, 64)))
    forward(
        "einsum bhqd,bhkd→bhqk",
        lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
        lambda t: (t(4, 12, 256, 64), t(4, 12, 256, 64)),
    )
    both(
        "attention, causal 4×8×256×64",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda t: [t(4, 8, 256, 64) for _ in range(3)],
    )
    forward(
        "attention, mask 4×8×256×64",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m > 0),
        lambda t: [*(t(4, 8, 256, 64) for _ in range(3)), t(256, 256)],
    )


def convolution() -> None:
    def conv(name: str, function: Callable[..., Any], x: Sequence[int], weight: Sequence[int], **options: Any) -> None:
        both(name, lambda x, w: function(x, w, **options), lambda t: (t(*x), t(*weight)))

    conv("conv1d 8×64×1024, 3", F.conv1d, (8, 64, 1024), (64, 64, 3), padding=1)
    conv("conv2d 8×64×56×56, 3×3", F.conv2d, (8, 64, 56, 56), (64, 64, 3, 3), padding=1)
    conv("conv2d 8×3×224×224, 7×7 stride 2", F.conv2d, (8, 3, 224, 224), (64, 3, 7, 7), padding=3, stride=2)
    conv("conv2d 8×128×28×28, 3×3 stride 2", F.conv2d, (8, 128, 28, 28), (128, 128, 3, 3), padding=1, stride=2)
    conv("conv2d 8×128×28×28, 1×1", F.conv2d, (8, 128, 28, 28), (256, 128, 1, 1))
    conv("conv2d 8×96×56×56, depthwise 3×3", F.conv2d, (8, 96, 56, 56), (96, 1, 3, 3), padding=1, groups=96)
    conv("conv2d 8×64×28×28, 4 groups 3×3", F.conv2d, (8, 64, 28, 28), (64, 16, 3, 3), padding=1, groups=4)
    conv("conv2d 8×128×28×28, 32 groups 3×3", F.conv2d, (8, 128, 28, 28), (128, 4, 3, 3), padding=1, groups=32)
    conv("conv3d 2×16×16×32×32, 3×3×3", F.conv3d, (2, 16, 16, 32, 32), (16, 16, 3, 3, 3), padding=1)
    conv("conv_transpose2d 8×64×28×28, 4×4 stride 2", F.conv_transpose2d, (8, 64, 28, 28), (64, 32, 4, 4), stride=2)


def images() -> None:
    both("max_pool2d 8×64×56×56, 2×2", lambda x: F.max_pool2d(x, 2), lambda t: (t(8, 64, 56, 56),))
    both("avg_pool2d 8×64×56×56, 3×3", lambda x: F.avg_pool2d(x, 3, 2), lambda t: (t(8, 64, 56, 56),))
    both("adaptive_avg_pool2d 16×512×14×14", lambda x: F.adaptive_avg_pool2d(x, 1), lambda t: (t(16, 512, 14, 14),))
    both(
        "interpolate, bilinear 8×32×32×32 ×2",
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda t: (t(8, 32, 32, 32),),
    )
    forward(
        "interpolate, nearest 8×32×32×32 ×2",
        lambda x: F.interpolate(x, scale_factor=2),
        lambda t: (t(8, 32, 32, 32),),
    )


def scans_and_order() -> None:
    forward("cumsum 1M", lambda x: x.cumsum(0), lambda t: (t(2**20),))
    forward("cumsum, int64 512×2048", lambda x: x.cumsum(1), lambda t: (t.integers(9, 512, 2048),))
    forward("cumsum over rows 2048×512", lambda x: x.cumsum(0), lambda t: (t(2048, 512),))
    forward("cumprod 512×2048", lambda x: x.cumprod(1), lambda t: (t.uniform(512, 2048),))
    forward("cummax 512×1024", lambda x: x.cummax(1)[1], lambda t: (t(512, 1024),))
    forward("logcumsumexp 512×1024", lambda x: x.logcumsumexp(1), lambda t: (t(512, 1024),))
    forward("sort 1M", lambda x: x.sort()[0], lambda t: (t(2**20),))
    forward("sort, int64 1M", lambda x: x.sort()[0], lambda t: (t.integers(2**40, 2**20),))
    forward("argsort 512×1024", lambda x: x.argsort(-1), lambda t: (t(512, 1024),))
    forward("topk 64×32000, 50", lambda x: x.topk(50), lambda t: (t(64, 32000),))
    forward("unique 100k", torch.unique, lambda t: (t.integers(1000, 100_000),))
    forward("mode 256×1000", lambda x: x.mode(1)[0], lambda t: (t.integers(50, 256, 1000),))
    forward("median 512×1024", lambda x: x.median(1)[0], lambda t: (t(512, 1024),))
    forward("kthvalue 512×1024", lambda x: x.kthvalue(10, 1)[0], lambda t: (t(512, 1024),))
    forward(
        "searchsorted 10k in 100k",
        lambda s, x: torch.searchsorted(s, x),
        lambda t: (t(100_000).sort()[0], t(100_000)),
    )


def indexing() -> None:
    forward("gather 4096×1024", lambda x, i: x.gather(1, i), lambda t: (t(4096, 1024), t.integers(1024, 4096, 256)))
    forward(
        "scatter_add 4096×256 into 4096×1024",
        lambda x, i, y: x.scatter_add(1, i, y),
        lambda t: (t(4096, 1024), t.integers(1024, 4096, 256), t(4096, 256)),
    )
    forward("index_select 4096 of 32000×256", lambda x, i: x[i], lambda t: (t(32000, 256), t.integers(32000, 4096)))
    forward(
        "index_add 4096×256 into 8000×256",
        lambda x, i, y: x.index_add(0, i, y),
        lambda t: (t(8000, 256), t.integers(8000, 4096), t(4096, 256)),
    )
    both("embedding 8×512 of 8000×512", F.embedding, lambda t: (t.integers(8000, 8, 512), t(8000, 512)))
    forward("masked_select 1M", torch.masked_select, lambda t: (t(2**20), t.integers(2, 2**20).bool()))
    forward("nonzero 1M", torch.nonzero, lambda t: (t.integers(2, 2**20),))
    forward("masked_fill 4096×1024", lambda x, m: x.masked_fill(m, -1), lambda t: (t(4096, 1024), t(4096, 1024) > 0))
    forward("tril 2048×2048", torch.tril, lambda t: (t(2048, 2048),))


def layout() -> None:
    forward("cat of four 1024×512", torch.cat, lambda t: ([t(1024, 512) for _ in range(4)], 1))
    forward("stack of eight 512×512", torch.stack, lambda t: ([t(512, 512) for _ in range(8)],))
    forward("pad, reflect 8×32×128×128", lambda x: F.pad(x, (2, 2, 2, 2), "reflect"), lambda t: (t(8, 32, 128, 128),))
    forward("pad 8×32×128×128", lambda x: F.pad(x, (2, 2, 2, 2)), lambda t: (t(8, 32, 128, 128),))
    forward("roll 2048×1024", lambda x: x.roll(100, 1), lambda t: (t(2048, 1024),))
    forward("flip 2048×1024", lambda x: x.flip(1), lambda t: (t(2048, 1024),))
    forward("repeat 256×1024 ×8", lambda x: x.repeat(8, 1), lambda t: (t(256, 1024),))
    forward("permute 16×256×12×64", lambda x: x.transpose(1, 2).contiguous(), lambda t: (t(16, 256, 12, 64),))


def reductions() -> None:
    for dim in range(3):
        forward(f"sum of 128×128×256 over {dim}", lambda x, d: x.sum(d), lambda t, d=dim: (t(128, 128, 256), d))
    forward("sum of 4M", torch.sum, lambda t: (t(2**22),))
    forward("sum, bf16 4096×1024 over 1", lambda x: x.sum(1), lambda t: (t(4096, 1024, dtype=BF16),))
    forward("mean of 4096×1024 over 0", lambda x: x.mean(0), lambda t: (t(4096, 1024),))
    forward("amax of 4096×1024 over 1", lambda x: x.amax(1), lambda t: (t(4096, 1024),))
    forward("argmax of 2048×1024 over 1", lambda x: x.argmax(1), lambda t: (t(2048, 1024),))
    forward("argmax of 64×32000 over 1", lambda x: x.argmax(1), lambda t: (t(64, 32000),))
    forward("var of 4096×1024 over 1", lambda x: x.var(1), lambda t: (t(4096, 1024),))
    forward("norm of 4M", torch.linalg.vector_norm, lambda t: (t(2**22),))
    forward("logsumexp of 512×8000 over 1", lambda x: x.logsumexp(1), lambda t: (t(512, 8000),))
    forward("any of 4M", lambda x: x.any(), lambda t: (torch.zeros(2**22, dtype=torch.bool, device=t.device),))


def training() -> None:
    both("cross_entropy 512×32000", F.cross_entropy, lambda t: (t(512, 32000), t.integers(32000, 512)))
    both("mse_loss 2048×1024", F.mse_loss, lambda t: (t(2048, 1024), t(2048, 1024)))
    forward("dropout 2048×1024", lambda x: F.dropout(x, 0.1), lambda t: (t(2048, 1024),))
    CASES["adam step, fused 4 × 1024×1024"] = adam_step
    both("LSTM 32×64×128", apply, lambda t: (t.module(torch.nn.LSTM(128, 128)), t(64, 32, 128)))
    both("GRU 32×64×128", apply, lambda t: (t.module(torch.nn.GRU(128, 128)), t(64, 32, 128)))


def adam_step(make: Make) -> Call:
    make.grad = True
    parameters = [make(1024, 1024) for _ in range(4)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    return torch.optim.AdamW(parameters, fused=True).step


def random_numbers() -> None:
    forward("randn 1M", lambda d: torch.randn(2**20, device=d), lambda t: (t.device,))
    forward("rand 1M", lambda d: torch.rand(2**20, device=d), lambda t: (t.device,))
    forward("bernoulli 1M", torch.bernoulli, lambda t: (t.uniform(2**20),))
    forward("randperm 100k", lambda d: torch.randperm(100_000, device=d), lambda t: (t.device,))
    forward("multinomial 512×1000, 10", lambda x: torch.multinomial(x, 10), lambda t: (t.uniform(512, 1000),))
    forward(
        "multinomial with replacement 64×8000, 100",
        lambda x: torch.multinomial(x, 100, True),
        lambda t: (t.uniform(64, 8000),),
    )


def linear_algebra() -> None:
    forward("cholesky 256×256", torch.linalg.cholesky, lambda t: (t.positive_definite(256),))
    forward("qr 256×256", torch.linalg.qr, lambda t: (t(256, 256),))
    forward("svd 100×100", torch.linalg.svd, lambda t: (t(100, 100),))
    forward("eigh 100×100", torch.linalg.eigh, lambda t: (t.positive_definite(100),))
    forward("solve 256×256", torch.linalg.solve, lambda t: (t.positive_definite(256), t(256, 16)))
    forward("inv 256×256", torch.linalg.inv, lambda t: (t.positive_definite(256),))
    forward("det of 256 16×16", torch.linalg.det, lambda t: (t(256, 16, 16),))
    forward("fft 256×4096", lambda x: torch.fft.fft(x), lambda t: (t(256, 4096),))
    forward("rfft2 32×256×256", lambda x: torch.fft.rfft2(x), lambda t: (t(32, 256, 256),))


def seconds(call: Call, count: int, synchronize: Callable[[], object]) -> list[float]:
    """Times of `count` calls, each until its result is there; one more call before them isn't counted."""
    times = []
    for _ in range(count + 1):
        began = time.perf_counter()
        result = call()
        synchronize()
        times.append(time.perf_counter() - began)
        del result
    return times[1:]


def measure(case: Case, rounds: int) -> tuple[float, float, float]:
    """Median seconds on the device and on the CPU, and the seconds of the device's first call."""
    torch.manual_seed(0)
    on_device = case(Make("tpu"))
    torch.manual_seed(0)
    on_host = case(Make("cpu"))
    torch.accelerator.synchronize()
    began = time.perf_counter()
    on_device()
    torch.accelerator.synchronize()
    first = time.perf_counter() - began
    device_count, host_count = (
        max(1, min(20, int(ROUND_SECONDS / min(seconds(call, 1, synchronize)))))
        for call, synchronize in ((on_device, torch.accelerator.synchronize), (on_host, lambda: None))
    )
    device_times: list[float] = []
    host_times: list[float] = []
    for _ in range(rounds):
        device_times += seconds(on_device, device_count, torch.accelerator.synchronize)
        host_times += seconds(on_host, host_count, lambda: None)
    return statistics.median(device_times), statistics.median(host_times), first


def main() -> int:
    os.environ["TORCH_TPU_FALLBACK"] = "error"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="the operators whose name this matches")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 above the limits")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # As many as XLA:CPU takes.
    for family in FAMILIES:
        family()
    results = {}
    for name, case in CASES.items():
        if re.search(options.only, name):
            results[name] = measure(case, options.rounds)
    ratios = {name: device / host for name, (device, host, _) in results.items()}
    worst_first = sorted(ratios, key=ratios.__getitem__, reverse=True)
    median, worst = statistics.median(ratios.values()), ratios[worst_first[0]]
    if options.json:
        rows = [
            {"operator": n, "ratio": ratios[n], **dict(zip(("tpu", "cpu", "first"), results[n], strict=True))}
            for n in worst_first
        ]
        print(json.dumps({"median": median, "worst": worst, "operators": rows}, indent=1, ensure_ascii=False))
    else:
        table = Table("operator", "tpu ms", "cpu ms", "ratio", "first call s")
        for name in worst_first:
            device, host, first = results[name]
            table.add_row(name, f"{device * 1e3:.2f}", f"{host * 1e3:.2f}", f"{ratios[name]:.2f}×", f"{first:.2f}")
        Console().print(table)
        print(f"{len(ratios)} operators: median {median:.2f}× (limit {MEDIAN_LIMIT}×), ", end="")
        print(f"worst {worst:.2f}× (limit {WORST_LIMIT:.0f}×): {worst_first[0]}")
    return 1 if options.check and (median > MEDIAN_LIMIT or worst > WORST_LIMIT) else 0


FAMILIES = (
    elementwise,
    normalization,
    products,
    convolution,
    images,
    scans_and_order,
    indexing,
    layout,
    reductions,
    training,
    random_numbers,
    linear_algebra,
)

if __name__ == "__main__":
    sys.exit(main())
