"""The PJRT client of this process: host arrays to device buffers and back, programs to executables.

One client, made when first needed. A buffer is jaxlib's array object; nothing outside `runtime` looks inside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import operator
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_tpu import hooks, metrics
from torch_tpu.runtime import (
    analysis,
    compat,
    disk_cache,
    fingerprint,
    malloc_settings,
    memory_counts,
    memory_limits,
    memory_mappings,
    platform,
)

if TYPE_CHECKING:
    import numpy.typing as npt

Buffer = Any
Options = Mapping[str, str | bool | int | float]

# Values that differ from XLA's defaults on every platform: a bf16 chain rounds after each op as PyTorch does. On a TPU
# that costs nothing: a Llama block's step compiled for v5e has the same time and memory either way (libtpu 0.0.52).
DEBUG_OPTIONS: dict[str, str | bool | int | float] = {"xla_allow_excess_precision": False}
CPU_OPTIONS: dict[str, str | bool | int | float] = {"xla_cpu_enable_fast_math": False}
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Of the memory that XLA:CPU uses in place.
_ALIGNMENT = 64
# How XLA, of any version, says that it has no such option, or no such value for it.
_LACKS_OPTION = re.compile(r"No such compile option: '(\w+)'|While setting option (\w+), ")

# A token for each of the last runs, whose results may be dropped long before they are there.
_runs: deque[Any] = deque()
# An older run has ended, or is waited for.
MOST_RUNS = 256


class NoContents(RuntimeError):
    """The contents of a buffer were asked for on a topology, where there are none."""


class Aval:
    """What jaxlib wants to know of an array: shape and numpy dtype."""

    __slots__ = ("dtype", "shape", "sharding", "size")
    weak_type = False

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.size = math.prod(shape)
        self.sharding: Any = None


class _OneDevice(compat.xla.SingleDeviceSharding):  # type: ignore[misc]
    memory_kind = None

    def _to_xla_hlo_sharding(self, ndim: int) -> Any:
        return compat.REPLICATED


# Held while jaxlib is asked where a buffer lies.
_asking = threading.Lock()


def _address(buffer: Buffer) -> int:
    """Where a buffer of XLA:CPU lies.

    The first time jaxlib notes the parts of an array that came from the host, and on the way tries to import `jax`. Two
    threads that ask at that time both note them: from then on the array is one of two parts, which has no address.
    """
    with _asking:
        address: int = buffer.unsafe_buffer_pointer()
    return address


class _HostMemory:
    """A buffer of XLA:CPU as numpy's array interface; an array made of it keeps the buffer alive.

    jaxlib's own conversion tries to import `jax` for every new array, which costs 100 µs where it is not installed.
    """

    __slots__ = ("__array_interface__", "_buffer")

    def __init__(self, buffer: Buffer) -> None:
        buffer.block_until_ready()
        self._buffer = buffer
        aval = buffer.aval
        kind = aval.dtype.str if aval.dtype.isbuiltin == 1 else f"|V{aval.dtype.itemsize}"
        address = _address(buffer) if aval.size else 0
        self.__array_interface__ = {"version": 3, "shape": aval.shape, "typestr": kind, "data": (address, True)}


class Executable:
    """A compiled program. Calling it with buffers enqueues it and returns its result buffers at once.

    Attributes:
        temporary_bytes: of its scratch memory.
        allocates: the bytes of its results and scratch memory, without those of arguments that it reuses.
    """

    __slots__ = ("__weakref__", "_handlers", "allocates", "enqueue", "loaded", "temporary_bytes")

    def __init__(self, loaded: Any, handlers: list[Any], result_bytes: int) -> None:
        self.loaded = loaded
        self.enqueue: Any = functools.partial(loaded.execute_sharded, with_tokens=True)
        self._handlers = handlers
        statistics = loaded.get_compiled_memory_stats()
        self.temporary_bytes: int = statistics.temp_size_in_bytes
        self.allocates: int = self.temporary_bytes + result_bytes - statistics.alias_size_in_bytes

    def __call__(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        _wait_for_runs(MOST_RUNS - 1)
        return self.results(self.enqueue(arguments))

    def results(self, enqueued: Any) -> list[Buffer]:
        """The result buffers of a run that `enqueue` began."""
        memory_counts.counter.program_ran(self.allocates)
        _runs.append(enqueued.consume_token())
        results: list[Buffer] = enqueued.consume_with_handlers(self._handlers)
        return results

    def analysis(self) -> analysis.Analysis:
        """The compiler's analysis; the time to compile is not known here."""
        return analysis.analyse(self.loaded, "", math.nan)


