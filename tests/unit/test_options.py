"""Options that several commands share are options of each, and reach it as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from transport.process.programs import with_options

app = typer.Typer(rich_markup_mode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    where: Annotated[str, typer.Option("--where", help="a place")]
    times: Annotated[int, typer.Option("--times")] = 2


@app.command()
@with_options(Shared)
def go(shared: Shared, how: Annotated[str, typer.Option("--how")] = "slowly") -> None:
    """Go somewhere."""
    typer.echo(f"{shared} {how}")


@app.command()
@with_options(Shared)
def stay(shared: Shared) -> None:
    typer.echo(str(shared.times))


def test_a_command_has_the_shared_options_and_its_own():
    done = CliRunner().invoke(app, ["go", "--where", "there", "--how", "fast"])
    assert done.output == "Shared(where='there', times=2) fast\n"
    assert CliRunner().invoke(app, ["stay", "--where", "here", "--times", "3"]).output == "3\n"


def test_help_names_them_all_and_one_that_is_missing_is_an_error():
    words = CliRunner().invoke(app, ["go", "--help"]).output
    assert all(word in words for word in ("--where", "a place", "--times", "--how", "Go somewhere"))
    assert CliRunner().invoke(app, ["go"]).exit_code == 2
