"""How a peer becomes part of a figure, whether it runs here or not."""

from collections.abc import Callable

from benchmarks.figure import Peer
from benchmarks.peers.launch import PeerFailed, PeerMissing

NO_MNIST = "no MNIST here: write --mnist FOLDER"


def measured(name: str, unit: str, measure: Callable[[], float]) -> Peer:
    """A peer's value; one that is missing or fails is shown as such, and the rest goes on."""
    try:
        return Peer(name, measure(), unit)
    except PeerMissing as missing:
        return Peer(name, None, unit, str(missing))
    except PeerFailed as failed:
        return Peer(name, None, unit, f"failed: {failed}")
