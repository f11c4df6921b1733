"""The C library's heap under XLA:CPU, which takes memory for results and intermediates anew for every program.

glibc gives freed memory back to the kernel, so the next program pays for each page again: up to three times the time of
the program itself.
"""

from __future__ import annotations

import ctypes
import os
import platform

# Numbers of malloc.h, and the largest that glibc takes for the last.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_ON_THE_HEAP, _KEPT, _THREAD_HEAP = 32 * 2**20, 2**30, 64 * 2**20


def keep_freed_memory() -> None:
    """Keeps freed memory (blocks below 32 MiB, 1 GiB in all) in the process, unless the user has tuned malloc."""
    tuned = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    if platform.libc_ver()[0] != "glibc" or tuned or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_THRESHOLD, _LARGEST_ON_THE_HEAP)
    mallopt(_TRIM_THRESHOLD, _KEPT)
    # Of XLA's threads, whose heaps are cut into pieces of this size, each given back when it is empty.
    mallopt(_TOP_PAD, _THREAD_HEAP)
