"""Where a command's task comes from: a recipe by name, a user's script, or a run folder."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from offbeat.config.task import OptimizerFactory, Task
from offbeat.config.text import nearest, read_value
from offbeat.discipline.course import Course, as_course
from offbeat.discipline.discipline import Discipline
from offbeat.errors import CheckpointError, ConfigError, OffbeatError, RunError
from offbeat.folder.checkpoint import RunFolder
from offbeat.recipes import RECIPES, recipe

SCRIPT_FORM = "write --script FILE.py:FUNCTION"


# ---------------------------------------------------------------- where a task comes from


@dataclass(frozen=True)
class FromRecipe:
    """A recipe by name; a run folder records enough to make the same task again."""

    name: str
    options: Mapping[str, Any]
    folder: Path | None = None  # that says so, and is not to be trusted

    @property
    def origin(self) -> dict[str, Any]:
        return {"recipe": self.name, "options": dict(self.options)}

    def __str__(self) -> str:
        return self.name

    def make(self) -> Task:
        if self.folder is None:
            return recipe(self.name, **self.options)
        try:
            return recipe(self.name, **self.options)
        except OffbeatError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.folder / 'run.json'} names options that the recipe {self.name} cannot "
                f"take: {described(error)}"
            ) from error

    def blame(self, error: Exception) -> None:
        """A recipe is offbeat's own code: what it raises unforeseen stays as it is."""


