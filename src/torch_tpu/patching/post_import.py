"""Runs a function right after a module has been imported, whenever that is, without importing it earlier."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Action = Callable[[ModuleType], None]


class _LoaderThenActions(importlib.abc.Loader):
    """A module's own loader, followed by the actions."""

    def __init__(self, loader: importlib.abc.Loader, actions: Sequence[Action]) -> None:
        self._loader = loader
        self._actions = actions

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Put back first: the module, and whoever inspects it, must see the loader it would have had without us.
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for action in self._actions:
            action(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        actions = self.actions.get(fullname)
        if actions is None:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _LoaderThenActions(spec.loader, actions)
                return spec
        return None


_finder = _Finder()


def after_import(name: str, action: Action) -> None:
    """Calls `action` with the module `name` after each import or reload, and now if it is imported already."""
    if name in sys.modules:
        action(sys.modules[name])
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.actions.setdefault(name, []).append(action)
