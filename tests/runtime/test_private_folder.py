"""What others own or may write is neither read nor written; folders and files are the user's alone under any umask.

Nothing here needs another user: whose a file is, is compared with what `os.geteuid` says.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_tpu import metrics
from torch_tpu.runtime import private_folder
from torch_tpu.runtime.disk_cache import DiskCache
from torch_tpu.runtime.private_folder import NotPrivate

KEY, OTHER = "ab" + "0" * 62, "cd" + "1" * 62


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o077)
    os.umask(before)
    yield lambda mask: (os.umask(mask), None)[1]
    os.umask(before)


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    made = DiskCache(tmp_path / "cache")
    assert made.write(KEY, b"of the user")
    return made


@pytest.fixture
def as_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)


def is_refused(cache: DiskCache, key: str, match: str) -> None:
    """The entry is neither read nor written nor removed, and one warning says what to do."""
    path = cache.path(key)
    before = path.read_bytes() if path.exists() else None
    counted = metrics.counters().get("disk_cache_refused", 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert cache.read(key) is None
            assert not cache.write(key, b"new")
            with cache.lock(key):
                pass
    (warned,) = caught
    assert re.search(match, str(warned.message)), warned.message
    assert "TORCH_TPU_CACHE_DIR" in str(warned.message)
    assert (path.read_bytes() if path.exists() else None) == before
    assert metrics.counters()["disk_cache_refused"] >= counted + 4
    assert re.search(match, cache.why_unused())


@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o277, 0o777])
def test_all_that_is_made_is_the_users_alone(tmp_path: Path, umask: Callable[[int], None], mask: int) -> None:
    umask(mask)
    cache = DiskCache(tmp_path / "new" / "parent" / "cache")
    assert cache.write(KEY, b"payload")
    with cache.lock(KEY):
        pass
    assert cache.write(KEY, b"again")
    assert cache.read(KEY) == b"again"
    umask(0o022)
    modes = {str(p.relative_to(tmp_path)): p.stat().st_mode & 0o777 for p in (tmp_path / "new").rglob("*")}
    entry = str(cache.path(KEY).relative_to(tmp_path))
    folders = ["new/parent", "new/parent/cache", "new/parent/cache/ab", "new/parent/cache/locks"]
    assert modes == {**dict.fromkeys(folders, 0o700), entry: 0o600, "new/parent/cache/locks/ab0": 0o600}
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702, 0o720])
def test_a_folder_that_others_may_write(cache: DiskCache, mode: int) -> None:
    cache.folder.chmod(mode)
    is_refused(cache, KEY, rf"other users may write to {cache.folder} .*`chmod -R go-w {cache.folder}`")
    is_refused(DiskCache(cache.folder), OTHER, "other users may write to")
    assert cache.clear() == 0
    assert cache.stats().entries == 0
    cache.folder.chmod(0o755)
    assert cache.read(KEY) == b"of the user"
    assert cache.why_unused() == ""


def test_a_part_that_others_may_write(cache: DiskCache) -> None:
    """The rest of the cache stays in use."""
    (cache.folder / "ab").chmod(0o775)
    is_refused(cache, KEY, f"other users may write to {cache.folder / 'ab'} ")
    assert cache.write(OTHER, b"payload")
    assert cache.read(OTHER) == b"payload"
    assert cache.stats().entries == 1


def test_an_entry_that_others_may_write(cache: DiskCache) -> None:
    cache.path(KEY).chmod(0o666)
    is_refused(cache, KEY, f"chmod -R go-w {cache.path(KEY)}")
    cache.path(KEY).chmod(0o644)
    assert cache.read(KEY) == b"of the user"


def test_what_belongs_to_somebody_else(cache: DiskCache, request: pytest.FixtureRequest) -> None:
    """As a cache that root filled is to an ordinary user, and one of an ordinary user to root."""
    assert cache.read(KEY) == b"of the user"
    request.getfixturevalue("as_somebody_else")
    is_refused(cache, KEY, rf"{cache.folder} belongs to \S+, not to \S+\. .*`sudo chown -R \S+ {cache.folder}`")


def test_an_entry_of_somebody_else_in_an_own_folder(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    original, entry = os.fstat, os.stat(cache.path(KEY))

    def fstat(descriptor: int) -> os.stat_result:
        status = original(descriptor)
        if os.path.samestat(status, entry):
            status = os.stat_result((*status[:4], status.st_uid + 1, *status[5:]))
        return status

    monkeypatch.setattr(os, "fstat", fstat)
    is_refused(cache, KEY, f"{cache.path(KEY)} belongs to ")
    monkeypatch.undo()
    assert cache.clear() == 1  # its folder is the user's own


def test_links_are_not_followed(cache: DiskCache, tmp_path: Path) -> None:
    assert cache.write(OTHER, b"real")

    def replace_by_link(path: Path) -> None:
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)

    replace_by_link(cache.path(OTHER))
    is_refused(cache, OTHER, f"{cache.path(OTHER)} is a symbolic link.*`rm ")
    replace_by_link(cache.path(KEY).parent)
    is_refused(DiskCache(cache.folder), KEY, f"{cache.folder / 'ab'} is a symbolic link")
    assert cache.clear() == 1  # the link
    assert (tmp_path / cache.path(OTHER).name).exists()
    assert (tmp_path / "ab" / cache.path(KEY).name).exists()


def test_a_link_that_comes_between_looking_and_opening(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is opened is what is looked at: the first look is only for the message."""
    cache.path(KEY).rename(cache.folder / "elsewhere")
    cache.path(KEY).symlink_to(cache.folder / "elsewhere")
    monkeypatch.setattr(private_folder, "_check_no_link", lambda *_: None)
    with pytest.warns(UserWarning, match="can't be read"):
        assert cache.read(KEY) is None


