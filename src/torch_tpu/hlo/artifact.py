"""A finished module for other programs: names on `main`, bytecode, and StableHLO's portable artifact."""

from __future__ import annotations

import io
from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from torch_tpu.hlo import module

# The attribute of an argument or result of `main` that holds its name. Readers that don't know it keep or ignore it.
NAME = "torch.name"
_PURE = ("stablehlo.", "chlo.", "func.call")


def name(built: ir.Module, parameters: Sequence[str], results: Sequence[str]) -> None:
    """Names the parameters and results of `main`."""
    with module.building, module.context(), ir.Location.unknown():
        function = module.main(built)
        function.attributes["arg_attrs"] = _names(parameters)
        function.attributes["res_attrs"] = _names(results)


def drop_last_parameter(built: ir.Module) -> bool:
    """Removes the last parameter of `main` if no result depends on it; returns whether it did."""
    with module.building, module.context(), ir.Location.unknown():
        function = module.main(built)
        block = function.entry_block
        for op in reversed(list(block.operations)):
            if op.operation.name.startswith(_PURE) and not any(list(result.uses) for result in op.results):
                op.operation.erase()
        last = block.arguments[len(block.arguments) - 1]
        if list(last.uses):
            return False
        types = [argument.type for argument in block.arguments][:-1]
        block.erase_argument(len(types))
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, function.type.results))
        return True


def _names(names: Sequence[str]) -> ir.ArrayAttr:
    return ir.ArrayAttr.get([ir.DictAttr.get({NAME: ir.StringAttr.get(name)}) for name in names])


def bytecode(built: ir.Module) -> bytes:
    """MLIR bytecode: compact, for a reader with the same version of StableHLO."""
    with module.building:
        buffer = io.BytesIO()
        built.operation.write_bytecode(buffer)
        return buffer.getvalue()


def portable(built: ir.Module, version: str | None = None) -> bytes:
    """StableHLO's portable artifact, which readers of the same or a later version understand.

    Args:
        version: the version of StableHLO to write for, such as "1.9.0"; None: the present one. StableHLO keeps
            artifacts readable for five years.

    Raises:
        ValueError: where the version is unknown, or lacks an operation of the module.
    """
    with module.building, module.context():
        return bytes(stablehlo.serialize_portable_artifact(built, version or stablehlo.get_current_version()))
