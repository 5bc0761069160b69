"""Train PyTorch models on workers that differ in speed, fail, and talk over slow links.

The modules in the order in which a gradient meets them:

- `task`, `setup`, `length`, `trial`, `job`: what is trained, checked, tried and put together
- `lease`, `data`, `prefetch`: which samples a worker gets, and the batches made of them
- `replica`: batch to gradient
- `layout`: how a replica may be split over processes, and what that would cost
- `send`, `codec`: what goes out, and how small
- `contribution`, `link`: what travels, and over what
- `store`, `optim`: admit, gather, weigh, apply; checkpoints
- `log`, `logfile`, `replay`: the ordered record of a run, its files, and running it again
- `board`, `discipline`, `choices`: who may go on, and the five choices that decide it
- `worker`, `loop`: the cycle that ties these together, and its turns in real time
- `engine`, `cluster`, `pace`: what runs it all, and the cluster that a simulation runs
- `session`, `signals`, `train`, `cost`, `kept`, `run`: the front door for functions
- `script`, `hosts`, `join`: the front door for scripts
- `track`: your own callback, TensorBoard, CSV, MLflow, W&B
- `compare`: disciplines side by side on any task, over devices and repeats
- `watch`: the live page of a run
- `report`, `cli`, `demo`, `doctor`: what a run cost, and the command line
- `limits`: what the machine and its control groups allow
- `errors`, `given`, `spelling`: mistakes, told with their remedy
- `chance`: the generators that anybody's code may draw from
- `recipes`, `studies`: complete tasks to train, and published findings tried on them
"""

from offbeat import codec, optim, track
from offbeat.choices import (
    Accumulated,
    AdaptiveDelayCompensation,
    All,
    Change,
    Constant,
    Count,
    DelayCompensation,
    Elastic,
    GapAware,
    Gradient,
    InPlace,
    Inverse,
    Pair,
    Polynomial,
    Rule,
    Yours,
)
from offbeat.cluster import Cluster, Failure, Machine, Pause
from offbeat.cost import estimate
from offbeat.discipline import (
    ASP,
    ASUP,
    BMUF,
    BSP,
    EASGD,
    SSP,
    AsyncLocalSGD,
    Average,
    DiLoCo,
    Discipline,
    Downpour,
    FedBuff,
    Gossip,
    Hogwild,
    LocalSGD,
    SoftSync,
    parse,
)
from offbeat.errors import CheckpointError, ConfigError, OffbeatError, ReplayMismatch, RunError
from offbeat.join import Member, join
from offbeat.layout.explain import explain
from offbeat.layout.value import Layout
from offbeat.log import Listener
from offbeat.replay import Replay, replay
from offbeat.replica.objective import BatchLoss
from offbeat.report.summary import History, Summary
from offbeat.run import Interrupted, Run
from offbeat.store.constraint import Clamp, MaxNorm
from offbeat.store.schedule import Schedule
from offbeat.store.table import ByCount, BySize, ByWeight
from offbeat.store.updater import Clip
from offbeat.task import Metric, Task
from offbeat.track.callback import Callback
from offbeat.train import train

__version__ = "0.1.0"

__all__ = [
    "ASP",
    "ASUP",
    "BMUF",
    "BSP",
    "EASGD",
    "SSP",
    "Accumulated",
    "AdaptiveDelayCompensation",
    "All",
    "AsyncLocalSGD",
    "Average",
    "BatchLoss",
    "ByCount",
    "BySize",
    "ByWeight",
    "Callback",
    "Change",
    "CheckpointError",
    "Clamp",
    "Clip",
    "Cluster",
    "ConfigError",
    "Constant",
    "Count",
    "DelayCompensation",
    "DiLoCo",
    "Discipline",
    "Downpour",
    "Elastic",
    "Failure",
    "FedBuff",
    "GapAware",
    "Gossip",
    "Gradient",
    "History",
    "Hogwild",
    "InPlace",
    "Interrupted",
    "Inverse",
    "Layout",
    "Listener",
    "LocalSGD",
    "Machine",
    "MaxNorm",
    "Member",
    "Metric",
    "OffbeatError",
    "Pair",
    "Pause",
    "Polynomial",
    "Replay",
    "ReplayMismatch",
    "Rule",
    "Run",
    "RunError",
    "Schedule",
    "SoftSync",
    "Summary",
    "Task",
    "Yours",
    "codec",
    "estimate",
    "explain",
    "join",
    "optim",
    "parse",
    "replay",
    "track",
    "train",
]