def _wait_for_runs(most: int) -> None:
    """Waits for the oldest runs until at most so many are left; one that failed says so where its result is read."""
    while len(_runs) > most:
        with contextlib.suppress(IndexError, client_errors()):  # another thread may have taken the last one
            _runs.popleft().block_until_ready()


def launch(executables: Iterable[Executable], arguments: Iterable[Sequence[Buffer]], enqueued: list[Any]) -> None:
    """Enqueues programs one after the other and appends each run to `enqueued`, for `Executable.results`.

    To Python this is one step: an interruption comes before it or after it. So whatever happens, `enqueued` says which
    programs took the buffers donated to them.
    """
    # Before anything is enqueued: an interruption of waiting loses no results.
    _wait_for_runs(MOST_RUNS - 1)
    enqueued.extend(map(operator.call, [e.enqueue for e in executables], arguments))


class Client:
    """A PJRT client and its first device.

    Attributes:
        platform_name: PJRT's name of the platform, such as "cpu" or "tpu".
        device_kind: PJRT's name of the chip, such as "TPU v5 lite".
        runs_on_cpu: Whether XLA:CPU compiles the programs, jaxlib's own or a plug-in's.
        is_host_memory: Whether buffers are read in place. A plug-in may keep them where it likes.
        calls_lapack: Whether programs can call jaxlib's LAPACK, of which a plug-in's compiler knows nothing.
        runs: Whether programs run; if not, buffers have shapes and no contents.
        total_memory: Bytes that no value can exceed.
        fingerprint: What a program depends on besides its module and options (`runtime.fingerprint`).
        is_of_world: Whether it belongs to a world of processes, so that programs can communicate.
        names_operators: Whether programs say which operator and line of the user's program each operation comes from.
    """

    runs = True
    is_of_world = False
    names_operators = False

    def __init__(self, chosen: platform.Platform) -> None:
        devices = self._open(chosen)
        self.device = devices[0]
        self._client = self.device.client
        self.platform_name: str = self.device.platform
        self.device_kind: str = self.device.device_kind
        self.device_count: int = len(devices)
        self.runs_on_cpu = self.platform_name == "cpu"
        self.is_host_memory = self.calls_lapack = self.runs_on_cpu and chosen.plugin_path is None
        self.total_memory = memory_limits.of_device(chosen, self.device_kind)
        self._sharding = _OneDevice(self.device)
        self._devices = compat.xla.DeviceList((self.device,))
        self._device_list = [self.device]
        self._copy_semantics = compat.xla.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
        self.fingerprint = fingerprint.of_client(self.device, _library_without_version(chosen))
        self._unknown_options: set[str] = set()
        self._executables: weakref.WeakValueDictionary[str, Executable] = weakref.WeakValueDictionary()
        # What host arrays lie under adopted buffers, by the buffers' ids, for as long as those live.
        self._adopted: dict[int, tuple[weakref.ref[Any], npt.NDArray[Any]]] = {}
        self._mappings = memory_mappings.Watch()
        self.disk_cache = disk_cache.from_environment()

    def _open(self, chosen: platform.Platform) -> Sequence[Any]:
        """Starts PJRT; returns the devices of this process."""
        devices: Sequence[Any] = _make_client(chosen).local_devices()
        return devices

    def put(self, array: npt.NDArray[Any]) -> Buffer:
        """A device copy of `array`. The caller may change or free `array` as soon as this returns."""
        return compat.xla.batched_device_put(
            Aval(array.shape, array.dtype),
            self._sharding,
            [array],
            self._device_list,
            True,
            True,
            self._copy_semantics,
            True,
        )

    def adopt(self, array: npt.NDArray[Any]) -> Buffer:
        """A device buffer over the memory of `array` where XLA can use it in place, else a copy (`put`).

        The caller must not write to `array` any more. A program that would write to the buffer gets a copy of it.
        """
        if not self.is_host_memory or array.ctypes.data % _ALIGNMENT:
            return self.put(array)
        never_written = compat.xla.HostBufferSemantics.ZERO_COPY
        buffer = compat.xla.batched_device_put(
            Aval(array.shape, array.dtype), self._sharding, [array], self._device_list, True, False, never_written, True
        )
        key = id(buffer)
        self._adopted[key] = weakref.ref(buffer, lambda _: self._adopted.pop(key, None)), array
        return buffer

    def is_ready(self, buffer: Buffer) -> bool:
        """Whether what computes the buffer has run."""
        ready: bool = buffer.is_ready()
        return ready

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Buffer:
        """A device buffer of zeros."""
        return self.put(np.zeros(shape, dtype))

    def get(self, buffer: Buffer) -> npt.NDArray[Any]:
        """The contents of `buffer`, after waiting for it. Read-only, and on XLA:CPU the buffer's own memory."""
        if self.is_host_memory:
            adopted = self._adopted.get(id(buffer))
            if adopted is not None:  # jaxlib would try to import `jax` before it said where it lies
                return adopted[1]
            return np.asarray(_HostMemory(buffer)).view(buffer.aval.dtype)
        buffer.block_until_ready()  # raises where the program failed; the conversion would give None
        array: npt.NDArray[Any] = buffer._single_device_array_to_np_array_did_copy()[0]
        return array

    def copy(self, buffer: Buffer) -> Buffer:
        """Another buffer with the same contents."""
        return compat.copy(buffer, self._devices, self._sharding)

    def get_bool(self, buffer: Buffer) -> bool:
        """The value of a 0-d bool buffer, after waiting for it."""
        if self.is_host_memory:
            buffer.block_until_ready()
            return ctypes.c_bool.from_address(_address(buffer)).value
        return bool(self.get(buffer))

    def compile(
        self,
        module: Any,
        results: Sequence[tuple[tuple[int, ...], npt.DTypeLike]],
        options: Options | None = None,
        custom_calls: Collection[str] = (),
        ranks: tuple[int, ...] = (),
    ) -> Executable:
        """Compiles a StableHLO module (an `ir.Module`, or text as bytes) whose results have these shapes and dtypes.

        Args:
            options: XLA debug options by name, on top of the project's own.
            custom_calls: the functions the module calls.
            ranks: the processes that run it together, this one among them.
        """
        if ranks and not self.is_of_world:
            made: Executable = hooks.join_world().compile(module, results, options, custom_calls, ranks)
            return made
        if any(name.startswith("lapack_") for name in custom_calls):
            compat.register_lapack()
        chosen = dict(DEBUG_OPTIONS)
        if self.runs_on_cpu:
            chosen.update(CPU_OPTIONS)
        chosen.update(options or {})
        key = self._key(module, chosen)
        executable = self._executables.get(key)
        if executable is None:
            avals = [Aval(shape, dtype) for shape, dtype in results]
            executable = self._executables[key] = self._executable(key, module, chosen, avals, ranks)
        return executable

    def _key(self, module: Any, options: Options) -> str:
        return fingerprint.of_program(self.fingerprint, module, options.items())

    def _executable(
        self, key: str, module: Any, options: Options, results: list[Aval], ranks: tuple[int, ...]
    ) -> Executable:
        if self.runs_on_cpu and self._mappings.is_near_limit():
            metrics.count("programs_forgotten")
            hooks.forget_programs()
        loaded = self._load_or_compile(key, module, options)
        handlers = [compat.result_handler(aval, self._sharding) for aval in results]
        return Executable(loaded, handlers, sum(aval.size * aval.dtype.itemsize for aval in results))

    def _load_or_compile(self, key: str, module: Any, options: Options) -> Any:
        """The program of this key from the disk cache, else compiled and stored there."""
        cache = self.disk_cache
        if cache is None:
            return self._compile(module, options)
        loaded = self._load(cache, key, options)
        if loaded is not None:
            return loaded
        with cache.lock(key):
            # Another process may have compiled it while this one waited.
            loaded = self._load(cache, key, options)
            if loaded is None:
                loaded = self._compile(module, options)
                cache.write(key, compat.serialize(self._client, loaded))
        return loaded

    def _compile_options(self, options: Options) -> Any:
        compile_options = compat.CompileOptions()
        compile_options.num_replicas = 1
        compile_options.num_partitions = 1
        known = [(name, value) for name, value in options.items() if name not in self._unknown_options]
        compile_options.env_option_overrides = known
        return compile_options

    def _with_options(self, options: Options, use: Callable[[Any], Any]) -> Any:
        """What `use` makes of the compile options; without those that this compiler, of another version, lacks."""
        while True:
            try:
                return use(self._compile_options(options))
            except client_errors() as error:
                lacking = _LACKS_OPTION.search(str(error))
                name = lacking and (lacking[1] or lacking[2])
                if name not in options.keys() - self._unknown_options:
                    raise
                self._unknown_options.add(str(name))

    def _compile(self, module: Any, options: Options) -> Any:
        def compiled(compile_options: Any) -> Any:
            return self._client.compile_and_load(module, self._devices, compile_options)

        with metrics.timed("compile_seconds"):
            loaded = self._with_options(options, compiled)
        metrics.count("compile")
        return loaded

    def _load(self, cache: disk_cache.DiskCache, key: str, options: Options) -> Any:
        payload = cache.read(key)
        if payload is None:
            return None

        def deserialized(compile_options: Any) -> Any:
            return self._client.deserialize_executable(payload, self._devices, compile_options)

        try:
            with metrics.timed("disk_cache_seconds"):
                loaded = self._with_options(options, deserialized)
        except client_errors() as error:
            cache.reject(key, f"can't be loaded ({str(error).splitlines()[0]})")
            return None
        metrics.count("disk_cache_hit")
        return loaded

    def largest_live(self, count: int) -> list[str]:
        """What takes most memory: live buffers by shape and dtype, as text, largest total first."""
        totals: dict[str, list[int]] = {}
        for buffer in self._client.live_arrays():
            aval = buffer.aval
            if aval is None:
                continue  # an array that jaxlib made for itself
            entry = totals.setdefault(f"{aval.dtype}{list(aval.shape)}", [0, 0])
            entry[0] += 1
            entry[1] += int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize
        ranked = sorted(totals.items(), key=lambda item: -item[1][1])[:count]
        return [f"{number} × {kind} = {size / 2**20:,.1f} MiB" for kind, (number, size) in ranked]

    def synchronize(self) -> None:
        """Waits until everything enqueued has run, in whatever order: programs and copies to the device."""
        compat.free_garbage()  # for those who run without Python's garbage collector
        _wait_for_runs(0)
        for buffer in self._client.live_arrays():
            try:
                if not buffer.is_ready():
                    buffer.block_until_ready()
            except client_errors():
                if not buffer.is_deleted():  # another thread may have donated it meanwhile
                    raise


