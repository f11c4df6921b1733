"""torch_tpu.export: a StableHLO module that others read, compile and run."""

from __future__ import annotations

import copy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jaxlib.mlir.dialects import stablehlo
from torch import nn
from torch._higher_order_ops.scan import scan

import torch_tpu
from torch_tpu.compile.export import ExportError
from torch_tpu.hlo import module
from torch_tpu.runtime.process_client import client

RUNNER = Path(__file__).with_name("run_exported.py")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.arange(8.0)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None, power: int = 1) -> dict[str, Any]:
        hidden = self.layer(self.embed(ids) * self.scale, src_key_padding_mask=mask)
        pooled = self.norm(hidden.mean(1))
        return {"logits": self.head(pooled) ** power, "parts": (hidden, None), "power": power}


def evaluate(exported: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compiles and runs an exported module in this process, from its portable artifact."""
    with module.context():
        parsed = stablehlo.deserialize_portable_artifact(module.context(), exported.portable_artifact())
    results = [(r.shape, module.types.numpy_dtype(r.dtype)) for r in exported.results]
    program = client().compile(parsed, results, custom_calls=exported.custom_calls)
    given = {**exported.weights(), **arrays}
    made = program([client().put(np.asarray(given[a.name])) for a in exported.arguments])
    return {r.name: client().get(m).copy() for r, m in zip(exported.results, made, strict=True)}


def elsewhere(exported: Any, arrays: dict[str, np.ndarray], folder: Path) -> Any:
    """Runs an exported module's file in a process without PyTorch."""
    exported.save(folder / "module.zip")
    np.savez(folder / "inputs.npz", **arrays)
    files = [str(folder / name) for name in ("module.zip", "inputs.npz", "results.npz")]
    subprocess.run([sys.executable, str(RUNNER), *files], check=True)
    return {name: array.copy() for name, array in np.load(files[2]).items()}


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_it_equals_the_module_here_and_without_pytorch(device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    host = Network()
    ids = torch.randint(0, 10, (3, 5))
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[:, 3:] = True
    exported = torch_tpu.export(copy.deepcopy(host).to(device), ids, mask=mask.to(device), power=2)
    arrays = {"ids": ids.numpy(), "mask": mask.numpy()}
    results = elsewhere(exported, arrays, tmp_path) if device == "cpu" else evaluate(exported, arrays)
    want = host(ids, mask, 2)
    torch.testing.assert_close(torch.as_tensor(results["output['logits']"]), want["logits"].detach())
    torch.testing.assert_close(torch.as_tensor(results["output['parts'][0]"]), want["parts"][0].detach())
    for name, buffer in host.norm.named_buffers():
        torch.testing.assert_close(torch.as_tensor(results[f"new norm.{name}"]), buffer)
    assert exported.constants == {"output['parts'][1]": None, "output['power']": 2}


def test_names_kinds_and_shapes() -> None:
    exported = torch_tpu.export(Network(), torch.zeros(3, 5, dtype=torch.long))
    arguments = {a.name: a for a in exported.arguments}
    assert [n for n in arguments if "embed" in n or "head" in n] == ["embed.weight"]  # tied: one argument
    assert arguments["layer.linear1.weight"].kind == "parameter"
    assert arguments["norm.running_mean"].kind == "buffer"
    assert arguments["constant_0"].kind == "constant"
    assert (arguments["ids"].kind, arguments["ids"].shape, arguments["ids"].dtype) == ("input", (3, 5), torch.int64)
    assert [r.name for r in exported.results][:2] == ["output['logits']", "output['parts'][0]"]
    assert 'torch.name = "layer.linear1.weight"' in exported.text
    assert len(exported.bytecode) < len(exported.text)


def test_parameters_on_meta_and_its_file(tmp_path: Path) -> None:
    with torch.device("meta"):
        layer = nn.Linear(4, 2)
    exported = torch_tpu.export(layer, torch.ones(1, 4))
    assert exported.weights() == {}
    weight, bias, x = (
        np.arange(8.0, dtype=np.float32).reshape(2, 4),
        np.ones(2, np.float32),
        np.ones((1, 4), np.float32),
    )
    results = evaluate(exported, {"weight": weight, "bias": bias, "input": x})
    assert results["output"].tolist() == [[7.0, 23.0]]
    exported.save(tmp_path / "layer.zip")
    with zipfile.ZipFile(tmp_path / "layer.zip") as file:
        assert file.namelist() == ["module.stablehlo", "module.mlir", "signature.json"]


def test_written_arguments_views_and_a_result_that_is_an_argument() -> None:
    def step(cache: torch.Tensor, row: torch.Tensor, unused: torch.Tensor) -> Any:
        cache[1:3].add_(row)
        return row, cache.t()[0]

    cache = torch.arange(8.0).reshape(4, 2).t().contiguous().t()  # its memory is column-major, the argument is not
    exported = torch_tpu.export(step, cache, torch.ones(2), torch.ones(1))
    arrays = {"cache": cache.numpy(), "row": np.array([10, 20], np.float32), "unused": np.ones(1, np.float32)}
    results = evaluate(exported, arrays)
    assert results["new cache"].tolist() == [[0.0, 1.0], [12.0, 23.0], [14.0, 25.0], [6.0, 7.0]]
    assert results["output[0]"].tolist() == [10.0, 20.0]
    assert results["output[1]"].tolist() == [0.0, 12.0, 14.0, 6.0]
    assert [r.written for r in exported.results] == [None, None, "cache"]


def test_the_random_state_is_an_argument() -> None:
    x = torch.ones(16)
    exported = torch_tpu.export(lambda x: F.dropout(x), x)
    assert exported.arguments[-1].kind == "random state"
    assert exported.draws == 16
    torch.manual_seed(3)
    want = F.dropout(x.to("tpu")).tolist()
    seeded = {"x": x.numpy(), "random_state": np.array([3, 0], np.uint64)}
    assert evaluate(exported, seeded)["output"].tolist() == want
    assert not any(a.kind == "random state" for a in torch_tpu.export(lambda x: F.dropout(x, 0.0), x).arguments)


def test_a_gradient_and_low_precision() -> None:
    def train(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad((x @ p).float().square().sum(), p)
        return p - 0.1 * g

    p = torch.arange(6.0).reshape(3, 2).bfloat16().requires_grad_()
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    exported = torch_tpu.export(train, p, x)
    bits = {"p": p.detach().view(torch.int16).numpy(), "x": x.view(torch.int16).numpy()}
    results = evaluate(exported, {name: b.view(module.types.NUMPY[torch.bfloat16]) for name, b in bits.items()})
    assert results["output"].astype(np.float32).tolist() == train(p, x).float().tolist()


def test_lapack_is_named() -> None:
    x = torch.eye(3) * 4
    exported = torch_tpu.export(torch.linalg.cholesky, x)
    (given,) = [a.name for a in exported.arguments]
    assert evaluate(exported, {given: x.numpy()})["output"].tolist() == (torch.eye(3) * 2).tolist()


@torch.library.custom_op("torch_tpu_test::on_host", mutates_args=(), device_types="cpu")
def on_host(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@on_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.nonzero(), "a size or a branch depends on data"),
        (lambda x: x if x.sum() > 0 else -x, "a size or a branch depends on data"),
        (on_host, "torch_tpu_test.on_host.default has no lowering"),
    ],
    ids=["size", "branch", "custom operator"],
)
def test_what_can_not_be_exported(function: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        torch_tpu.export(function, torch.ones(3))
    with pytest.raises(ExportError, match=r"Tensor of layout torch\.sparse_coo can't be an argument"):
        torch_tpu.export(torch.relu, torch.ones(3).to_sparse())


def test_wrong_calls_raise_what_pytorch_raises() -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        torch_tpu.export(nn.Linear(3, 2), torch.ones(2, 4))


class Branches(nn.Module):
    """Control flow with parameters inside, each kind once."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("step", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        chosen = torch.cond(x.sum() > 0, lambda x: self.up(x).relu(), lambda x: x * self.step, (x,))
        count = torch.zeros((), dtype=torch.int64, device=x.device)
        _, grown = torch.while_loop(
            lambda i, y: (y.sum() < 50) & (i < 9), lambda i, y: (i + 1, y * 2 + self.step), (count, x.abs() + 1)
        )
        _, sums = scan(lambda total, row: (total + row * self.step, total * 2), torch.zeros_like(x[0]), x)
        return {"chosen": chosen, "grown": grown, "sums": sums}


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_control_flow(tmp_path: Path, sign: float) -> None:
    model = Branches()
    x = torch.arange(12.0).reshape(3, 4) * sign
    exported = torch_tpu.export(model, torch.zeros(3, 4))
    assert [a.name for a in exported.arguments] == ["up.weight", "up.bias", "step", "x"]
    assert "stablehlo.if" in exported.text
    made = elsewhere(exported, {"x": x.numpy()}, tmp_path)
    for name, want in model(x).items():
        torch.testing.assert_close(torch.from_numpy(made[f"output['{name}']"]), want, rtol=1e-5, atol=1e-6)


def test_what_branches_capture() -> None:
    captured = torch.tensor([1.0, 2.0], device="tpu")
    exported = torch_tpu.export(
        lambda x: torch.cond(x[0] > 0, lambda x: x + captured, lambda x: x * captured, (x,)), torch.ones(2)
    )
    for x in (np.array([1, 1], np.float32), np.array([-1, 1], np.float32)):
        want = x + [1, 2] if x[0] > 0 else x * [1, 2]
        np.testing.assert_allclose(evaluate(exported, {"x": x})["output"], want)
