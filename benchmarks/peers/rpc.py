"""A parameter server over torch.distributed.rpc, as PyTorch's own tutorial builds one."""

import tempfile
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from benchmarks.peers.common import Times, timed
from benchmarks.peers.launch import PeerMissing, together

LR = 0.01
SERVER, WORKER = "server", "worker"


def exchange(floats: int, *, repeats: int = 15, threads: int = 1) -> Times:
    """Push a flat gradient, apply SGD, pull: one worker, one server process."""
    if not rpc.is_available():
        raise PeerMissing("not in this build of PyTorch: install one with torch.distributed.rpc")
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"meet": f"file://{folder}/meet", "floats": floats, "repeats": repeats}
        each = [{**arguments, "name": name} for name in (SERVER, WORKER)]
        return Times(tuple(together("peers.rpc:member", each, threads)[1]["seconds"]))


class Server:
    """The parameters, and the one call that updates and returns them."""

    parameters: Tensor

    @classmethod
    def start(cls, floats: int) -> None:
        cls.parameters = torch.randn(floats)

    @classmethod
    def update(cls, gradient: Tensor) -> Tensor:
        return cls.parameters.add_(gradient, alpha=-LR)


def member(meet: str, name: str, floats: int, repeats: int) -> dict[str, Any]:
    options = rpc.TensorPipeRpcBackendOptions(init_method=meet, rpc_timeout=120)
    if name == SERVER:
        Server.start(floats)
    rpc.init_rpc(name, rank=(SERVER, WORKER).index(name), world_size=2, rpc_backend_options=options)
    seconds = []
    if name == WORKER:
        gradient = torch.randn(floats)
        # What comes back is fresh memory: a model would take it as it is, without a copy.
        seconds = timed(lambda: rpc.rpc_sync(SERVER, Server.update, args=(gradient,)), repeats)
    rpc.shutdown()
    return {"seconds": seconds}
