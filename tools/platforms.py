"""What the tests run on: jaxlib's own XLA:CPU, or (`--platform xcpu`) a PJRT plug-in for the CPU.

The plug-in is reached as libtpu is: buffers that are not read in place, no LAPACK, its own format of executables.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

PLUGIN = "xcpu"
PACKAGE = "fastatomstruct-xla-cpu"
PLUGIN_IS_MISSING = f"{PACKAGE}, a PJRT plug-in for the CPU, is not installed: it is there for Linux on x86-64 only"


def plugin_library() -> Path | None:
    """The plug-in's shared library, if the package is installed."""
    try:
        files = metadata.files(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files or () if file.name == "libpjrt_cpu.so"), None)


def choose(platform: str) -> bool:
    """Sets `TORCH_TPU_PLATFORM` for this process and those it starts; "xcpu" alone means the package's library.

    Returns:
        Whether the platform is there.
    """
    if platform == PLUGIN:
        found = plugin_library()
        if found is None:
            return False
        platform = f"{PLUGIN}:{found}"
    if platform:
        os.environ["TORCH_TPU_PLATFORM"] = platform
    return True


def file_of(*names: str) -> str:
    """The name of a file of results of a kind, a mode and a platform, of which those that are empty go unnamed."""
    return "-".join(name.partition(":")[0] for name in names if name) + ".jsonl"
