"""The MLIR context of this process, and building one StableHLO module with a `main` function for one platform."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, func, stablehlo

from torch_tpu.hlo import replicas, types
from torch_tpu.hlo.array import Array
from torch_tpu.hlo.target import Target as Target
from torch_tpu.hlo.target import target as target
from torch_tpu.hlo.target import under_construction

Spec = tuple[tuple[int, ...], torch.dtype]

_context: ir.Context | None = None
# An MLIR context may be built in by one thread at a time; a lowering may build while it is being built (re-entry).
building = threading.RLock()


@dataclass(frozen=True)
class Function:
    """A private function of a module under construction.

    Attributes:
        used: for each parameter it was defined with, whether it reads it; it has no other ones.
        results: shapes and dtypes of what it returns.
    """

    name: str
    used: tuple[bool, ...]
    results: tuple[Spec, ...]


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
    return next(op for op in _functions(module) if op.name.value == "main")


def parameter_types(module: ir.Module) -> list[Any]:
    """The MLIR types of the parameters of a module's `main`."""
    return list(main(module).type.inputs)


def call(callee: ir.Module, operands: Sequence[Array], results: Sequence[Spec]) -> list[Array]:
    """Calls the `main` of another module from the one under construction, which gets one copy of it.

    Args:
        results: shapes and dtypes of what it returns.
    """
    name = target().copies.get(callee)
    if name is None:
        name = target().copies[callee] = _copy_functions(callee)
    return _call(name, operands, results)


def define(parameters: Sequence[Spec], body: Callable[..., Sequence[Array]]) -> Function:
    """Adds a private function to the module under construction, of arrays of these shapes and dtypes."""
    with _before_enclosing_function():
        function, results = _function(target().new_name(), "private", parameters, body)
    used = _drop_unused(function)
    return Function(ir.StringAttr(function.attributes["sym_name"]).value, tuple(used), tuple(results))


def invoke(function: Function, operands: Sequence[Array]) -> list[Array]:
    """Calls a function that `define` made, with an operand for each parameter it was defined with."""
    given = [o for o, is_used in zip(operands, function.used, strict=True) if is_used]
    return _call(function.name, given, function.results)


def _call(name: str, operands: Sequence[Array], results: Sequence[Spec]) -> list[Array]:
    result_types = [types.tensor_type(shape, dtype) for shape, dtype in results]
    called = func.CallOp(result_types, ir.FlatSymbolRefAttr.get(name), [o.value for o in operands])
    return [Array(v, shape, dtype) for v, (shape, dtype) in zip(called.results, results, strict=True)]


def _functions(module: ir.Module) -> list[Any]:
    return [op for op in module.body.operations if isinstance(op, func.FuncOp)]


def _copy_functions(callee: ir.Module) -> str:
    """Copies the functions of another module under new names; returns the new name of its `main`."""
    names = {function.name.value: target().new_name() for function in _functions(callee)}

    def rename(op: Any) -> Any:
        if "callee" in op.attributes:
            old = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
            op.attributes["callee"] = ir.FlatSymbolRefAttr.get(names[old])
        return ir.WalkResult.ADVANCE

    with _before_enclosing_function() as place:
        for function in _functions(callee):
            copy = function.operation.clone(place)
            copy.attributes["sym_name"] = ir.StringAttr.get(names[function.name.value])
            copy.attributes["sym_visibility"] = ir.StringAttr.get("private")
        if "arg_attrs" in copy.attributes:
            del copy.attributes["arg_attrs"]  # what `reuse_parameters` says of a program called by itself
            if len(names) > 1:
                copy.walk(rename)
    return names["main"]


@contextlib.contextmanager
def _before_enclosing_function() -> Iterator[ir.InsertionPoint]:
    operation = ir.InsertionPoint.current.block.owner.operation
    while operation.name != "func.func":
        operation = operation.parent
    with ir.InsertionPoint(operation) as place:
        yield place


