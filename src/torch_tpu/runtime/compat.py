"""Differences between jaxlib versions, and the private jaxlib names the rest of `runtime` builds on.

jaxlib's client API is private. Everything taken from it is named here, so a new version is one file to mend.
Tried with jaxlib 0.10.2 (Python 3.11) and 0.12.0 (Python 3.13).
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import jaxlib

from torch_tpu.patching import versions


def unsupported(missing: str) -> RuntimeError:
    """The error for a jaxlib that lacks what this package builds on."""
    return RuntimeError(
        f"jaxlib {versions.found('jaxlib')} is not supported: {missing}. torch_tpu was tested with jaxlib "
        f"{versions.tested('jaxlib')}."
    )


class _Names:
    """A private module of jaxlib, whose missing names say so. Those found are kept: launches ask for some."""

    def __init__(self, name: str) -> None:
        try:
            self._module: ModuleType = importlib.import_module(name)
        except ImportError as error:
            raise unsupported(f"{name} can't be imported ({error})") from error

    def find(self, name: str) -> Any:
        """The object of a name; None where there is none."""
        return getattr(self._module, name, None)

    def __getattr__(self, name: str) -> Any:
        try:
            found = getattr(self._module, name)
        except AttributeError as error:
            raise unsupported(str(error)) from None
        setattr(self, name, found)
        return found


_xla_client: Any = _Names("jaxlib.xla_client")
_hlo: Any = _Names("jaxlib._hlo")
XLA_MODULE: str = _xla_client._xla.__name__
xla: Any = _Names(XLA_MODULE)
make_cpu_client: Any = _xla_client.make_cpu_client
CompileOptions: Any = _xla_client.CompileOptions
DeviceAssignment: Any = _xla_client.DeviceAssignment
REPLICATED: Any = _hlo.HloSharding.replicate()

JAXLIB_VERSION = tuple(versions.numbers(jaxlib.__version__))

# What is called on objects that jaxlib makes, by class.
METHODS = {
    "Client": ("compile_and_load", "deserialize_executable", "live_arrays", "local_devices", "serialize_executable"),
    "LoadedExecutable": ("execute_sharded", "get_compiled_memory_stats"),
    "ArrayImpl": (
        *("_single_device_array_to_np_array_did_copy", "aval", "block_until_ready", "delete", "is_deleted"),
        *("is_ready", "unsafe_buffer_pointer"),
    ),
}


def check_methods() -> None:
    """Raises RuntimeError where a class of jaxlib's lacks a method, rather than in the middle of a run."""
    for name, methods in METHODS.items():
        owner = xla.find(name)
        missing = [method for method in methods if owner is not None and not hasattr(owner, method)]
        if missing:
            raise unsupported(f"jaxlib's {name} has no {missing[0]}")


def result_handler(aval: object, sharding: object) -> Any:
    """The object that turns one raw result of an execution into an array.

    jaxlib 0.12 dropped the fourth argument (`_skip_checks`) of 0.10.
    """
    if JAXLIB_VERSION >= (0, 12):
        return xla.array_result_handler(aval, sharding, True)
    return xla.array_result_handler(aval, sharding, True, True)


def free_garbage(*_: object) -> None:
    """Frees the tracebacks that jaxlib took with each program it ran; it keeps them until it is asked to free them."""
    xla.collect_garbage()


def copy(buffer: Any, devices: Any, sharding: Any) -> Any:
    """A copy of an array on the same devices, without waiting for it."""
    always = xla.ArrayCopySemantics.ALWAYS_COPY
    return xla.batched_copy_array_to_devices_with_sharding([buffer], [devices], [sharding], [always])[0]


def serialize(client: Any, loaded: Any) -> bytes:
    """A loaded executable as bytes that `client.deserialize_executable` takes, in this process or another."""
    return bytes(client.serialize_executable(loaded))


def hlo_module(serialized: bytes) -> Any:
    """A module of XLA's own from its protocol buffer (`HloModuleProto`)."""
    return _hlo.HloModule.from_serialized_hlo_module_proto(serialized)


def module_of_its_own(bytecode: bytes) -> Any:
    """An `ir.Module` in a context that nothing else uses, so that any thread may work on it."""
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    dialects: Any = importlib.import_module("jaxlib.mlir._mlir_libs._jax_mlir_ext")
    context = ir.Context()
    registry = ir.DialectRegistry()
    dialects.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    for dialect in ("stablehlo", "chlo"):
        importlib.import_module(f"jaxlib.mlir.dialects.{dialect}").register_dialect(context)
    return ir.Module.parse(bytecode, context=context)


def name_of(module: Any) -> str:
    """What an `ir.Module` is called."""
    name: str = module.operation.attributes["sym_name"].value
    return name


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
