"""Differences between jaxlib versions, and the private jaxlib names the rest of `runtime` builds on.

jaxlib's client API is private. Everything taken from it is named here, so a new version is one file to mend.
Tried with jaxlib 0.10.2 (Python 3.11) and 0.12.0 (Python 3.13).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jaxlib
from jaxlib import _hlo  # type: ignore[attr-defined]
from jaxlib import xla_client as _xla_client

xla: Any = _xla_client._xla
make_cpu_client: Any = _xla_client.make_cpu_client
CompileOptions: Any = _xla_client.CompileOptions
DeviceAssignment: Any = _xla_client.DeviceAssignment
REPLICATED: Any = _hlo.HloSharding.replicate()

JAXLIB_VERSION: tuple[int, ...] = tuple(int(part) for part in jaxlib.__version__.split(".")[:3])


def result_handler(aval: object, sharding: object) -> Any:
    """The object that turns one raw result of an execution into an array.

    jaxlib 0.12 dropped the fourth argument (`_skip_checks`) of 0.10.
    """
    if JAXLIB_VERSION >= (0, 12):
        return xla.array_result_handler(aval, sharding, True)
    return xla.array_result_handler(aval, sharding, True, True)


def serialize(client: Any, loaded: Any) -> bytes:
    """A loaded executable as bytes that `client.deserialize_executable` takes, in this process or another."""
    return bytes(client.serialize_executable(loaded))


def without_locations(module: Any) -> Any:
    """A copy of an `ir.Module` whose operations don't say where in the user's program they come from."""
    passmanager: Any = importlib.import_module("jaxlib.mlir.passmanager")
    with module.context:
        copy = module.operation.clone()
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(copy)
        return copy


@functools.cache
def register_lapack() -> None:
    """Makes jaxlib's LAPACK wrappers (typed FFI, "lapack_spotrf_ffi" and so on) known to XLA:CPU. Imports SciPy."""
    lapack: Any = importlib.import_module("jaxlib.cpu._lapack")
    lapack.initialize()
    for name, target in lapack.registrations().items():
        if name.startswith("lapack_") and name.endswith("_ffi"):
            xla.register_custom_call_target(name, target, "cpu", 1)
