"""The public surface is a list that only changes on purpose."""

import importlib
import types
from pathlib import Path

import pytest

import offbeat

PACKAGE = Path(offbeat.__file__).parent
PUBLIC = [
    "ASP", "ASUP", "BMUF", "BSP", "EASGD", "SSP",
    "Accumulated", "AdaptiveDelayCompensation", "All", "AsyncLocalSGD", "Average",
    "BatchLoss", "ByCount", "BySize", "ByWeight", "Callback", "Change", "CheckpointError", "Clip",
    "Clamp", "Cluster", "MaxNorm",
    "ConfigError", "Constant", "Count", "DelayCompensation", "DiLoCo", "Discipline", "Downpour",
    "EarlyStopping", "EqualShares", "GivenShares", "SpeedShares",
    "Elastic", "Failure", "FedBuff", "GapAware", "Gossip", "Gradient", "History", "Hogwild",
    "InPlace", "Interrupted", "Inverse", "Layout", "Listener", "LocalSGD", "Machine", "Member",
    "Metric",
    "OffbeatError", "Pair", "Pause", "Polynomial", "Rennala", "Replay", "ReplayMismatch",
    "Ringmaster", "Rule",
    "Run", "RunError", "Schedule",
    "SoftSync", "Summary", "Switch", "Task", "Turn", "Yours", "codec",
    "estimate", "explain", "join", "optim", "parse", "replay", "track", "train",
    "Host", "Network", "Outage", "Region", "Share", "StoreLink",
]  # fmt: skip


def test_public_names_are_exactly_these() -> None:
    assert sorted(offbeat.__all__) == sorted(PUBLIC)
    assert len(set(offbeat.__all__)) == len(offbeat.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(offbeat, name)
    assert value.__doc__


def test_nothing_else_is_public_by_accident() -> None:
    seen = {name for name in vars(offbeat) if not name.startswith("_")}
    for name in sorted(seen - set(offbeat.__all__)):
        module = getattr(offbeat, name)
        assert isinstance(module, types.ModuleType), f"offbeat.{name} is public by accident"
        assert module is importlib.import_module(f"offbeat.{name}")


def test_functions_win_over_the_modules_of_their_name() -> None:
    assert isinstance(offbeat.train, types.FunctionType)
    assert isinstance(offbeat.replay, types.FunctionType)


def test_the_docstring_names_every_module_of_the_package() -> None:
    assert offbeat.__doc__ is not None
    places = [p for p in PACKAGE.iterdir() if p.suffix in ("", ".py")]
    for name in {place.stem for place in places if not place.stem.startswith("_")}:
        assert f"`{name}`" in offbeat.__doc__


def test_errors_have_one_base_and_an_exit_code_each() -> None:
    kinds = [
        offbeat.ConfigError, offbeat.RunError, offbeat.CheckpointError, offbeat.ReplayMismatch,
    ]  # fmt: skip
    assert all(issubclass(kind, offbeat.OffbeatError) for kind in kinds)
    assert len({kind.exit_code for kind in [*kinds, offbeat.OffbeatError]}) == 5
    assert issubclass(offbeat.ConfigError, ValueError)
