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
    """

    platform: str
    custom_calls: set[str] = field(default_factory=set)


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


def build(
    name: str, target: Target, parameters: Sequence[Spec], body: Callable[..., Sequence[Array]]
) -> tuple[ir.Module, list[Spec]]:
    """A module whose `main` takes arrays of these shapes and dtypes and returns what `body` makes of them."""
    with building, _under_construction(target), context(), ir.Location.unknown():
        module = ir.Module.create()
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
        with ir.InsertionPoint(module.body):
            argument_types = [types.tensor_type(shape, dtype) for shape, dtype in parameters]
            main: Any = func.FuncOp("main", (argument_types, []))
            main.attributes["sym_visibility"] = ir.StringAttr.get("public")
            block = main.add_entry_block()
        with ir.InsertionPoint(block):
            arguments = [Array(v, s, d) for v, (s, d) in zip(block.arguments, parameters, strict=True)]
            results = body(*arguments)
            func.return_([r.value for r in results])
        main.attributes["function_type"] = ir.TypeAttr.get(
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


def drop_unused_parameters(module: ir.Module) -> list[bool]:
    """Removes the parameters of `main` that nothing reads; returns for each whether it was read."""
    with building, context(), ir.Location.unknown():
        main: Any = next(op for op in module.body.operations if isinstance(op, func.FuncOp))
        block = main.entry_block
        used = [any(True for _ in argument.uses) for argument in block.arguments]
        for i in reversed(range(len(used))):
            if not used[i]:
                block.erase_argument(i)
        kept = [argument.type for argument in block.arguments]
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(kept, main.type.results))
    return used


def operations(module: ir.Module) -> set[str]:
    """The names of the operations of `main`, without their dialect; those of inner regions are left out."""
    with building:
        main: Any = next(op for op in module.body.operations if isinstance(op, func.FuncOp))
        names = (op.operation.name for op in main.entry_block.operations)
        return {name.partition(".")[2] for name in names if not name.startswith("func.")}
