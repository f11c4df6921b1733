"""What a compiled program depends on, as one digest: the name under which the disk cache keeps it."""

from __future__ import annotations

import functools
import hashlib
import os
import platform as python_platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

# Read by XLA and libtpu when they start; a program compiled under other flags is another program.
FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@functools.cache
def host_processor() -> str:
    """The instruction sets of this machine, for which XLA:CPU generates code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{python_platform.machine()} {python_platform.processor()}"
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip(" :") in kinds}))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def own_sources() -> str:
    """The digest of this package's code, for what is kept of programs that the package makes."""
    digest = hashlib.sha256(_version("torch-tpu").encode())
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def of_library(path: Path) -> str:
    """The digest of a plug-in's shared library: what it says of its version may be nothing ("PJRT C API")."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def of_client(device: Any, library: Path | None = None) -> str:
    """What a device and its PJRT client contribute: the compiler's version, the processor, the process's XLA flags.

    Args:
        library: a plug-in whose version has to be read from its file.
    """
    client = device.client
    parts = [
        client.platform,
        client.platform_version,
        device.device_kind,
        *(f"{package} {_version(package)}" for package in ("jaxlib", "libtpu", "torch-tpu")),
        *(f"{name}={os.environ.get(name, '')}" for name in FLAG_VARIABLES),
    ]
    if library is not None:
        parts.append(of_library(library))
    if client.platform == "cpu":
        # XLA:CPU splits work by the number of threads, which is that of the processors this process may use.
        parts += [host_processor(), str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)]
    return "\n".join(parts)


def of_program(client: str, module: Any, options: Iterable[tuple[str, object]]) -> str:
    """The digest of a program: the module (an `ir.Module`, or its text as bytes), its options and the client."""
    code = module if isinstance(module, bytes) else bytecode(module)
    digest = hashlib.sha256()
    for part in (client.encode(), repr(sorted(options, key=lambda option: option[0])).encode(), code):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def bytecode(module: Any) -> bytes:
    """A module (an `ir.Module` or its operation) as MLIR bytecode."""
    parts: list[bytes] = []
    module.operation.write_bytecode(_Sink(parts))
    return b"".join(parts)


class _Sink:
    """A file that only collects what is written."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    def write(self, part: bytes) -> None:
        self._parts.append(bytes(part))
