"""Which PJRT platform this process runs on, and which TPU generation it shows to programs that ask.

Decided from the environment and the PCI bus alone, before jaxlib or libtpu are loaded.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_tpu.metrics.user_warnings import warn
from torch_tpu.runtime.generations import BY_NAME, BY_PCI_ID, BY_TOPOLOGY, GENERATIONS, Generation

PCI_DEVICES = Path("/sys/bus/pci/devices")
GOOGLE_VENDOR_ID = 0x1AE0
DEFAULT_STAND_IN = "TPU v5e"


class PlatformError(RuntimeError):
    """The environment asks for a platform that is not available."""


@dataclass(frozen=True)
class Chip:
    """A TPU chip of this machine: its address on the PCI bus and what it is."""

    pci_address: str
    generation: Generation


@dataclass(frozen=True)
class Platform:
    """The chosen platform.

    Attributes:
        name: What PJRT calls it: "cpu", "tpu", or the name of another plugin; "topology" for an ahead-of-time
            target (no TPU attached).
        plugin_path: The plugin's shared library; None for XLA:CPU, which is part of jaxlib.
        stand_in: The generation that a platform other than "tpu" passes for; None on a TPU.
        chips: The TPU chips found on the PCI bus, used or not.
        reason: Why this platform was chosen, in words for the user.
        topology: libtpu's name of the TPUs to compile for, such as "v5e:2x2"; None where programs run.
    """

    name: str
    plugin_path: Path | None
    stand_in: Generation | None
    chips: tuple[Chip, ...]
    reason: str
    topology: str | None = None

    def generation(self, device_kind: str) -> Generation:
        """The TPU generation of a device that PJRT calls `device_kind`: the real one on a TPU, else the stand-in."""
        return self.stand_in or generation_named(device_kind)


def generation_named(name: str) -> Generation:
    """The generation with this canonical name or PJRT device kind."""
    try:
        return BY_NAME[name]
    except KeyError:
        known = ", ".join(generation.name for generation in GENERATIONS)
        raise PlatformError(f"{name!r} is not a TPU generation that torch_tpu knows. Known are: {known}.") from None


def find_chips(pci_devices: Path = PCI_DEVICES) -> tuple[Chip, ...]:
    """The TPU chips on this machine's PCI bus, in order of address; none where there is no such bus."""
    chips = []
    for device in sorted(pci_devices.glob("*")):
        try:
            vendor = int((device / "vendor").read_text(), 16)
            device_id = int((device / "device").read_text(), 16)
        except (OSError, ValueError):
            continue
        if vendor == GOOGLE_VENDOR_ID and device_id in BY_PCI_ID:
            chips.append(Chip(device.name, BY_PCI_ID[device_id]))
    return tuple(chips)


