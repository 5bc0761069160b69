"""What an exchange of ResNet-50's parameters costs, beside the memory's limit and other servers."""

from statistics import median
from typing import Any

from benchmarks.beside import measured
from benchmarks.figure import Figure, Peer
from benchmarks.peers import ddp, ray_server, rpc
from benchmarks.peers.launch import alone
from benchmarks.peers.limit import HELD, resnet_shapes
from benchmarks.scale import RESNET_FLOATS, Scale

LIMITS = {"sgd": "axpy + copy", "momentum": "momentum step + copy", "adam": "fused Adam + copy"}
BOUNDS = {"sgd": 1.25, "adam": 1.3}
NAMES = {"sgd": "SGD", "momentum": "SGD with momentum", "adam": "Adam"}
# One worker reads the server's parameters in place; of two each gets a copy, which is harder, and
# depends on where the system happens to put the pages: from launch to launch by a fifth. The same
# bounds hold for both.
ALONE, OF_TWO = "one worker", "one of two workers"


def exchange(scale: Scale) -> list[Figure]:
    """Push, apply and pull against the raw limit, all-reduce, RPC and Ray."""
    size = f"exchange of {scale.floats / 1e6:.1f} M floats"
    found = {
        (rule, how): _rounds(scale, rule, copied=how == OF_TWO)
        for rule in BOUNDS
        for how in (ALONE, OF_TWO)
    }
    figures = [
        _over_limit(f"{size}, {NAMES[rule]}, {how}, over the limit", mine, rule, BOUNDS[rule])
        for (rule, how), mine in found.items()
    ]
    others = {
        "gloo all-reduce, 2 ranks": (ddp.all_reduce, 4.0),
        "torch RPC server": (rpc.exchange, 6.0),
        "Ray actor server": (ray_server.exchange, None),
    }
    for name, (measure, bound) in others.items():
        peer = measured(
            name, "ms", lambda m=measure: 1e3 * m(scale.floats, repeats=scale.exchanges).median
        )
        what = f"{size}, SGD: {name} over offbeat"
        figures += [
            _over(f"{what}, {how}", found["sgd", how], peer, bound) for how in (ALONE, OF_TWO)
        ]
    hashed = _rounds(scale, "sgd", hashed=True)
    what = f"{size}, SGD, with a hash of every version in the log, over the limit"
    return [*figures, _over_limit(what, hashed, "sgd")]


def _over(what: str, found: dict[str, Any], peer: Peer, at_least: float | None) -> Figure:
    mine = _milliseconds(found["exchange"])
    faster = None if peer.value is None else peer.value / mine
    return Figure(what, faster, "x", at_least=at_least, peers=(Peer("offbeat", mine, "ms"), peer))


def before_image(scale: Scale) -> list[Figure]:
    """What it would cost to keep, before every update, all that the update changes.

    A server that is killed within a step leaves its parameters half written. Undoing that step
    takes a copy from before it, in memory that outlives the server.
    """
    figures = []
    for rule in ("momentum", "adam"):
        found = _rounds(scale, rule)
        whole = [a + b for a, b in zip(found["exchange"], found["image"], strict=True)]
        ratio = _ratio(whole, found["limit"])
        figures.append(
            Figure(
                f"exchange and a before-image of every update, {NAMES[rule]}, over the limit",
                ratio,
                "x",
                beside="why a large model has a backup process in place of images",
                peers=(
                    Peer("exchange", _milliseconds(found["exchange"]), "ms"),
                    Peer(
                        "before-image",
                        _milliseconds(found["image"]),
                        "ms",
                        f"{HELD[rule]} copies: parameters and state",
                    ),
                    Peer(LIMITS[rule], _milliseconds(found["limit"]), "ms"),
                ),
            )
        )
    return figures


def _rounds(scale: Scale, rule: str, copied: bool = True, hashed: bool = False) -> dict[str, Any]:
    shapes = resnet_shapes() if scale.floats == RESNET_FLOATS else [[scale.floats]]
    arguments = {
        "shapes": shapes, "repeats": scale.exchanges, "rule": rule, "copied": copied,
        "hashed": hashed,
    }  # fmt: skip
    return alone("local.exchange_process:rounds", arguments)


def _over_limit(
    what: str, found: dict[str, Any], rule: str, at_most: float | None = None
) -> Figure:
    threads = f"{found['threads']} thread{'s' * (found['threads'] > 1)}"
    return Figure(
        what,
        _ratio(found["exchange"], found["limit"]),
        "x",
        at_most=at_most,
        peers=(
            Peer("offbeat", _milliseconds(found["exchange"]), "ms"),
            Peer(f"{LIMITS[rule]}, {threads}", _milliseconds(found["limit"]), "ms"),
            Peer("the same in private memory", _milliseconds(found["private"]), "ms"),
        ),
    )


def _ratio(mine: list[float], limit: list[float]) -> float:
    """The median of ratios of neighbours in time: the memory's speed drifts."""
    return median(a / b for a, b in zip(mine, limit, strict=True))


def _milliseconds(seconds: list[float]) -> float:
    return 1e3 * median(seconds)
