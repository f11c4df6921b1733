"""The command `python -m tools.cases FOLDER`: runs each program of a folder and shows how many pass, mode by mode."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tools import platforms
from tools.cases import results
from tools.cases.results import Result
from tools.cases.run import MODES, run

app = typer.Typer(add_completion=False, rich_markup_mode=None)
OUTCOMES = ("pass", "fail", "cannot compile")


def programs_of(folder: Path, pattern: str) -> list[Path]:
    """The programs whose name matches, by their number: `NUMBER_name.py`."""
    numbered = [p for p in folder.resolve().glob("*.py") if re.match(r"\d+_", p.name) and re.search(pattern, p.stem)]
    return sorted(numbered, key=lambda p: int(p.name.partition("_")[0]))


def totals(found: dict[str, Sequence[Result]]) -> Table:
    table = Table("mode", "programs", *OUTCOMES)
    for mode, those in found.items():
        counts = Counter(result.outcome for result in those)
        table.add_row(mode, str(len(those)), *(str(counts[outcome]) for outcome in OUTCOMES))
    return table


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(help="The programs: files NUMBER_name.py with a function case(device).")],
    only: Annotated[str, typer.Option(help="Only those whose name matches this regular expression.")] = "",
    modes: Annotated[str, typer.Option(help=f"In which modes, of {','.join(MODES)}.")] = ",".join(MODES),
    platform: Annotated[str, typer.Option(help="What to run on: xcpu, or what TORCH_TPU_PLATFORM may name.")] = "",
    restart: Annotated[bool, typer.Option(help="Run again what has a result already.")] = False,
    only_failed: Annotated[bool, typer.Option(help="Run again what failed before.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which a program counts as failed.")] = 600.0,
    output: Annotated[Path, typer.Option(help="Where the results are kept.")] = Path("conformance-results"),
) -> None:
    """Runs each program on the device, each in a process of its own. Continues where the last run ended.

    What fails compiled is compiled for the CPU with PyTorch's aot_eager too: what fails there alike can't be compiled.
    """
    unknown = [mode for mode in modes.split(",") if mode not in MODES]
    if unknown:
        raise typer.BadParameter(f"unknown mode {unknown[0]}: expected {', '.join(MODES)}")
    if not platforms.choose(platform):
        raise typer.BadParameter(platforms.PLUGIN_IS_MISSING)
    programs = programs_of(folder, only)
    if not programs:
        raise typer.BadParameter(f"{folder} has no programs NUMBER_name.py that match")
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    found: dict[str, Sequence[Result]] = {}
    for mode in modes.split(","):
        path = output / platforms.file_of("cases", mode, platform)
        known = {} if restart else results.load(path)
        for program in programs:
            before = known.get(program.stem)
            same = before is not None and before.digest == results.digest_of(program)
            if before is None or not same or (only_failed and before.failure):
                result = known[program.stem] = run(program, mode, timeout)
                results.save(path, result)
                said = result.failure + (f" (aot_eager on the CPU: {result.refusal})" if result.refusal else "")
                line = f"{result.outcome}  {mode}  {result.name}  {result.seconds} s  {said}"
                console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
        found[mode] = [known[program.stem] for program in programs]
    console.print(totals(found))
    if any(result.outcome == "fail" for those in found.values() for result in those):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
