"""The flags of the command line, each with its words of help."""

from collections.abc import Mapping
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat import track
from offbeat.config.checks import at_least
from offbeat.config.run_config import NAMES, RAY, USUAL
from offbeat.discipline.course import parse
from offbeat.engine.sim.cluster import Cluster as SimulatedCluster
from offbeat.errors import ConfigError
from offbeat.log.log import Listener

TASK, TRAINING, FOLDER, COST = "Task", "Workers and training", "Run folder", "Cost-only"


class Nonfinite(StrEnum):
    STOP = "stop"
    SKIP = "skip"


def _in(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def training(help: str, metavar: str | None = None, *names: str) -> Any:
    """An option of how a run is trained."""
    return _in(TRAINING, help, *names, metavar=metavar)


def _given(value: Any) -> bool:
    return value is not None and value is not False


def asked(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that are options of a run, by the names that `ob.train` and `ob.join` have.

    What was not given is left out: there the script's own holds, or what is usual. What is said of
    a Ray cluster is for the command itself.
    """
    names = (name for name in NAMES if name not in RAY)
    found = {name: flags[name] for name in names if _given(flags.get(name))}
    found = {name: v.value if isinstance(v, Enum) else v for name, v in found.items()}
    if flags["sync"] is not None:
        found["discipline"] = parse(flags["sync"])
    return found


def counts(text: str) -> tuple[int | None, int]:
    """How many workers to begin with, if that is said, and how many there may be."""
    first, colon, last = text.partition(":")
    try:
        least, most = int(first), int(last if colon else first)
    except ValueError:
        raise ConfigError(f"-n takes a number or two, such as 4 or 2:8, not {text!r}") from None
    at_least("-n", least, 1)
    if most < least:
        raise ConfigError(f"-n {text}: the second number is the most, and is smaller")
    return (least if colon else None), most


def cluster_of(text: str | None, workers: int | None) -> SimulatedCluster:
    """The cluster that `--cluster` describes, or so many equal workers."""
    if text is None:
        return SimulatedCluster.equal(USUAL if workers is None else workers)
    found = SimulatedCluster.read(text)
    if workers is not None and workers != len(found):
        raise ConfigError(f"-n {workers}, but --cluster describes {len(found)}: leave -n out")
    return found


# ---------------------------------------------------------------- what is trained

Recipe = Annotated[
    str | None, _in(TASK, "digits (used if nothing is given), mnist, chars or resnet50.")
]
Option = Annotated[
    list[str] | None,
    _in(TASK, "For the recipe, as in folder=data/mnist. May be repeated.", metavar="KEY=VALUE"),
]
Script = Annotated[
    str | None,
    _in(
        TASK,
        "A function that returns offbeat.Task or (model, data, loss[, test]).",
        metavar="FILE.py:FUNCTION",
    ),
]

# ---------------------------------------------------------------- by whom and how

Sync = Annotated[
    str,
    _in(
        TRAINING,
        "bsp, soft:2, ssp:3, asp, asp:weigh=inverse, local:16, diloco:100, asup, ...",
        metavar="DISCIPLINE",
    ),
]
Cluster = Annotated[
    str | None,
    _in(TRAINING, "A TOML file, or one compute time per worker: 20ms,20ms,80ms."),
]
Workers = Annotated[int | None, _in(TRAINING, "Equal workers, 4 unless given.", "-n", "--workers")]
BatchSize = Annotated[int | None, _in(TRAINING, "Samples per step; else the task's own.")]
DropLast = Annotated[
    bool, _in(TRAINING, "Leave out what makes no whole batch at an epoch's end.", "--drop-last")
]
Shares = Annotated[
    str | None,
    _in(
        TRAINING,
        "How the samples of a round are shared out: by speed, or a number for each worker.",
        metavar="speed|1,2,4",
    ),
]
Epochs = Annotated[int | None, _in(TRAINING, "Passes over the data, 1 unless given.")]
Rate = Annotated[float | None, _in(TRAINING, "Learning rate; else the task's own.")]


class Via(StrEnum):
    STORE = "store"
    ALLREDUCE = "allreduce"


Meeting = Annotated[
    Via | None, _in(TRAINING, "Where contributions meet: in the store, or among the workers.")
]
Codec = Annotated[
    str | None, _in(TRAINING, "Make contributions smaller: bf16, int8, topk:0.01, ...")
]
PullCodec = Annotated[str | None, _in(TRAINING, "Make what workers pull smaller: bf16, int8, ...")]
Layout = Annotated[
    str | None,
    _in(TRAINING, "How each replica is split over processes.", metavar="pp=2,microbatches=8"),
]
Device = Annotated[
    str | None,
    _in(
        TRAINING,
        "Where workers compute: cuda:0, one for each as in cuda:0,cuda:1, or auto; else the CPU.",
        metavar="DEVICE",
    ),
]
Shards = Annotated[int, _in(TRAINING, "Parts of the store.")]
Seed = Annotated[int, _in(TRAINING, "Of initial weights, order and simulated times.")]
EvaluateEvery = Annotated[int | None, _in(TRAINING, "Samples between two tests; else one epoch.")]
OnNonfinite = Annotated[Nonfinite, _in(TRAINING, "What to do with a gradient that is not finite.")]

# ---------------------------------------------------------------- where it is kept

Out = Annotated[
    Path | None, _in(FOLDER, "Keep log, checkpoints and model in this folder.", metavar="DIR")
]
Resume = Annotated[bool, _in(FOLDER, "Go on with the run in --out.", "--resume")]
CheckpointEvery = Annotated[
    int | None, _in(FOLDER, "Versions between two checkpoints; else one epoch.")
]
RunDir = Annotated[
    Path, typer.Argument(help="A run folder, made with simulate --out.", metavar="RUN_DIR")
]
Every = Annotated[int, typer.Option(help="Compare every K-th version.", metavar="K")]

# ---------------------------------------------------------------- where else it is shown

TensorBoard = Annotated[
    Path | None, _in(FOLDER, "Write event files for TensorBoard there.", metavar="DIR")
]
CSV = Annotated[
    Path | None,
    _in(FOLDER, "Write tests, updates and events as a table.", "--csv", metavar="FILE"),
]

Watch = Annotated[
    bool, _in(FOLDER, "Show the run on a page of this machine while it goes.", "--watch")
]

# ---------------------------------------------------------------- costs alone, and output

CostOnly = Annotated[
    bool, _in(COST, "Time and bytes without gradients, for up to 10,000 workers.", "--cost-only")
]
Steps = Annotated[int | None, _in(COST, "Steps per worker, 100 unless given.")]
ModelBytes = Annotated[int | None, _in(COST, "Size of the model, 0 unless given.")]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")
]

# ---------------------------------------------------------------- of a comparison


class Engine(StrEnum):
    LOCAL = "local"
    SIM = "sim"


GRID = "Grid"
Devices = Annotated[str, _in(GRID, "How many workers, each number in turn.", metavar="1,2,...")]
Syncs = Annotated[
    list[str],
    _in(
        GRID,
        "Disciplines: bsp,ssp:3,asp. A part that begins with no discipline's name belongs to the "
        "one before it: fedbuff:2,2,asp are two. May be repeated.",
        metavar="LIST",
    ),
]
Repeat = Annotated[int, _in(GRID, "Runs of every cell, each with the next seed.")]
Target = Annotated[
    str | None,
    _in(GRID, "Score whose time is compared: 90%, or a loss of 0.35; else one that all reach."),
]
GridEngine = Annotated[
    Engine | None, _in(TRAINING, "Processes here (local, the default) or virtual time (sim).")
]
Emulate = Annotated[
    str | None,
    _in(TRAINING, "Least time of a step: 20ms for all, or one time per worker.", metavar="TIMES"),
]
GridCluster = Annotated[
    str | None,
    _in(TRAINING, "Of the simulation: a TOML file or compute times, one or one per worker."),
]
Straggler = Annotated[
    float | None,
    _in(TRAINING, "The last of two or more workers is so many times slower.", metavar="TIMES"),
]
GridBatchSize = Annotated[
    int | None,
    _in(TRAINING, "Samples per worker and step; else the task's own, or what data can feed."),
]
GridEpochs = Annotated[
    int | None, _in(TRAINING, "Passes over the data; else about 500 steps of one device.")
]
Rates = Annotated[
    list[str] | None,
    _in(
        TRAINING,
        "Learning rate of all, 0.1, or of one, asp=0.05; else the task's own. May be repeated.",
        metavar="RATE",
    ),
]
GridOut = Annotated[
    Path | None,
    _in(FOLDER, "Where cells and results are kept; else runs/compare-TASK.", metavar="DIR"),
]


def trackers(tensorboard: Path | None, csv: Path | None) -> list[Listener]:
    """Whoever is to follow the run besides the display."""
    found: list[Listener] = []
    if tensorboard is not None:
        found.append(track.TensorBoard(tensorboard))
    if csv is not None:
        found.append(track.CSV(csv))
    return found
