"""Patches, each an entry: its name, what it is for, what it relies on, and the function that makes it.

    @optional("print", "tensors are printed from a copy on the host", function("torch._tensor_str:_tensor_str", "self"))
    def print_host_copies(changes: Changes) -> None:
        ...

A patch looks at what it relies on first, and is made whole or not at all. Where an optional one does not fit, its
feature is off, which one warning says as soon as the device is used: who does not use it sees nothing of this. Where
a required one does not fit, the device is not available.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch_tpu.metrics import user_lines
from torch_tpu.patching import versions
from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import Need
from torch_tpu.patching.post_import import after_import


class PatchError(RuntimeError):
    """A patch without which there is no device does not fit."""


class State(enum.Enum):
    """What became of a patch."""

    APPLIED = "applied"
    NOT_NEEDED_YET = "not needed yet"
    OFF = "off"


class Moment(enum.Enum):
    """When a patch is made."""

    LOAD = "when the device is registered"
    AFTER_IMPORT = "after a module has been imported"
    FIRST_USE = "when the device is first used"
    CALL = "when the code that needs it asks"


class Patch:
    """One entry.

    Attributes:
        feature: what it is for, as a statement that is true with it.
        needs: what it relies on.
        required: without it there is no device.
        change: makes it, given a `Changes` and what `apply` was given.
        after: the module after whose import it is made; "" for other patches.
        state: what became of it, and `reason` why it is off.
    """

    def __init__(
        self,
        name: str,
        feature: str,
        needs: tuple[Need, ...],
        change: Callable[..., None],
        *,
        required: bool,
        moment: Moment,
        after: str,
    ) -> None:
        self.name = name
        self.feature = feature
        self.needs = needs
        self.required = required
        self.moment = moment
        self.after = after
        self.state = State.NOT_NEEDED_YET
        self.reason = ""
        self.change = change
        self._made: list[Changes] = []
        self._told = False

    @property
    def package(self) -> str:
        """Whose objects it changes."""
        return self.needs[0].where.partition(":")[0].partition(".")[0]

    def problem(self) -> str:
        """Why it does not fit what is installed; "" where it does."""
        return next(filter(None, (need.problem() for need in self.needs)), "")

    def explain(self, problem: str) -> str:
        """The problem as a sentence that names the versions."""
        package = self.package
        return (
            f"the patch '{self.name}' does not fit {package} {versions.found(package)}: {problem} "
            f"(torch_tpu was tested with {package} {versions.tested(package)})."
        )

    def apply(self, *arguments: Any) -> bool:
        """Makes the change, unless it has been made to these objects; whether it is in effect.

        Raises:
            PatchError: it is required, and does not fit.
        """
        if any(need.is_ours() for need in self.needs):
            self.state = State.APPLIED
            return True
        problem = self.problem()
        if not problem:
            changes = Changes(self.name, self.after)
            try:
                self.change(changes, *arguments)
            except Exception as error:
                changes.undo()
                problem = f"{type(error).__name__}: {error}"
            else:
                self._made.append(changes)
                self.state = State.APPLIED
                return True
        self.state, self.reason = State.OFF, self.explain(problem)
        if self.required:
            raise PatchError(f"{self.reason} The device needs it: {self.feature}.")
        if not self._told:
            self._told = True
            _unsaid.append(self)
        if _used:
            # An import of the user's brings this patch along, and must go through where warnings are errors.
            try:
                _say_what_is_off()
            except UserWarning as said:
                logging.getLogger("torch_tpu").warning(said)
        return False

    def module_imported(self, module: ModuleType) -> None:
        """`apply`, for `after_import`."""
        self.apply()

    def undo(self) -> None:
        """Puts back what was there, if the patch was made."""
        while self._made:
            self._made.pop().undo()
            self.state = State.NOT_NEEDED_YET

    @contextlib.contextmanager
    def during(self, *arguments: Any) -> Iterator[None]:
        """Makes the change for the time of a block."""
        self.apply(*arguments)
        try:
            yield
        finally:
            self.undo()


Declare = Callable[[Callable[..., None]], Patch]

# In the order in which they are made.
patches: list[Patch] = []
_unsaid: list[Patch] = []
_used = False


def optional(name: str, feature: str, *needs: Need, moment: Moment = Moment.LOAD, after: str = "") -> Declare:
    """Declares a patch without which a feature is off."""
    return _declared(name, feature, needs, required=False, moment=Moment.AFTER_IMPORT if after else moment, after=after)


def required(name: str, feature: str, *needs: Need) -> Declare:
    """Declares a patch without which there is no device. It is made when the device is registered."""
    return _declared(name, feature, needs, required=True, moment=Moment.LOAD, after="")


def _declared(name: str, feature: str, needs: tuple[Need, ...], **options: Any) -> Declare:
    def declare(change: Callable[..., None]) -> Patch:
        patch = Patch(name, feature, needs, change, **options)
        patches.append(patch)
        return patch

    return declare


def check_required() -> None:
    """Looks at what the required patches rely on, before anything is changed.

    Raises:
        PatchError: one of them does not fit.
    """
    for patch in patches:
        problem = patch.problem() if patch.required else ""
        if problem:
            patch.state, patch.reason = State.OFF, patch.explain(problem)
            raise PatchError(f"{patch.reason} The device needs it: {patch.feature}.")


def apply_all() -> None:
    """Makes the patches, those of modules that are not imported yet when they are.

    Raises:
        PatchError: a required one failed. Nothing remains changed then.
    """
    try:
        for patch in patches:
            if patch.moment is Moment.LOAD:
                patch.apply()
    except PatchError:
        for patch in patches:
            patch.undo()
        raise
    for patch in patches:
        if patch.after:
            after_import(patch.after, patch.module_imported)


def device_is_used() -> None:
    """Makes the patches that wait for this, and says which features are off."""
    global _used
    if not _used:
        for patch in patches:
            if patch.moment is Moment.FIRST_USE and patch.state is State.NOT_NEEDED_YET:
                patch.apply()
        _used = True
    _say_what_is_off()


def demand(patch_name: str) -> None:
    """Raises RuntimeError where a patch that a feature can't do without is off."""
    for patch in patches:
        if patch.name == patch_name and patch.state is State.OFF:
            raise RuntimeError(f"This feature is off on 'tpu': {patch.feature}. Reason: {patch.reason}")


@contextlib.contextmanager
def needing_private_names(feature: str) -> Iterator[None]:
    """An import that fails inside, because PyTorch lacks a private name, says which versions were tested.

    Args:
        feature: what is true where the import succeeds.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise RuntimeError(
            f"On 'tpu' it is off that {feature}: torch {versions.found('torch')} does not have what is needed "
            f"({error}; torch_tpu was tested with torch {versions.tested('torch')})."
        ) from error


def _say_what_is_off() -> None:
    while _unsaid:
        patch = _unsaid.pop(0)
        place = user_lines.here(2)
        file = place[0].co_filename if place else "<unknown>"
        message = f"{patch.reason[0].upper()}{patch.reason[1:]} This feature is off: {patch.feature}."
        warnings.warn_explicit(message, UserWarning, file, user_lines.line_of(place))