def build(
    name: str, target: Target, parameters: Sequence[Spec], body: Callable[..., Sequence[Array]]
) -> tuple[ir.Module, list[Spec]]:
    """A module whose `main` takes arrays of these shapes and dtypes and returns what `body` makes of them."""
    with building, under_construction(target), context(), ir.Location.unknown():
        module = ir.Module.create()
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
        with ir.InsertionPoint(module.body):
            _, results = _function("main", "public", parameters, body)
        if target.collectives:
            replicas.settle(module, target)
        return module, results


def _function(
    name: str, visibility: str, parameters: Sequence[Spec], body: Callable[..., Sequence[Array]]
) -> tuple[Any, list[Spec]]:
    argument_types = [types.tensor_type(shape, dtype) for shape, dtype in parameters]
    function: Any = func.FuncOp(name, (argument_types, []))
    function.attributes["sym_visibility"] = ir.StringAttr.get(visibility)
    block = function.add_entry_block()
    with ir.InsertionPoint(block):
        arguments = [Array(v, s, d) for v, (s, d) in zip(block.arguments, parameters, strict=True)]
        results = body(*arguments)
        func.return_([r.value for r in results])
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(argument_types, [r.value.type for r in results])
    )
    return function, [(r.shape, r.dtype) for r in results]


def parse(code: bytes) -> ir.Module:
    """The module that was written as this MLIR bytecode."""
    with building, context(), ir.Location.unknown():
        return ir.Module.parse(code)


def named(name: str) -> contextlib.AbstractContextManager[Any]:
    """Operations built inside say that they come from `name`; XLA shows it in profiles and in the optimised HLO."""
    location: contextlib.AbstractContextManager[Any] = ir.Location.name(name, context=context())
    return location


def reuse_parameters(module: ir.Module, donations: Iterable[tuple[int, int]]) -> None:
    """Lets results take the memory of parameters, which callers lose thereby.

    Args:
        donations: the position of a parameter, and of a result with the same shape and dtype.
    """
    with building, context(), ir.Location.unknown():
        function = main(module)
        attributes: list[Any] = [ir.DictAttr.get({})] * len(function.type.inputs)
        for parameter, result in donations:
            index = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), result)
            attributes[parameter] = ir.DictAttr.get({"tf.aliasing_output": index})
        function.arg_attrs = ir.ArrayAttr.get(attributes)


def drop_unused_parameters(module: ir.Module) -> list[bool]:
    """Removes the parameters of `main` that nothing reads; returns for each whether it was read."""
    with building, context(), ir.Location.unknown():
        return _drop_unused(main(module))


def _drop_unused(function: Any) -> list[bool]:
    block = function.entry_block
    used = [any(True for _ in argument.uses) for argument in block.arguments]
    for i in reversed(range(len(used))):
        if not used[i]:
            block.erase_argument(i)
    kept = [argument.type for argument in block.arguments]
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(kept, function.type.results))
    return used


_NAMES_BY_TYPE: dict[tuple[str, type], str] = {
    ("abs", ir.ComplexType): "modulus",
    ("dot_general", ir.BF16Type): "bfloat16_dot",
}


def operations(module: ir.Module) -> Counter[tuple[str, tuple[int, ...]]]:
    """How many operations its functions have by name, without their dialect, and by shape of the largest result.

    Parameters count as operations of this name, the absolute value of complex numbers as "modulus", products of
    bfloat16 as "bfloat16_dot"; what is in inner regions doesn't count.
    """
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    with building:
        for function in _functions(module):
            found.update(("parameter", tuple(a.type.shape)) for a in function.entry_block.arguments)
            for op in function.entry_block.operations:
                dialect, _, name = op.operation.name.partition(".")
                if name in ("abs", "dot_general"):
                    name = _NAMES_BY_TYPE.get((name, type(op.operands[0].type.element_type)), name)
                if dialect != "func":
                    found[name, max((tuple(r.type.shape) for r in op.results), key=math.prod, default=())] += 1
    return found
