"""The versions of other packages that this one was tested with. `pyproject.toml` has the same table."""

from __future__ import annotations

import re
import sys

# Oldest first.
TESTED: dict[str, tuple[str, ...]] = {
    "torch": ("2.13.0",),
    "jaxlib": ("0.10.2", "0.12.0"),
    "libtpu": ("0.0.52",),
    "accelerate": ("1.15.0",),
    "safetensors": ("0.8.0",),
}


def numbers(version: str) -> list[int]:
    """The release numbers of a version: [2, 13, 0] for "2.13.0+cpu"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in release[0].split(".")] if release else []


def found(package: str) -> str:
    """The version of a package in this process, or the one installed."""
    version = getattr(sys.modules.get(package), "__version__", None)
    if version is None:
        # Not at the top: it takes longer to import than this package, and is rarely needed.
        from importlib import metadata

        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "(not installed)"
    return str(version)


def is_newer(package: str, version: str) -> bool:
    """Whether a version is newer than all that were tested."""
    return package in TESTED and numbers(version) > numbers(TESTED[package][-1])


def tested(package: str) -> str:
    """The tested versions in words: "0.10.2 and 0.12.0"."""
    return " and ".join(TESTED.get(package, ("no version",)))
