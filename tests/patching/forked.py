"""Loads torch_tpu where an object that a patch relies on is missing; prints what happened as JSON.

    python -m tests.patching.forked

Each case runs in a fork of a process that has imported everything but torch_tpu, so that it takes a fraction of a
second. A missing object comes back as soon as the patch has looked for it: the library's own code knows its new name.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import sys
import traceback
import warnings

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"

import torch
import torch.utils.checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.patching.hiding import hidden

MOMENTS = ("LOAD", "AFTER_IMPORT", "FIRST_USE", "CALL")
# What the runtime imports, once for all cases. Threads would not survive the fork; importing starts none.
HEAVY = ("jaxlib.xla_client", "jaxlib._hlo", "jaxlib.mlir.ir", "jaxlib.mlir.dialects.stablehlo", "sympy")


def in_a_fork(function, *arguments):
    """What the function returns, run in a child of this process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = function(*arguments)
        except BaseException:
            answer = {"crash": traceback.format_exc()}
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(text) if text else {"crash": f"ended with status {status}"}


def entries():
    from torch_tpu import patch_report

    return [
        {
            "name": patch.name,
            "feature": patch.feature,
            "required": patch.required,
            "after": patch.after,
            "moment": patch.moment.name,
            "needs": [need.where for need in patch.needs],
        }
        for patch in patch_report.patches()
    ]


def work_on_the_cpu():
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()

    def loss(x):
        return torch.nn.functional.dropout((x @ x.T).relu(), 0.0).sum()

    expected = torch.tensor([[6.0, 10, 14], [6, 10, 14]])
    gradient = torch.autograd.grad(loss(x), x)[0]
    assert torch.equal(gradient, expected), gradient
    assert "requires_grad" in repr(x)
    torch._dynamo.reset()
    gradient = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), x)[0]
    assert torch.equal(gradient, expected), gradient
    rows = DataLoader(TensorDataset(torch.arange(6.0)), 2, shuffle=True, generator=torch.Generator().manual_seed(1))
    assert sum(batch.sum() for (batch,) in rows) == 15
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    torch.utils.checkpoint.checkpoint(lambda w: (w * w).sum(), weight, use_reentrant=False).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"weight": weight, "state": optimizer.state_dict()}, file)
    file.seek(0)
    assert torch.load(file)["weight"].tolist() == [0, 0, 0]
    assert torch.ones(2).__dlpack__() is not None
    assert torch.UntypedStorage(4).nbytes() == 4


def use_the_device():
    assert torch.ones(1, device="tpu").tolist() == [1]


def error_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def load(patches):
    """What happens where the first object that each of these patches needs is missing."""
    missing = {moment: [p["needs"][0] for p in patches if p["moment"] == moment] for moment in MOMENTS}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hidden(*missing["LOAD"], *missing["AFTER_IMPORT"]):
            import torch_tpu  # noqa: F401
        work_on_the_cpu()
        early = about_patches(caught)
        from torch_tpu import _loader
        from torch_tpu.patching import patch_registry

        usable = _loader.failure() is None
        if usable:
            with hidden(*missing["FIRST_USE"]):
                patch_registry.device_is_used()
        error = error_of(use_the_device)
        if usable and missing["CALL"]:
            from torch_tpu import patch_report

            names = [patch["name"] for patch in patches]
            for patch in patch_report.patches():
                if patch.name in names and patch.moment is patch_registry.Moment.CALL:
                    patch.undo()
                    with hidden(patch.needs[0].where):
                        assert not patch.apply()
                        assert not patch.apply()
            error = error or error_of(use_the_device)
    available = torch.accelerator.is_available()
    return {"error": error, "available": available, "early": early, "warnings": about_patches(caught)}


def load_with_another_jaxlib():
    """The errors of two uses where jaxlib has renamed something."""
    import torch_tpu  # noqa: F401

    with hidden("jaxlib.xla_client:make_cpu_client"):
        errors = [error_of(use_the_device) for _ in range(2)]
    work_on_the_cpu()
    return errors


def about_patches(caught):
    return [str(warning.message) for warning in caught if str(warning.message).startswith("The patch")]


def look_for_each():
    """The state of each patch, and what it says before, while and after each object that it relies on is missing."""
    from torch_tpu import patch_report

    said = {}
    for patch in patch_report.patches():
        for need in patch.needs:
            if need.where.partition(":")[0] in sys.modules:
                before = patch.problem()
                with hidden(need.where):
                    missing = need.problem(), patch.problem()
                said[f"{patch.name}-{need.where}"] = [patch.state.value, before, *missing, patch.problem()]
    return said


def compile_on_the_cpu():
    """What is loaded by a graph of the CPU that goes to Inductor, here to what stands in for it."""
    torch._inductor.compile_fx.compile_fx = lambda model_, example_inputs_, **options: model_.forward
    import torch_tpu  # noqa: F401

    torch._dynamo.reset()
    result = torch.compile(lambda x: x * 2)(torch.ones(2)).tolist()
    parts = ("torch_tpu.compile.backend", "torch_tpu.ops", "torch_tpu.runtime.client")
    return {"result": result, "loaded": [part for part in parts if part in sys.modules]}


def main():
    torch.set_num_threads(1)
    patches = in_a_fork(entries)
    modules = [patch["after"] for patch in patches if patch["after"]]
    for module in [*modules, *HEAVY, "safetensors.torch"]:
        if importlib.util.find_spec(module.partition(".")[0]):
            importlib.import_module(module)
    work_on_the_cpu()
    present = [p for p in patches if all(need.partition(":")[0] in sys.modules for need in p["needs"])]
    cases = {"nothing": [], "every optional patch": [p for p in present if not p["required"]], "every patch": present}
    answers = {
        name: {"patches": chosen, **in_a_fork(load, chosen)}
        for name, chosen in (cases | {patch["name"]: [patch] for patch in present}).items()
    }
    absent = [patch["name"] for patch in patches if patch not in present]
    others = {"jaxlib": in_a_fork(load_with_another_jaxlib), "inductor": in_a_fork(compile_on_the_cpu)}
    others["objects"] = in_a_fork(look_for_each)
    print(json.dumps({"answers": answers, "absent": absent, **others}))


if __name__ == "__main__":
    main()
