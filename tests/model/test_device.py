"""Runs on a device: the same numbers as on the CPU, and nothing that takes one for the other.

Each test is a process of its own, which has a device that stands in for a real one. It may fork
only before it has made a backward pass.
"""

import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.cli import main
from offbeat.config.run_config import Hosts
from offbeat.errors import ConfigError
from offbeat.model import gradient_stream
from tests import standin
from tests.contract.common import Stop, StopAfter

DEVICE = "standin:0"
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
ADAM = partial(torch.optim.Adam, lr=0.01)
UNEVEN = "20ms,30ms,70ms"


def data() -> TensorDataset:
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(48, 6, generator=chance)
    return TensorDataset(x, torch.randint(0, 3, (48,), generator=chance))


class Net(nn.Module):
    """A buffer that moves, chance, a frozen part and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.inside = nn.Linear(6, 6)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.25)
        self.out = nn.Linear(6, 3, bias=False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.inside.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.inside(self.frozen(x))))
        return self.out(self.drop(self.tied(x)))


class Blocks(nn.Sequential):
    """One that can be split both ways."""

    layout_shards: ClassVar = {"0": "column", "2": "row"}

    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__(
            *(nn.Linear(6, 8), nn.Dropout(0.25), nn.Linear(8, 6), nn.BatchNorm1d(6)),
            nn.Linear(6, 3),
        )


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def on_device(output: Tensor, target: Tensor) -> Tensor:
    """A loss that sees where it is computed; tests are made on the CPU."""
    place = torch.device(DEVICE if torch.is_grad_enabled() else "cpu")
    assert output.device == target.device == place
    return F.cross_entropy(output, target)


def all_on_device(output: Tensor, target: Tensor) -> Tensor:
    """The same where tests are made there too."""
    assert output.device == target.device == torch.device(DEVICE)
    return F.cross_entropy(output, target)


def on_device_elsewhere(output: Tensor, target: Tensor) -> Tensor:
    """What is tried before a run is on the CPU where workers are on hosts of their own."""
    trial = Path("/proc/self/comm").read_text().startswith("offbeat trial")
    assert output.device == target.device == torch.device("cpu" if trial else DEVICE)
    return F.cross_entropy(output, target)


def compare_tests(**how: Any) -> None:
    """Tests on the device find what they find on the CPU."""
    how |= {"discipline": "bsp", "test": data()}
    there = train(DEVICE, loss=all_on_device, test_device=DEVICE, **how)
    here = train(None, **how)
    one, other = there.history.tests[-1], here.history.tests[-1]
    assert (one.loss, one.accuracy) == (other.loss, other.accuracy)
    same(there.model, here.model)


def train(
    device: str | None, model: nn.Module | None = None, loss: Any = None, **how: Any
) -> ob.Run:
    loss = loss or (F.cross_entropy if device is None else on_device)
    settings: dict[str, Any] = {"optimizer": SGD, "batch_size": 8, "epochs": 2, **how}
    return ob.train(model or net(), data(), loss, device=device, **settings)


def replayed(folder: Path, device: str | None = None) -> int:
    """How many versions were compared, all the same."""
    loss = F.cross_entropy if device is None else on_device
    found = ob.replay(folder, net(), data(), loss, device=device)
    assert found.check().compared == found.versions
    return found.compared


def same(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.device.type == theirs[name].device.type == "cpu"
        assert torch.equal(tensor, theirs[name]), name


def compare(model: Any = net, **how: Any) -> None:
    """On the device first: what comes out is known from the CPU."""
    found = train(DEVICE, model(), **how)
    same(found.model, train(None, model(), **how).model)


# ---------------------------------------------------------------- real processes


class Wide(nn.Module):
    """Large enough that its gradients come down while others are made; one part gets none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.idle = nn.Linear(6, 30_000), nn.Linear(2, 2)
        self.last = nn.Linear(30_000, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def local_runs() -> None:
    gradient_stream.PIECE = 1 << 16
    compare(Wide, workers=1, discipline="asp", epochs=1, shards=2)
    compare(Wide, workers=2, discipline="bsp", epochs=1, via="allreduce")
    compare(workers=1, discipline="asp")
    compare(workers=1, discipline="average:2", optimizer=ADAM, nonfinite="skip", codec="bf16")
    compare_tests(workers=1)
    over_tcp = {"workers": 1, "discipline": "easgd:2", "engine": Hosts(), "codec": "int8"}
    there = train(DEVICE, loss=on_device_elsewhere, **over_tcp)
    same(there.model, train(None, **over_tcp).model)
    compare(Blocks, workers=1, discipline="local:2", layout="pp=2", verify=True)
    compare(Blocks, workers=1, discipline="bsp", layout="tp=2")
    with tempfile.TemporaryDirectory() as place:
        out = Path(place)
        kept = {"workers": 2, "discipline": "asp", "out": out, "checkpoint_every": 2}
        with suppress(Stop):
            train(f"cpu,{DEVICE}", loss=F.cross_entropy, listeners=[StopAfter(12)], **kept)
        train(None, resume=True, **kept)
        assert replayed(out) == replayed(out, DEVICE) > 6
    with pytest.raises(ConfigError, match="standin is in use in this process already"):
        train(DEVICE, workers=2, discipline="asp")


def test_on_the_local_engine() -> None:
    standin.run(local_runs)


# ---------------------------------------------------------------- virtual time


def simulated_runs() -> None:
    settings: list[dict[str, Any]] = [
        {"discipline": "asp", "clip": ob.Clip(norm=0.5)},
        {"discipline": "asp:weigh=dc", "codec": "topk:0.3", "nonfinite": "skip"},
        {"discipline": "downpour:2", "optimizer": None, "accumulate": 2},
        {"discipline": "average:2", "optimizer": ADAM, "constrain": "clamp(-0.3,0.3,out.*)"},
        {"discipline": "bmuf:2", "codec": "1bit"},
        {"discipline": "easgd:2", "codec": "int8"},
        {"discipline": "gossip", "test": data(), "policies": {"norm.*": "local"}},
    ]
    compare_tests(cluster=UNEVEN)
    for how in settings:
        compare(cluster=UNEVEN, **how)
    compare(Blocks, cluster=UNEVEN, discipline="easgd:2", layout="pp=2")


def test_in_virtual_time() -> None:
    standin.run(simulated_runs)


def stopped_and_resumed() -> None:
    """A checkpoint does not tell where its numbers were computed."""
    for discipline, rule in (("easgd:2", SGD), ("average:2", ADAM)):
        with tempfile.TemporaryDirectory() as place:
            whole, out = Path(place) / "whole", Path(place) / "run"
            how = {"discipline": discipline, "optimizer": rule, "cluster": UNEVEN}
            wanted = train(None, out=whole, **how)
            for device, records in (("cpu", 25), (DEVICE, 25)):
                resume = {"out": out, "resume": out.exists(), "listeners": [StopAfter(records)]}
                with suppress(Stop):
                    train(None if device == "cpu" else device, **how, **resume)
            found = train(DEVICE, **how, out=out, resume=True)
            assert (out / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()
            same(found.model, wanted.model)
            assert replayed(out) == replayed(out, DEVICE) > 1


def test_a_run_goes_on_wherever_it_is_computed() -> None:
    standin.run(stopped_and_resumed)


def comes_back() -> None:
    """What is passed in is trained, and otherwise as it was."""
    model = net()
    parts = [*model.parameters(), *model.buffers()]
    heard: list[torch.device] = []
    model.out.register_forward_hook(lambda module, inputs, output: heard.append(output.device))
    model.frozen.eval()
    before = model.frozen.weight.clone()
    state = torch.get_rng_state()
    train(DEVICE, model, cluster=UNEVEN, discipline="asp")
    assert torch.equal(torch.get_rng_state(), state)
    assert {*heard} == {torch.device(DEVICE)}
    now = [*model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(now, parts, strict=True))
    assert {tensor.device.type for tensor in now} == {"cpu"}
    assert model.tied.weight is model.inside.weight
    assert model.training
    assert not model.frozen.training
    assert not model.frozen.weight.requires_grad
    assert torch.equal(model.frozen.weight, before)
    with pytest.raises(ConfigError, match="lies on standin:0: leave the model on the CPU"):
        train(None, net().to(DEVICE), discipline="asp")
    with pytest.raises(ConfigError, match="hogwild workers write the store's own memory"):
        train(DEVICE, discipline="hogwild")
    with pytest.raises(ConfigError, match="schedule=2bw computes on parameters where they come"):
        train(DEVICE, Blocks(), discipline="asp", layout="pp=2,schedule=2bw")
    with pytest.raises(ConfigError, match="makes those of one process one after the other"):
        train(DEVICE, Blocks(), discipline="asp", layout="tp=2", engine="sim")
    with pytest.raises(ConfigError, match="device 'standin:4' is not there"):
        train("standin:4", discipline="asp")


def test_the_model_comes_back() -> None:
    standin.run(comes_back)


# ---------------------------------------------------------------- scripts

SCRIPT = """
import sys
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
import offbeat as ob
from tests.model.test_device import SGD, data, net

with ob.join() as run:
    expected = run.device
    model = run.replica(net())
    optimizer = run.optimizer(SGD)
    for x, y in run.batches(data(), batch_size=8):
        place = next(model.parameters()).device
        assert run.device == expected == x.device == place == model.norm.running_mean.device
        loss = F.cross_entropy(model(x.to(run.device)), y.to(run.device))
        loss.backward()
        run.record(loss)
        optimizer.step()
    assert next(model.parameters()).device == run.device
    save_file({k: v.cpu() for k, v in model.out.state_dict().items()}, f"{sys.argv[1]}{run.rank}")
"""


def scripts() -> None:
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "train.py"
        script.write_text(SCRIPT)
        ways = (
            ["-n", "2", "--sync", "bsp"],
            ["--engine", "sim", "--cluster", "20ms,30ms", "--sync", "asp"],
        )
        for number, way in enumerate(ways):
            found = []
            for device in (DEVICE, "cpu"):
                saved = Path(place) / f"{number}-{device[:3]}-"
                assert not main(["run", *way, "--device", device, str(script), str(saved)])
                found.append([Path(f"{saved}{rank}").read_bytes() for rank in range(2)])
            assert found[0] == found[1]


def test_scripts() -> None:
    standin.run(scripts)
