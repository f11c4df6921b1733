"""On which ranks a module with collectives runs, and the groups that each of its operations has among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from torch_tpu.hlo.target import Target


def groups_attribute(groups: Sequence[Sequence[int]]) -> Any:
    elements: Any = np.array(groups, np.int64)
    return ir.DenseIntElementsAttr.get(elements)


def settle(module: ir.Module, built: Target) -> None:
    """Says on which ranks a module runs, if it has collectives.

    Those are the ranks of its groups, if that is one group. Else all ranks of the world run it, each with groups of its
    own: those of a dimension of a mesh are translations of each other.

    Raises:
        NotImplementedError: a group is no dimension of a mesh.
    """
    if not built.collectives:
        return
    kinds = {ranks for _, ranks, _ in built.collectives}
    if len(kinds) == 1:
        (built.ranks,) = kinds
    else:
        world = max(world for *_, world in built.collectives)
        built.ranks = tuple(range(world))
        for operation, ranks, _ in built.collectives:
            operation.attributes["replica_groups"] = groups_attribute(translations(ranks, world))
    attributes = module.operation.attributes
    attributes["mhlo.num_replicas"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), len(built.ranks))
    # Programs of other groups are other programs, though their operations are the same.
    said = ir.StringAttr.get(",".join(map(str, built.ranks)))
    attributes["mhlo.frontend_attributes"] = ir.DictAttr.get({"ranks": said})


def translations(ranks: Sequence[int], world: int) -> list[list[int]]:
    """All groups of the mesh dimension that one group belongs to: an arithmetic progression of ranks."""
    size = len(ranks)
    stride = ranks[1] - ranks[0] if size > 1 else 1
    groups = [[b + n * stride for n in range(size)] for b in range(world) if stride and b // stride % size == 0]
    if list(ranks) not in groups or sorted(r for g in groups for r in g) != list(range(world)):
        raise NotImplementedError(
            f"the ranks {list(ranks)} are no dimension of a mesh of {world}, so they can't communicate in one program "
            "with ranks of other groups"
        )
    return groups
