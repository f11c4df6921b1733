"""Runs a file of `Exported.save` without PyTorch: `python run_exported.py FILE INPUTS.npz RESULTS.npz`."""

from __future__ import annotations

import io
import json
import sys
import zipfile

import numpy as np
from jaxlib import _hlo, xla_client
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, stablehlo

xla = xla_client._xla


class Sharding(xla.SingleDeviceSharding):
    memory_kind = None

    def _to_xla_hlo_sharding(self, ndim):
        return _hlo.HloSharding.replicate()


class Aval:
    weak_type = False

    def __init__(self, shape, dtype):
        self.shape, self.dtype, self.size, self.sharding = tuple(shape), np.dtype(dtype), int(np.prod(shape)), None


def main(path, inputs, results):
    with zipfile.ZipFile(path) as file:
        signature = json.loads(file.read("signature.json"))
        artifact = file.read("module.stablehlo")
        names = [name.removeprefix("weights/").removesuffix(".npy") for name in file.namelist() if "weights/" in name]
        arrays = {name: np.load(io.BytesIO(file.read(f"weights/{name}.npy"))) for name in names}
    arrays.update(np.load(inputs))
    context, registry = ir.Context(), ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    stablehlo.register_dialect(context)
    chlo.register_dialect(context)
    module = stablehlo.deserialize_portable_artifact(context, artifact)
    client = xla_client.make_cpu_client()
    device = client.local_devices()[0]
    sharding = Sharding(device)
    program = client.compile_and_load(module, xla.DeviceList((device,)), xla_client.CompileOptions())
    given = [
        xla.batched_device_put(
            Aval(a["shape"], a["dtype"]), sharding, [arrays[a["name"]]], [device], True, enable_x64=True
        )
        for a in signature["arguments"]
    ]
    handlers = [
        xla.array_result_handler(Aval(r["shape"], r["dtype"]), sharding, True, True) for r in signature["results"]
    ]
    made = program.execute_sharded(given).consume_with_handlers(handlers)
    names = [r["name"] for r in signature["results"]]
    np.savez(results, **{n: r._single_device_array_to_np_array_did_copy()[0] for n, r in zip(names, made, strict=True)})
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main(*sys.argv[1:])
