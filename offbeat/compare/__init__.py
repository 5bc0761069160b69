"""Compare disciplines on any task: a grid of runs over devices and repeats, kept in one folder.

- `spell`: lists of disciplines, devices and rates as text
- `plan`, `speeds`: which cells there are, and how fast their workers are
- `place`: the folder, which cells it holds, and whether they belong to this plan
- `source`, `watch`: where tasks come from, and who is told how it goes
- `runner`: running what is missing, and the grid that comes of it
- `results`: the figures as JSON and CSV
- `estimate`, `display`: how long it will take, and showing that while it goes
"""

from offbeat.compare.plan import ComparisonPlan, Point
from offbeat.compare.runner import Comparison, compare
from offbeat.compare.source import Source
from offbeat.compare.speeds import RealSpeeds, Simulated
from offbeat.compare.watch import Watcher

__all__ = [
    "Comparison",
    "RealSpeeds",
    "ComparisonPlan",
    "Point",
    "Simulated",
    "Source",
    "Watcher",
    "compare",
]
