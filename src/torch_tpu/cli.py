"""The command `torch-tpu`: checks whether the device works here, and shows what it can do.

What takes long to import or may be missing is imported by the command that needs it.
"""

from __future__ import annotations

import json
import os
import platform as python_platform
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_tpu.patching import versions
from torch_tpu.planner import command
from torch_tpu.runtime import disk_cache, platform, tpu_diagnosis
from torch_tpu.runtime.generations import GIB

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
cache_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The compiled programs kept on disk.")
app.add_typer(cache_app, name="cache")
app.command(name="plan", context_settings=command.PASS_ON)(command.plan)

PACKAGES = ("torch", "jaxlib", "ml_dtypes", "libtpu")
PROBE_TIMEOUT_SECONDS = 120
# Run by `doctor` in a process of its own: a chip that another process holds makes libtpu wait or abort.
PROBE = """
import json, torch, torch_tpu
from torch_tpu.runtime.process_client import client
x = torch.arange(6, dtype=torch.float32).reshape(2, 3).to("tpu")
y = x @ x.T + 1
torch.tpu.synchronize()
if client().runs:
    y = y.cpu()
    assert torch.equal(y, torch.tensor([[6.0, 15.0], [15.0, 51.0]])), f"wrong result: {y}"
properties = torch.tpu.get_device_properties(0)
print(json.dumps([torch.tpu.device_count(), properties.name, properties.total_memory]))
"""
# Also in a process of its own: what is patched is imported, to see whether the patches fit.
PATCHES_PROBE = "import json, torch_tpu.patch_report; print(json.dumps(torch_tpu.patch_report.report()))"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        subject: What was looked at.
        found: What was found.
        usable: False when the device can't work because of it.
        advice: What the user can do about it; empty when nothing needs doing.
    """

    subject: str
    found: str
    usable: bool = True
    advice: str = ""

    @property
    def mark(self) -> str:
        if not self.usable:
            return "[red]✗[/]"
        return "[yellow]![/]" if self.advice else "[green]✓[/]"


@app.callback()
def main() -> None:
    """A PyTorch backend for TPUs and everything else that speaks PJRT."""


@app.command()
def doctor() -> None:
    """Checks whether the device works here.

    Lists what was found and what to do about what is missing. Exits with 0 when the device is usable and
    with 1 when it is not.
    """
    findings = [_python(), *(_package(name) for name in PACKAGES), _autoload(), _cache_folder(), *_platform()]
    patches: list[Finding] = []
    if all(finding.usable for finding in findings):
        patches = _patches()
        findings.append(_device())
    usable = all(finding.usable for finding in [*findings, *patches])

    console = Console()
    table = Table("", "what", "found", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(finding.mark, finding.subject, escape(finding.found))
    console.print(table)
    if patches:
        table = Table("", "patch", "state", box=None, pad_edge=False)
        for finding in patches:
            table.add_row(finding.mark, finding.subject, escape(finding.found))
        console.print(table)
    for finding in [*findings, *patches]:
        if finding.advice:
            console.print(f"{finding.mark} {finding.subject}: {escape(finding.advice)}")
    console.print("[green]The device works.[/]" if usable else "[red]The device is not usable.[/]")
    raise typer.Exit(0 if usable else 1)


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="A shorter run.")] = False,
    output: Annotated[Path, typer.Option(help="The folder for the results.")] = Path("demo-output"),
) -> None:
    """Runs real models on the device."""
    try:
        from torch_tpu.demo import main as run_demo
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("torch_tpu"):
            raise
        typer.echo(f"The demo needs {error.name}. Run `pip install 'torch-tpu[demo]'`.", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(run_demo(quick=quick, output=output))


@app.command()
def operators(
    output: Annotated[Path | None, typer.Option(help="The file to write. Without it, the terminal.")] = None,
) -> None:
    """Lists how the device answers each of PyTorch's operators, and in which file. Needs a clone of the repository.

    Takes half a minute, because small calls of many operators are tried.
    """
    clone = _clone()
    if clone is None:
        typer.echo(
            "`torch-tpu operators` needs a clone of the repository: what measures is not installed with the package. "
            "In a clone run `make operators`, or read docs/operators.md.",
            err=True,
        )
        raise typer.Exit(1)
    options = [] if output is None else ["--output", str(output.resolve())]
    raise typer.Exit(subprocess.run([sys.executable, "-m", "tools.operators", *options], cwd=clone).returncode)


def _clone() -> Path | None:
    """The folder of the repository, where the package runs from a clone."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "tools" / "operators").is_dir() else None