@dataclass(frozen=True)
class FromScript:
    """A function in a user's file; a run folder records its name and never has it imported."""

    text: str

    @property
    def origin(self) -> dict[str, Any]:
        return {"script": self.text}

    def __str__(self) -> str:
        return self.text

    @property
    def file(self) -> Path:
        return Path(self.text.rpartition(":")[0])

    def make(self) -> Task:
        place, _, name = self.text.rpartition(":")
        if not place or not name:
            raise ConfigError(f"--script {self.text} names no function: {SCRIPT_FORM}")
        if not self.file.is_file():
            raise ConfigError(f"there is no file {place}: {SCRIPT_FORM}")
        make = self._function(self._called(self._module), name)
        return self._task(self._called(make))

    def blame(self, error: Exception) -> None:
        """Raise RunError with file and line if `error` passed through the script."""
        where = self._line(error)
        if where and not isinstance(error, OffbeatError):
            raise RunError(f"{self.file} line {where}: {described(error)}") from error

    def _module(self) -> ModuleType:
        # Like `python FILE.py`: the script may import the modules that lie beside it.
        folder = str(self.file.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        # Under a name of its own, so that a script called random.py hides nothing.
        name = f"offbeat_script_{self.file.stem}"
        spec = importlib.util.spec_from_file_location(name, self.file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{self.file} is no Python file: {SCRIPT_FORM}")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _called(self, code: Callable[[], Any]) -> Any:
        """What `code` returns; a mistake in the script becomes an error with file and line."""
        try:
            return code()
        except OffbeatError:
            raise
        except SyntaxError as error:
            raise ConfigError(f"{error.filename} line {error.lineno}: {error.msg}") from error
        except (Exception, SystemExit) as error:
            where = self._line(error)
            at = f"{self.file} line {where}" if where else str(self.file)
            raise ConfigError(f"{at}: {described(error)}") from error

    def _line(self, error: BaseException) -> int | None:
        """The last line of the script that `error` passed through."""
        return line_in(self.file, error)

    def _function(self, module: ModuleType, name: str) -> Callable[[], Any]:
        make = getattr(module, name, None)
        if callable(make):
            return make  # type: ignore[no-any-return]
        there = [
            word
            for word, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise ConfigError(
            f"{self.file} has no function {name!r}{nearest(name, there)}; "
            f"it has {', '.join(there) or 'none'}: {SCRIPT_FORM}"
        )

    def _task(self, made: Any) -> Task:
        if isinstance(made, Task):
            return made
        right = isinstance(made, tuple) and len(made) in (3, 4) and isinstance(made[0], nn.Module)
        if not right or not callable(made[2]):
            what = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
            raise ConfigError(
                f"{self.text} returned {what}: "
                "return offbeat.Task(...) or a tuple (model, data, loss[, test])"
            )
        return Task(*made)


Source = FromRecipe | FromScript


def line_in(file: Path, error: BaseException) -> int | None:
    """The last line of `file` that `error` passed through."""
    mine = file.resolve()
    frames = traceback.walk_tb(error.__traceback__)
    lines = [n for frame, n in frames if Path(frame.f_code.co_filename).resolve() == mine]
    return lines[-1] if lines else None


def described(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def source(name: str | None, options: Sequence[str], script: str | None, seed: int = 0) -> Source:
    """What `--recipe`, `--option` and `--script` name; `seed` also seeds the recipe's model."""
    if script is not None:
        if name is not None:
            raise ConfigError("--recipe and --script both name a task: leave one of them out")
        if options:
            raise ConfigError("--option belongs to a recipe: write the values into the script")
        return FromScript(script)
    name = name or "digits"
    if name not in RECIPES:
        raise ConfigError(
            f"there is no recipe {name!r}{nearest(name, RECIPES)}; "
            f"write --recipe with one of {', '.join(RECIPES)}"
        )
    takes = inspect.signature(RECIPES[name]).parameters
    values = {"seed": seed} if "seed" in takes else {}
    return FromRecipe(name, values | dict(_option(word, takes) for word in options))


def _option(word: str, takes: Mapping[str, inspect.Parameter]) -> tuple[str, Any]:
    """One `key=value`, read as the recipe's parameter of that name wants it."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"--option {word} has no value: write --option key=value")
    if key not in takes:
        raise ConfigError(
            f"--option {key}: there is no such option{nearest(key, takes)}; "
            f"the recipe takes {', '.join(takes)}"
        )
    kind = takes[key].annotation
    if kind in (int, float, bool, int | None, float | None):
        return key, read_value(value, kind, f"--option {key}")
    return key, value


def recorded(config: Mapping[str, Any], folder: Path, script: str | None) -> Source:
    """The task of a run folder; only recipes are made from what a folder says."""
    origin = origin_of(config, folder)
    if "loop" in origin:
        raise ConfigError(
            f"{folder} was made by {origin['loop']}, whose own loop computes its gradients: "
            f"write offbeat run --replay {folder} {origin['loop']} if you trust it"
        )
    if script is not None:
        return FromScript(script)
    if "script" in origin:
        raise ConfigError(
            f"{folder} was made from {origin['script']}, and code that a run folder names "
            f"is never run: write --script {origin['script']} if you trust it"
        )
    if "recipe" not in origin:
        raise ConfigError(
            f"{folder} does not say where its model came from: "
            "write --script FILE.py:FUNCTION, or use offbeat.replay in Python"
        )
    name, options = origin["recipe"], origin.get("options", {})
    if not isinstance(name, str) or name not in RECIPES or not isinstance(options, dict):
        raise CheckpointError(f"{folder / 'run.json'} names a recipe that is not there: {name!r}")
    return FromRecipe(name, options, folder)


def origin_of(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What run.json says of where its model came from."""
    origin = config.get("origin") or {}
    if not isinstance(origin, dict):
        raise CheckpointError(f"{folder / 'run.json'} is not of a run, or is damaged: origin")
    return origin


def check_folder(folder: Path, wanted: Source, resume: bool) -> None:
    """Refuse, before any work, a folder that is taken or holds the run of another recipe."""
    place = RunFolder(folder)
    if not place.config_file.exists():
        return
    if not resume:
        raise ConfigError(
            f"{folder} holds a run: add --resume to go on with it, or name another folder"
        )
    origin = origin_of(place.config(), folder)
    if "recipe" in origin and origin != wanted.origin:
        raise CheckpointError(
            f"{folder} is another run: it was made from {_spelled(origin)}, not {wanted}; "
            "use the same settings to resume it"
        )


def _spelled(origin: Mapping[str, Any]) -> str:
    options = (f"--option {key}={value}" for key, value in origin.get("options", {}).items())
    return " ".join([f"--recipe {origin['recipe']}", *options])


# ---------------------------------------------------------------- the optimiser


def optimizer_for(
    task: Task, discipline: Discipline | Course, sync: str, lr: float | None
) -> OptimizerFactory | None:
    """The task's optimiser at rate `lr`, or None where the discipline brings its own rule."""
    if as_course(discipline).first.brings_rule:
        if lr is not None:
            raise ConfigError(
                f"{sync} brings its own rule, so --lr has nothing to set: "
                f"write --sync '{_with_rate(sync, lr)}'"
            )
        return None
    return task.optimizer_at(lr)


def _with_rate(sync: str, lr: float) -> str:
    name, _, rest = sync.partition(":")
    if name == "custom":
        return f"custom:...,apply=rule(...,lr={lr:g})"
    kept = [word for word in rest.split(",") if word and not word.startswith("lr=")]
    return f"{name}:{','.join([*kept, f'lr={lr:g}'])}"
