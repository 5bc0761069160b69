"""The command line: `offbeat run`, `demo`, `compare`, `report`, `simulate`, `replay` and more."""

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import offbeat
from offbeat.cli import (
    compare,
    demo,
    doctor,
    layout,
    network,
    replay,
    report,
    run,
    simulate,
    store,
    work,
)
from offbeat.cli.output import EXIT_CODES, fail, stop_code
from offbeat.errors import ConfigError, OffbeatError
from offbeat.report.words import visible

WITH_SCRIPTS = (["run"], ["store"], ["work"])

app = typer.Typer(
    help="Train PyTorch models on uneven workers, from lock-step to free-running, "
    "and see what each way costs.",
    epilog=EXIT_CODES,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    *(demo.demo, compare.compare, report.report),
    *(simulate.simulate, replay.replay, layout.layout, doctor.doctor),
):
    app.command(epilog=EXIT_CODES)(command)
# Words behind the script's name are its own, whatever they look like.
for script in (run.run, store.store, work.work):
    app.command(epilog=EXIT_CODES, context_settings={"allow_interspersed_args": False})(script)
app.command(epilog=EXIT_CODES)(network.token)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake becomes a line and an exit code, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in _own(words)
    try:
        return int(app(words, prog_name="offbeat", standalone_mode=False) or 0)
    except OffbeatError as error:
        return fail(str(error), error.exit_code, as_json)
    except typer.Abort as abort:
        return fail("stopped", stop_code(abort.__cause__), as_json)
    except Exception as error:
        # Typer's errors of usage have no base class that is public in all its versions.
        if callable(message := getattr(error, "format_message", None)):
            path = getattr(getattr(error, "ctx", None), "command_path", "offbeat")
            usage = f"{message().rstrip('.')}; see {path} --help"
            return fail(usage, ConfigError.exit_code, as_json)
        print(visible(traceback.format_exc()), end="", file=sys.stderr)
        return fail(f"{type(error).__name__}: {error}", OffbeatError.exit_code, as_json)


def _own(words: list[str]) -> list[str]:
    """The words that are not a script's."""
    scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
    return words[: scripts[0]] if words[:1] in WITH_SCRIPTS and scripts else words


def _version(wanted: bool) -> None:
    if wanted:
        print(f"offbeat {offbeat.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
