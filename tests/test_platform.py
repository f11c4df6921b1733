"""Platform choice: from environments and PCI trees made up for the test, so it needs no TPU and no libtpu."""

import re
import sys
from pathlib import Path

import pytest

from torch_tpu.runtime import platform
from torch_tpu.runtime.generations import GIB
from torch_tpu.runtime.platform import PlatformError, choose, find_chips, find_libtpu, generation_named


def make_pci(root: Path, devices: dict[str, tuple[str, str]]) -> Path:
    """A folder like /sys/bus/pci/devices with a vendor and a device id for each address."""
    root.mkdir()
    for address, (vendor, device) in devices.items():
        (root / address).mkdir()
        (root / address / "vendor").write_text(f"{vendor}\n")
        (root / address / "device").write_text(f"{device}\n")
    return root


@pytest.fixture
def no_chips(tmp_path):
    return make_pci(tmp_path / "no_chips", {"0000:00:00.0": ("0x8086", "0x1237")})


@pytest.fixture
def two_v5e(tmp_path):
    return make_pci(
        tmp_path / "two_v5e",
        {
            "0000:00:06.0": ("0x1ae0", "0x0063"),
            "0000:00:05.0": ("0x1ae0", "0x0063"),
            "0000:00:04.0": ("0x1ae0", "0x0042"),  # Google's network card
            "0000:00:03.0": ("0x10de", "0x0063"),  # the id of a v5e from another vendor
        },
    )


@pytest.fixture
def library(tmp_path):
    file = tmp_path / "libtpu.so"
    file.touch()
    return file


@pytest.fixture
def libtpu_package(tmp_path, monkeypatch):
    """Makes the import system find a package `libtpu` that fails when it is imported."""
    package = tmp_path / "packages" / "libtpu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('libtpu was imported')")
    (package / "libtpu.so").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    # jaxlib's or a test's import of the real one would be found first.
    monkeypatch.delitem(sys.modules, "libtpu", raising=False)
    return package / "libtpu.so"


@pytest.fixture
def no_libtpu_package(monkeypatch):
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: None)


def test_chips_come_in_order_of_address_and_only_from_google(two_v5e):
    chips = find_chips(two_v5e)
    assert [(chip.pci_address, chip.generation.name) for chip in chips] == [
        ("0000:00:05.0", "TPU v5e"),
        ("0000:00:06.0", "TPU v5e"),
    ]


@pytest.mark.parametrize(
    ("device_id", "name"),
    [("0x005e", "TPU v4"), ("0x0062", "TPU v5p"), ("0x0063", "TPU v5e"), ("0x006f", "TPU v6e"), ("0x0076", "TPU v7")],
)
def test_pci_id_tells_the_generation(tmp_path, device_id, name):
    (chip,) = find_chips(make_pci(tmp_path / "pci", {"0000:00:05.0": ("0x1ae0", device_id)}))
    assert chip.generation.name == name


def test_no_pci_bus_and_unreadable_entries_mean_no_chips(tmp_path):
    assert find_chips(tmp_path / "missing") == ()
    pci = make_pci(tmp_path / "pci", {"0000:00:05.0": ("not a number", "0x0063")})
    (pci / "0000:00:06.0").mkdir()
    assert find_chips(pci) == ()


# The device kinds are what libtpu 0.0.52 reports for compile-only topologies of each generation.
@pytest.mark.parametrize(
    ("device_kind", "name", "chip_gib", "device_gib"),
    [
        ("TPU v4", "TPU v4", 32, 32),
        ("TPU v5 lite", "TPU v5e", 16, 16),
        ("TPU v5", "TPU v5p", 95, 95),
        ("TPU v6 lite", "TPU v6e", 32, 32),
        ("TPU7x", "TPU v7", 192, 96),
    ],
)
def test_device_kind_tells_name_and_memory(device_kind, name, chip_gib, device_gib):
    generation = generation_named(device_kind)
    assert generation is generation_named(name)
    assert generation.name == name
    assert generation.hbm_bytes_per_chip == chip_gib * GIB
    assert generation.hbm_bytes_per_device == device_gib * GIB


def test_unknown_generation_is_an_error_that_lists_the_known_ones():
    with pytest.raises(PlatformError, match=r"'TPU v3' .*TPU v4, TPU v5e, TPU v5p, TPU v6e, TPU v7"):
        generation_named("TPU v3")


def test_libtpu_comes_from_the_package_without_importing_it(libtpu_package):
    assert find_libtpu({}) == libtpu_package


def test_tpu_library_path_wins_over_the_package(libtpu_package, library):
    assert find_libtpu({"TPU_LIBRARY_PATH": str(library)}) == library