def find_libtpu(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where libtpu's library is: `TPU_LIBRARY_PATH`, else inside the installed `libtpu` package, else nowhere.

    The package is looked up without being imported: importing it sets TPU_LIBRARY_PATH for the whole process.
    """
    named = environ.get("TPU_LIBRARY_PATH")
    if named:
        return _existing_file(named, "TPU_LIBRARY_PATH")
    spec = importlib.util.find_spec("libtpu")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        library = Path(folder) / "libtpu.so"
        if library.is_file():
            return library
    return None


def choose(environ: Mapping[str, str] = os.environ, pci_devices: Path = PCI_DEVICES) -> Platform:
    """The platform that `TORCH_TPU_PLATFORM` names.

    Its values are "auto" (the default: "tpu" where there are TPU chips and libtpu, else "cpu"), "cpu", "tpu",
    a topology such as "v5e:2x2" (programs are compiled for these TPUs, and not run), or another PJRT plugin as
    "NAME:PATH".

    Raises:
        PlatformError: When the value means nothing, or what it names is not on this machine.
    """
    chips = find_chips(pci_devices)
    wanted = environ.get("TORCH_TPU_PLATFORM", "").strip() or "auto"
    if wanted == "auto":
        return _automatic(environ, chips)
    if wanted == "cpu":
        return Platform("cpu", None, _stand_in(environ), chips, "TORCH_TPU_PLATFORM=cpu")
    if wanted == "tpu":
        return Platform("tpu", _libtpu(wanted, environ), None, chips, "TORCH_TPU_PLATFORM=tpu")
    name, _, path = wanted.partition(":")
    if name in BY_TOPOLOGY:
        return _topology(wanted, environ, chips)
    if not name.isidentifier() or name == "cpu" or not path:
        raise PlatformError(
            f"TORCH_TPU_PLATFORM={wanted!r} is not a platform. Use auto, cpu, tpu, "
            "a topology such as v5e:2x2 (`torch-tpu topologies` lists them), or another PJRT plugin as NAME:PATH, "
            "such as cuda:/opt/pjrt/cuda_plugin.so."
        )
    library = _existing_file(path, "TORCH_TPU_PLATFORM")
    stand_in = None if name == "tpu" else _stand_in(environ)
    return Platform(name, library, stand_in, chips, f"TORCH_TPU_PLATFORM={wanted}")


def topology_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `TORCH_TPU_PLATFORM` names a topology, well or badly."""
    return environ.get("TORCH_TPU_PLATFORM", "").strip().partition(":")[0] in BY_TOPOLOGY


def _topology(wanted: str, environ: Mapping[str, str], chips: tuple[Chip, ...]) -> Platform:
    name, _, shape = wanted.partition(":")
    sides = shape.split("x")
    dimensions = BY_TOPOLOGY[name].dimensions
    if len(sides) != dimensions or not all(side.isdigit() and int(side) for side in sides):
        raise PlatformError(
            f"TORCH_TPU_PLATFORM={wanted!r}: the chips of a {name} form a {dimensions}-dimensional torus, so write "
            f"{name}:{'x'.join(['2'] * dimensions)} or the like. `torch-tpu topologies` lists what libtpu accepts."
        )
    return Platform("topology", _libtpu(wanted, environ), None, chips, f"TORCH_TPU_PLATFORM={wanted}", wanted)


def _libtpu(wanted: str, environ: Mapping[str, str]) -> Path:
    library = find_libtpu(environ)
    if library is None:
        raise PlatformError(
            f"TORCH_TPU_PLATFORM={wanted}, but libtpu is not installed. Run `pip install 'torch-tpu[tpu]'`, "
            "or set TPU_LIBRARY_PATH to a libtpu.so."
        )
    return library


def _automatic(environ: Mapping[str, str], chips: tuple[Chip, ...]) -> Platform:
    if not chips:
        return Platform("cpu", None, _stand_in(environ), chips, "no TPU chips on the PCI bus")
    library = find_libtpu(environ)
    if library is None:
        reason = f"{len(chips)} TPU chips on the PCI bus, but libtpu is not installed"
        # Without a word the program would run correctly, and far slower than its owner expects.
        warn(f"{reason}: running on XLA:CPU. Run `pip install 'torch-tpu[tpu]'`.")
        return Platform("cpu", None, _stand_in(environ), chips, reason)
    return Platform("tpu", library, None, chips, f"{len(chips)} TPU chips on the PCI bus, and libtpu is installed")


def _stand_in(environ: Mapping[str, str]) -> Generation:
    """The generation a platform that is no TPU passes for: libraries refuse device names that are not a TPU's."""
    name = environ.get("TORCH_TPU_DEVICE_NAME") or DEFAULT_STAND_IN
    try:
        return generation_named(name)
    except PlatformError as error:
        raise PlatformError(f"TORCH_TPU_DEVICE_NAME: {error}") from None


def _existing_file(path: str, variable: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise PlatformError(f"{variable} names {path!r}, which is not a file. Correct the path or unset {variable}.")
    return file
