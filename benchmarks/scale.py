"""How much to measure: everything at its full size, or a short look."""

from dataclasses import dataclass
from pathlib import Path

RESNET_FLOATS = 25_557_032


@dataclass(frozen=True)
class Scale:
    """Sizes and repeats of every benchmark; `mnist` is the folder of its four files, if any."""

    repeats: int = 5
    floats: int = RESNET_FLOATS
    exchanges: int = 15  # timed exchanges of that many floats
    small_steps: int = 2000  # steps of the small model in one repeat
    small_epochs: int = 330  # of the small model in one run, some seconds
    window: float = 5.0  # seconds of one look at samples/s
    launches: int = 3  # fresh starts, or seeds
    reaches: int = 3  # seeds of the runs to an accuracy, which differ much
    pairs: int = 3  # of a plain run of ResNet-50 and one of offbeat
    resnet_steps: int = 8
    side: int = 224  # pixels of ResNet-50's images, as it is known
    small_side: int = 64  # of images that make its steps short
    epochs: int = 3  # of MNIST
    samples: int | None = None  # of MNIST, where fewer than all will do
    accuracy: float = 0.97  # what a run on MNIST has to reach
    demo_rows: int | None = None  # all
    demo_epochs: int | None = None  # as many as the demo has
    watch_epochs: int = 150  # of a run with the live page, some seconds
    layout_steps: int = 12  # of a split model
    shard_floats: int = 100_000_000  # of a model on a store of several processes
    width: int = 768  # of a transformer of 100 M parameters
    layers: int = 14
    workers: int = 10_000  # of the simulated cluster
    mnist: Path | None = None


QUICK = Scale(
    repeats=2,
    floats=1_000_000,
    exchanges=3,
    small_steps=50,
    small_epochs=5,
    window=1.0,
    launches=1,
    reaches=1,
    pairs=1,
    resnet_steps=2,
    side=48,
    small_side=32,
    epochs=1,
    samples=2_000,
    accuracy=0.5,
    demo_rows=2,
    demo_epochs=2,
    watch_epochs=20,
    layout_steps=4,
    width=64,
    layers=4,
    shard_floats=4_000_000,
    workers=1_000,
)
