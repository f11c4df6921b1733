"""AOTAutograd's cache serves the backend: a second process differentiates, partitions, lowers and compiles nothing."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tpu import metrics
from torch_tpu.compile.program import stored_graph
from torch_tpu.runtime import fingerprint
from torch_tpu.runtime.disk_cache import SUFFIX, DiskCache
from torch_tpu.runtime.process_client import client

# Trains a little model with what takes part in entries: a buffer that is written, random numbers, an index check, a
# constant of the graph; once with sizes that vary.
PROGRAM = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, torch_tpu
    from torch import nn
    from torch._dynamo.utils import counters

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.norm, self.drop = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

        def forward(self, ids):
            return self.drop(self.norm(self.word(ids)) * torch.tensor([1.0, 2.0, 3.0, 4.0], device=ids.device))

    values = []
    for dynamic in (False, True):
        torch.manual_seed(0)
        model = Model().to("tpu")
        step = torch.compile(model, dynamic=dynamic)
        for size in (5, 6):
            loss = step(torch.arange(size, device="tpu")).square().sum()
            loss.backward()
            values.append(loss.item())
        values += [model.word.weight.grad.tolist(), model.norm.running_mean.tolist()]
graphs = sum(len(graph["programs"]) for graph in torch_tpu.metrics.snapshot()["graphs"])
warned = [str(w.message) for w in caught if "torch_tpu" in str(w.message)]
print(json.dumps([values, counters["aot_autograd"], torch_tpu.metrics.counters(), graphs, warned]))
"""


