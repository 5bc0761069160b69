"""Run folders that were made before the modules were moved, which later code must go on with.

`python -m tests.contract.old_runs` has made the archives beside this file. It was run once, with
the code of the first stage, and is not to be run again: the point of the folders is that they are
old. Nor may a case that has an archive be changed, for its folders say how they were made; the
command only makes what is not there yet.

Each archive holds two folders: `finished`, and `stopped`, of the same run cut off in the middle.
What they must come to is in `expected.json`.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob

FOLDER = Path(__file__).with_suffix("")
EXPECTED = FOLDER / "expected.json"
SAMPLES, EPOCHS, BATCH = 26, 3, 4  # the last batch of an epoch is a short one

# ---------------------------------------------------------------- what is trained


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))


def net() -> nn.Module:
    """With buffers, and with chance in every step."""
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))


def deep() -> nn.Module:
    """Long enough to be split."""
    return nn.Sequential(
        nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    )


def made(make: Callable[[], nn.Module]) -> tuple[nn.Module, TensorDataset]:
    """A model and its data, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(), TensorDataset(torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 2))


SGD = partial(torch.optim.SGD, lr=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
ADAM = partial(torch.optim.Adam, lr=0.01)


def two_rates(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first], "lr": 0.1}, {"params": others}]


def largest_weight(model: nn.Module, data: Any) -> float:
    return max(float(p.detach().abs().max()) for p in model.parameters())


SCRIPT = """
import os, signal
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(torch.randn(26, 8), torch.randn(26, 2))
with ob.join(seed=3) as run:
    model = run.replica(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.3), nn.Linear(4, 2)))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.05, momentum=0.5))
    for x, y in run.batches(data, batch_size=4, epochs=3):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        run.record(loss)
        HERE
        optimizer.step()
        optimizer.zero_grad()
"""


# ---------------------------------------------------------------- how


class Case(NamedTuple):
    """A run of `ob.train`. `code` is what a replay has to be given too."""

    name: str
    discipline: str
    engine: str = "sim"
    model: Callable[[], nn.Module] = mlp
    optimizer: Any = MOMENTUM
    exact: bool = True  # whether it always comes to the same bits when it goes on
    ctrl_c: bool = False  # stopped by a signal, and so saved; else cut off after a checkpoint
    options: Mapping[str, Any] = {}
    code: Mapping[str, Any] = {}
    begins_with: str = ""  # another case
    part: int = 0  # bytes of a part of the log

    def run(self, out: Path | str, resume: bool = False, **more: Any) -> None:
        real = {"workers": 2, "threads": 1, "emulate": "5ms"}
        where = real if self.engine == "local" else {"cluster": "10ms,13ms"}
        ob.train(
            *made(self.model),
            F.mse_loss,
            discipline=self.discipline,
            optimizer=self.optimizer,
            engine=self.engine,
            batch_size=BATCH,
            epochs=EPOCHS,
            seed=3,
            out=out,
            resume=resume,
            **{"checkpoint_every": 3} | where | dict(self.options) | dict(self.code) | more,
        )

    def replay(self, folder: Path) -> int:
        """How many versions were compared; ReplayMismatch unless all were identical."""
        return ob.replay(folder, *made(self.model), F.mse_loss, **self.code).check().compared

    def stop(self, out: str, updates: int, **more: Any) -> None:
        with contextlib.suppress(Cut, KeyboardInterrupt):
            self.run(out, listeners=[StopAt(updates, self.ctrl_c)], **more)