def test_tpu_library_path_must_be_a_file(tmp_path):
    with pytest.raises(PlatformError, match=r"TPU_LIBRARY_PATH names .*missing\.so.*not a file"):
        find_libtpu({"TPU_LIBRARY_PATH": str(tmp_path / "missing.so")})


def test_no_libtpu_anywhere(no_libtpu_package):
    assert find_libtpu({}) is None


@pytest.mark.parametrize("environ", [{}, {"TORCH_TPU_PLATFORM": ""}, {"TORCH_TPU_PLATFORM": "auto"}])
def test_without_chips_the_default_is_the_cpu_as_a_v5e(no_chips, libtpu_package, environ):
    chosen = choose(environ, no_chips)
    assert (chosen.name, chosen.plugin_path, chosen.chips) == ("cpu", None, ())
    assert chosen.generation("cpu").name == "TPU v5e"
    assert chosen.reason == "no TPU chips on the PCI bus"


def test_chips_and_libtpu_choose_the_tpu(two_v5e, library):
    chosen = choose({"TPU_LIBRARY_PATH": str(library)}, two_v5e)
    assert (chosen.name, chosen.plugin_path, len(chosen.chips)) == ("tpu", library, 2)


def test_chips_without_libtpu_run_on_the_cpu_with_a_warning(two_v5e, no_libtpu_package):
    with pytest.warns(UserWarning, match=r"2 TPU chips.*XLA:CPU.*pip install 'torch-tpu\[tpu\]'"):
        chosen = choose({}, two_v5e)
    assert chosen.name == "cpu"
    assert len(chosen.chips) == 2


def test_cpu_can_be_asked_for_beside_chips(two_v5e, library):
    chosen = choose({"TORCH_TPU_PLATFORM": "cpu", "TPU_LIBRARY_PATH": str(library)}, two_v5e)
    assert (chosen.name, chosen.plugin_path, chosen.reason) == ("cpu", None, "TORCH_TPU_PLATFORM=cpu")


def test_tpu_can_be_asked_for_where_no_chip_shows(no_chips, library):
    chosen = choose({"TORCH_TPU_PLATFORM": "tpu", "TPU_LIBRARY_PATH": str(library)}, no_chips)
    assert (chosen.name, chosen.plugin_path) == ("tpu", library)


def test_tpu_without_libtpu_says_how_to_get_it(no_chips, no_libtpu_package):
    with pytest.raises(PlatformError, match=r"libtpu is not installed.*pip install 'torch-tpu\[tpu\]'"):
        choose({"TORCH_TPU_PLATFORM": "tpu"}, no_chips)


def test_another_plugin_by_name_and_path(no_chips, library):
    chosen = choose({"TORCH_TPU_PLATFORM": f"cuda:{library}"}, no_chips)
    assert (chosen.name, chosen.plugin_path) == ("cuda", library)
    assert chosen.generation("NVIDIA H100").name == "TPU v5e"


def test_the_plugin_must_be_a_file(no_chips, tmp_path):
    with pytest.raises(PlatformError, match=r"TORCH_TPU_PLATFORM names .*not a file"):
        choose({"TORCH_TPU_PLATFORM": f"cuda:{tmp_path}"}, no_chips)


@pytest.mark.parametrize("value", ["gpu", "TPU", "cuda:", ":plugin.so", "my plugin:plugin.so", "cpu:plugin.so"])
def test_a_value_that_means_nothing_is_an_error_that_lists_the_choices(no_chips, value):
    with pytest.raises(PlatformError, match=f"{re.escape(repr(value))}.*auto, cpu, tpu.*NAME:PATH"):
        choose({"TORCH_TPU_PLATFORM": value}, no_chips)


def test_the_stand_in_can_be_named_by_either_of_its_names(no_chips):
    for name in ("TPU v6e", "TPU v6 lite"):
        chosen = choose({"TORCH_TPU_DEVICE_NAME": name}, no_chips)
        assert chosen.generation("cpu").name == "TPU v6e"


def test_the_stand_in_must_be_a_tpu(no_chips):
    with pytest.raises(PlatformError, match="TORCH_TPU_DEVICE_NAME: 'cpu' is not a TPU generation"):
        choose({"TORCH_TPU_DEVICE_NAME": "cpu"}, no_chips)


def test_a_real_tpu_tells_its_own_generation(two_v5e, library):
    chosen = choose({"TPU_LIBRARY_PATH": str(library), "TORCH_TPU_DEVICE_NAME": "TPU v6e"}, two_v5e)
    assert chosen.stand_in is None
    assert chosen.generation("TPU v5 lite").name == "TPU v5e"
