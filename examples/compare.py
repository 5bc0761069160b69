"""Several disciplines on one uneven cluster, each at the best of a few rates, in one table."""

from functools import partial

import torch

import offbeat as ob
from offbeat.recipes import digits

DISCIPLINES = ("bsp", "bsp:backup=1", "soft:2", "ssp:3", "asp", "local:4")
RATES = (0.15, 0.5)
TARGET = 0.85


def best_run(discipline: str) -> tuple[float, ob.Run]:
    """The rate whose run ends most accurate, and that run."""
    runs = {}
    for rate in RATES:
        task = digits()  # with a model that is not trained yet
        runs[rate] = ob.train(
            task.model,
            task.data,
            task.loss,
            discipline=discipline,
            optimizer=partial(torch.optim.SGD, lr=rate),
            cluster=ob.Cluster.with_straggler(4, slower=3),
            epochs=3,
            test=task.test,
            evaluate_every=240,
            nonfinite="skip",
        )
    return max(runs.items(), key=lambda found: found[1].summary().accuracy or 0.0)


def main() -> None:
    print(f"{'discipline':14}{'rate':>6}{TARGET:>9.0%} after{'final':>9}{'waiting':>10}{'τ':>7}")
    for discipline in DISCIPLINES:
        rate, run = best_run(discipline)
        cost = run.summary()
        reached = run.history.time_to(TARGET)
        when = "never" if reached is None else f"{reached:.2f} s"
        print(
            f"{discipline:14}{rate:6}{when:>15}{cost.accuracy:9.1%}"
            f"{cost.wait_share:10.0%}{cost.staleness_mean:7.2f}"
        )


if __name__ == "__main__":
    main()
