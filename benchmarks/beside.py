"""Every peer by name: what the machine and other ways of training take for the same work."""

from collections.abc import Callable
from statistics import mean, median

from benchmarks.figure import Figure, Peer
from benchmarks.peers import ddp, hogwild, limit, plain, ray_server, rpc
from benchmarks.peers.common import Rate, Training
from benchmarks.peers.launch import PeerFailed, PeerMissing
from benchmarks.scale import RESNET_FLOATS, Scale

Peers = dict[str, Peer]
# Plain SGD on MNIST with 4 x 32 samples a step: of 0.1 to 1.2 the rate that reaches 97 % first.
DDP_RATE = 0.3
NO_MNIST = "no MNIST here: write --mnist FOLDER"


def measured(name: str, unit: str, measure: Callable[[], float]) -> Peer:
    """A peer's value; one that is missing or fails is shown as such, and the rest goes on."""
    try:
        return Peer(name, measure(), unit)
    except PeerMissing as missing:
        return Peer(name, None, unit, str(missing))
    except PeerFailed as failed:
        return Peer(name, None, unit, f"failed: {failed}")


def exchange(scale: Scale) -> Peers:
    """Push, apply and pull of as many floats as ResNet-50 has: limits and servers."""
    shapes = limit.resnet_shapes() if scale.floats == RESNET_FLOATS else [[scale.floats]]
    flat, floats, repeats = limit.flat(shapes), scale.floats, scale.exchanges
    works: dict[str, tuple[str, Callable[[], float]]] = {}
    for threads in (1, 2):
        for kind, work in (("axpy", limit.axpy_copy), ("Adam", limit.adam_copy)):
            for shared, where in ((True, "shared"), (False, "private")):

                def one(
                    work: limit.Limit = work, threads: int = threads, shared: bool = shared
                ) -> float:
                    return work(flat, repeats=repeats, threads=threads, shared=shared).median

                name = f"{kind} + copy, {where} memory, {threads} thread{'s' * (threads > 1)}"
                works[f"{kind.lower()} {where} {threads}"] = (name, one)
    works |= {
        "axpy list 1": (
            "axpy + copy, tensor by tensor, 1 thread",
            lambda: limit.axpy_copy(shapes, repeats=repeats).median,
        ),
        "ddp": ("gloo all-reduce, 2 ranks", lambda: ddp.all_reduce(floats, repeats=repeats).median),
        "rpc": ("torch RPC server", lambda: rpc.exchange(floats, repeats=repeats).median),
        "ray": ("Ray actor server", lambda: ray_server.exchange(floats, repeats=repeats).median),
    }
    return {
        key: measured(name, "ms", lambda work=work: 1e3 * work())
        for key, (name, work) in works.items()
    }


def small_step(scale: Scale) -> Peers:
    """A step of the small MLP, batch 32, one thread each."""
    steps, repeats = scale.small_steps, scale.repeats

    def plain_step(processes: int) -> float:
        return 1e6 * plain.small_step(steps=steps, repeats=repeats, processes=processes).median

    return {
        "plain": measured("plain step", "us", lambda: plain_step(1)),
        "two": measured("plain step, two processes at once", "us", lambda: plain_step(2)),
        "ddp": measured(
            "DDP step, 2 ranks",
            "us",
            lambda: 1e6 * ddp.small_step(steps=steps, repeats=repeats).median,
        ),
    }


def straggler(scale: Scale) -> Peers:
    """Four workers of 20 ms, one of them four times slower: samples/s and start-up."""
    start_up: dict[str, tuple[float, ...]] = {}

    def look(key: str, measure: Callable[..., Rate]) -> Peer:
        def rate() -> float:
            found = measure(seconds=scale.window, repeats=scale.launches)
            start_up[key] = found.start_up
            return found.median

        return measured(f"{key}, straggler", "samples/s", rate)

    peers = {
        "ddp": look("DDP", ddp.straggler),
        "hogwild": look("torch Hogwild", hogwild.straggler),
        "ray": look("Ray actors, async", ray_server.straggler),
    }
    for key, name in (("hogwild", "torch Hogwild"), ("ray", "Ray actors, async")):
        seconds = start_up.get(name)
        peers[f"{key} start-up"] = Peer(
            f"{name}: start-up of 4 workers",
            median(seconds) if seconds else None,
            "s",
            "" if seconds else peers[key].note,
        )
    return peers


def resnet(scale: Scale) -> Peers:
    """ResNet-50, batch 8: seconds of a step, images per second, and the peak of a process."""
    size = {"steps": scale.resnet_steps, "side": scale.side}
    peers: Peers = {}
    works: dict[str, tuple[str, Callable[[], Training]]] = {
        "one": ("plain ResNet-50, 1 thread", lambda: plain.resnet(**size)),
        "threads": ("plain ResNet-50, 2 threads", lambda: plain.resnet(**size, threads=2)),
        "two": ("two plain ResNet-50, 1 thread each", lambda: plain.resnet(**size, processes=2)),
        "ddp": ("DDP ResNet-50, 2 ranks", lambda: ddp.resnet(**size)),
    }
    for key, (name, work) in works.items():
        try:
            found = work()
        except PeerFailed as failed:
            peers[key] = Peer(name, None, "images/s", f"failed: {failed}")
            continue
        peers[key] = Peer(name, found.per_second, "images/s")
        peers[f"{key} step"] = Peer(f"{name}: step", 1e3 * found.step.median, "ms")
        peers[f"{key} peak"] = Peer(f"{name}: peak memory", found.peak_bytes / 1e6, "MB")
    return peers


def mnist(scale: Scale) -> Peers:
    """DDP's time to the accuracy under the straggler, and a plain loop's epochs on one core."""
    reach = f"DDP: seconds to {scale.accuracy:.0%}, straggler"
    if scale.mnist is None:
        return {
            "ddp": Peer(reach, None, "s", NO_MNIST),
            "plain": Peer("plain loop on MNIST", None, "s", NO_MNIST),
        }
    folder, samples = scale.mnist, scale.samples
    peers = {
        "ddp": measured(
            reach,
            "s",
            lambda: (
                ddp.to_accuracy(folder, lr=DDP_RATE, target=scale.accuracy, samples=samples).seconds
            ),
        )
    }
    name = f"plain ConvNet on MNIST, {scale.epochs} epoch(s), 1 thread"
    try:
        runs = [
            plain.mnist(folder, epochs=scale.epochs, seed=seed, samples=samples)
            for seed in range(scale.launches)
        ]
    except PeerFailed as failed:
        return {**peers, "plain": Peer(name, None, "s", f"failed: {failed}")}
    share = mean(run.accuracy for run in runs)
    peers["plain"] = Peer(name, median(run.seconds for run in runs), "s")
    peers["plain accuracy"] = Peer(f"{name}: accuracy", 100 * share, "%")
    peers["plain peak"] = Peer(f"{name}: peak", max(run.peak_bytes for run in runs) / 1e6, "MB")
    return peers


def peers(scale: Scale) -> list[Figure]:
    """All of them, as figures without a bound."""
    groups = (exchange, small_step, straggler, resnet, mnist)
    found = [peer for group in groups for peer in group(scale).values()]
    return [Figure(peer.name, peer.value, peer.unit, beside=peer.note) for peer in found]
