"""`offbeat replay`: run a log again and say whether it arrives at the same bits."""

import sys
from pathlib import Path

import typer

from offbeat.cli import options
from offbeat.cli.output import print_json, say
from offbeat.cli.source import recorded
from offbeat.config.describe import settings_of
from offbeat.errors import ConfigError, ReplayMismatch
from offbeat.folder.checkpoint import RunFolder
from offbeat.replay import Replay
from offbeat.replay import replay as run_again
from offbeat.report.words import counted


def replay(
    run_dir: options.RunDir,
    script: options.Script = None,
    every: options.Every = 1,
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Run the log of a run folder again and compare the parameters of every version."""
    if every < 1:
        raise ConfigError(f"--every must be at least 1, not {every}")
    place = RunFolder(run_dir)
    origin = recorded(place.config(), run_dir, script)
    task = origin.make()
    # An optimiser that the folder cannot name is code, and comes from the script.
    told = settings_of(place).optimizer
    custom = script is not None and told is not None and told.get("settings") is None
    try:
        found = run_again(
            run_dir,
            task.model,
            task.data,
            task.loss,
            optimizer=task.optimizer if custom else None,
            every=every,
            device=device,
        )
    except Exception as error:
        origin.blame(error)
        raise
    show(found, run_dir, json)


def show(found: Replay, run_dir: Path, json: bool) -> None:
    """Say whether a replay was identical; if it was not, that is the exit code."""
    words = _words(found)
    if json:
        failure = {} if found.identical else {"error": words, "exit_code": ReplayMismatch.exit_code}
        print_json(
            {
                "folder": str(run_dir),
                "identical": found.identical,
                "versions": found.versions,
                "compared": found.compared,
                "difference": found.difference,
            }
            | failure
        )
    else:
        say(words, sys.stdout if found.identical else sys.stderr)
    if not found.identical:
        raise typer.Exit(ReplayMismatch.exit_code)


def _words(found: Replay) -> str:
    if found.difference is not None:
        return f"differs first at version {found.difference.version}: {found.difference.reason}"
    if not found.compared:
        held = counted(found.versions, "version")
        return f"nothing compared: the log has {held} and no hash among them"
    if found.compared == found.versions:
        if found.versions == 1:
            return "identical at its only version"
        return f"identical at all {found.versions} versions"
    compared = counted(found.compared, "version")
    return f"identical at the {compared} compared, of {found.versions}"
