"""What a patch relies on: objects by name, and what must be true of each. Looking imports nothing.

A name is "module:name.name", as in "torch._C:StorageBase.nbytes".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# Set on what a patch puts in place, so that nothing is replaced twice.
MARK = "_torch_tpu_patch"

_TAKES_ANY_NAME = 0x08  # `**kwargs`, a flag of a code object


class MissingError(LookupError):
    """An object that is not where a patch expects it."""


def resolve(where: str) -> Any:
    """The object of a name.

    Raises:
        MissingError: it does not exist, or its module has not been imported.
    """
    path, _, names = where.partition(":")
    found: Any = sys.modules.get(path)
    if found is None:
        raise MissingError(f"there is no module {path}")
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except Exception:
            raise MissingError(f"{path} has no {name}") from None
        path = f"{path}.{name}"
    return found


class Need:
    """One object that a patch relies on.

    Attributes:
        where: its name.
        check: what is wrong with it, given the object; "" where nothing is.
    """

    def __init__(self, where: str, check: Callable[[Any], str]) -> None:
        self.where = where
        self.check = check

    def problem(self) -> str:
        """What is wrong; "" where the object is as expected."""
        try:
            wrong = self.check(resolve(self.where))
        except MissingError as missing:
            return str(missing)
        except Exception as error:
            wrong = f"can't be looked at ({type(error).__name__}: {error})"
        return wrong and f"{self.where.replace(':', '.')} {wrong}"

    def is_ours(self) -> bool:
        """Whether a patch has put the object there."""
        try:
            found = resolve(self.where)
        except MissingError:
            return False
        return getattr(getattr(found, "fget", found), MARK, None) is not None


def function(where: str, *parameters: str) -> Need:
    """Something to call that is no class, with these parameters, as far as Python can tell."""

    def check(found: Any) -> str:
        if not callable(found) or isinstance(found, type):
            return "is not a function"
        missing = [p for p in parameters if not _takes(found, p)]
        return f"has no parameter {missing[0]}" if missing else ""

    return Need(where, check)


def a_class(where: str, *attributes: str) -> Need:
    """A class that has these attributes."""

    def check(found: Any) -> str:
        if not isinstance(found, type):
            return "is not a class"
        missing = [name for name in attributes if not hasattr(found, name)]
        return f"has no {missing[0]}" if missing else ""

    return Need(where, check)


def a_property(where: str) -> Need:
    """A property that is written in Python."""
    return Need(where, lambda found: "" if callable(getattr(found, "fget", None)) else "is not a property")


def holding(where: str, *keys: object, kind: type) -> Need:
    """A dict or list (`kind`) that has these keys or items."""

    def check(found: Any) -> str:
        if not isinstance(found, kind):
            return f"is not a {kind.__name__}"
        content: Any = found
        missing = [key for key in keys if key not in content]
        return f"has no {missing[0]!r}" if missing else ""

    return Need(where, check)


def operator(name: str, *arguments: str) -> Need:
    """An overload of PyTorch's, "aten.add.Tensor", with these first arguments."""

    def check(found: Any) -> str:
        taken = tuple(argument.name for argument in found._schema.arguments)
        return "" if taken[: len(arguments)] == arguments else f"has the arguments {', '.join(taken)}"

    return Need(f"torch.ops:{name}", check)


def _takes(found: Any, parameter: str) -> bool:
    """Whether a function has a parameter, as far as Python can tell: of C's it can't."""
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    code = getattr(getattr(found, "__func__", found), "__code__", None)
    if code is None or code.co_flags & _TAKES_ANY_NAME:
        return True
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return parameter in names
