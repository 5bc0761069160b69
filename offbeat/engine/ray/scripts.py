"""A script on Ray: the launcher plays it up to its loop, and every actor from the first line on."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from offbeat.config.run_config import OnRay, RunConfig
from offbeat.engine.hosts.admission import plain
from offbeat.engine.hosts.scripts import WorkHost
from offbeat.engine.hosts.sketch import sketch_of, versions
from offbeat.engine.hosts.store import settings_for_workers
from offbeat.engine.hosts.worker import AfterTheEnd, Entering
from offbeat.engine.local.process import last_words
from offbeat.engine.ray.actor import Assignment, RayActor
from offbeat.engine.ray.launcher import Told, run_with
from offbeat.engine.script import Participant, Script, host, script_job
from offbeat.engine.script_hosts import Finished
from offbeat.engine.spawn import LastWords
from offbeat.log.log import Listener


@dataclass(frozen=True)
class ScriptTask:
    """A script as it is sent: its text, for hosts that have no file of it, and where it lies."""

    text: bytes
    path: Path
    folder: Path  # in which it was started
    arguments: tuple[str, ...]
    versions: dict[str, Any]

    @classmethod
    def of(cls, script: Script) -> "ScriptTask":
        text, path = script.path.read_bytes(), script.path.resolve()
        return cls(text, path, Path.cwd(), script.arguments, plain(versions()))

    @contextmanager
    def here(self) -> Iterator[Script]:
        """The script as a file of this host, in the folder in which it was started."""
        with suppress(OSError):
            os.chdir(self.folder)
        with TemporaryDirectory() as folder:
            path = self.path
            if not path.is_file() or path.read_bytes() != self.text:
                path = Path(folder) / path.name
                path.write_bytes(self.text)
            yield Script(path, self.arguments)


class ScriptActor(RayActor):
    """A worker of `offbeat run`."""

    def take_part(self, assignment: Assignment) -> LastWords | None:
        with self.task.here() as script:
            emulate = self.engine.emulate
            least = None if emulate is None else emulate[assignment.number]
            where = AssignedHost(assignment.dialer(), script.path, least, assignment=assignment)
            mark = host.set(where)
            try:
                with script.as_program():
                    module = script.module()
                    sys.modules["__main__"] = module
                    script.play(module)
            except AfterTheEnd:
                return None
            except KeyboardInterrupt:  # the run was stopped, and its store has told so
                return None
            except SystemExit as leaving:
                if leaving.code in (None, 0):
                    return None
                return LastWords(f"its script ended with {leaving.code}", late=where.finished)
            except Exception as error:
                return last_words(error, late=where.finished)
            finally:
                host.reset(mark)
        return None


@dataclass
class AssignedHost(WorkHost):
    """A worker's script that was told which worker it is."""

    assignment: Assignment | None = None

    def entering(self, sketch: Mapping[str, object]) -> Entering:
        assert self.assignment is not None
        return self.assignment.entering(sketch)

    @property
    def finished(self) -> bool:
        """Whether it has taken part, to the end or to where it left its loop."""
        return self.entered is not None and self.entered.said


@dataclass
class RayHost:
    """`offbeat run --engine ray`: this process becomes the store, and actors play the script.

    `asked` are the options that the command line names, and win over the script's.
    """

    workers: int
    engine: OnRay
    asked: Mapping[str, Any]
    script: Script
    listeners: Sequence[Listener] = ()
    rank: int = 0

    def settle(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        mine = {"workers": self.workers, "engine": self.engine}
        mine["listeners"] = (*self.listeners, *given.get("listeners", ()))
        return {**given, **self.asked, **mine}

    def participant(self, config: RunConfig) -> Participant:
        engine, sketch = config.engine, sketch_of(config, self.script.path)
        assert isinstance(engine, OnRay)
        job = script_job(config)
        settings = settings_for_workers(config, dict(self.asked))
        settings["threads"] = engine.threads_for(job)
        told = Told(ScriptActor, ScriptTask.of(self.script), settings, sketch, scripted=True)
        raise Finished(run_with(config, job, told))

    def ended(self, error: BaseException | None) -> bool:
        """The script is through, or has failed; a launcher never comes so far."""
        return False