def _make_client(chosen: platform.Platform) -> Any:
    if chosen.name == "cpu":
        malloc_settings.keep_freed_memory()
        return compat.make_cpu_client(asynchronous=True)
    if chosen.name == "tpu":
        os.environ.setdefault("TPU_ML_PLATFORM", "PyTorch")
        if not chosen.chips:
            # libtpu would ask Google's metadata server for minutes before saying that there is no TPU.
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    with _quiet_log():
        load_plugin(chosen.name, chosen.plugin_path)
        return compat.xla.get_c_api_client(chosen.name, {}, None)


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    """Keeps the log of a plug-in that starts inside to what is fatal: errors come as exceptions.

    XLA:CPU would write four kilobytes for each program from the disk cache, about flags that are no processor features.
    The package's own setting is "1"; another one is the user's.
    """
    said = os.environ.get(_LOG_LEVEL)
    if said == "1":
        os.environ[_LOG_LEVEL] = "3"
    try:
        yield
    finally:
        if said == "1":
            os.environ[_LOG_LEVEL] = said


def _library_without_version(chosen: platform.Platform) -> Path | None:
    """A plug-in that doesn't say which build it is; libtpu does."""
    return None if chosen.name in ("tpu", "topology") else chosen.plugin_path


def load_plugin(name: str, path: Path | None) -> None:
    """Loads a PJRT plugin, once."""
    if not compat.xla.pjrt_plugin_loaded(name):
        compat.xla.load_pjrt_plugin(name, str(path), None)
    if not compat.xla.pjrt_plugin_initialized(name):
        compat.xla.initialize_pjrt_plugin(name)


def client_errors() -> type[Exception]:
    """What the client raises when compiling or running fails."""
    error: type[Exception] = compat.xla.JaxRuntimeError
    return error
