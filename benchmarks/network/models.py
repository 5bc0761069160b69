"""The models that hosts train, by name, and their loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.local.exchange_process import Weights
from benchmarks.peers.common import image_mlp
from benchmarks.peers.limit import resnet_shapes


def model_of(name: str, seed: int = 0) -> nn.Module:
    """`image`, `million`, `resnet`, or `weights:25000`, as many floats that compute nothing."""
    torch.manual_seed(seed)
    if name == "image":
        return image_mlp(seed)
    if name == "million":
        sizes = nn.Linear(784, 1024), nn.Linear(1024, 256), nn.Linear(256, 10)
        return nn.Sequential(nn.Flatten(), sizes[0], nn.ReLU(), sizes[1], nn.ReLU(), sizes[2])
    if name == "resnet":
        return Weights(resnet_shapes())
    return Weights([[int(name.removeprefix("weights:"))]])


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of a model that computes nothing, the least that has a gradient everywhere."""
    if isinstance(model, Weights):
        return torch.stack([weight.sum() for weight in model.weights]).sum() * 1e-6
    return functional.cross_entropy(model(x), y)
