"""What each process of a sharded store holds, beside what one process that trains alone holds."""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import offbeat as ob
from benchmarks.figure import Figure, Peer
from benchmarks.local.runs import NEVER
from benchmarks.peers.launch import alone
from benchmarks.scale import Scale
from offbeat.log.records import Entry, Updated

WIDTH = 1024
SHARDS = 4
STEPS = 6
EACH = 16  # bytes of a parameter, its gradient and Adam's two moments
ADAM = partial(torch.optim.Adam, lr=1e-5)


def network(floats: int) -> nn.Module:
    layers = max(SHARDS, floats // WIDTH**2)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def samples(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, WIDTH), torch.randn(count, WIDTH))


def mapped(pid: int | str) -> Iterator[tuple[str, dict[str, int]]]:
    """Every mapping of a process: its name, and bytes by the kernel's names for them."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    heads = list(re.finditer(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)$", text, re.MULTILINE))
    ends = [*(head.start() for head in heads), len(text)]
    for head, (_, stop) in zip(heads, pairwise(ends), strict=True):
        sizes = re.findall(r"^(\w+): +(\d+) kB$", text[head.end() : stop], re.MULTILINE)
        yield head.group(1), {name: int(count) * 1024 for name, count in sizes}


def held(pid: int | str) -> int:
    """Pages of its own, and pages of the run's shared memory that it has touched."""
    total = 0
    for name, sizes in mapped(pid):
        if name.startswith("/memfd:offbeat"):
            total += sizes["Rss"]
        else:
            total += sizes["Private_Clean"] + sizes["Private_Dirty"]
    return total


def children(of: int | str) -> dict[str, int]:
    found = {}
    for file in Path(f"/proc/{of}/task").glob("*/children"):
        for pid in file.read_text().split():
            found[Path(f"/proc/{pid}/comm").read_text().strip()] = int(pid)
    return found


class Look(ob.Listener):
    """Looks at server and hands at every update, and keeps the most that each has held."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}

    def see(self, record: Entry) -> None:
        server = children("self").get("offbeat server")
        if not isinstance(record, Updated) or server is None:
            return
        with suppress(OSError):  # the last records are read when it has ended
            for name, pid in {"offbeat server": server, **children(server)}.items():
                self.most[name] = max(self.most.get(name, 0), held(pid))


def served(floats: int, shards: int, workers: int) -> dict[str, Any]:
    """A run of a few steps; returns parameters and the most bytes that a process of it held."""
    model, look = network(floats), Look()
    ob.train(
        model,
        samples(STEPS * workers),
        functional.mse_loss,
        discipline="asp",
        optimizer=ADAM,
        workers=workers,
        threads=1,
        batch_size=1,
        shards=shards,
        checkpoint_every=NEVER,
        listeners=[look],
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": count, "processes": len(look.most), "most": max(look.most.values())}


def plain(floats: int) -> dict[str, Any]:
    """The same steps in one process without offbeat: what it held beyond an idle one."""
    data = samples(2)
    before = held("self")
    model = network(floats)
    rule = ADAM(model.parameters(), foreach=False)
    for x, y in zip(*data.tensors, strict=True):
        rule.zero_grad(set_to_none=False)
        functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        rule.step()
    return {"held": held("self") - before}


def shards(scale: Scale) -> list[Figure]:
    """The largest process of a store of four, of what one process that trains alone holds."""
    arguments = {"floats": scale.shard_floats, "shards": SHARDS, "workers": 1}
    found = alone("shards:served", arguments)
    two = alone("shards:served", arguments | {"workers": 2})
    one = alone("shards:served", arguments | {"shards": 1})
    bare = alone("shards:plain", {"floats": scale.shard_floats})
    whole = EACH * found["parameters"]
    return [
        Figure(
            f"largest of {SHARDS} server processes, Adam, {found['parameters'] / 1e6:.0f} M "
            "parameters, of 16 bytes each",
            found["most"] / whole,
            "x",
            at_most=0.3,
            beside=f"{found['processes']} processes, own pages and touched shared ones",
            peers=(
                Peer("one server process", one["most"] / whole, "x"),
                Peer("2 workers", two["most"] / whole, "x", "the slots of both are touched"),
                Peer("plain PyTorch", bare["held"] / whole, "x", "one process that trains"),
            ),
        )
    ]
