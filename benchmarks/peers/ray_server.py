"""A parameter server as a Ray actor, as Ray's own example builds one."""

import importlib.util
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.peers.common import (
    STRAGGLER,
    Rate,
    Times,
    batches,
    image_mlp,
    made_up,
    timed,
    wait_until,
)
from benchmarks.peers.launch import PeerMissing, alone

LR = 0.05


def exchange(floats: int, *, repeats: int = 15, threads: int = 1) -> Times:
    """Push a flat gradient, apply SGD, pull: one worker, one server actor."""
    _needed()
    arguments = {"floats": floats, "repeats": repeats, "threads": threads}
    return Times(tuple(_run("exchange_loop", arguments, threads)["seconds"]))


def straggler(
    emulate: Sequence[float] = STRAGGLER,
    *,
    batch: int = 32,
    seconds: float = 5.0,
    repeats: int = 3,
    threads: int = 1,
) -> Rate:
    """Samples per second of asynchronous worker actors, several looks at one cluster."""
    _needed()
    arguments = {
        "emulate": list(emulate), "batch": batch, "seconds": seconds, "repeats": repeats,
        "threads": threads,
    }  # fmt: skip
    result = _run("straggler_loop", arguments, threads)
    return Rate(tuple(result["per_second"]), (result["start_up"],))


def _run(function: str, arguments: dict[str, Any], threads: int) -> dict[str, Any]:
    # Made here, so that it goes even if the process has to be killed; socket paths are short.
    with tempfile.TemporaryDirectory(
        prefix="ray", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        return alone(f"peers.ray_server:{function}", {**arguments, "folder": folder}, threads)


def _needed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise PeerMissing("not installed: pip install offbeat[bench]")


@contextmanager
def _cluster(folder: str) -> Iterator[Any]:
    import ray

    ray.init(
        num_cpus=16,  # slots, not cores: actors are small and must all find a place
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=folder,
    )
    try:
        yield ray
    finally:
        ray.shutdown()


class Server:
    """The parameters, and the one call that updates and returns them."""

    def __init__(self, start: Any, threads: int):
        torch.set_num_threads(threads)
        # What arrives lies in Ray's read-only object store.
        self.parameters = torch.from_numpy(start.copy())

    def update(self, gradient: Any) -> Any:
        self.parameters.add_(torch.from_numpy(gradient), alpha=-LR)
        return self.parameters.numpy()


class Worker:
    """Pushes a gradient, takes what comes back, and goes on."""

    def __init__(self, rank: int, server: Any, least: float, batch: int, threads: int):
        torch.set_num_threads(threads)
        self.server, self.least, self.batch = server, least, batch
        self.model = image_mlp()
        self.stream = batches(made_up(784, seed=rank), batch, rank)

    def steps(self, seconds: float) -> float:
        """Samples per second over so many seconds, or one step where they are none."""
        start, steps = time.monotonic(), 0
        while steps == 0 or time.monotonic() < start + seconds:
            self._step()
            steps += 1
        return steps * self.batch / (time.monotonic() - start)

    def _step(self) -> None:
        import ray

        until = time.monotonic() + self.least
        x, y = next(self.stream)
        parameters = list(self.model.parameters())
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        gradients = torch.autograd.grad(loss, parameters)
        flat = torch.nn.utils.parameters_to_vector(gradients)
        wait_until(until)
        fresh = torch.from_numpy(ray.get(self.server.update.remote(flat.numpy())).copy())
        torch.nn.utils.vector_to_parameters(fresh, parameters)


def exchange_loop(floats: int, repeats: int, threads: int, folder: str) -> dict[str, Any]:
    with _cluster(folder) as ray:
        server = ray.remote(Server).remote(torch.randn(floats).numpy(), threads)
        gradient, mine = torch.randn(floats).numpy(), torch.empty(floats)

        def once() -> None:
            # Its result is read-only, so a worker has to copy it before it can train.
            mine.copy_(torch.from_numpy(ray.get(server.update.remote(gradient))))

        return {"seconds": timed(once, repeats)}


def straggler_loop(
    emulate: list[float], batch: int, seconds: float, repeats: int, threads: int, folder: str
) -> dict[str, Any]:
    start = time.monotonic()
    with _cluster(folder) as ray:
        vector = torch.nn.utils.parameters_to_vector(image_mlp().parameters()).detach().numpy()
        server = ray.remote(Server).remote(vector, threads)
        workers = [
            ray.remote(Worker).remote(rank, server, least, batch, threads)
            for rank, least in enumerate(emulate)
        ]
        ray.get([worker.steps.remote(0.0) for worker in workers])
        start_up = time.monotonic() - start
        looks = [
            sum(ray.get([worker.steps.remote(seconds) for worker in workers]))
            for _ in range(repeats)
        ]
    return {"per_second": looks, "start_up": start_up}
