"""What can be called again: the part of an entry's run that the axes of the conformance run are written against.

An axis (`again`, `offsets`, `numbers`, …) makes a sequence of calls that are alike in what a program depends on, or
only nearly alike, and the subject compares each with the CPU. Nothing is forgotten between them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tools.compare import Mismatch
from tools.conformance.outcome import Difference


class Form(NamedTuple):
    """A way to call a subject: forward, with gradients, in place.

    Attributes:
        check: calls it with a sample, on the CPU and on the device, and compares.
        writes: whether it writes to its arguments.
        is_defined: whether the CPU gives a sample whose tensors share storages what it gives separate copies of them;
            None: always. Kernels that read what they have written give anything.
    """

    name: str
    check: Callable[[Any], None]
    writes: bool = False
    is_defined: Callable[[Any], bool] | None = None


class Subject(Protocol):
    """An operator, a module or a compiled function."""

    def forms(self, sample: Any) -> Sequence[Form]:
        """How it can be called with this sample and others like it."""
        ...

    def arguments(self, sample: Any) -> Any:
        """The nest of what a sample passes."""
        ...

    def with_arguments(self, sample: Any, nest: Any) -> Any:
        """The sample with other arguments."""
        ...

    def keeping_places(self) -> contextlib.AbstractContextManager[None]:
        """Inside, copies of tensors lie in their storages as the sample's do, and share them as they do."""
        ...


def with_leaves(subject: Subject, sample: Any, change: Callable[[list[Any]], Iterable[Any]]) -> Any:
    """The sample with other leaves in its arguments."""
    leaves, spec = tree_flatten(subject.arguments(sample))
    return subject.with_arguments(sample, tree_unflatten(list(change(leaves)), spec))


def leaves_of(subject: Subject, sample: Any) -> list[Any]:
    return tree_leaves(subject.arguments(sample))


def tensors_of(subject: Subject, sample: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(subject, sample) if isinstance(leaf, torch.Tensor)]


def check_calls(form: Form, calls: Iterable[tuple[str, Any]]) -> None:
    """Makes calls (what is said of each, and its sample) one after the other."""
    for name, sample in calls:
        with saying(f"{form.name}, {name}"):
            form.check(sample)


@contextlib.contextmanager
def saying(what: str) -> Iterator[None]:
    """A failure inside says which call it was."""
    try:
        yield
    except Mismatch as mismatch:
        raise Mismatch(mismatch.kind, f"{what}: {mismatch}") from mismatch
    except Difference as difference:
        raise Difference(difference.kind, f"{what}: {difference}") from difference
    except Exception as error:
        raise Difference(f"raises {type(error).__name__}", f"{what}: {error}") from error