@app.command()
def topologies(
    every: Annotated[
        bool, typer.Option("--all", help="Also list shapes that the compiler accepts but nobody rents out.")
    ] = False,
) -> None:
    """Lists the TPU slices to compile for: TORCH_TPU_PLATFORM and `plan --target` take these names.

    These are the slices that Google Cloud rents out. The figures are the published peaks of one device (a TPU v7 chip
    has two devices); nothing is measured. TPU v4 is not listed: libtpu can't compile for it as its users get it.
    """
    from torch_tpu.runtime import topology

    library = platform.find_libtpu()
    if library is None:
        typer.echo("libtpu is not installed. Run `pip install 'torch-tpu[tpu]'`.", err=True)
        raise typer.Exit(1)
    table = Table("name", "TPU", "chips", "devices", "HBM", "bfloat16", "HBM speed", box=None)
    if every:
        table.add_column("rented")
    for found in topology.accepted(library, every):
        kind = found.generation
        row = (
            *(found.name, kind.name, f"{found.chips:,}", f"{found.devices:,}"),
            f"{kind.hbm_bytes_per_device / GIB:.0f} GiB",
            f"{kind.bf16_flops_per_device / 1e12:,.1f} TFLOP/s",
            f"{kind.hbm_bandwidth_per_device / 1e9:,.0f} GB/s",
        )
        table.add_row(*row, *(["yes" if found.rented else "no"] if every else []))
    Console().print(table)


def _disk_cache() -> disk_cache.DiskCache:
    cache = disk_cache.from_environment()
    if cache is None:
        typer.echo("The disk cache is off: TORCH_TPU_CACHE_DIR is empty.", err=True)
        raise typer.Exit(1)
    return cache


def _say_what_is_unused(cache: disk_cache.DiskCache) -> bool:
    """Says on stderr why the cache, or some of it, is not used; returns whether all of it is."""
    why = cache.why_unused()
    if why:
        typer.echo(f"Not used: {why}", err=True)
    return not why


@cache_app.command()
def path() -> None:
    """Prints the folder."""
    cache = _disk_cache()
    typer.echo(cache.folder)
    _say_what_is_unused(cache)


@cache_app.command()
def stats() -> None:
    """Prints how many programs are kept and how much space they take."""
    cache = _disk_cache()
    found = cache.stats()
    typer.echo(f"{found.entries:,} programs, {found.nbytes / 2**20:,.1f} MiB of {cache.limit / 2**20:,.0f} MiB")
    _say_what_is_unused(cache)


@cache_app.command()
def clear() -> None:
    """Removes every program. Running processes keep theirs.

    Files in a folder that others own or may write to are left there, and the command exits with 1.
    """
    cache = _disk_cache()
    typer.echo(f"{cache.clear():,} programs removed")
    raise typer.Exit(0 if _say_what_is_unused(cache) else 1)


def _python() -> Finding:
    return Finding("Python", f"{python_platform.python_version()} ({sys.executable})")


def _package(name: str) -> Finding:
    oldest = _required_versions().get(name)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if name == "libtpu":
            return Finding(name, "not installed: only needed on TPUs and to compile for them")
        return Finding(name, "not installed", usable=False, advice="run `pip install torch-tpu`.")
    if oldest and versions.numbers(version) < versions.numbers(oldest):
        return Finding(name, version, usable=False, advice=f"run `pip install '{name}>={oldest}'`.")
    if versions.is_newer(name, version):
        return Finding(name, version, advice=f"newer than the tested versions: {versions.tested(name)}.")
    return Finding(name, version)


def _required_versions() -> dict[str, str]:
    """The oldest version of each package that torch-tpu's own metadata accepts."""
    try:
        requirements = metadata.requires("torch-tpu") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w-]+)>=([\d.]+)$", requirement) for requirement in requirements)
    return {match[1].replace("-", "_"): match[2] for match in found if match}


