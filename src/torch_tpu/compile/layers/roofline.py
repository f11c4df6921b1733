"""How long a graph takes at the least, by its matrix products and convolutions and by the memory its values fill."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from torch_tpu.runtime.generations import BY_NAME, GIGA
from torch_tpu.runtime.process_client import client

# What two cores of a server do at best in float32: operations and bytes per second.
HOST = (100 * GIGA, 20 * GIGA)


def least_seconds(graph: GraphModule) -> float:
    """The longer of what its floating-point operations take, and its arguments and results, on the client's device."""
    flops, bandwidth = _peak()
    outputs: Any = graph.graph.output_node().args[0]
    values = {*graph.graph.find_nodes(op="placeholder"), *(n for n in outputs if isinstance(n, Node))}
    return max(sum(map(_flops, graph.graph.nodes)) / flops, sum(map(_bytes, values)) / bandwidth)


def _peak() -> tuple[float, float]:
    generation = BY_NAME.get(client().device_kind)
    if generation is None:
        return HOST
    return generation.bf16_flops_per_device, generation.hbm_bandwidth_per_device


def _flops(node: Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None or any("val" not in n.meta for n in (node, *node.all_input_nodes)):
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.itemsize if isinstance(value, torch.Tensor) else 0
