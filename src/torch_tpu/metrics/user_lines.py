"""Where in the user's program something happened: cheap to take (half a microsecond), made readable when asked for."""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
from types import CodeType, FrameType

# Code and the instruction it was at: cheaper to take than a line.
CallSite = tuple[CodeType, int] | None

_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_torch = importlib.util.find_spec("torch")
_TORCH = tuple(os.path.join(folder, "") for folder in (_torch and _torch.submodule_search_locations) or ())
# Files of the standard library lie there, those of installed packages below it.
_PACKAGES = ("site-packages", "dist-packages")
# Frozen modules, and what FX generates.
_GENERATED = ("<frozen", "<eval_with_key")
# Installed with torch, and around its deprecated functions.
_AROUND_TORCH = (os.sep + "typing_extensions.py",)

_user_files: dict[str, bool] = {}


def is_user_code(code: CodeType) -> bool:
    """Whether code belongs neither to torch nor to this package nor to Python."""
    name = code.co_filename
    found = _user_files.get(name)
    if found is None:
        if len(_user_files) > 65536:
            _user_files.clear()
        standard = name.startswith(_STANDARD_LIBRARY) and not any(p in name for p in _PACKAGES)
        standard = standard or name.endswith(_AROUND_TORCH)
        found = _user_files[name] = not standard and not name.startswith((_OWN, *_TORCH, *_GENERATED))
    return found


def here(depth: int = 1) -> CallSite:
    """The innermost place of the user's program in this thread, looked for from `depth` frames above the caller on."""
    try:
        frame: FrameType | None = sys._getframe(depth)
    except ValueError:  # called from C++, with fewer frames above
        return None
    while frame is not None:
        code = frame.f_code
        found = _user_files.get(code.co_filename)
        if found or (found is None and is_user_code(code)):
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def here_or_backward() -> CallSite:
    """`here`, or the call of `backward` that waits in another thread where PyTorch runs this one for it."""
    return here(2) or next(filter(None, map(_of_backward, sys._current_frames().values())), None)


def user_frame() -> FrameType | None:
    """The frame of `here_or_backward`."""
    found = _innermost_of_user(sys._getframe(1))
    return found or next(filter(None, map(_frame_of_backward, sys._current_frames().values())), None)


def _of_backward(innermost: FrameType) -> CallSite:
    frame = _frame_of_backward(innermost)
    return None if frame is None else (frame.f_code, frame.f_lasti)


def _frame_of_backward(innermost: FrameType) -> FrameType | None:
    """Where the user's program called `backward`, in a thread whose innermost frame is inside of that."""
    if not innermost.f_code.co_filename.endswith(os.path.join("torch", "autograd", "graph.py")):
        return None
    return _innermost_of_user(innermost)


def _innermost_of_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
    return frame


def line_of(place: CallSite) -> int:
    """The line number of a place; 0 where it is unknown."""
    if place is None:
        return 0
    code, instruction = place
    line = next((line for k, (line, *_) in enumerate(code.co_positions()) if 2 * k == instruction), None)
    return line or code.co_firstlineno


def where(place: CallSite) -> str:
    """`file:line` of a place."""
    return "an unknown place" if place is None else f"{place[0].co_filename}:{line_of(place)}"


def source_of(place: CallSite) -> str:
    """The source text of a place's line, where the file is still there."""
    return "" if place is None else linecache.getline(place[0].co_filename, line_of(place)).strip()