def _autoload() -> Finding:
    advice = 'a program must `import torch_tpu` before it uses the device "tpu"'
    if not metadata.entry_points(group="torch.backends", name="torch_tpu"):
        return Finding("autoload", "not registered", advice=f"run `pip install torch-tpu`; until then {advice}.")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return Finding("autoload", "off: TORCH_DEVICE_BACKEND_AUTOLOAD=0", advice=f"{advice}.")
    return Finding("autoload", "`import torch` registers the device")


def _cache_folder() -> Finding:
    """Where compiled programs are kept, and whether they are used."""
    try:
        cache = disk_cache.from_environment()
    except ValueError as error:
        return Finding("disk cache", "none", usable=False, advice=f"{error}.")
    if cache is None:
        return Finding("disk cache", "off: TORCH_TPU_CACHE_DIR is empty, or the user has no home folder")
    return Finding("disk cache", str(cache.folder), advice=cache.why_unused())


def _platform() -> list[Finding]:
    chips = platform.find_chips()
    kinds = sorted({chip.generation.name for chip in chips})
    chips_found = Finding("TPU chips", f"{len(chips)} × {', '.join(kinds)}" if chips else "none")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            chosen = platform.choose()
    except platform.PlatformError as error:
        return [chips_found, Finding("platform", "none", usable=False, advice=str(error))]
    name = f"{chosen.name} ({chosen.plugin_path or 'XLA:CPU in jaxlib'})"
    advice = " ".join(str(warning.message) for warning in warned)
    findings = [chips_found, Finding("platform", f"{name}: {chosen.reason}", advice=advice)]
    if chosen.name == "tpu":
        findings.append(_device_files())
    if chosen.stand_in:
        runs_on = "XLA:CPU" if chosen.name == "cpu" else f"the plugin {chosen.name}"
        named = chosen.stand_in.name
        findings.append(Finding("stand-in", f"{runs_on} runs the programs; the device calls itself {named}"))
    return findings


def _device_files() -> Finding:
    """Whether the chips' device files are there, may be opened, and are free."""
    files = tpu_diagnosis.device_files()
    if not files:
        return Finding(
            "device files", "none: neither /dev/accel* nor /dev/vfio/*", advice=tpu_diagnosis.advice("no TPU")
        )
    found = ", ".join(map(str, files))
    if forbidden := tpu_diagnosis.forbidden(files):
        denied = ", ".join(map(str, forbidden))
        return Finding(
            "device files", found, usable=False, advice=f"{denied}: {tpu_diagnosis.advice('permission denied')}"
        )
    if holders := tpu_diagnosis.holders(files):
        who = ", ".join(f"{name} (process {number})" for number, name in holders.items())
        return Finding("device files", f"{found}, open in {who}", advice=tpu_diagnosis.advice("already in use"))
    return Finding("device files", found)


def _patches() -> list[Finding]:
    """The changes to objects of other packages: applied, not needed yet, or off."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PATCHES_PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_SECONDS,
            check=True,
        )
        rows = json.loads(probe.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        return [Finding("patches", f"can't be listed: {error}")]
    return [
        Finding(
            row["name"],
            row["state"] if not row["note"] else f"{row['state']}: {row['note']}",
            usable=row["state"] != "off" or not row["required"],
            advice="" if row["state"] != "off" else f"{row['reason']} This feature is off: {row['feature']}.",
        )
        for row in rows
    ]


def _device() -> Finding:
    """Computes something small on the device, in a process of its own, and checks the numbers."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "device",
            f"no answer within {PROBE_TIMEOUT_SECONDS} s",
            usable=False,
            advice=tpu_diagnosis.advice("already in use"),
        )
    if probe.returncode != 0:
        last_words = (probe.stderr.strip() or f"exit code {probe.returncode}").splitlines()[-1]
        known = tpu_diagnosis.advice(last_words)
        return Finding("device", "failed", usable=False, advice=f"{last_words} → {known}" if known else last_words)
    count, name, memory = json.loads(probe.stdout.splitlines()[-1])
    did = "compiled 2×3 @ 3×2, ran nothing" if platform.topology_asked_for() else "computed 2×3 @ 3×2 correctly"
    return Finding("device", f"{count} × {name}, {memory / GIB:.1f} GiB; {did}")
