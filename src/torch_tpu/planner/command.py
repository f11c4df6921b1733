"""`torch-tpu plan`: plans a script in a process of its own and shows the result."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from torch_tpu.planner import largest_that_fits, terminal
from torch_tpu.planner.figures import Plan
from torch_tpu.runtime import platform

PASS_ON = {"ignore_unknown_options": True}
NARROWEST = 80


def plan(
    script: Annotated[Path, typer.Argument(help="The script, as you would run it on a TPU.", exists=True)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments. Put `--` before those that `plan` has too.")
    ] = None,
    target: Annotated[str, typer.Option(help="The TPU slice: a name that `torch-tpu topologies` lists.")] = "",
    steps: Annotated[int, typer.Option(help="How many training steps to run; the last one counts.", min=2)] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens in a step, if they can't be read from the batch.")] = 0,
    samples: Annotated[int, typer.Option(help="Samples in a step, if they can't be read from the batch.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures to this file.")] = None,
    save: Annotated[Path | None, typer.Option(help="Keep the compiled programs in this folder.")] = None,
    find_max: Annotated[
        str, typer.Option(help="`batch=1:512` puts numbers for {batch} in ARGUMENTS and finds the largest that fits.")
    ] = "",
) -> None:
    """Predicts the memory and time that a script takes on a TPU. No TPU is needed.

    Runs the unchanged script for a few steps with tensors that have shapes but no values, compiles its programs with
    the TPU compiler, and reports memory, time and what to improve. Exits with 0 if it fits one device, else with 2.
    """
    _check(target)
    # Narrower tables have no room for numbers; a narrow terminal breaks their lines instead.
    console = Console(width=max(Console().width, NARROWEST))
    given = list(arguments or [])
    if find_max:
        made = _largest(console, script, given, target, steps, (tokens, samples), find_max)
    else:
        made = _in_a_process(script, given, target, steps, (tokens, samples), save)
    terminal.show(made, console)
    if json is not None:
        _write(json, made.to_json())
    if html is not None:
        from torch_tpu.planner import html_page

        _write(html, html_page.page(made, " ".join([str(script), *given])))
    raise typer.Exit(0 if made.fits else 2)


def _check(target: str) -> None:
    environment = {**os.environ, "TORCH_TPU_PLATFORM": target}
    try:
        if not platform.topology_asked_for(environment):
            raise platform.PlatformError(f"{target!r} is not a TPU slice. Give one such as v5e:2x2.")
        platform.choose(environment)
    except platform.PlatformError as error:
        raise typer.BadParameter(str(error), param_hint="--target") from None


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        typer.echo(f"{file} can't be written ({error.strerror}). The plan is shown above.", err=True)
        raise typer.Exit(1) from None


def _in_a_process(
    script: Path,
    arguments: list[str],
    target: str,
    steps: int,
    batch: tuple[int, int],
    save: Path | None = None,
    quiet: bool = False,
) -> Plan:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "torch_tpu.planner", "--target", target, "--json", str(result)]
        command += ["--steps", str(steps), "--tokens", str(batch[0]), "--samples", str(batch[1])]
        command += ["--save", str(save)] if save is not None else []
        # XLA in jaxlib logs what `runtime.optimised_hlo` works round.
        environment = {**os.environ, "TORCH_TPU_PLATFORM": target, "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(
            [*command, str(script), *arguments],
            env=environment,
            stdout=subprocess.DEVNULL if quiet else None,
            check=False,
        )
        if done.returncode or not result.exists():
            raise typer.Exit(done.returncode or 1)
        return Plan.from_json(result.read_text())


def _largest(
    console: Console,
    script: Path,
    arguments: list[str],
    target: str,
    steps: int,
    batch: tuple[int, int],
    text: str,
) -> Plan:
    try:
        numbers = largest_that_fits.parse(text)
        largest_that_fits.substitute(arguments, numbers.name, numbers.least)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--find-max") from None
    tried: dict[int, Plan] = {}

    def probe(number: int) -> tuple[bool, int, int]:
        given = largest_that_fits.substitute(arguments, numbers.name, number)
        made = tried[number] = _in_a_process(script, given, target, steps, batch, quiet=True)
        console.print(f"{numbers.name} {number}: {made.verdict}")
        return made.fits, made.memory.peak, made.memory.limit

    found = largest_that_fits.largest(numbers, probe)
    table = Table(numbers.name, "", "peak", "predicted time", "tokens a second", "samples a second", box=None)
    for number, made in sorted(tried.items()):
        mark = "[green]fits[/]" if made.fits else "[red]does not fit[/]"
        rates = (f"{made.tokens_per_second:,.0f}", f"{made.samples_per_second:,.1f}")
        table.add_row(f"{number:,}", mark, terminal.size(made.memory.peak), terminal.duration(made.seconds), *rates)
    console.print(table)
    if found is None:
        console.print(f"[red]Not even {numbers.name} {numbers.least} fits one device of {target}.[/]\n")
        return tried[numbers.least]
    more = "" if found + numbers.step > numbers.most else f"; {found + numbers.step:,} does not fit"
    console.print(f"[bold]The largest {numbers.name} that fits one device of {target} is {found:,}{more}.[/]\n")
    return tried[found]
