"""What the compiler assumes of a device, beyond the published figures in `runtime.generations`.

The clock is the published bfloat16 peak over the operations of one cycle: `cores × matrix units × side² × 2`. For a
product of 4096³ in bfloat16 libtpu 0.0.52 estimates 1,083,068 cycles on a v5e (1,048,576 is the least), 544,925 on a
v5p (524,288), 301,616 on a v6e and 324,772 on a device of a TPU7x (262,144). The usable memory is what its
out-of-memory errors name as the limit; the rest belongs to the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_tpu.runtime.generations import BY_TOPOLOGY, GIB, Generation


@dataclass(frozen=True)
class Machine:
    """One device. Bytes, FLOP/s in bfloat16, bytes/s, Hz."""

    generation: Generation
    usable_bytes: int
    flops: float
    bandwidth: float
    clock: float


# Operations in bfloat16 per cycle and device; GiB that a program may use.
_FIGURES = {
    "v5e": (4 * 128 * 128 * 2, 15.75),
    "v5p": (8 * 128 * 128 * 2, 95.73),
    "v6e": (4 * 256 * 256 * 2, 31.24),
    "tpu7x": (4 * 256 * 256 * 2, 94.74),
}


def machine(topology: str) -> Machine:
    """The device of a topology such as "v5e:2x2"."""
    name = topology.partition(":")[0]
    generation = BY_TOPOLOGY[name]
    per_cycle, usable = _FIGURES[name]
    flops = generation.bf16_flops_per_device
    return Machine(
        generation,
        int(usable * GIB),
        flops,
        generation.hbm_bandwidth_per_device,
        generation.bf16_flops_per_device / per_cycle,
    )
