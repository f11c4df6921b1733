"""What the registry does with a patch: looks, changes whole or not at all, says what is off."""

from __future__ import annotations

import functools
import importlib
import sys
import tomllib
import types
import warnings
from pathlib import Path

import pytest
import torch

from torch_tpu.device import stream_guard, symbols
from torch_tpu.patching import needs, patch_registry, versions
from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import a_class, a_property, function, holding
from torch_tpu.runtime import compat

ROOT = Path(__file__).parents[2]


@pytest.fixture
def library(monkeypatch):
    """A module to patch, and a registry of its own."""
    module = types.ModuleType("some_library")
    source = """
class Base:
    def inherited(self): return "base"
class Owner(Base):
    @staticmethod
    def fixed(number): return number
    @property
    def named(self): return "name"
def called(first, *, second=2): return first + second
def any_names(**options): return options
table = {"cpu": 1}
items = [1]
number = 5
"""
    exec(source, module.__dict__)
    module.__version__ = "9.1"
    monkeypatch.setitem(sys.modules, "some_library", module)
    monkeypatch.setitem(versions.TESTED, "some_library", ("8.0", "9.0"))
    monkeypatch.setattr(patch_registry, "patches", [])
    monkeypatch.setattr(patch_registry, "_unsaid", [])
    monkeypatch.setattr(patch_registry, "_used", False)
    return module


@pytest.mark.parametrize(
    ("need", "problem"),
    [
        (function("some_library:called", "first", "second"), ""),
        (function("some_library:called", "third"), "some_library.called has no parameter third"),
        (function("some_library:any_names", "third"), ""),
        (function("some_library:Owner"), "some_library.Owner is not a function"),
        (function("some_library:number"), "some_library.number is not a function"),
        (function("some_library:Owner.fixed", "number"), ""),
        (function("builtins:len", "whatever C calls it"), ""),
        (a_class("some_library:Owner", "fixed", "inherited"), ""),
        (a_class("some_library:Owner", "gone"), "some_library.Owner has no gone"),
        (a_class("some_library:called"), "some_library.called is not a class"),
        (a_property("some_library:Owner.named"), ""),
        (a_property("some_library:Owner.fixed"), "some_library.Owner.fixed is not a property"),
        (holding("some_library:table", "cpu", kind=dict), ""),
        (holding("some_library:table", "tpu", kind=dict), "some_library.table has no 'tpu'"),
        (holding("some_library:items", kind=dict), "some_library.items is not a dict"),
        (function("some_library:Owner.gone.further"), "some_library.Owner has no gone"),
        (function("no_such_library:f"), "there is no module no_such_library"),
        (needs.operator("aten.add.Tensor", "self", "other"), ""),
        (needs.operator("aten.add.Tensor", "self", "gone"), "torch.ops.aten.add.Tensor has the arguments "),
        (needs.operator("aten.no_such_operator.default"), "torch.ops.aten has no no_such_operator"),
        (needs.Need("some_library:number", lambda n: n.gone), "some_library.number can't be looked at (AttributeError"),
    ],
)
def test_what_a_need_finds(library, need, problem):
    found = need.problem()
    assert found.startswith(problem) if problem else found == ""


def test_parameters_are_those_of_the_wrapped_function(library):
    @functools.wraps(library.called)
    def wrapper(*args):
        return library.called(*args)

    library.wrapped = wrapper
    assert function("some_library:wrapped", "second").problem() == ""
    assert function("some_library:wrapped", "args").problem()


def test_changes_are_taken_back(library):
    owner = library.Owner
    before = dict(vars(owner)), dict(library.table), list(library.items), library.called.__code__
    changes = Changes("test")
    changes.set(owner, "fixed", staticmethod(lambda number: -number))
    changes.set(owner, "named", property(lambda self: "ours"))
    changes.set(owner, "inherited", lambda self: "ours")
    changes.set(owner, "fixed", staticmethod(lambda number: 10 * number))
    changes.set(library.called, "__code__", (lambda first, *, second=2: first - second).__code__)
    changes.put(library.table, "cpu", 2)
    changes.put(library.table, "tpu", 3)
    changes.append(library.items, 2)
    assert (owner.fixed(2), owner().named, owner().inherited(), library.called(1)) == (20, "ours", "ours", -1)
    assert (library.table, library.items) == ({"cpu": 2, "tpu": 3}, [1, 2])
    changes.undo()
    assert (dict(vars(owner)), library.table, library.items, library.called.__code__) == before
    assert (owner.fixed(2), owner().named, owner().inherited(), library.called(1)) == (2, "name", "base", 3)


def test_a_patch_is_made_once_to_an_object_and_again_to_a_new_one(library):
    @patch_registry.optional("twice", "it doubles", function("some_library:called", "first"))
    def patch(changes):
        original = library.called
        changes.set(library, "called", lambda first: 2 * original(first))

    assert patch.state is patch_registry.State.NOT_NEEDED_YET
    assert patch.apply()
    assert patch.apply()
    assert library.called(1) == 6
    assert patch.state is patch_registry.State.APPLIED
    library.called = lambda first: first  # as a reload would
    assert patch.apply()
    assert library.called(1) == 2


def test_a_change_that_fails_half_way_changes_nothing(library):
    @patch_registry.optional("half", "something is on", function("some_library:called"))
    def patch(changes):
        changes.set(library, "number", 6)
        raise KeyError("surprise")

    assert not patch.apply()
    assert library.number == 5
    assert patch.state is patch_registry.State.OFF
    assert "KeyError: 'surprise'" in patch.reason


