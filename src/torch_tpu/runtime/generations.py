"""The generations of TPU and their published figures, per chip.

Source of the figures and of the slices: the pages "TPU v4", "v5e", "v5p", "v6e" and "TPU7x" of the Cloud TPU
documentation, and "TPUs in GKE", read in November and December 2026. The figures are a chip's peak; nothing here was
measured.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
TERA = 10**12
GIGA = 10**9


@dataclass(frozen=True)
class Generation:
    """One generation of TPU.

    Attributes:
        name: The canonical name, which torchtitan, helion and vLLM recognise.
        device_kinds: PJRT's own names for the same chip, in any version of libtpu.
        pci_device_id: The chip's device id on the PCI bus, under Google's vendor id.
        hbm_bytes_per_chip: High-bandwidth memory of one chip.
        topology: How libtpu names it in a topology, such as "v5e" in "v5e:2x2"; empty where libtpu compiles for it in
            another arrangement of cores than its users get.
        devices_per_chip: How many PJRT devices one chip shows; they share its memory and its figures evenly.
        bf16_flops: Peak floating-point operations per second in bfloat16.
        int8_ops: Peak operations per second in int8 (on TPU v7 in fp8); 0 where none is published.
        hbm_bandwidth: Bytes per second between the chip and its memory.
        ici_bandwidth: Bytes per second a chip can send to its neighbours, over all its links.
        dimensions: Of the torus its chips form.
        slices: The shapes in which Google Cloud rents its chips out. Of 3-dimensional ones these are the documented
            examples; others are A x B x C in multiples of 4, with A <= B <= C.
    """

    name: str
    device_kinds: tuple[str, ...]
    pci_device_id: int
    hbm_bytes_per_chip: int
    topology: str
    bf16_flops: int
    int8_ops: int
    hbm_bandwidth: int
    ici_bandwidth: int
    dimensions: int
    slices: tuple[str, ...] = ()
    devices_per_chip: int = 1

    @property
    def hbm_bytes_per_device(self) -> int:
        return self.hbm_bytes_per_chip // self.devices_per_chip

    @property
    def bf16_flops_per_device(self) -> int:
        return self.bf16_flops // self.devices_per_chip

    @property
    def hbm_bandwidth_per_device(self) -> int:
        return self.hbm_bandwidth // self.devices_per_chip

    @property
    def ici_bandwidth_per_device(self) -> int:
        return self.ici_bandwidth // self.devices_per_chip


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16", "16x16x24"),
)
GENERATIONS = (
    Generation("TPU v4", (), 0x005E, 32 * GIB, "", 275 * TERA, 275 * TERA, 1200 * GIGA, 300 * GIGA, 3),
    Generation(
        *("TPU v5e", ("TPU v5 lite",), 0x0063, 16 * GIB, "v5e"),
        *(197 * TERA, 393 * TERA, 800 * GIGA, 200 * GIGA, 2),
        slices=_FLAT,
    ),
    Generation(
        *("TPU v5p", ("TPU v5",), 0x0062, 95 * GIB, "v5p"),
        *(459 * TERA, 918 * TERA, 2765 * GIGA, 600 * GIGA, 3),
        slices=_CUBIC,
    ),
    Generation(
        *("TPU v6e", ("TPU v6 lite",), 0x006F, 32 * GIB, "v6e"),
        *(918 * TERA, 1836 * TERA, 1600 * GIGA, 400 * GIGA, 2),
        slices=_FLAT,
    ),
    Generation(
        *("TPU v7", ("TPU7x", "TPU v7x"), 0x0076, 192 * GIB, "tpu7x"),
        *(2307 * TERA, 4614 * TERA, 7380 * GIGA, 1200 * GIGA, 3),
        slices=_CUBIC,
        devices_per_chip=2,
    ),
)
BY_NAME = {name: generation for generation in GENERATIONS for name in (generation.name, *generation.device_kinds)}
BY_PCI_ID = {generation.pci_device_id: generation for generation in GENERATIONS}
BY_TOPOLOGY = {generation.topology: generation for generation in GENERATIONS if generation.topology}
