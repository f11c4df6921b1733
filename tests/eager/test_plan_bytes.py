"""A plan's bytes give the same plan again; whatever else they are, they are refused and run nothing."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_tpu import hooks
from torch_tpu.eager.program import plan_bytes, stored_plans
from torch_tpu.eager.program.plan import Call, Plan
from torch_tpu.eager.program.plan_bytes import Damaged
from torch_tpu.runtime.disk_cache import SUFFIX, DiskCache
from torch_tpu.runtime.process_client import client


class Planted:
    """Its pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def model(x: torch.Tensor, index: torch.Tensor, table: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """Views of an input and of results, a write, a check with a value, random numbers, data."""
    table.mul_(scale)
    rows = table[index] * x
    flat = torch.nn.functional.dropout(rows, 0.5).t()
    return [rows, flat, flat[1:], table[:2], x, torch.view_as_complex(torch.stack([rows, rows], -1)), rows[:0]]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Call, Plan]]:
    """Plans of compiled graphs, forward and backward, with the calls they are for."""
    made: list[tuple[Call, Plan]] = []
    cache = DiskCache(tmp_path_factory.mktemp("cache"))

    def keep(call: Call, plan: Plan) -> None:
        if call.func is None:
            made.append((call, plan))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(client(), "disk_cache", cache)
        patched.setattr(stored_plans, "keep", keep)
        torch.compiler.reset()
        hooks.forget_programs()
        x, table = torch.ones(3, 4, device="tpu"), torch.rand(5, 4, device="tpu")
        index = torch.tensor([0, 2, 4], device="tpu")
        torch.compile(model, dynamic=False)(x, index, table, 2.0)
        leaf = torch.rand(3, 4, device="tpu", requires_grad=True)
        torch.compile(lambda x: torch.nn.functional.cross_entropy(x, index[:3] % 4), dynamic=False)(leaf).backward()
        torch.compile(lambda x: x * 2 + x.shape[0], dynamic=True)(table)
        torch.compile(lambda x: [x + 1, x[1:], x.t()], dynamic=False)(torch.rand(9, 4, device="tpu")[3:7])
        torch.compile(torch.linalg.cholesky, dynamic=False)(torch.eye(3, device="tpu"))
    assert len(made) >= 4
    return made


def state(plan: Plan) -> dict[str, Any]:
    """All of a plan but what differs from process to process."""
    fields = {name: getattr(plan, name) for name in Plan.__slots__}
    assert fields.pop("number") is not None
    for name in ("executable", "call"):
        fields.pop(name)
    return {**fields, "_module": plan.code()}


def test_the_same_plan_comes_back(plans: list[tuple[Call, Plan]]) -> None:
    seen = set()
    for call, plan in plans:
        again = plan_bytes.load(plan_bytes.dump(plan), call)
        assert again.number != plan.number
        assert state(again) == state(plan)
        assert list(again.operations.items()) == list(plan.operations.items())
        assert plan_bytes.dump(again) == plan_bytes.dump(plan)
        seen |= {name for name, value in state(plan).items() if value}
    assert seen >= {"writes", "checks", "draws", "uses_rng", "bases", "data", "custom_calls", "reused", "returned"}


def test_a_pickle_is_no_plan(plans: list[tuple[Call, Plan]], tmp_path: Path) -> None:
    call, _ = plans[0]
    for content in (pickle.dumps(Planted(tmp_path / "made")), plan_bytes.MAGIC + pickle.dumps(Planted(tmp_path / "m"))):
        with pytest.raises(Damaged):
            plan_bytes.load(content, call)
    assert list(tmp_path.iterdir()) == []


def damages(content: bytes, source: random.Random) -> Iterator[bytes]:
    """Cut off, bits turned, parts doubled or left out, digits and letters exchanged."""
    for end in source.sample(range(len(content)), 60):
        yield content[:end]
    begin = len(plan_bytes.MAGIC) + 8
    end = begin + int.from_bytes(content[begin - 8 : begin], "little")
    for limit in (end, len(content)):
        for _ in range(150):
            damaged = bytearray(content)
            for _ in range(source.choice((1, 1, 3))):
                damaged[source.randrange(limit)] ^= 1 << source.randrange(8)
            yield bytes(damaged)
    for _ in range(100):
        first, last = sorted(source.sample(range(end), 2))
        yield content[:first] + content[last:]
        yield content[:last] + content[first:]
        damaged = bytearray(content)
        damaged[source.randrange(begin, end)] = source.choice(b'0123456789-,[]{}":.eEntf')
        yield bytes(damaged)


def test_damaged_bytes_are_refused(plans: list[tuple[Call, Plan]]) -> None:
    """Or are a plan all the same, as where a letter of a message is another: never is anything else raised."""
    source = random.Random(0)
    refused = accepted = 0
    for call, plan in plans[:3]:
        content = plan_bytes.dump(plan)
        for damaged in damages(content, source):
            try:
                assert isinstance(plan_bytes.load(damaged, call), Plan)
                accepted += 1
            except Damaged:
                refused += 1
    assert refused > 1500
    assert accepted < refused / 5


