"""Compare disciplines on any task: a grid of runs over devices and repeats, kept in one folder.

- `spell`: lists of disciplines, devices and rates as text
- `plan`, `speeds`: which cells there are, and how fast their workers are
- `place`: the folder, which cells it holds, and whether they belong to this plan
- `source`: where tasks come from
- `runner`: running what is missing, the grid that comes of it, and who is told how it goes
- `results`: the figures as JSON and CSV
- `display`: how it goes, and how long it will take
"""

from offbeat.compare.plan import ComparisonPlan, Point
from offbeat.compare.runner import Comparison, Watcher, compare
from offbeat.compare.source import Source
from offbeat.compare.speeds import RealSpeeds, Simulated

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
