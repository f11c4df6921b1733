"""The client of ahead-of-time targets (no TPU attached): libtpu compiles programs for a topology, and nothing runs.

Buffers have shapes and no contents. Asking for contents is an error, unless a listener gives placeholder values.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from torch_tpu import metrics
from torch_tpu.runtime import analysis, compat, fingerprint, memory_counts, platform
from torch_tpu.runtime.analysis import Analysis
from torch_tpu.runtime.client import Aval, Buffer, Client, Executable, NoContents, Options, client_errors, load_plugin
from torch_tpu.runtime.generations import BY_TOPOLOGY, Generation


class Placeholder:
    """A buffer without contents."""

    __slots__ = ("__weakref__", "aval")

    def __init__(self, aval: Aval) -> None:
        self.aval = aval

    def is_ready(self) -> bool:
        return True

    def is_deleted(self) -> bool:
        return False

    def block_until_ready(self) -> None:
        pass


class AheadOfTimeProgram(Executable):
    """A program for a topology. Calling it gives placeholders.

    Attributes:
        key: Its name in the disk cache.
        module: Its StableHLO (an `ir.Module`).
        shapes: The shapes and dtypes of what it returns.
    """

    __slots__ = ("_analysis", "_client", "_options", "key", "module", "shapes")

    def __init__(self, client: TopologyClient, key: str, module: Any, options: Options, results: list[Aval]) -> None:
        self.key = key
        self.shapes = results
        self._client = client
        self.module = module
        self._options = options
        self._analysis: Analysis | None = None

    def enqueue(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        results: list[Buffer] = [Placeholder(aval) for aval in self.shapes]
        listener = self._client.listener
        if listener is not None:
            listener.ran(self, arguments, results)
        elif temporary := self.analysis().temporary_bytes:
            memory_counts.counter.program_ran(temporary)
        return results

    def results(self, enqueued: Any) -> list[Buffer]:
        made: list[Buffer] = enqueued
        return made

    def analysis(self) -> Analysis:
        """The compiler's analysis; compiles the program at the first call.

        Raises:
            client_errors(): where the compiler refuses it, such as for want of memory.
        """
        if self._analysis is None:
            self._analysis = self._client.analyse(self.key, self.module, self._options)
        return self._analysis


class Listener(Protocol):
    """Is told of everything that would happen on the device."""

    def put(self, buffer: Placeholder) -> None:
        """A buffer that the host has written."""

    def ran(self, program: AheadOfTimeProgram, arguments: Sequence[Buffer], results: Sequence[Buffer]) -> None:
        """A program that would have run."""

    def read(self, buffer: Buffer) -> npt.NDArray[Any]:
        """Placeholder values for a buffer that the host reads."""


class TopologyClient(Client):
    """The client of the first device of a topology.

    Attributes:
        generation: What its chips are.
        listener: While there is one, programs are compiled when their analysis is asked for, else at once; and the host
            may read.
    """

    runs = False
    names_operators = True

    def __init__(self, chosen: platform.Platform) -> None:
        super().__init__(chosen)
        self.topology = str(chosen.topology)
        self.generation: Generation = BY_TOPOLOGY[self.topology.partition(":")[0]]
        self.listener: Listener | None = None

    def _open(self, chosen: platform.Platform) -> Sequence[Any]:
        return open_topology(str(chosen.topology), chosen.plugin_path)

    def put(self, array: npt.NDArray[Any]) -> Buffer:
        return self._put(Aval(array.shape, array.dtype))

    def copy(self, buffer: Buffer) -> Buffer:
        return Placeholder(buffer.aval)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Buffer:
        return self._put(Aval(tuple(shape), dtype))

    def _put(self, aval: Aval) -> Buffer:
        buffer = Placeholder(aval)
        if self.listener is not None:
            self.listener.put(buffer)
        return buffer

    def get(self, buffer: Buffer) -> npt.NDArray[Any]:
        """Placeholder values for the contents of `buffer`.

        Raises:
            NoContents: where there is none.
        """
        if self.listener is None:
            raise NoContents(
                f"TORCH_TPU_PLATFORM={self.topology} is an ahead-of-time target (no TPU attached), so tensors have no "
                "values to read. `torch-tpu plan` runs a script with placeholder values; "
                "TORCH_TPU_PLATFORM=cpu runs it with real ones, on XLA:CPU."
            )
        return self.listener.read(buffer)

    def get_bool(self, buffer: Buffer) -> bool:
        """Run-time checks are taken to hold: there are no values to look at."""
        return True

    def largest_live(self, count: int) -> list[str]:
        return []

    def synchronize(self) -> None:
        """Nothing runs, so there is nothing to wait for."""

    def _key(self, module: Any, options: Options) -> str:
        # Of the program as a machine with these TPUs makes it, which does not name operators.
        return super()._key(compat.without_locations(module), options)

    def _executable(
        self, key: str, module: Any, options: Options, results: list[Aval], ranks: tuple[int, ...]
    ) -> AheadOfTimeProgram:
        return AheadOfTimeProgram(self, key, module, options, results)

    def analyse(self, key: str, module: Any, options: Options) -> Analysis:
        """Compiles a program (an `ir.Module`), or finds what was said of it before."""
        cache = self.disk_cache
        if cache is None:
            return self._compile_and_analyse(module, options)[1]
        # Programs that differ in nothing but the user's lines share an executable, not what is said of it.
        name = hashlib.sha256(b"analysis" + key.encode() + fingerprint.bytecode(module)).hexdigest()
        with cache.lock(key):
            found = cache.read(name)
            if found is not None:
                try:
                    read = Analysis.from_bytes(found)
                    metrics.count("disk_cache_hit")
                    return read
                except (ValueError, TypeError, zlib.error):
                    cache.reject(name, "was written by another version")
            compiled, said = self._compile_and_analyse(module, options)
            cache.write(key, compiled.serialize())
            cache.write(name, said.to_bytes())
        return said

    def _compile_and_analyse(self, module: Any, options: Options) -> tuple[Any, Analysis]:
        # Programs may be compiled by several threads at the same time, which one MLIR context does not allow.
        own = compat.module_of_its_own(fingerprint.bytecode(module))
        began = time.perf_counter()
        compiled = self._with_options(options, lambda known: self._client.compile(own, self._devices, known))
        seconds = time.perf_counter() - began
        metrics.count("compile")
        metrics.add_seconds("compile_seconds", seconds)
        return compiled, analysis.analyse(compiled, compat.name_of(own), seconds)


def open_topology(name: str, library: Path | None) -> Sequence[Any]:
    """The devices of a topology such as "v5e:2x2". They can be compiled for, nothing else.

    Raises:
        client_errors(): where libtpu has no such topology.
    """
    # There is no TPU to ask for, to lock or to log about.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    load_plugin("tpu", library)
    found = compat.xla.get_default_c_api_topology("tpu", name, {})
    devices: Sequence[Any] = found._make_compile_only_devices()
    return devices


@dataclass(frozen=True)
class Accepted:
    """A topology that libtpu compiles for: `devices` PJRT devices on `chips` chips.

    `rented` says whether Google Cloud rents such a slice out.
    """

    name: str
    generation: Generation
    chips: int
    devices: int
    rented: bool


def accepted(library: Path, every: bool = False, most_chips: int = 1024) -> Iterator[Accepted]:
    """The topologies libtpu accepts, by generation, smallest first.

    Args:
        every: also those that nobody rents out, of up to `most_chips` chips with sides that are powers of two.
    """
    for prefix, generation in BY_TOPOLOGY.items():
        shapes = set(generation.slices)
        if every:
            shapes |= {"x".join(map(str, sides)) for sides in _shapes(generation.dimensions, most_chips)}
        sides_of = {shape: tuple(map(int, shape.split("x"))) for shape in shapes}
        for shape in sorted(shapes, key=lambda shape: (math.prod(sides_of[shape]), sides_of[shape])):
            try:
                devices = open_topology(f"{prefix}:{shape}", library)
            except client_errors():
                continue
            chips = math.prod(sides_of[shape])
            yield Accepted(f"{prefix}:{shape}", generation, chips, len(devices), shape in generation.slices)


def _shapes(dimensions: int, most_chips: int) -> list[tuple[int, ...]]:
    """Ascending sides, but a last side of 1 where there are three: the way slices of chips are named."""
    powers = [1 << k for k in range(most_chips.bit_length())]
    shapes: list[tuple[int, ...]] = [()]
    for _ in range(dimensions):
        shapes = [(*shape, side) for shape in shapes for side in powers if math.prod((*shape, side)) <= most_chips]
    return [s for s in shapes if s == tuple(sorted(s)) or (len(s) == 3 and s[2] == 1 and s[0] <= s[1])]
