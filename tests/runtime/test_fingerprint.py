"""What programs are told apart by."""

from __future__ import annotations

from pathlib import Path

from torch_tpu.runtime import fingerprint
from torch_tpu.runtime.process_client import client


def test_another_build_of_a_plugin_is_another_compiler(tmp_path: Path) -> None:
    """A plug-in may call each of its builds "PJRT C API"."""
    builds = [tmp_path / "old.so", tmp_path / "new.so", tmp_path / "copy of the old.so"]
    for path, content in zip(builds, (b"build 1", b"build 2", b"build 1"), strict=True):
        path.write_bytes(content)
    old, new, copy = (fingerprint.of_client(client().device, path) for path in builds)
    assert old == copy != new
    assert fingerprint.of_client(client().device) not in (old, new)
