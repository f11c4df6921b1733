"""Tables that grow with what a program does have a bound, and those that the report shows are empty after a reset."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest
import torch

from torch_tpu import metrics
from torch_tpu.compile.buckets import padded_values
from torch_tpu.eager.deferred import segment
from torch_tpu.eager.host import shape_churn
from torch_tpu.eager.program import argument_buffers, call_signature, plan_table
from torch_tpu.metrics import events, programs
from torch_tpu.recent import Recent

SOURCE = Path(metrics.__file__).parents[1]
MANY = 3000


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tables as they are, with smaller bounds."""
    for name, most in (("_earlier", 500), ("_of_plan", 500), ("_in_fused", 500), ("_captured", 100), ("graphs", 100)):
        assert isinstance(getattr(programs, name), Recent)
        monkeypatch.setattr(programs, name, Recent(most))
    monkeypatch.setattr(programs, "MOST_BREAKS", 100)
    monkeypatch.setattr(events, "MOST_PLACES", 100)
    metrics.reset()
    yield
    metrics.reset()


def sizes() -> dict[str, int]:
    tables = {
        name: getattr(programs, name)
        for name in ("log", "graphs", "breaks", "_captured", "_earlier", "_of_plan", "_fused", "_in_fused")
    }
    return {
        name: len(table.entries()) if isinstance(table, Recent) else len(table)
        for name, table in {**tables, "events": events._entries}.items()
    }


def test_programs_graphs_and_breaks() -> None:
    for n in range(MANY):
        programs.captured(f"graph {n} of f", "")
        programs.made("graph", f"graph {n} of f", {"shape": str(n)}, n)
        programs.made("operator", "add.Tensor", {"shape": str(n)}, MANY + n)
        programs.fused([n, MANY + n], ["a", "b"], 1)
        programs.broken("a call", f"of {n}", f"file:{n}", "f()")
        programs.ran_by_operator(f"graph {n} of f", "why")
    held = sizes()
    assert all(250 <= held[name] <= 500 for name in ("_earlier", "_of_plan", "_in_fused"))
    assert all(50 <= held[name] <= 100 for name in ("graphs", "_captured"))
    assert held["breaks"] == 101
    assert held["_fused"] == programs.MOST_COMPARED
    assert held["log"] <= programs.MOST_LOGGED
    assert len(programs._earlier.find("add.Tensor")) == programs.MOST_COMPARED
    found = metrics.snapshot()
    assert sum(b["count"] for b in found["graph_breaks"]) == MANY
    assert found["graph_breaks"][0]["line"] == "other lines"
    assert [g["name"] for g in found["graphs"]] == [f"graph {n} of f" for n in range(MANY - held["graphs"], MANY)]


def test_programs_of_one_graph() -> None:
    programs.captured("graph 1 of f", "")
    for n in range(MANY):
        programs.made("graph", "graph 1 of f", {"shape": str(n)}, n)
    (graph,) = metrics.snapshot()["graphs"]
    assert len(graph["programs"]) == programs.MOST_OF_GRAPH
    assert graph["programs"][-1]["reason"] == f"shape: {MANY - 2} → {MANY - 1}"


def test_lines() -> None:
    def place(n: int) -> tuple[CodeType, int]:
        return compile(f"{n}", f"file {n}", "eval"), 0

    kept = [place(n) for n in range(MANY)]
    for where in kept:
        metrics.note("sync", "item", place=where)
    assert len(events._entries) <= 101
    assert sum(event["count"] for event in metrics.snapshot()["syncs"]) == MANY


def test_a_reset_empties_what_the_report_shows() -> None:
    programs.captured("graph 1 of f", "", is_padded=True)
    programs.layered("graph 1 of f", 12, 3)
    programs.made("graph", "graph 1 of f", {"shape": "1"}, 1)
    programs.ran_in_pieces("graph 1 of f", "why")
    programs.broken("a call", "of f", "file:1", "f()")
    metrics.note("flush", "grown long")
    metrics.reset()
    empty = {key: value for key, value in metrics.snapshot().items() if value}
    assert empty == {}
    # A later program of the graph still has a reason, and the graph is known as it was captured.
    programs.made("graph", "graph 1 of f", {"shape": "2"}, 2)
    (graph,) = metrics.snapshot()["graphs"]
    assert (graph["layers"], graph["parts"], graph["is_padded"], graph["in_pieces"]) == (12, 3, True, 0)
    assert [p["reason"] for p in graph["programs"]] == ["shape: 1 → 2"]


def test_a_piece_of_a_graph_is_listed_with_it() -> None:
    programs.captured("graph 1 of f", "")
    metrics.reset()
    programs.made("graph", "graph 1 of f, before add", {"shape": "2"}, 2)
    assert [g["name"] for g in metrics.snapshot()["graphs"]] == ["graph 1 of f"]


def test_longer_forms_of_a_value() -> None:
    """Slices of one table, each padded to a bucket of its own."""
    x = torch.arange(4096.0).to("tpu")
    for n in range(1, 200):
        padded, _ = padded_values.lengthened(x[:n], [n + 1], lambda _: False)
        assert padded.shape == (n + 1,)
    (found,) = (views for value, views in padded_values._longer.items() if value is x.untyped_storage().value)
    assert len(found) + len(found.older) <= padded_values.MOST_LONGER
    again, _ = padded_values.lengthened(x[:199], [200], lambda _: False)
    assert again.data_ptr() == padded.data_ptr()  # of one that is used again there is one copy
    assert again[:199].tolist() == list(range(199))