def fields_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    begin = len(plan_bytes.MAGIC) + 8
    end = begin + int.from_bytes(content[begin - 8 : begin], "little")
    return json.loads(content[begin:end]), content[end:]


def with_fields(fields: dict[str, Any], code: bytes) -> bytes:
    text = json.dumps(fields).encode()
    return plan_bytes.MAGIC + len(text).to_bytes(8, "little") + text + code


VALUES = (None, True, -1, 2**70, 0.5, "x", "", [], [[]], {}, {"list": 0}, [0, 0], {"fresh": [0]}, {"same": 99})


def test_each_field_is_looked_at(plans: list[tuple[Call, Plan]]) -> None:
    """Another value in the place of each field, and of each item of each field that is a list."""
    call, plan = plans[0]
    fields, code = fields_of(plan_bytes.dump(plan))

    def variants(value: Any, depth: int = 3) -> Iterator[Any]:
        yield from VALUES
        if isinstance(value, list) and depth:
            for i, item in enumerate(value):
                for other in variants(item, depth - 1):
                    yield [*value[:i], other, *value[i + 1 :]]
        if isinstance(value, dict) and depth:
            for key, item in value.items():
                for other in variants(item, depth - 1):
                    yield {key: other}

    count = 0
    for name, value in fields.items():
        without = {key: item for key, item in fields.items() if key != name}
        with pytest.raises(Damaged):
            plan_bytes.load(with_fields(without, code), call)
        for other in variants(value):
            count += 1
            try:
                plan_bytes.load(with_fields({**fields, name: other}, code), call)
            except Damaged:
                continue
            # What was accepted is a value of its kind: fewer places, or other numbers.
            assert type(other) is type(value) or name == "returned", (name, other)
    assert count > 1000
    with pytest.raises(Damaged):
        plan_bytes.load(with_fields({**fields, "more": 1}, code), call)
    with pytest.raises(Damaged, match=r"cut off|read"):
        plan_bytes.load(plan_bytes.MAGIC + (2**63).to_bytes(8, "little"), call)
    with pytest.raises(Damaged, match="read"):
        plan_bytes.load(with_fields({**fields}, code).replace(b'"draws"', b'"draws"' + b"[" * 100_000), call)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("returned", lambda tree: {"list": [{"alias": [0, [1000], [1], 0, "float32"]}]}),
        ("returned", lambda tree: {"list": [{"alias": [0, [2], [1], 4000, "float32"]}]}),
        ("returned", lambda tree: {"list": [{"alias": [0, [2], [1], -4, "float32"]}]}),
        ("returned", lambda tree: {"list": [{"alias": [0, [2], [1], 3, "float32"]}]}),
        ("results", lambda specs: [[[2**40], "float32"], *specs[1:]]),
        ("checks", lambda checks: [[slot, "{0.__class__}", kind, slot] for slot, _, kind, _ in checks]),
        ("checks", lambda checks: [[slot, text, "SystemExit", None] for slot, text, *_ in checks]),
        ("checks", lambda checks: [[0, text, kind, None] for _, text, kind, _ in checks]),
        ("bases", lambda places: [*places, places[0]]),
        ("bases", lambda places: [len(places) + 100]),
        ("writes", lambda writes: [[99, *rest] for _, *rest in writes]),
        ("results", lambda specs: [[shape, "eval"] for shape, _ in specs]),
    ],
)
def test_what_would_reach_beyond_the_call(
    plans: list[tuple[Call, Plan]], name: str, change: Callable[[Any], Any]
) -> None:
    call, plan = plans[0]
    fields, code = fields_of(plan_bytes.dump(plan))
    with pytest.raises(Damaged):
        plan_bytes.load(with_fields({**fields, name: change(fields[name])}, code), call)


def test_what_has_no_form_is_not_kept(plans: list[tuple[Call, Plan]], monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = plans[0]
    monkeypatch.setattr(plan, "checks", ((0, "no", ZeroDivisionError, None),))
    with pytest.raises(plan_bytes.Unstorable, match="ZeroDivisionError"):
        plan_bytes.dump(plan)
    monkeypatch.setattr(plan, "checks", ())
    monkeypatch.setattr(plan, "returned", [object()])
    with pytest.raises(plan_bytes.Unstorable, match="object"):
        plan_bytes.dump(plan)


def test_a_planted_plan_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a right checksum, in a folder that is the user's: the entry is rejected, and the plan made again."""
    cache = DiskCache(tmp_path / "cache")
    monkeypatch.setattr(client(), "disk_cache", cache)
    x = torch.ones(3, 7, device="tpu")

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).relu() + 1

    def run() -> list[Any]:
        torch.compiler.reset()
        hooks.forget_programs()
        result: list[Any] = torch.compile(function)(x).tolist()
        return result

    want = run()
    for path in cache.folder.glob(f"*/*{SUFFIX}"):
        cache.write(path.name.removesuffix(SUFFIX), pickle.dumps(Planted(tmp_path / "made")))
    with pytest.warns(UserWarning, match="can't be read"):
        assert run() == want == [[4.0] * 7] * 3
    assert not (tmp_path / "made").exists()