def test_what_is_off_is_said_once_when_the_device_is_used(library):
    @patch_registry.optional("gone", "something is on", function("some_library:gone"))
    def gone(changes):
        raise AssertionError("not reached")

    @patch_registry.optional(
        "at use", "more is on", function("some_library:gone_too"), moment=patch_registry.Moment.FIRST_USE
    )
    def at_use(changes):
        raise AssertionError("not reached")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_registry.apply_all()
        assert not gone.apply()
        assert caught == []
        assert at_use.state is patch_registry.State.NOT_NEEDED_YET
        patch_registry.device_is_used()
        patch_registry.device_is_used()
        assert not gone.apply()
    assert [str(warning.message) for warning in caught] == [
        "The patch 'gone' does not fit some_library 9.1: some_library has no gone (torch_tpu was tested with "
        "some_library 8.0 and 9.0). This feature is off: something is on.",
        "The patch 'at use' does not fit some_library 9.1: some_library has no gone_too (torch_tpu was tested with "
        "some_library 8.0 and 9.0). This feature is off: more is on.",
    ]
    assert {warning.filename for warning in caught} == {__file__}
    with pytest.raises(RuntimeError, match=r"off on 'tpu': something is on\. Reason: the patch 'gone' does not"):
        patch_registry.demand("gone")


def test_a_required_patch_that_fails_takes_the_others_back(library):
    @patch_registry.optional("first", "it is six", holding("some_library:items", kind=list))
    def first(changes):
        changes.set(library, "number", 6)

    @patch_registry.required("second", "it is there", function("some_library:called"))
    def second(changes):
        raise OSError("no")

    with pytest.raises(
        patch_registry.PatchError, match=r"'second' does not fit some_library 9\.1: OSError: no .*it is there"
    ):
        patch_registry.apply_all()
    assert library.number == 5
    assert (first.state, second.state) == (patch_registry.State.NOT_NEEDED_YET, patch_registry.State.OFF)


def test_a_patch_for_the_time_of_a_block(library):
    @patch_registry.optional("block", "", function("some_library:called"), moment=patch_registry.Moment.CALL)
    def patch(changes, number):
        changes.set(library, "number", number)

    for number in (7, 8):
        with patch.during(number):
            assert library.number == number
        assert library.number == 5
        assert patch.state is patch_registry.State.NOT_NEEDED_YET


def test_tested_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["torch-tpu"]["tested"] == {name: list(found) for name, found in versions.TESTED.items()}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name: pinned[name] for name in versions.TESTED if pinned[name] not in versions.TESTED[name]} == {}
    assert versions.numbers("2.13.0+cpu") == [2, 13, 0]
    assert versions.numbers("2.9.1") < versions.numbers("2.13")
    assert versions.is_newer("torch", "2.14.0a0")
    assert not versions.is_newer("torch", "2.13.0+cpu")
    assert not versions.is_newer("numpy", "99")


def test_a_name_that_jaxlib_lacks(monkeypatch):
    with pytest.raises(RuntimeError, match=r"jaxlib .* is not supported: .*no_such_name.*tested with jaxlib 0\.10\.2"):
        compat.xla.no_such_name  # noqa: B018
    compat.check_methods()
    monkeypatch.setitem(compat.METHODS, "Client", ("no_such_method",))
    with pytest.raises(RuntimeError, match="is not supported: jaxlib's Client has no no_such_method"):
        compat.check_methods()


@pytest.mark.skipif(sys.platform != "linux", reason="the device guard is changed on Linux alone")
def test_the_guard_is_left_alone_where_its_entry_is_not_the_one_looked_for(monkeypatch):
    names = stream_guard.virtual_functions()
    place = names.index("exchangeStream")
    shifted = [*names[:place], "something new", *names[place:]]
    monkeypatch.setattr(stream_guard, "virtual_functions", lambda: shifted)
    with pytest.raises(RuntimeError, match=r"is not exchangeStream by its symbols, but .*getStreamNativeHandle"):
        stream_guard.ignore_streams.change(Changes("test"))


def test_symbols(tmp_path):
    assert symbols.symbol_at(0) == ""
    (tmp_path / "text").write_text("no library")
    assert symbols.symbol_in_file(tmp_path / "text", 16) == ""


@pytest.mark.parametrize(
    ("use", "lacking"),
    [
        ("compile", "torch._functorch.partitioners.min_cut_rematerialization_partition"),
        ("debug", "torch._functorch.partitioners.min_cut_rematerialization_partition"),
        ("export", "torch.fx.experimental.proxy_tensor.make_fx"),
    ],
)
def test_a_name_that_compiling_lacks(use: str, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the versions."""
    import torch_tpu.compile

    uses = {
        "compile": torch_tpu.compile.compile_graph,
        "debug": lambda: torch_tpu.compile.debug(torch.neg),
        "export": lambda: torch_tpu.export(torch.neg, torch.ones(2)),
    }
    for name in [n for n in sys.modules if n.startswith("torch_tpu.compile.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(torch_tpu.compile, name.split(".")[2], raising=False)
    module, _, name = lacking.rpartition(".")
    monkeypatch.delattr(importlib.import_module(module), name)
    with pytest.raises(RuntimeError, match=rf"off that torch.compile .* torch 2\..*{name}.*tested with torch 2.13.0"):
        uses[use]()
