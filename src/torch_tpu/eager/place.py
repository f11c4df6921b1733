"""Where in the user's program an operator is called: taken for every recorded operator, put into words when needed."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from torch_tpu.tensor.errors import is_user_code

# Code and instruction, which are cheaper to take than a line.
Place = tuple[CodeType, int] | None


def here() -> Place:
    """The innermost place that belongs neither to torch nor to this package, from the caller's third caller on."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        if is_user_code(frame.f_code):
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None


def where(place: Place) -> str:
    """`file:line` of a place."""
    if place is None:
        return "an unknown place"
    code, instruction = place
    line = next((line for k, (line, *_) in enumerate(code.co_positions()) if 2 * k == instruction), None)
    return f"{code.co_filename}:{line or code.co_firstlineno}"
