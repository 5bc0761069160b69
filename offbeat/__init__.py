"""Train PyTorch models on workers that differ in speed, fail, and talk over slow links.

The packages in the order in which a gradient meets them:

- `config`: one description of a run, checked once
- `discipline`: the five choices that say how workers keep step
- `data`: which samples a worker gets, and the batches made of them
- `model`: batch to gradient
- `split`: the same over several processes, and what a split would cost
- `worker`, `codec`: what goes out, how small, and the loop around it
- `protocol`: what server and workers say to each other, and what each does next
- `transport`: how they reach each other
- `store`, `rules`, `optim`: admit, gather, weigh, apply
- `log`, `folder`: the ordered record of a run, and where it is kept
- `engine`: what runs workers and store: simulated, or on this machine
- `train`, `join`, `loop`, `replay`: the front doors, for functions, scripts and logs
- `report`, `compare`, `watch`, `track`: what a run cost, beside others, and while it goes
- `cli`: the command line
- `recipes`, `studies`: complete tasks to train, and published findings tried on them
- `errors`: what goes wrong, told with its remedy
"""

from offbeat import codec, optim, track
from offbeat.config.task import Metric, Task
from offbeat.data.shares import EqualShares, GivenShares, SpeedShares
from offbeat.discipline.course import Switch, Turn, parse
from offbeat.discipline.discipline import Discipline
from offbeat.discipline.named import (
    ASP,
    ASUP,
    BMUF,
    BSP,
    EASGD,
    SSP,
    AsyncLocalSGD,
    Average,
    DiLoCo,
    Downpour,
    FedBuff,
    Gossip,
    Hogwild,
    LocalSGD,
    Rennala,
    Ringmaster,
    SoftSync,
)
from offbeat.discipline.parts import (
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
from offbeat.engine.result import Interrupted, Run
from offbeat.engine.sim.cluster import Cluster, Machine
from offbeat.engine.sim.cost import estimate
from offbeat.engine.sim.faults import Failure, Outage, Pause
from offbeat.engine.sim.hosts import Host, Network, Region, Share, StoreLink
from offbeat.errors import CheckpointError, ConfigError, OffbeatError, ReplayMismatch, RunError
from offbeat.join import Member, join
from offbeat.log.log import Listener
from offbeat.loop import EarlyStopping
from offbeat.model.objective import BatchLoss
from offbeat.model.table import ByCount, BySize, ByWeight
from offbeat.replay import Replay, replay
from offbeat.report.summary import History, Summary
from offbeat.rules.constraint import Clamp, MaxNorm
from offbeat.rules.schedule import Schedule
from offbeat.rules.updater import Clip
from offbeat.split.layout import Layout
from offbeat.split.plan.explain import explain
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
    "EarlyStopping",
    "Elastic",
    "EqualShares",
    "Failure",
    "FedBuff",
    "GapAware",
    "GivenShares",
    "Gossip",
    "Gradient",
    "History",
    "Hogwild",
    "Host",
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
    "Network",
    "OffbeatError",
    "Outage",
    "Pair",
    "Pause",
    "Polynomial",
    "Region",
    "Rennala",
    "Replay",
    "ReplayMismatch",
    "Ringmaster",
    "Rule",
    "Run",
    "RunError",
    "Schedule",
    "Share",
    "SoftSync",
    "SpeedShares",
    "StoreLink",
    "Summary",
    "Switch",
    "Task",
    "Turn",
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
