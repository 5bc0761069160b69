"""Playing a user's script: what it prints, how it ends, and whose mistake it was."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import NoReturn, Protocol

import typer

from offbeat.cli.output import fail, stop_code
from offbeat.cli.source import described, line_in
from offbeat.engine.result import Run
from offbeat.engine.script import Script, ScriptHost, host
from offbeat.engine.script_hosts import Finished
from offbeat.engine.spawn import ProcessFailed
from offbeat.errors import ConfigError, OffbeatError, RunError
from offbeat.report.live import Progress
from offbeat.report.tables import share


class Where(ScriptHost, Protocol):
    """Who runs the script, and is told how it ends."""

    def ended(self, error: BaseException | None) -> bool:
        """The script is through or has failed; returns whether it has taken part in a run."""


def play(script: Script, progress: Progress, where: Where, as_json: bool) -> Run | None:
    """Play the script here, with `where` it takes part; the run, if this process has its result."""
    mark = host.set(where)
    try:
        with script.as_program(), blamed(script, progress, as_json):
            module = script.module()
            sys.modules["__main__"] = module
            try:
                script.play(module)
            except Finished as finished:
                return finished.result
            except BaseException as error:
                where.ended(error)
                raise
            if where.ended(None):
                return None
            raise ConfigError(
                f"{script.path} ended without a loop: write "
                "for x, y in run.batches(dataset, batch_size=32) inside with ob.join() as run"
            )
    finally:
        host.reset(mark)


@contextmanager
def blamed(script: Script, progress: Progress, as_json: bool) -> Iterator[None]:
    """What goes wrong in a script is told with its line; its prints stay out of the JSON."""
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            yield
    except KeyboardInterrupt as interrupt:
        progress.end()
        raise typer.Exit(_stopped(progress, stop_code(interrupt), as_json)) from None
    except SyntaxError as error:
        raise ConfigError(f"{error.filename} line {error.lineno}: {error.msg}") from error
    except SystemExit as leaving:
        progress.end()
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        raise typer.Exit(code if isinstance(code, int) else int(code is not None)) from None
    except Exception as error:
        progress.end()
        _blame(error, script, began=progress.store is not None)


def _blame(error: Exception, script: Script, began: bool) -> NoReturn:
    where = line_in(script.path, error)
    if where is None or isinstance(
        error, ProcessFailed
    ):  # a worker's error does not lie where it was told
        raise error
    at = f"{script.path} line {where}"
    if isinstance(error, OffbeatError):
        raise type(error)(f"{at}: {error}") from error
    kind = RunError if began else ConfigError
    raise kind(f"{at}: {described(error)}") from error


def _stopped(progress: Progress, code: int, as_json: bool) -> int:
    if progress.store is None:
        return fail("stopped before the run began", code, as_json)
    done = share(progress.done)
    return fail(
        f"stopped with {done} done; a run with --out goes on with the same command and --resume",
        code,
        as_json,
    )
