"""What `torch_tpu.export` returns: a StableHLO module, and the names, shapes and dtypes of what it takes and gives."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import TreeSpec

from torch_tpu.hlo import artifact, module, types
from torch_tpu.tensor.transfer import to_numpy


@dataclass(frozen=True)
class ExportedArgument:
    """An argument of `main`.

    Attributes:
        kind: "parameter", "buffer", "constant" (a tensor that the function captured), "input", or "random state":
            uint64[2], the seed and the generator's offset divided by 4.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Result:
    """A result of `main`.

    Attributes:
        written: the argument whose new value this is; None for what the call returns.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    written: str | None


@dataclass(frozen=True)
class Exported:
    """One StableHLO module.

    Attributes:
        name: of what was exported.
        platform: what its lowerings were chosen for, such as "cpu" or "tpu".
        arguments: of `main`, in order: parameters, buffers, captured tensors, inputs, the random state if it is used.
            They are row-major arrays, each named after its place in the module or in the call.
        results: of `main`, in order: the tensors returned, then the new values of arguments that were written.
        constants: what the call returns besides tensors, by name.
        structure: PyTorch's description (pytree) of the returned nest; its leaves are results and constants.
        custom_calls: functions the module calls that XLA must know: LAPACK's on "cpu", which jaxlib registers.
        draws: by how many 32-bit random words the call advances the random state.
    """

    name: str
    platform: str
    arguments: tuple[ExportedArgument, ...]
    results: tuple[Result, ...]
    constants: dict[str, Any]
    structure: TreeSpec
    custom_calls: frozenset[str]
    draws: int
    _module: Any
    _values: dict[str, torch.Tensor]

    @property
    def text(self) -> str:
        """The module as MLIR text."""
        with module.building:
            return str(self._module)

    @property
    def bytecode(self) -> bytes:
        """The module as MLIR bytecode, for readers with this version of StableHLO."""
        return artifact.bytecode(self._module)

    def portable_artifact(self, version: str | None = None) -> bytes:
        """The module in the form that later versions of StableHLO read; see `hlo.artifact.portable`."""
        return artifact.portable(self._module, version)

    def weights(self) -> dict[str, npt.NDArray[Any]]:
        """The present values of parameters, buffers and captured tensors, by name; without those on "meta"."""
        return {n: to_numpy(t.detach().cpu()) for n, t in self._values.items() if t.device.type != "meta"}

    def save(self, path: str | PathLike[str], *, weights: bool = True) -> None:
        """Writes a zip file: `module.stablehlo` (portable), `module.mlir` (text), `signature.json`, `weights/NAME.npy`.

        A dtype that numpy lacks (bfloat16, float8) is stored as raw bytes of its width; `signature.json` names it.

        Args:
            weights: whether to write the values of parameters, buffers and captured tensors too.
        """
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("module.stablehlo", self.portable_artifact())
            file.writestr("module.mlir", self.text)
            file.writestr("signature.json", json.dumps(self.signature(), indent=1))
            for name, array in self.weights().items() if weights else ():
                buffer = io.BytesIO()
                np.save(buffer, array if array.dtype.isbuiltin == 1 else array.view(f"V{array.dtype.itemsize}"))
                file.writestr(f"weights/{name}.npy", buffer.getvalue())

    def signature(self) -> dict[str, Any]:
        """What `save` writes into `signature.json`: arguments and results with shapes and numpy's names of dtypes."""
        return {
            "name": self.name,
            "platform": self.platform,
            "arguments": [
                {"name": a.name, "kind": a.kind, "shape": a.shape, "dtype": types.numpy_dtype(a.dtype).name}
                for a in self.arguments
            ],
            "results": [
                {"name": r.name, "shape": r.shape, "dtype": types.numpy_dtype(r.dtype).name, "written": r.written}
                for r in self.results
            ],
            "constants": {name: repr(value) for name, value in self.constants.items()},
            "structure": str(self.structure),
            "custom_calls": sorted(self.custom_calls),
            "draws": self.draws,
        }

    def __repr__(self) -> str:
        taken = ", ".join(f"{a.name}: {_short(a)}" for a in self.arguments)
        given = ", ".join(f"{r.name}: {_short(r)}" for r in self.results)
        return f"Exported({self.name} for {self.platform}: ({taken}) -> ({given}))"


def _short(spec: ExportedArgument | Result) -> str:
    return f"{types.numpy_dtype(spec.dtype).name}{list(spec.shape)}"
