"""Classes that take the place of PyTorch's, so that objects for `tpu` can be of a subclass."""

from __future__ import annotations

from typing import Any


def metaclass_of(original: type) -> Any:
    """A metaclass under which every instance and subclass of `original` counts as one of its replacement."""

    class Replacing(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    return Replacing
