"""Draws the pictures of the documentation from the records of simulated runs.

    python docs/figures.py

writes docs/images/ anew. Timelines come from cost-only runs: who waits for whom depends on times
alone. Curves come from runs with real gradients.
"""

from collections.abc import Iterator
from pathlib import Path

from drawing import draw_chart, draw_timelines
from timelines import Chart, Line, Panel, curve, timeline

__all__ = [
    "CHARTS",
    "IMAGES",
    "PANELS",
    "TIMELINES",
    "curve",
    "draw_chart",
    "draw_timelines",
    "timeline",
]

IMAGES = Path(__file__).resolve().parent / "images"
HICCUPS = ("lognormal:20ms,0.5", "lognormal:20ms,0.5", "lognormal:20ms,0.5", "lognormal:28ms,0.5")
IRREGULAR = ("lognormal:20ms,0.6", "lognormal:20ms,0.6", "lognormal:20ms,0.6")  # no one is slow

_MOMENTUM = {"lr": 0.05, "momentum": 0.9}
PANELS = tuple(
    Panel(title, sync, HICCUPS, until=0.46)
    for title, sync in (
        ("Lock-step (bsp): a round is as long as its slowest step", "bsp"),
        ("Slack (ssp:2): at most two steps ahead of the slowest", "ssp:2"),
        ("Free-running (asp): nobody waits", "asp"),
    )
)
TIMELINES: dict[str, tuple[Panel, ...]] = {
    "timeline": PANELS,
    "bsp": (
        Panel("bsp: everybody waits for the last", "bsp", IRREGULAR),
        Panel("bsp:backup=1: the last one is dropped (×)", "bsp:backup=1", IRREGULAR),
    ),
    "soft": (
        Panel("soft:2: two gradients make one update", "soft:2"),
        Panel("asp, to compare: each gradient is an update", "asp"),
    ),
    "ssp": (
        Panel("ssp:3, times that scatter: slack absorbs hiccups", "ssp:3", IRREGULAR),
        Panel("ssp:3, one worker always slow: the slack runs out", "ssp:3"),
    ),
    "asp": (
        Panel("asp: nobody waits", "asp"),
        Panel("asp:weigh=inverse: the same, and stale gradients count less", "asp:weigh=inverse"),
    ),
    "ringmaster": (
        Panel("ringmaster:3: a gradient that is three updates old is dropped (×)", "ringmaster:3"),
        Panel("asp, to compare: all are applied", "asp"),
    ),
    "rennala": (
        Panel("rennala:3: three gradients of one version; late ones are dropped (×)", "rennala:3"),
        Panel("soft:3, to compare: any three gradients", "soft:3"),
    ),
    "switch": (
        Panel("switch:bsp,asp,at=v4: in lock-step, then free-running", "switch:bsp,asp,at=v4"),
        Panel("switch:asp,bsp,at=v12: the other way round", "switch:asp,bsp,at=v12"),
    ),
    "downpour": (
        Panel("downpour: push and fetch after every step", "downpour", exchange=0.006),
        Panel(
            "downpour:push=4,fetch=2: push every 4, fetch every 2",
            "downpour:push=4,fetch=2",
            exchange=0.006,
        ),
    ),
    "asup": (
        Panel("asup: slack 8, and rates of 1/τ", "asup"),
        Panel("asup:slack=2: less stale, more waiting", "asup:slack=2"),
    ),
    "hogwild": (
        Panel("asp: an exchange with the store after every step", "asp", exchange=0.004),
        Panel("hogwild, drawn as asp with exchanges that take no time", "asp"),
    ),
    "local": (
        Panel("bsp, slow links: an exchange after every step", "bsp", exchange=0.015),
        Panel("local:4: an exchange after four steps", "local:4", exchange=0.015),
    ),
    "easgd": (
        Panel("local:4, to compare: all meet", "local:4", exchange=0.006),
        Panel("easgd:4: each meets the centre when it is ready", "easgd:4", exchange=0.006),
    ),
    "async-local": (
        Panel(
            "local:6, to compare: the slow one holds up the rest",
            "local:6",
            exchange=0.006,
            until=0.8,
        ),
        Panel(
            "async-local:6: the slow one makes fewer steps",
            "async-local:6",
            exchange=0.006,
            until=0.8,
        ),
    ),
    "fedbuff": (
        Panel(
            "fedbuff:2,every=3: any two changes make an update", "fedbuff:2,every=3", exchange=0.006
        ),
        Panel("local:3, to compare: one change of everybody", "local:3", exchange=0.006),
    ),
    "gossip": (
        Panel("bsp, to compare: all meet, and wait for the last", "bsp", exchange=0.006),
        Panel("gossip: each meets one other when it is ready", "gossip", exchange=0.006),
    ),
}
CHARTS: dict[str, Chart] = {
    "average": Chart(
        "Three things to do with momentum at a sync, 4 workers",
        "megabytes sent",
        (
            Line("average:8", "average:8", settings=_MOMENTUM),
            Line("state=keep", "average:8,state=keep", settings=_MOMENTUM),
            Line("state=reset", "average:8,state=reset", settings=_MOMENTUM),
        ),
        workers=4,
        epochs=6,
    ),
    "bmuf": Chart(
        "Block momentum against plain averaging, 8 workers",
        "epochs",
        (
            Line("bmuf:4", "bmuf:4", settings={"lr": 0.1}),
            Line("bmuf:4,nesterov=yes", "bmuf:4,nesterov=yes", settings={"lr": 0.1}),
            Line("average:4,state=reset", "average:4,state=reset", settings={"lr": 0.1}),
        ),
        workers=8,
        epochs=8,
    ),
    "diloco": Chart(
        "What a megabyte buys, 4 workers with AdamW",
        "megabytes sent",
        (
            Line("bsp", "bsp", "AdamW", {"lr": 0.01}),
            Line("diloco:5", "diloco:5", "AdamW", {"lr": 0.003}),
            Line("diloco:20", "diloco:20", "AdamW", {"lr": 0.01}),
        ),
        workers=4,
        epochs=6,
    ),
}


def pictures() -> Iterator[tuple[Path, str]]:
    """Every picture: where it lies, and what it is."""
    for name, panels in TIMELINES.items():
        yield IMAGES / f"{name}.svg", draw_timelines(panels)
    for name, chart in CHARTS.items():
        curves = [curve(line, chart) for line in chart.lines]
        yield IMAGES / f"{name}.svg", draw_chart(chart, curves)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for path, picture in pictures():
        path.write_text(picture)
