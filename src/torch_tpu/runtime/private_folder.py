"""Folders that are the user's alone: made so whatever the umask, and looked at before anything in them is used.

What lies in a cache is code. So a folder or file is used only if it belongs to the user of this process and nobody else
may write it. Both are asked of the open descriptor, and what is inside a folder is reached from its descriptor: whoever
exchanges a folder or file meanwhile gains nothing. Root uses nothing but its own either: it would run what an ordinary
user wrote.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
# A pipe in the place of a file must not stop the process.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY


class NotPrivate(Exception):
    """A folder or file that somebody else may have written.

    Attributes:
        remedy: the command that helps, if nobody did.
    """

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


def check(status: os.stat_result, path: Path) -> None:
    """Looks at the owner and mode of a folder or file.

    Raises:
        NotPrivate: where it is not the user's own, or others may write it.
    """
    if status.st_uid != os.geteuid():
        own = _user(os.geteuid())
        raise NotPrivate(
            f"{path} belongs to {_user(status.st_uid)}, not to {own}", f"sudo chown -R {own} {_quoted(path)}"
        )
    if status.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise NotPrivate(f"other users may write to {path} (mode {mode:04o})", f"chmod -R go-w {_quoted(path)}")


def _quoted(path: Path | str) -> str:
    return shlex.quote(str(path))


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


# --- making ------------------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, for the user alone.

    Raises:
        NotPrivate: where others could exchange it.
        OSError: where it can't be made.
    """
    check_above(folder)
    _make(folder)


def _make(folder: Path) -> None:
    try:
        os.mkdir(folder, PRIVATE_FOLDER)
    except FileExistsError:
        return
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        _make(folder.parent)
        _make(folder)
        return
    if stat.S_IMODE(os.lstat(folder).st_mode) & 0o777 != PRIVATE_FOLDER:  # the umask took rights of the user
        os.chmod(folder, PRIVATE_FOLDER)


def make_in(parent: int, name: str) -> None:
    """Makes a folder for the user alone, in a folder that is open."""
    try:
        os.mkdir(name, PRIVATE_FOLDER, dir_fd=parent)
    except FileExistsError:
        return
    if os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode & 0o777 != PRIVATE_FOLDER:
        os.chmod(name, PRIVATE_FOLDER, dir_fd=parent)


def create(parent: int, name: str) -> BinaryIO:
    """A new file for the user alone, open for writing, in a folder that is open."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(name, flags, PRIVATE_FILE, dir_fd=parent)
    os.fchmod(descriptor, PRIVATE_FILE)
    return os.fdopen(descriptor, "wb")


# --- opening -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """The descriptor of a folder, which may be reached through symbolic links.

    Raises:
        NotPrivate, OSError
    """
    check_above(folder)
    descriptor = os.open(folder, _FOLDER)
    try:
        check(os.fstat(descriptor), folder)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened_in(parent: int, name: str, path: Path) -> Iterator[int]:
    """The descriptor of a folder in a folder that is open; `path` is what it is called in errors.

    Raises:
        NotPrivate, OSError
    """
    _check_no_link(parent, name, path)
    descriptor = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    try:
        check(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def read(parent: int, name: str, path: Path) -> BinaryIO:
    """A file in a folder that is open, itself open for reading; `path` is what it is called in errors.

    Raises:
        NotPrivate, OSError
    """
    _check_no_link(parent, name, path)
    descriptor = os.open(name, _READ | os.O_NOFOLLOW, dir_fd=parent)
    try:
        status = os.fstat(descriptor)
        check(status, path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_no_link(parent: int, name: str, path: Path) -> None:
    # Only for the message: opening does not follow a link either.
    if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        raise NotPrivate(f"{path} is a symbolic link", f"rm {_quoted(path)}")


# --- what lies above, and folders that others open by path -------------------------------------------------------


def check_above(folder: Path, by_path: bool = False) -> None:
    """Looks at the folders above one, by whose rights it could be exchanged.

    A folder that everybody may write, without the bit that keeps what is there with its owner ("sticky", as /tmp has
    it), is refused. A group that may write, or another owner, is accepted: what is opened is looked at itself.

    Args:
        by_path: what is in the folder will be opened by its path. Then a group of more than the user, and owners
            but the user and root, are refused too.

    Raises:
        NotPrivate
    """
    above = {p: None for path in (folder.absolute(), folder.resolve()) for p in reversed(path.parents)}
    for path in above:
        try:
            status = path.stat()
        except OSError:
            continue  # it is not there yet, and will be made
        if status.st_uid == os.geteuid() and not status.st_mode & (_OTHERS_WRITE | _OTHERS_ENTER):
            return  # others get no further
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
        if status.st_mode & stat.S_IWOTH and not is_sticky:
            raise NotPrivate(f"every user may replace what is in {path}", f"chmod o-w {_quoted(path)}")
        if by_path and status.st_uid not in (0, os.geteuid()):
            raise NotPrivate(
                f"{path} belongs to {_user(status.st_uid)}", f"sudo chown {_user(os.geteuid())} {_quoted(path)}"
            )
        if by_path and status.st_mode & stat.S_IWGRP and not is_sticky and not _is_own_group(status.st_gid):
            raise NotPrivate(f"a group of users may replace what is in {path}", f"chmod g-w {_quoted(path)}")


def _is_own_group(number: int) -> bool:
    """Whether a group has no member but the user, as Linux distributions make one for each user."""
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return user.pw_gid == number and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def check_tree(folder: Path) -> None:
    """Looks at a folder with all that is in it, for somebody who opens it by path and makes files by the umask.

    Where only the user can enter the folder, modes inside of it don't matter.

    Raises:
        NotPrivate
    """
    check_above(folder, by_path=True)
    status = folder.stat()
    is_closed = not status.st_mode & (_OTHERS_WRITE | _OTHERS_ENTER)
    try:
        check(status, folder)
        if not is_closed:
            check(folder.parent.stat(), folder.parent)
        for path, inside in _all_in(folder):
            if stat.S_ISLNK(inside.st_mode):
                raise NotPrivate(f"{path} is a symbolic link", f"rm {_quoted(path)}")
            if inside.st_uid != os.geteuid() or not is_closed:
                check(inside, path)
    except NotPrivate as error:
        if error.remedy.startswith("chmod"):
            error.remedy = f"chmod -R go= {_quoted(folder)}"
        raise


def _all_in(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    status = entry.stat(follow_symlinks=False)
                    yield Path(entry.path), status
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(Path(entry.path))
