"""Compiled programs on disk: shared between processes, bounded in size, safe against crashes and damaged files.

An entry is one file, named by the digest of everything that decides the program (`runtime.fingerprint`). Whatever is
wrong with the folder or a file costs a compilation and a warning, never an error. The files are machine code: folders
and files are made for the user alone, and what others own or may write is neither read nor written
(`runtime.private_folder`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from torch_tpu import metrics
from torch_tpu.metrics.user_warnings import warn
from torch_tpu.runtime import private_folder
from torch_tpu.runtime.private_folder import PRIVATE_FILE, NotPrivate

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
        return self.folder / key[:2] / _name(key)

    def read(self, key: str) -> bytes | None:
        """The entry of this key, or None where there is none or it is damaged; a damaged one is removed."""
        try:
            with self._opened(key[:2]) as folder, private_folder.read(folder, _name(key), self.path(key)) as file:
                content = file.read()
                head = len(MAGIC) + 32
                payload = content[head:]
                is_whole = content[: len(MAGIC)] == MAGIC and content[len(MAGIC) : head] == _checksum(key, payload)
                if is_whole:
                    with contextlib.suppress(OSError):
                        os.utime(file.fileno())
        except FileNotFoundError:
            return None
        except NotPrivate as error:
            self._refuse(error)
            return None
        except OSError as error:
            self._warn("read", f"can't be read ({error.strerror})")
            return None
        if not is_whole:
            self.reject(key, "is damaged or was not written by torch_tpu")
            return None
        return payload

    def write(self, key: str, payload: bytes) -> bool:
        """Stores an entry, of which readers see all or nothing; returns whether it is there."""
        try:
            with self._opened(key[:2], make=True) as folder:
                self._write(folder, key, payload)
        except NotPrivate as error:
            self._refuse(error)
            return False
        except OSError as error:
            self._warn("write", f"can't be written ({error.strerror})")
            return False
        self._until_look -= len(payload)
        if self._until_look < 0:
            self._until_look = self.limit // 32
            self.shrink()
        return True

    def _write(self, folder: int, key: str, payload: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            private_folder.read(folder, _name(key), self.path(key)).close()  # what stands there is the user's own
        temporary = f"{secrets.token_hex(8)}.tmp"
        try:
            with private_folder.create(folder, temporary) as file:
                file.write(MAGIC + _checksum(key, payload) + payload)
            os.replace(temporary, _name(key), src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise

    def reject(self, key: str, why: str) -> None:
        """Removes an entry that can't be used."""
        warn(f"torch_tpu compiles a program again: the cached {_name(key)} {why}.")
        self._remove(key[:2], _name(key))

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held while a program is compiled, so that processes that need the same one at the same time wait for it.

        A few programs share a lock: the keys' first three digits choose one of 4,096 lock files.
        """
        import filelock  # takes as long as reading several entries, and who finds all of them needs none

        held = None
        try:
            with self._opened("locks", make=True):
                path = self.folder / "locks" / key[:3]
            held = filelock.FileLock(path, timeout=LOCK_SECONDS, mode=PRIVATE_FILE, poll_interval=0.01)
            held.acquire()
        except NotPrivate as error:
            held = None
            self._refuse(error)
        except (OSError, NotImplementedError):  # filelock's Timeout is an OSError
            held = None
        try:
            yield
        finally:
            if held is not None:
                held.release()

    def stats(self) -> Stats:
        sizes = [size for _, size, _, name in self._files() if name.endswith(SUFFIX)]
        return Stats(len(sizes), sum(sizes))

    def shrink(self) -> None:
        """Removes what killed writers left and, where the entries exceed the limit, those not used for longest."""
        entries = []
        for used, size, folder, name in self._files():
            if name.endswith(SUFFIX):
                entries.append((used, size, folder, name))
            elif name.endswith(".tmp") and time.time() - used > STALE_SECONDS:
                self._remove(folder, name)
        total = sum(size for _, size, *_ in entries)
        if total <= self.limit:
            return
        for _, size, folder, name in sorted(entries):
            self._remove(folder, name)
            total -= size
            if total <= self.limit * SHRUNK:
                break

    def clear(self) -> int:
        """Removes every entry; returns how many there were."""
        removed = 0
        for _, _, folder, name in list(self._files()):
            if name.endswith((SUFFIX, ".tmp")):
                removed += self._remove(folder, name) and name.endswith(SUFFIX)
        return removed

    def why_unused(self) -> str:
        """Why the cache, or the first part of it that is not, is not used, and what to do; empty if all of it is."""
        try:
            with private_folder.opened(self.folder) as root:
                for name in _folders_in(root):
                    path = self.folder / name
                    with private_folder.opened_in(root, name, path) as folder:
                        for entry in sorted(n for n in os.listdir(folder) if n.endswith(SUFFIX)):
                            private_folder.read(folder, entry, path / entry).close()
        except FileNotFoundError:
            return ""
        except NotPrivate as error:
            return self._advice(error)
        except OSError as error:
            return f"{error.filename or self.folder} can't be read ({error.strerror})."
        return ""

    @contextlib.contextmanager
    def _opened(self, name: str, make: bool = False) -> Iterator[int]:
        """The descriptor of a folder of the cache."""
        if make:
            private_folder.make(self.folder)
        with private_folder.opened(self.folder) as root:
            if make:
                private_folder.make_in(root, name)
            with private_folder.opened_in(root, name, self.folder / name) as folder:
                yield folder

    def _files(self) -> Iterator[tuple[float, int, str, str]]:
        """(time of last use, size in bytes, folder, name) of every file; other processes may remove some meanwhile."""
        folders: list[str] = []
        with contextlib.suppress(OSError, NotPrivate), private_folder.opened(self.folder) as root:
            folders = _folders_in(root)
        for name in folders:
            with contextlib.suppress(OSError, NotPrivate), self._opened(name) as folder:
                for file in os.listdir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        status = os.stat(file, dir_fd=folder, follow_symlinks=False)
                        yield status.st_mtime, status.st_size, name, file

    def _remove(self, folder: str, name: str) -> bool:
        """Removes a file, if it is there; returns whether it was."""
        with contextlib.suppress(OSError, NotPrivate), self._opened(folder) as descriptor:
            os.unlink(name, dir_fd=descriptor)
            return True
        return False

    def _refuse(self, error: NotPrivate) -> None:
        metrics.count("disk_cache_refused")
        if "refused" not in self._warned:
            self._warned.add("refused")
            advice = self._advice(error)
            warn(f"torch_tpu does not use its cache of compiled programs and compiles them again: {advice}")

    def _advice(self, error: NotPrivate) -> str:
        return (
            f"{error}. Programs that somebody else wrote there would run as code. If you trust what is there, "
            f"`{error.remedy}` makes it usable. TORCH_TPU_CACHE_DIR chooses another folder (a file system without "
            "owners and modes can't hold the cache); set it to nothing to keep no programs."
        )

    def _warn(self, what: str, why: str) -> None:
        metrics.count(f"disk_cache_{what}_error")
        if what not in self._warned:
            self._warned.add(what)
            warn(
                f"torch_tpu's cache of compiled programs in {self.folder} {why}. Programs are compiled again. "
                "TORCH_TPU_CACHE_DIR chooses another folder; set it to nothing to keep no programs."
            )


def _name(key: str) -> str:
    return f"{key}{SUFFIX}"


def _folders_in(root: int) -> list[str]:
    """The names of the folders that hold entries, in the folder of a cache."""
    return sorted(name for name in os.listdir(root) if re.fullmatch("[0-9a-f]{2}", name))


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
    return _opened(folder, int(limit))


@functools.lru_cache(maxsize=16)
def _opened(folder: Path, limit: int) -> DiskCache:
    """One object for a folder: what is wrong with it is said once."""
    return DiskCache(folder, limit)