class ScriptCase(NamedTuple):
    """A run of `offbeat run` with a loop of its own."""

    name: str
    engine: str
    words: Sequence[str]
    stops: str  # what the loop does to be stopped at AT
    exact: bool = True
    begins_with: str = ""
    part: int = 0

    def run(self, out: Path | str, resume: bool = False, stops: str = "pass") -> None:
        goes_on = ["--resume"] if resume else []
        words = ["--checkpoint-every", "3", "--out", str(out), *goes_on, *self.words]
        if self.engine == "sim":
            offbeat("run", *words, script(stops))
            return
        # It forks, and the children of a process of tests would be tests too.
        done = subprocess.run(
            [sys.executable, "-m", "offbeat", "run", *words, script(stops)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise Ended(done.returncode, done.stderr)

    def replay(self, folder: Path) -> int:
        told = offbeat("run", "--replay", str(folder), "--json", script("pass"))
        found = json.loads(told)
        assert found["identical"] is True
        return found["versions"]

    def stop(self, out: str, updates: int) -> None:
        with contextlib.suppress(Ended):
            self.run(out, stops=self.stops.replace("AT", str(updates)))


class Ended(Exception):
    """The command line said no, or was stopped."""


def offbeat(*words: str) -> str:
    """What `python -m offbeat` prints, without a process of its own, which takes seconds."""
    told = io.StringIO()
    with mock.patch.object(sys, "argv", ["offbeat", *words]), contextlib.redirect_stdout(told):
        try:
            runpy.run_module("offbeat", run_name="__main__")
        except SystemExit as leaving:
            if leaving.code:
                raise Ended(leaving.code, told.getvalue()) from None
    return told.getvalue()


def script(stops: str) -> str:
    """The script as a file of the current folder: a whole path would get into what is stored."""
    Path("train.py").write_text(SCRIPT.replace("HERE", stops))
    return "train.py"


class Cut(Exception):
    """Raised by a listener, it ends a run as a kill would: nothing more is saved."""


class StopAt(ob.Listener):
    def __init__(self, updates: int, ctrl_c: bool):
        self.left, self.ctrl_c = updates, ctrl_c

    def see(self, record: Any) -> None:
        self.left -= type(record).__name__ == "Updated"
        if self.left == 0:
            self.left = -1
            if not self.ctrl_c:
                raise Cut
            signal.raise_signal(signal.SIGINT)


FAULTS = ob.Cluster.from_toml_text(
    """
patience = "15ms"
[[worker]]
compute = "10ms"
latency = "1ms"
pauses = [{ at = "25ms", lasting = "30ms" }]
[[worker]]
compute = "exponential:12ms"
bandwidth = 100000.0
failures = [{ at = "35ms", returns_after = "20ms" }]
[[worker]]
compute = "21ms"
failures = [{ at = "50ms" }]
[[worker]]
compute = "11ms"
joins_at = "15ms"
"""
)
THREE = {"cluster": "10ms,13ms,20ms"}
OFTEN = {"checkpoint_every": 1}  # for runs of a few updates
HALVED = ob.Schedule(partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5))
ONE_SIZE = {"drop_last": True}
# A batch norm wants more than half a short batch.
HALVES = ONE_SIZE | {"layout": "pp=2,microbatches=2,split=count"}
TWO_BATCHES = HALVES | {"layout": "pp=2,microbatches=2,split=count,schedule=2bw"}
Real = partial(Case, engine="local")

CASES: list[Case | ScriptCase] = [
    # real processes, in an order that is another each time
    Real("asp-local", "asp", exact=False),
    Real("asp-local-ctrl-c", "asp", optimizer=ADAM, exact=False, ctrl_c=True),
    Real("ssp-local", "ssp:3", exact=False),
    Real("easgd-local", "easgd:2", exact=False),
    Real("gossip-local", "gossip", exact=False),
    Real("topk-local", "asp", exact=False, options={"codec": "topk:0.3"}),
    Real("buffers-local", "asp", model=net, exact=False, ctrl_c=True),
    Real("shards-local", "asp", optimizer=ADAM, exact=False, options={"shards": 3}),
    Real("overlap-local", "asp", exact=False, options={"overlap": True}),
    Real("split-local", "asp", model=deep, exact=False, options=HALVES),
    Real("2bw-local", "asp", model=deep, exact=False, options=TWO_BATCHES),
    # real processes in lock-step; chance decides who gets which batch, and where a worker keeps a
    # state of its own, or batches are not of one size, that is seen in the last bits
    Real("bsp-local", "bsp", options=ONE_SIZE),
    Real("local-local", "local:4", exact=False, options=OFTEN),
    Real("diloco-local", "diloco:2,momentum=0.5", exact=False, options=OFTEN),
    Real("bsp-allreduce", "bsp", options=ONE_SIZE | {"via": "allreduce"}),
    Real("local-allreduce", "local:4", exact=False, options=OFTEN | {"via": "allreduce"}),
    Real("split-bsp-local", "bsp", model=deep, options=HALVES),
    # virtual time: every discipline
    Case("bsp-sim", "bsp"),
    Case("bsp-backup-sim", "bsp:backup=1", options=OFTEN | THREE),
    Case("soft-sim", "soft:2", options=OFTEN | THREE),
    Case("ssp-sim", "ssp:3", ctrl_c=True),
    Case("asp-sim", "asp", optimizer=ADAM),
    Case("asp-inverse-sim", "asp:weigh=inverse", options=THREE),
    Case("asp-dc-sim", "asp:weigh=dc(strength=0.5)", options=THREE),
    Case("asp-dc-adaptive-sim", "asp:weigh=dc-adaptive", options=THREE),
    Case("asp-gap-sim", "asp:weigh=gap", options=THREE),
    Case("downpour-sim", "downpour:2,fetch=3", optimizer=None),
    Case("asup-sim", "asup:2,lr=0.002", optimizer=None),
    Case("average-sim", "average:2", optimizer=ADAM, options=OFTEN),
    Case("local-sim", "local:4", options=OFTEN),
    Case("bmuf-sim", "bmuf:2,nesterov=yes", options=OFTEN),
    Case("easgd-sim", "easgd:2"),
    Case("diloco-sim", "diloco:2,momentum=0.5", options=OFTEN),
    Case("async-local-sim", "async-local:3", options=OFTEN | THREE),
    Case("fedbuff-sim", "fedbuff:2,every=2", options=OFTEN | THREE),
    Case("gossip-sim", "gossip", options=THREE),
    # virtual time: everything else that a folder keeps
    Case("faults-sim", "asp", model=net, options={"cluster": FAULTS}),
    Case("faults-bsp-sim", "bsp", model=net, ctrl_c=True, options={"cluster": FAULTS}),
    Case("topk-sim", "asp", options={"codec": "topk:0.3"}),
    Case("int8-sim", "asp", ctrl_c=True, options={"codec": "int8"}),
    Case("1bit-sim", "local:2", options=OFTEN | {"codec": "1bit"}),
    Case("buffers-sim", "asp", model=net),
    Case("policies-sim", "local:2", model=net, options=OFTEN, code={"policies": {"1.*": "local"}}),
    Case("shards-sim", "asp", optimizer=ADAM, options={"shards": 3}),
    Case("split-sim", "asp", model=deep, options=HALVES),
    Case("started-sim", "asp", optimizer=ADAM, begins_with="asp-sim"),
    Case("parts-sim", "asp", part=1500),
    Case(
        "options-sim",
        "asp",
        optimizer=SGD,
        options={
            "accumulate": 2,
            "drop_last": True,
            "hash_every": 2,
            "constrain": [ob.Clamp(-0.3, 0.3, "0.*"), ob.MaxNorm(0.5, "2.weight")],
            "test": made(mlp)[1],
            "evaluate_every": 10,
            "metric": ob.Metric("largest", largest_weight, higher_is_better=False),
            "origin": {"loop": "train.py"},
        },
        code={"schedule": HALVED, "clip": ob.Clip(norm=0.4), "groups": two_rates},
    ),
    # scripts
    ScriptCase(
        "script-local",
        "local",
        ["-n", "2", "--sync", "asp", "--emulate", "20ms"],
        "if run.rank == 1 and run.version >= AT: os.kill(os.getppid(), signal.SIGTERM)",
        exact=False,
    ),
    ScriptCase(
        "script-sim",
        "sim",
        ["--sync", "ssp:2", "--cluster", "10ms,13ms,20ms"],
        "run.version == AT and signal.raise_signal(signal.SIGINT)",
    ),
]


# ---------------------------------------------------------------- what they come to


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def arithmetic() -> str:
    """A digest of a few steps in plain PyTorch: where it is another, so is every other one."""
    total = hashlib.sha256()
    for make in (mlp, net, deep):
        for factory in (MOMENTUM, ADAM):
            with torch.random.fork_rng(devices=[]):
                model, data = made(make)
                torch.manual_seed(1)
                rule = factory(model.parameters())
                for rows in torch.arange(SAMPLES).split(BATCH):
                    inputs, target = data[rows]
                    rule.zero_grad()
                    F.mse_loss(model(inputs), target).backward()
                    rule.step()
            for tensor in model.state_dict().values():
                total.update(tensor.numpy().tobytes())
    return total.hexdigest()


# ---------------------------------------------------------------- the maker


def make(case: Case | ScriptCase) -> dict[str, Any]:
    """Write the archive of a case, from the current folder; returns what is expected of it."""
    more: dict[str, Any] = {}
    if case.begins_with:
        next(other for other in CASES if other.name == case.begins_with).run("earlier")
        more["start"] = "earlier"
    finished, stopped = Path("finished"), Path("stopped")
    case.run("finished", **more)
    whole = summary(finished)["updates"]
    case.stop("stopped", (whole + 1) // 2, **more)
    begun = case.replay(stopped)
    assert 0 < begun < whole, f"{case.name} was stopped at {begun} of {whole}"
    assert list((stopped / "checkpoints").iterdir()), f"{case.name} has no checkpoint"
    hashes = []
    for _ in range(2):
        shutil.copytree(stopped, "resumed")
        case.run("resumed", resume=True)
        hashes.append(summary(Path("resumed"))["parameter_hash"])
        shutil.rmtree("resumed")
    assert not case.exact or hashes[0] == hashes[1], f"{case.name} is not exact"
    pack(FOLDER / f"{case.name}.tar.gz", [finished, stopped])
    return {
        "finished": summary(finished)["parameter_hash"],
        "updates": whole,
        "resumed": hashes[0] if case.exact else None,
    }


def pack(archive: Path, folders: Sequence[Path]) -> None:
    """The same bytes for the same files, and nothing of this machine in them."""
    files = sorted(path for folder in folders for path in (folder, *folder.rglob("*")))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for file in files:
            if file.is_file() and file.suffix != ".safetensors":
                read = gzip.open if file.suffix == ".gz" else open
                with read(file, "rb") as opened:
                    text = opened.read()
                strange = [os.getcwd(), str(Path.home()), os.uname().nodename]
                assert not any(word.encode() in text for word in strange), file
            entry = tar.gettarinfo(file)
            entry.mtime = entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if file.is_dir() else 0o644
            tar.addfile(entry, io.BytesIO(file.read_bytes()) if file.is_file() else None)
    with (
        archive.open("wb") as file,
        gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=0) as packed,
    ):
        packed.write(content.getvalue())


@contextlib.contextmanager
def parts(size: int) -> Iterator[None]:
    """Logs of a few updates have several parts, if a size is given."""
    if size == 0:
        yield
        return
    from offbeat.log import (
        files as logfile,  # for the maker alone: the test needs nothing from inside
    )

    with mock.patch.object(logfile, "PART", size):
        yield


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {"cases": {}}
    if expected.setdefault("arithmetic", arithmetic()) != arithmetic():
        sys.exit("PyTorch rounds otherwise here than where the other folders were made")
    for case in CASES:
        if case.name not in expected["cases"]:
            place = tempfile.TemporaryDirectory()
            with place as folder, contextlib.chdir(folder), parts(case.part):
                expected["cases"][case.name] = make(case)
            print(case.name, expected["cases"][case.name])
            EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