def test_kinds_of_calls_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_churn, "_made", type(shape_churn._made)())
    for n in range(MANY + shape_churn.MOST_KINDS):
        shape_churn.made(n)
    assert len(shape_churn._made) <= shape_churn.MOST_KINDS + 1


def test_a_table_of_the_recent_forgets_what_is_not_used() -> None:
    table: Recent[int, int] = Recent(50)
    for n in range(MANY):
        table.keep(n, n)
        assert table.find(0) == 0
    assert 25 <= len(table.entries()) <= 50
    assert table.entries()[-1] == MANY - 1
    assert table.find(MANY - 60) is None
    table.forget(0)
    assert table.find(0) is None


def test_programs_of_fused_eager_and_plans() -> None:
    plans = [plan_table.plans, plan_table.fast_path_plans, call_signature._views, call_signature._view_kinds]
    assert all(
        isinstance(t, Recent)
        for t in [
            *plans,
            argument_buffers.scalar_buffers,
            argument_buffers.start_buffers,
            segment._segments,
            segment._compiled,
        ]
    )


# Tables of a module that have no bound of their own, and why they do not grow with what a program does.
FIXED = {
    "device/broken_device.py _libraries": "one for each namespace of operators",
    "device/generator.py _by_address": "weak",
    "device/pinned.py _kept": "three for the one patch",
    "device/privateuse1.py _kept": "two: the hooks and the guard",
    "device/stream_guard.py _tables": "one",
    "distributed/channel.py _channels": "weak",
    "distributed/kernels.py _kernels": "operators",
    "distributed/kernels.py _libraries": "one",
    "eager/deferred/runtime_checks.py unread": "read when a graph has run",
    "eager/deferred/thread_graphs.py graphs": "weak",
    "eager/deferred/deferred_graph.py _nodes": "2**20, on topologies only",
    "eager/kernel_table.py HANDWRITTEN": "operators",
    "eager/kernel_table.py _libraries": "one for each namespace of operators",
    "eager/dispatch/operator.py _programs": "operators",
    "eager/overload_table.py _rows": "operators",
    "eager/host/shape_churn.py _made": "MOST_KINDS",
    "compile/frontend/autograd_cache.py _warned": "_MOST_WARNED",
    "compile/buckets/rule_table.py RULES": "operators",
    "compile/buckets/padded_values.py _kept": "weak",
    "compile/buckets/padded_values.py _longer": "weak; of each value MOST_LONGER",
    "compile/layers/differentiate.py known_regions": "weak",
    "hlo/target.py _targets": "a stack",
    "hooks.py _keepers": "files that keep programs",
    "metrics/counts.py counters": "operators and what this package counts",
    "metrics/counts.py seconds": "what this package counts",
    "metrics/events.py _entries": "MOST_PLACES",
    "metrics/user_lines.py _user_files": "65536",
    "metrics/programs.py breaks": "MOST_BREAKS",
    "ops/tracing/cpu_acceptance.py _accepted": "_MOST_ACCEPTED",
    "patching/patch_registry.py _unsaid": "patches",
    "patching/patch_registry.py patches": "one for each change to another package's objects",
    "ops/core/families.py _loaded": "families",
    "ops/core/registry.py _decompositions": "operators",
    "ops/core/registry.py _families": "operators",
    "ops/core/registry.py _higher_order": "operators",
    "ops/core/registry.py _lowerings": "operators",
    "ops/core/registry.py _modules": "operators",
    "runtime/client.py _runs": "MOST_RUNS",
    "tensor/storage.py _geometries": "weak",
}
# Functions whose results are kept without a bound, and what for.
CACHED = {
    "compile/buckets/symbolic_sizes.py": "the sizes of one program, while it is traced",
    "device/properties.py": "the machine",
    "eager/host/shape_churn.py": "operators",
    "ops/activation.py": "operators",
    "ops/core/derived.py": "operators",
    "ops/core/schema.py": "operators",
    "ops/tracing/cpu_acceptance.py": "operators",
    "runtime/compat.py": "the versions of jaxlib",
    "runtime/fingerprint.py": "the machine",
}
_TABLES = {"dict", "list", "set", "Counter", "defaultdict", "OrderedDict", "deque", "WeakSet"}
_WEAK = {"WeakKeyDictionary", "WeakValueDictionary"}


def _tables(path: Path) -> Iterator[str]:
    """The module-level names of a file that begin as an empty container without a bound."""
    for statement in ast.parse(path.read_text()).body:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        value = statement.value
        is_empty = isinstance(value, (ast.Dict, ast.List)) and not ast.unparse(value)[1:-1]
        if isinstance(value, ast.Call):
            name = ast.unparse(value.func).rpartition(".")[2].partition("[")[0]
            bounded = any(k.arg == "maxlen" for k in value.keywords)
            is_empty = (name in _TABLES or name in _WEAK) and not bounded
            if name in _TABLES and value.args and not isinstance(value.args[0], ast.Name):
                is_empty = False
        if is_empty:
            yield ast.unparse(target)


def test_every_table_of_a_module_is_bounded() -> None:
    found = {
        f"{path.relative_to(SOURCE)} {name}"
        for path in SOURCE.rglob("*.py")
        if "planner" not in path.parts
        for name in _tables(path)
    }
    assert found - FIXED.keys() == set(), "bound it (recent.py), or say here why it is"
    cached = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "planner" not in path.parts and ("@cache\n" in path.read_text() or "functools.cache\n" in path.read_text())
    }
    assert cached - CACHED.keys() == set(), "say here what decides how many results are kept"
