"""How close this process is to Linux's limit on memory mappings.

XLA:CPU maps memory three times and more for each loaded program, and a process that runs out of mappings crashes.
"""

from __future__ import annotations

from pathlib import Path

MAPS = Path("/proc/self/maps")
LIMIT = Path("/proc/sys/vm/max_map_count")
# Looking takes up to 40 ms, for a process with very many.
LOADS_BETWEEN_LOOKS = 256
NEAR = 0.7


class Watch:
    """Counts loaded programs and looks at the mappings now and then."""

    def __init__(self) -> None:
        self._loads = 0

    def is_near_limit(self) -> bool:
        """Whether more than `NEAR` of the mappings are used; to be asked before each program is loaded.

        False between looks, and where the system does not say.
        """
        self._loads += 1
        if self._loads % LOADS_BETWEEN_LOOKS:
            return False
        try:
            return MAPS.read_bytes().count(b"\n") > NEAR * int(LIMIT.read_text())
        except (OSError, ValueError):
            return False