def test_a_second_process_does_none_of_it_again(tmp_path: Path) -> None:
    env = {**os.environ, "TORCH_TPU_CACHE_DIR": str(tmp_path / "ours"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run() -> list[Any]:
        made = subprocess.run([sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, check=True, timeout=300)
        answer: list[Any] = json.loads(made.stdout.splitlines()[-1])
        return answer

    values, aot, ours, graphs, warned = run()
    assert (aot["autograd_cache_saved"], ours.get("stored_plan", 0), warned) == (3, 0, [])
    again, aot, ours, same_graphs, warned = run()
    assert again == values
    assert aot["autograd_cache_hit"] == 3
    # No program is traced either, of graphs or of the operators between them.
    assert (ours.get("compile", 0), ours["stored_plan"], warned) == (0, ours["program"], [])
    assert same_graphs == graphs == 8  # forward and backward, of two sizes, with and without dynamic shapes


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskCache]:
    """Caches of a new user."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    monkeypatch.setattr(client(), "disk_cache", DiskCache(tmp_path / "ours"))
    with torch._functorch.config.patch(enable_autograd_cache=True):
        yield client().disk_cache
    torch.compiler.reset()


def anew(function: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, int]]:
    """What a function gives that was compiled as in a new process, and how its graph was come by."""
    torch.compiler.reset()
    before, plans = dict(counters["aot_autograd"]), metrics.counters().get("stored_plan", 0)
    result = torch.compile(function)(*args)
    states = ("hit", "miss", "bypass", "saved")
    came = {s: counters["aot_autograd"][f"autograd_cache_{s}"] - before.get(f"autograd_cache_{s}", 0) for s in states}
    came["plans"] = int(metrics.counters().get("stored_plan", 0) - plans)
    return result, {state: count for state, count in came.items() if count}


def scaled(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).relu()


X = [-1.0, 2.0]
WANT = [0.0, 6.0]
COLD, WARM = {"miss": 1, "saved": 1}, {"hit": 1, "plans": 1}


def test_a_graph_comes_back(cache: DiskCache) -> None:
    x = torch.tensor(X, device="tpu")
    for came in (COLD, WARM, WARM):
        result, how = anew(scaled, x)
        assert (result.tolist(), how) == (WANT, came)
    assert metrics.programs.graphs.entries()[-1].name.endswith("of scaled")
    # Another graph, and the same one for other sizes.
    assert anew(lambda x: (x * 4).relu(), x)[1] == COLD
    assert anew(scaled, torch.ones(3, device="tpu"))[1] == COLD


@pytest.mark.parametrize("whose", ["theirs", "ours"])
def test_damaged_entries_are_made_again(cache: DiskCache, tmp_path: Path, whose: str) -> None:
    x = torch.tensor(X, device="tpu")
    anew(scaled, x)
    for path in (tmp_path / whose).rglob("*" if whose == "theirs" else f"*{SUFFIX}"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-9])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, how = anew(scaled, x)
    assert result.tolist() == WANT
    # PyTorch logs what is wrong with its own.
    assert how == (COLD | {"plans": 1} if whose == "theirs" else {"hit": 1})
    assert any("is damaged" in str(w.message) for w in caught) == (whose == "ours")
    assert anew(scaled, x)[1] == WARM


class Planted:
    """Its pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_what_others_may_have_written_is_not_read(cache: DiskCache, tmp_path: Path, mode: int) -> None:
    x = torch.tensor(X, device="tpu")
    assert anew(scaled, x)[1] == COLD
    folder = tmp_path / "theirs" / "aotautograd"
    assert folder.stat().st_mode & 0o777 == 0o700
    (entry,) = folder.glob("*/*")
    entry.write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    folder.chmod(mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            result, how = anew(scaled, x)
            assert (result.tolist(), how) == (WANT, {"plans": 1})
    (warned,) = (str(w.message) for w in caught if "torch_tpu" in str(w.message))
    assert f"`chmod -R go= {folder}`" in warned
    assert "TORCHINDUCTOR_CACHE_DIR" in warned
    assert not (tmp_path / "ran").exists()
    assert len(list(folder.glob("*/*"))) == 1
    entry.unlink()
    folder.chmod(0o700)
    assert anew(scaled, x)[1] == {"miss": 1, "saved": 1, "plans": 1}


def test_what_belongs_to_somebody_else_is_not_read(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor(X, device="tpu")
    anew(scaled, x)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.warns(UserWarning, match=r"AOTAutograd's cache .* belongs to"):
        result, how = anew(scaled, x)
    assert (result.tolist(), how) == (WANT, {})


def test_a_fault_in_keeping_graphs_is_told(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch drops errors of its cache; each process would compile anew, and nobody would notice."""

    def typo(value: Any) -> Any:
        raise AttributeError("no_such_name")

    monkeypatch.setattr(stored_graph, "_parts", typo)
    with (
        torch._functorch.config.patch(strict_autograd_cache=False),
        pytest.raises(AssertionError, match=r"internal error of torch_tpu: .* in a graph: no_such_name"),
    ):
        anew(scaled, torch.tensor(X, device="tpu"))


def test_what_other_code_left_is_not_used(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of this package may differentiate, lower and lay out otherwise."""
    x = torch.tensor(X, device="tpu")
    anew(scaled, x)
    monkeypatch.setattr(fingerprint, "own_sources", lambda: "of another version")
    assert anew(scaled, x)[1] == COLD
    monkeypatch.setattr(client(), "fingerprint", f"{client().fingerprint}, of another platform")
    assert anew(scaled, x)[1] == COLD


def test_nothing_is_kept_where_programs_are_kept_nowhere(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client(), "disk_cache", None)
    for _ in range(2):
        result, how = anew(scaled, torch.tensor(X, device="tpu"))
        assert (result.tolist(), how) == (WANT, {})


def test_operators_of_users_are_not_kept(cache: DiskCache) -> None:
    """Their code may change while their name does not."""
    factor = 2

    @torch.library.custom_op("torch_tpu_tests::times", mutates_args=())
    def times(x: torch.Tensor) -> torch.Tensor:
        return x.cpu().mul(factor).to(x.device)

    times.register_fake(torch.empty_like)
    x = torch.tensor(X, device="tpu")
    for factor in (2, 5):
        result, how = anew(lambda x: torch.ops.torch_tpu_tests.times(x) + 1, x)
        assert result.tolist() == [1 - factor, 1 + 2 * factor]
        assert set(how) <= {"plans"}  # of what comes after the operator


def test_a_graph_in_pieces_comes_back_in_pieces(cache: DiskCache) -> None:
    def larger(x: torch.Tensor) -> torch.Tensor:
        return (x * 2)[x > 0] + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for _ in range(2):
            result, _ = anew(larger, torch.tensor(X, device="tpu"))
            assert result.tolist() == [5.0]
    assert metrics.counters()["graph_cut"] == 2


def test_gradients_can_be_asked_for_twice(cache: DiskCache) -> None:
    """PyTorch refuses it where backward may overwrite what was saved, which an entry would remember."""
    for came in (COLD, {"hit": 1, "plans": 1}):
        x = torch.tensor(X, device="tpu", requires_grad=True)
        y, how = anew(lambda x: (x.sin() * x.cos()).sum(), x)
        assert how == came
        y.backward(retain_graph=True)
        y.backward()
        torch.testing.assert_close(x.grad.cpu(), 2 * torch.cos(2 * torch.tensor(X)))


def test_the_bytes_of_a_graph() -> None:
    """The graph before and after: the same nodes and constants, whose bytes are the same again."""
    constant = torch.arange(6.0).reshape(2, 3).T

    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + constant, lambda x: x[:, :1] * x, (x,))

    before = make_fx(choose)(torch.ones(3, 2))
    code = stored_graph.dump(before)
    after = stored_graph.load(code)
    assert [(n.op, n.name, n.target) for n in after.graph.nodes] == [
        (n.op, n.name, n.target) for n in before.graph.nodes
    ]
    for x in (torch.ones(3, 2), -torch.ones(3, 2)):
        torch.testing.assert_close(after(x), choose(x))
    assert stored_graph.dump(after) == code
    before.graph.output_node().prepend(before.graph.call_function(json.dumps))
    with pytest.raises(stored_graph.UnstorableGraph, match="dumps"):
        stored_graph.dump(before)