def test_the_folder_itself_may_be_reached_through_a_link(cache: DiskCache, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cache.folder)
    assert DiskCache(tmp_path / "link").read(KEY) == b"of the user"


def test_a_pipe_in_the_place_of_an_entry_stops_nothing(cache: DiskCache) -> None:
    cache.path(KEY).unlink()
    os.mkfifo(cache.path(KEY), 0o600)
    with pytest.warns(UserWarning, match="can't be read"):
        assert cache.read(KEY) is None


@pytest.mark.usefixtures("as_somebody_else")
def test_a_folder_that_anybody_may_exchange(tmp_path: Path) -> None:
    """Seen by somebody to whom no folder above is closed."""
    tmp_path.chmod(0o777)
    with pytest.raises(NotPrivate, match=f"every user may replace what is in {tmp_path}") as caught:
        private_folder.make(tmp_path / "cache")
    assert caught.value.remedy == f"chmod o-w {tmp_path}"
    assert not (tmp_path / "cache").exists()
    tmp_path.chmod(0o1777)  # as /tmp is
    private_folder.check_above(tmp_path / "cache")
    tmp_path.chmod(0o770)  # what is opened there is looked at itself
    private_folder.check_above(tmp_path / "cache")
    with pytest.raises(NotPrivate, match=r"belongs to|a group of users may replace"):
        private_folder.check_above(tmp_path / "cache", by_path=True)


def test_a_folder_that_only_the_user_can_enter_guards_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed").chmod(0o700)
    (tmp_path / "closed" / "open").mkdir()
    (tmp_path / "closed" / "open").chmod(0o777)
    private_folder.check_above(tmp_path / "closed" / "open" / "cache", by_path=True)


def test_a_tree_that_is_opened_by_path(tmp_path: Path) -> None:
    tree = tmp_path / "whole" / "tree"
    private_folder.make(tree)
    (tree / "of an umask").mkdir()
    (tree / "of an umask").chmod(0o777)
    (tree / "of an umask" / "entry").write_bytes(b"")
    private_folder.check_tree(tree)  # nobody else can enter it
    tree.chmod(0o755)
    with pytest.raises(NotPrivate, match=r"other users may write to .*of an umask") as caught:
        private_folder.check_tree(tree)
    assert caught.value.remedy == f"chmod -R go= {tree}"
    (tree / "of an umask").chmod(0o755)
    private_folder.check_tree(tree)
    (tmp_path / "whole").chmod(0o775)
    with pytest.raises(NotPrivate, match="other users may write to"):
        private_folder.check_tree(tree)
    (tmp_path / "whole").chmod(0o755)
    (tree / "link").symlink_to(tmp_path)
    with pytest.raises(NotPrivate, match="symbolic link"):
        private_folder.check_tree(tree)
