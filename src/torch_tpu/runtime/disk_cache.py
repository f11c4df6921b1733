"""Compiled programs on disk: shared between processes, bounded in size, safe against crashes and damaged files.

An entry is one file, named by the digest of everything that decides the program (`runtime.fingerprint`). Whatever is
wrong with the folder or a file costs a compilation and a warning, never an error. The files are machine code: the
folder is made readable and writable by its owner alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs

from torch_tpu import metrics

MAGIC = b"torch_tpu executable 1\n"
SUFFIX = ".executable"
DEFAULT_LIMIT_BYTES = 8 * 2**30
# A full cache shrinks to this share of its limit, so that the next entry does not have to make room again.
SHRUNK = 0.8
# A writer that lives writes for seconds; what is older was left by one that was killed.
STALE_SECONDS = 3600.0
# A process that holds the lock longer than this may be stopped: the others compile for themselves.
LOCK_SECONDS = 600.0


@dataclass(frozen=True)
class Stats:
    """What a cache folder holds."""

    entries: int
    nbytes: int


class DiskCache:
    """Entries in `folder`, at most `limit` bytes of them, the least recently used leaving first."""

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit = limit
        # Bytes this process may still write before it looks whether the folder is over its limit; it looks at its
        # first write, because many short processes would otherwise never look.
        self._until_look = 0
        self._warned: set[str] = set()

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{SUFFIX}"

    def read(self, key: str) -> bytes | None:
        """The entry of this key, or None where there is none or it is damaged; a damaged one is removed."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", f"can't be read ({error.strerror})")
            return None
        head = len(MAGIC) + 32
        payload = content[head:]
        if content[: len(MAGIC)] != MAGIC or content[len(MAGIC) : head] != _checksum(key, payload):
            self.reject(key, "is damaged or was not written by torch_tpu")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return payload

    def write(self, key: str, payload: bytes) -> None:
        """Stores an entry; readers see all of it or nothing."""
        path = self.path(key)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(MAGIC + _checksum(key, payload) + payload)
                os.replace(name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            self._warn("write", f"can't be written ({error.strerror})")
            return
        self._until_look -= len(payload)
        if self._until_look < 0:
            self._until_look = self.limit // 32
            self.shrink()

    def reject(self, key: str, why: str) -> None:
        """Removes an entry that can't be used."""
        path = self.path(key)
        warnings.warn(f"torch_tpu compiles a program again: the cached {path.name} {why}.", stacklevel=2)
        with contextlib.suppress(OSError):
            path.unlink()

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held while a program is compiled, so that processes that need the same one at the same time wait for it.

        A few programs share a lock: the keys' first three digits choose one of 4,096 lock files.
        """
        held = None
        try:
            folder = self.folder / "locks"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = filelock.FileLock(folder / key[:3], timeout=LOCK_SECONDS, poll_interval=0.01)
            held.acquire()
        except (OSError, NotImplementedError):  # filelock's Timeout is an OSError
            held = None
        try:
            yield
        finally:
            if held is not None:
                held.release()

    def stats(self) -> Stats:
        sizes = [size for _, size, path in self._files() if path.suffix == SUFFIX]
        return Stats(len(sizes), sum(sizes))

    def shrink(self) -> None:
        """Removes what killed writers left and, where the entries exceed the limit, those not used for longest."""
        entries = []
        for used, size, path in self._files():
            if path.suffix == SUFFIX:
                entries.append((used, size, path))
            elif path.suffix == ".tmp" and time.time() - used > STALE_SECONDS:
                with contextlib.suppress(OSError):
                    path.unlink()
        total = sum(size for _, size, _ in entries)
        if total <= self.limit:
            return
        for _, size, path in sorted(entries):
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
            if total <= self.limit * SHRUNK:
                break

    def clear(self) -> int:
        """Removes every entry; returns how many there were."""
        removed = 0
        for _, _, path in self._files():
            if path.suffix in (SUFFIX, ".tmp"):
                with contextlib.suppress(OSError):
                    path.unlink()
                    removed += path.suffix == SUFFIX
        return removed

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(time of last use, size in bytes, path) of every file; other processes may remove some meanwhile."""
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                yield status.st_mtime, status.st_size, path

    def _warn(self, what: str, why: str) -> None:
        metrics.count(f"disk_cache_{what}_error")
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                f"torch_tpu's cache of compiled programs in {self.folder} {why}: programs are compiled anew. "
                "TORCH_TPU_CACHE_DIR names another folder, or none if it is empty.",
                stacklevel=2,
            )


def _checksum(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode() + payload).digest()


def default_folder() -> Path:
    return platformdirs.user_cache_path("torch_tpu", appauthor=False)


def from_environment(environ: Mapping[str, str] = os.environ) -> DiskCache | None:
    """The cache that `TORCH_TPU_CACHE_DIR` (empty: none) and `TORCH_TPU_CACHE_BYTES` (its limit) ask for.

    Raises:
        ValueError: where the limit is not a number of bytes.
    """
    named = environ.get("TORCH_TPU_CACHE_DIR")
    if named == "":
        return None
    limit = environ.get("TORCH_TPU_CACHE_BYTES", str(DEFAULT_LIMIT_BYTES))
    if not limit.isdecimal():
        raise ValueError(f"TORCH_TPU_CACHE_BYTES must be a number of bytes, got {limit!r}")
    try:
        folder = Path(named).expanduser() if named else default_folder()
    except RuntimeError:  # a user without a home
        return None
    return DiskCache(folder, int(limit))
