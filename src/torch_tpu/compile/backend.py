"""`torch.compile` on the device: AOTAutograd makes a forward and a backward graph, each becomes one program."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_tpu.compile.buckets import rules
from torch_tpu.compile.buckets.bucketed_program import BucketedProgram, Family
from torch_tpu.compile.buckets.policy import Policy
from torch_tpu.compile.frontend import changing_floats
from torch_tpu.compile.frontend.on_device import is_on_device
from torch_tpu.compile.program.graph_program import GraphProgram
from torch_tpu.compile.program.recompute import delay_recomputation, one_by_one, partition
from torch_tpu.metrics import programs
from torch_tpu.metrics.user_warnings import warn
from torch_tpu.patching import patch_registry

MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def compile_graph(
    graph: torch.fx.GraphModule, examples: Sequence[Any], *, mode: str | None = None, options: Any = None
) -> Callable[..., Any]:
    """The backend "tpu" of `torch.compile`.

    Args:
        graph: what Dynamo captured; `examples` are (fake) inputs of it.
        mode: one of PyTorch's; all mean the same here, because XLA optimises each program fully.
        options: "buckets" pads sizes that vary (`buckets.policy.Policy`). Those of Inductor
            (`torch._inductor.list_options()`) are accepted, for programs written for it, and do nothing but warn.

    Raises:
        ValueError: for a mode or an option that PyTorch does not have either.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}: expected one of {', '.join(map(repr, MODES))}")
    options = dict(options or {})
    policy = Policy(options.pop("buckets")) if options.get("buckets") else None
    options.pop("buckets", None)
    if options:
        _check_options(options)
    if not is_on_device(graph, examples):
        # What a break leaves of a function may be the host's alone.
        return graph.forward
    patch_registry.demand("Dynamo")
    _log_break(graph)
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import SerializableAOTDispatchCompiler

    from torch_tpu.compile.frontend import autograd_cache
    from torch_tpu.compile.frontend.autograd_cache import BACKWARD, CompiledGraph
    from torch_tpu.compile.layers import outline
    from torch_tpu.compile.layers.layered_program import Layers, are_worth_it

    title, family = _title(graph), Family()
    outlined: list[outline.OutlinedPart] = []

    def outlined_graph(captured: torch.fx.GraphModule, _: Sequence[Any]) -> torch.fx.GraphModule:
        copy, region = outline.outline(captured)
        if region is not None:
            # AOTAutograd calls the module that it was given.
            captured.graph = copy.graph
            outlined.append(region)
        return captured

    def compiler(part: str) -> Any:
        def compile_part(lowered: torch.fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
            programs.captured(f"{title}{part}", autograd_cache.why_again(), policy is not None)
            if outlined:
                lowered = outline.expand(lowered)
            if part == BACKWARD:
                delay_recomputation(lowered)
            else:
                autograd_cache.keep_saved_values()
            arguments = lowered, f"{title}{part}", part == BACKWARD
            if policy is not None:
                return CompiledGraph(BucketedProgram(*arguments, policy, family), part)
            if are_worth_it(lowered):
                return CompiledGraph(Layers(*arguments[:2]), part)
            outline.inline_writing(lowered)
            one_by_one(lowered, outline.recomputing_calls(lowered))
            return CompiledGraph(GraphProgram(*arguments), part)

        return SerializableAOTDispatchCompiler(CompiledGraph, compile_part)

    with autograd_cache.enabled_for(graph, policy is None):
        return aot_autograd(
            fw_compiler=compiler(", forward"),
            bw_compiler=compiler(BACKWARD),
            inference_compiler=compiler(""),
            decompositions=changing_floats.decompositions() if policy is None else rules.decompositions(),
            partition_fn=partition,
            keep_inference_input_mutations=True,
            pre_grad_passes=outlined_graph,
            compile_region_name=title,
        )(graph, examples)


def _check_options(options: Mapping[str, Any]) -> None:
    from torch._inductor import list_options

    known = list_options()
    for name in options:
        # PyTorch writes "a-b" or "a_b", as Inductor does.
        if name.replace("-", "_") not in known:
            raise ValueError(
                f"unknown option {name!r} of torch.compile. The backend 'tpu' has one option, 'buckets'; it also "
                "accepts those of Inductor (torch._inductor.list_options()) and ignores them."
            )
    warn(f"the backend 'tpu' ignores options of Inductor: {', '.join(options)}")


_graphs = itertools.count()


def _title(graph: torch.fx.GraphModule) -> str:
    """A name for a captured graph: its number and the function it comes from."""
    traces = (n.stack_trace for n in graph.graph.nodes if n.stack_trace)
    function = re.search(r", in (\S+)", next(traces, ""))
    return f"graph {next(_graphs)}{f' of {function[1]}' if function else ''}"


def _log_break(graph: torch.fx.GraphModule) -> None:
    """Tells the report where the user's function could not be captured further."""
    why = getattr(graph, "compile_subgraph_reason", None)
    if why is not None and why.graph_break and why.user_stack:
        first, *rest = [line.strip() for line in why.reason.splitlines()]
        explanation = next((line.partition(": ")[2] for line in rest if line.startswith("Explanation: ")), "")
        frame = why.user_stack[-1]
        programs.broken(first, explanation, f"{frame.filename}:{frame.lineno}", (frame.line or "").strip())
