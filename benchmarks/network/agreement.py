"""The same scenes on hosts made of namespaces and in the simulator: do they agree?"""

import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import offbeat as ob
from benchmarks.figure import Figure, Peer
from benchmarks.network.hosts import Hosts, until, why_not
from benchmarks.network.models import loss_of, model_of
from benchmarks.network.runs import Outcome, Scene, train
from benchmarks.peers.common import made_up
from benchmarks.scale import Scale
from offbeat.log.records import Entry

NEAR = 0.1  # by how much they may differ
BITS = 1e8  # a second
MODEL = "weights:250000"
EVEN, UNEVEN = (0.1, 0.1, 0.1), (0.05, 0.1, 0.3)
INT8 = {"codec": "int8", "pull_codec": "int8"}
# Real workers never begin at the same moment; simulated ones that do would always send together.
APART = 0.13  # seconds
CUT_AFTER, CUT_FOR = 2.0, 2.0  # seconds


@dataclass(frozen=True)
class Scenario:
    """A scene, and how it is synchronised."""

    what: str
    scene: Scene
    sync: str
    codecs: dict[str, str]
    cut: bool = False  # the first worker's host, for a while

    @property
    def options(self) -> list[str]:
        named = [(f"--{name.replace('_', '-')}", text) for name, text in self.codecs.items()]
        return ["--sync", self.sync, *(word for pair in named for word in pair)]


def scenarios(steps: int) -> list[Scenario]:
    even = Scene(EVEN, BITS, MODEL, 8, steps)
    uneven, alone = replace(even, emulate=UNEVEN), replace(even, emulate=EVEN[:1])
    return [
        Scenario("one worker, asp", alone, "asp", {}),
        Scenario("three on the store's link, asp", even, "asp", {}),
        Scenario("three on the store's link, bsp", even, "bsp", {}),
        Scenario("three speeds, asp", uneven, "asp", {}),
        Scenario("three speeds, ssp:2", uneven, "ssp:2", {}),
        Scenario("int8 both ways, asp", replace(even, steps=2 * steps), "asp", INT8),
        Scenario("local:8", replace(even, steps=4 * steps), "local:8", {}),
        Scenario(f"a cut of {CUT_FOR:g} s, asp", even, "asp", {}, cut=True),
    ]


def agreement(scale: Scale) -> list[Figure]:
    """Samples/s of real hosts over those of the simulator, for each scene."""
    what = "hosts over the simulator, samples/s"
    reason = why_not()
    if reason:
        return [Figure(what, None, "x", at_least=1 - NEAR, at_most=1 + NEAR, beside=reason)]
    figures = []
    for scenario in scenarios(max(6, int(5 * scale.window))):
        measured, simulated = on_hosts(scenario), in_simulator(scenario)
        figures.append(
            Figure(
                f"{what}: {scenario.what}",
                measured / simulated,
                "x",
                at_least=1 - NEAR,
                at_most=1 + NEAR,
                peers=(
                    Peer("hosts", measured, "samples/s"),
                    Peer("simulator", simulated, "samples/s"),
                ),
            )
        )
    return figures


def on_hosts(scenario: Scenario) -> float:
    cut = _cut if scenario.cut else None
    return train(scenario.scene, *scenario.options, meanwhile=cut).per_second()


def _cut(hosts: Hosts) -> None:
    """From another thread, some time after the first update."""
    log = hosts[1].folder / "run" / "log.jsonl"

    def work() -> None:
        until(lambda: log.exists() and b'"update"' in log.read_bytes(), "the first update")
        time.sleep(CUT_AFTER)
        hosts[2].cut()
        time.sleep(CUT_FOR)
        hosts[2].heal()

    threading.Thread(target=work, daemon=True).start()


class Records(ob.Listener):
    """All that the log has."""

    def __init__(self) -> None:
        self.all: list[Entry] = []

    def see(self, record: Entry) -> None:
        self.all.append(record)


def in_simulator(scenario: Scenario) -> float:
    scene, records = scenario.scene, Records()
    count = min(2048, scene.batch * scene.steps * len(scene.emulate))
    ob.train(
        model_of(scene.model),
        TensorDataset(*(part[:count] for part in made_up(784))),
        ob.BatchLoss(_loss),
        cluster=ob.Cluster.from_toml_text(cluster_of(scenario)),
        discipline=scenario.sync,
        optimizer=partial(torch.optim.SGD, lr=scene.rate),
        batch_size=scene.batch,
        epochs=-(-scene.steps * len(scene.emulate) * scene.batch // count),
        listeners=[records],
        hash_every=10**9,
        **scenario.codecs,  # type: ignore[arg-type]
    )
    return Outcome(records.all, {}, "").per_second()


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return loss_of(model, *batch)


def cluster_of(scenario: Scenario) -> str:
    """The scene as the simulator reads it."""
    rate = f'"{scenario.scene.bits:.0f}bit/s"'
    lines = ["[store]", f"in = {rate}", f"out = {rate}"]
    for number, seconds in enumerate(scenario.scene.emulate):
        lines += ["[[host]]", f'name = "lab{number}"', f"up = {rate}", f"down = {rate}"]
        if scenario.cut and not number:
            lines.append(f'outages = [{{at = "{CUT_AFTER}s", lasting = "{CUT_FOR}s"}}]')
        lines += ["[[worker]]", f'host = "lab{number}"', f'compute = "{1e3 * seconds:g}ms"']
        lines.append(f'joins_at = "{1e3 * APART * number:g}ms"')
    return "\n".join(lines)
