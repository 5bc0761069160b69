"""A discipline of your own: five choices that have no name yet, beside two that have."""

from functools import partial

import torch

import offbeat as ob
from offbeat.recipes import digits

# Local steps, as in local SGD. But nobody waits for a round: any two changes make an update.
# A worker may be one block ahead of the slowest, and a stale change moves the store less.
BLOCK = 4
PAIRS = ob.Discipline(
    send=ob.Change(every=BLOCK),
    gather=ob.Count(2),
    wait=BLOCK,
    weigh=ob.Polynomial(a=0.5),
    apply=ob.Rule("sgd", lr=1.0),
)


def main() -> None:
    print(f"as a string: {PAIRS}\n")
    rivals = {"lock-step": ob.BSP(), "local SGD": ob.LocalSGD(h=BLOCK), "pairs": PAIRS}
    for name, discipline in rivals.items():
        task = digits()  # with a model that is not trained yet
        run = ob.train(
            task.model,
            task.data,
            task.loss,
            discipline=discipline,
            optimizer=partial(torch.optim.SGD, lr=0.4),
            cluster="lognormal:20ms,0.6," * 3 + "lognormal:25ms,0.6",
            epochs=4,
            test=task.test,
        )
        cost = run.summary()
        print(
            f"{name:10} {cost.seconds:5.2f} virtual s, {cost.accuracy:.1%}, "
            f"waiting {cost.wait_share:.0%}, staleness {cost.staleness_mean:.2f}, "
            f"{cost.bytes_sent / 1e6:.1f} MB sent"
        )


if __name__ == "__main__":
    main()
