"""Runs on a Ray cluster that is there, in a process that holds it and returns plain numbers."""

import json
import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import offbeat as ob
from benchmarks.local.runs import NEVER, Steps
from benchmarks.network.runs import OFFBEAT, SCRIPT, Outcome, Scene
from benchmarks.peers.common import image_mlp, made_up
from benchmarks.peers.launch import ROOT, PeerFailed
from offbeat.config.run_config import OnRay
from offbeat.engine.ray.cluster import connected
from offbeat.log.log import read

SLOTS = {"CPU": 0.1}  # of workers that sleep most of the time


def on_a_cluster(emulate: list[float], batch: int, steps: int, launches: int) -> dict[str, Any]:
    """Seconds until every worker has made a step, and samples/s of a script."""
    with connected(OnRay(worker_resources=SLOTS), len(emulate)):
        starts = [_start(emulate, batch) for _ in range(launches)]
        scene = Scene(emulate, batch=batch, steps=steps)
        return {"starts": starts, "per_second": [_script(scene) for _ in range(launches)]}


def _start(emulate: list[float], batch: int) -> float:
    model, data = image_mlp(), TensorDataset(*made_up(784))
    seen, start = Steps(len(emulate)), time.monotonic()
    ob.train(
        model,
        data,
        functional.cross_entropy,
        discipline="asp",
        optimizer=partial(torch.optim.SGD, lr=0.05),
        workers=len(emulate),
        emulate=emulate,
        batch_size=batch,
        engine="ray",
        worker_resources=SLOTS,
        checkpoint_every=NEVER,
        listeners=[seen],
    )
    return max(seen.heard.values()) - start


def _script(scene: Scene) -> float:
    """By the command that a user types, in a process of its own that finds the cluster."""
    address = ray.get_runtime_context().gcs_address
    times = ",".join(f"{1e3 * seconds:g}ms" for seconds in scene.emulate)
    with tempfile.TemporaryDirectory() as folder:
        where = ["--engine", "ray", "--address", address, "--worker-resources", json.dumps(SLOTS)]
        how = ["--sync", "asp", "--emulate", times, "-n", str(len(scene.emulate)), "--no-tls"]
        kept = ["--json", "--out", "run"]
        done = subprocess.run(
            [*OFFBEAT, "run", *where, *how, *kept, str(SCRIPT), *scene.arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise PeerFailed(f"{done.stderr.strip()} {done.returncode}"[-900:])
        records = list(read(Path(folder) / "run" / "log.jsonl"))
        return Outcome(records, json.loads(done.stdout)["summary"], "").per_second()
