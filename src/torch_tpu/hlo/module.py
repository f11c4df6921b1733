"""The MLIR context of this process, and building one StableHLO module with a `main` function for one platform."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, func, stablehlo

from torch_tpu.hlo import types
from torch_tpu.hlo.array import Array

Spec = tuple[tuple[int, ...], torch.dtype]

_context: ir.Context | None = None
# An MLIR context may be built in by one thread at a time; a lowering may build while it is being built (re-entry).
building = threading.RLock()


@dataclass
class Target:
    """What the module under construction will run on, and what it needs there.

    Attributes:
        platform: PJRT's name of the platform, such as "cpu" or "tpu".
        custom_calls: names of the functions it calls that XLA must know.
        functions: private functions copied into it, by the `main` they are copies of.
    """

    platform: str
    custom_calls: set[str] = field(default_factory=set)
    functions: dict[Any, str] = field(default_factory=dict)


# Of the modules being built, the innermost last; `building` guards it.
_targets: list[Target] = []


def target() -> Target:
    """The target of the module under construction."""
    return _targets[-1]


def context() -> ir.Context:
    """The context every module of this process is built in."""
    global _context
    if _context is None:
        _context = ir.Context()
        registry = ir.DialectRegistry()
        _jax_mlir_ext.register_dialects(registry)
        _context.append_dialect_registry(registry)
        _context.load_all_available_dialects()
        stablehlo.register_dialect(_context)
        chlo.register_dialect(_context)
    return _context


def main(module: ir.Module) -> Any:
    """The function `main` of a module."""
    return next(op for op in module.body.operations if isinstance(op, func.FuncOp))


def parameter_types(module: ir.Module) -> list[Any]:
    """The MLIR types of the parameters of a module's `main`."""
    return list(main(module).type.inputs)


def call(callee: ir.Module, operands: Sequence[Array], results: Sequence[Spec]) -> list[Array]:
    """Calls the `main` of another module from the one under construction, which gets one copy of it.

    Args:
        results: shapes and dtypes of what it returns.
    """
    function = main(callee)
    functions = target().functions
    name = functions.get(callee)
    if name is None:
        name = functions[callee] = f"f{len(functions)}"
        caller = ir.InsertionPoint.current.block.owner
        copy = function.operation.clone(ir.InsertionPoint(caller))
        copy.attributes["sym_name"] = ir.StringAttr.get(name)
        copy.attributes["sym_visibility"] = ir.StringAttr.get("private")
    called = func.CallOp(function.type.results, ir.FlatSymbolRefAttr.get(name), [o.value for o in operands])
    return [Array(v, shape, dtype) for v, (shape, dtype) in zip(called.results, results, strict=True)]


def build(
    name: str, target: Target, parameters: Sequence[Spec], body: Callable[..., Sequence[Array]]
) -> tuple[ir.Module, list[Spec]]:
    """A module whose `main` takes arrays of these shapes and dtypes and returns what `body` makes of them."""
    with building, _under_construction(target), context(), ir.Location.unknown():
        module = ir.Module.create()
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
        with ir.InsertionPoint(module.body):
            argument_types = [types.tensor_type(shape, dtype) for shape, dtype in parameters]
            function: Any = func.FuncOp("main", (argument_types, []))
            function.attributes["sym_visibility"] = ir.StringAttr.get("public")
            block = function.add_entry_block()
        with ir.InsertionPoint(block):
            arguments = [Array(v, s, d) for v, (s, d) in zip(block.arguments, parameters, strict=True)]
            results = body(*arguments)
            func.return_([r.value for r in results])
        function.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(argument_types, [r.value.type for r in results])
        )
        return module, [(r.shape, r.dtype) for r in results]


@contextlib.contextmanager
def _under_construction(target: Target) -> Iterator[None]:
    _targets.append(target)
    try:
        yield
    finally:
        _targets.pop()


def named(name: str) -> contextlib.AbstractContextManager[Any]:
    """Operations built inside say that they come from `name`; XLA shows it in profiles and in the optimised HLO."""
    location: contextlib.AbstractContextManager[Any] = ir.Location.name(name, context=context())
    return location


def drop_unused_parameters(module: ir.Module) -> list[bool]:
    """Removes the parameters of `main` that nothing reads; returns for each whether it was read."""
    with building, context(), ir.Location.unknown():
        function = main(module)
        block = function.entry_block
        used = [any(True for _ in argument.uses) for argument in block.arguments]
        for i in reversed(range(len(used))):
            if not used[i]:
                block.erase_argument(i)
        kept = [argument.type for argument in block.arguments]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(kept, function.type.results))
    return used


def operations(module: ir.Module) -> set[str]:
    """The names of the operations of `main`, without their dialect; those of inner regions are left out."""
    with building:
        names = (op.operation.name for op in main(module).entry_block.operations)
        return {name.partition(".")[2] for name in names if not name.startswith("func.")}
