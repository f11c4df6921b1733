"""Warnings that name the user's line: Python shows each once per line, and its filters work by the user's module.

`warnings.warn` with a stack level would name whatever lies so many frames above: a file of this package, of PyTorch or
of the library that called it.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch_tpu.metrics import user_lines
from torch_tpu.metrics.user_lines import CallSite
from torch_tpu.recent import Recent

# What Python has shown for lines whose frames are gone, by file; for others it keeps that in their module.
_shown: Recent[str, dict[Any, Any]] = Recent(1000)
_MOST_SHOWN = 1000


def warn(message: str, category: type[Warning] = UserWarning, place: CallSite = None) -> None:
    """Warns of what the user's program does, at the line that it is at.

    Args:
        place: the line, if that is not where the program is now.
    """
    frame = user_lines.user_frame()
    if frame is not None and place in (None, (frame.f_code, frame.f_lasti)):
        names = frame.f_globals
        warnings.warn_explicit(
            message,
            category,
            frame.f_code.co_filename,
            frame.f_lineno,
            module=names.get("__name__") or frame.f_code.co_filename,
            registry=names.setdefault("__warningregistry__", {}),
        )
    elif place is not None:
        file = place[0].co_filename
        shown = _shown.find(file) or _shown.keep(file, {})
        if len(shown) > _MOST_SHOWN:
            shown.clear()
        warnings.warn_explicit(message, category, file, user_lines.line_of(place), registry=shown)
    else:
        warnings.warn(message, category, stacklevel=2)
