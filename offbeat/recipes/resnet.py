"""ResNet-50 on made-up images: a real model's weight and cost with nothing to download."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from offbeat.config.task import Task
from offbeat.recipes.common import from_seed, whole

# Of each stage: how many blocks, how wide inside, and the stride of its first block.
STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
EXPANSION = 4  # a block's outer width over its inner one


def resnet50(classes: int = 1000, seed: int = 0, samples: int = 64, side: int = 64) -> Task:
    """ResNet-50 and `samples` random images of `side` by `side` pixels with random labels."""
    whole("classes", classes, least=2)
    whole("samples", samples, least=1)
    whole("side", side, least=32)  # five halvings must leave a pixel
    model = from_seed(seed, partial(ResNet50, classes))
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 3, side, side, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    return Task(
        model=model,
        data=TensorDataset(images, labels),
        loss=functional.cross_entropy,
        # No test set: random labels can be learnt by heart but not predicted.
        test=None,
        # The usual 0.1 for a batch of 256, scaled to this batch.
        optimizer=partial(torch.optim.SGD, lr=0.1 * 16 / 256, momentum=0.9, weight_decay=1e-4),
        batch_size=16,
    )


class ResNet50(nn.Module):
    """The v1.5 network: 25,557,032 parameters with 1000 classes."""

    # In the order they run, for models split over processes.
    layout_blocks = ("stem", "blocks", ("classify", "head"))

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(3, 64, kernel=7, stride=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels = 64
        for count, width, stride in STAGES:
            for index in range(count):
                blocks.append(Bottleneck(channels, width, stride if index == 0 else 1))
                channels = EXPANSION * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.blocks(self.stem(images)))

    def classify(self, features: Tensor) -> Tensor:
        """Logits from the mean of each channel."""
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class Bottleneck(nn.Module):
    """Narrow, look around, widen, and add to what came in."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = EXPANSION * width
        widen, last_norm = _convolution(width, wide, kernel=1)
        # A block starts as its shortcut: at full strength, small batches raise the loss at first.
        nn.init.zeros_(last_norm.get_parameter("weight"))
        self.branch = nn.Sequential(
            *_convolution(channels, width, kernel=1),
            nn.ReLU(),
            # v1.5: the 3 by 3 convolution strides, so no input pixel is skipped unseen.
            *_convolution(width, width, kernel=3, stride=stride),
            nn.ReLU(),
            widen,
            last_norm,
        )
        same = channels == wide and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_convolution(channels, wide, 1, stride))
        )

    def forward(self, states: Tensor) -> Tensor:
        return functional.relu(self.branch(states) + self.shortcut(states))


def _convolution(channels: int, wider: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    # Batch norm subtracts the mean, so a bias before it would have no effect.
    convolution = nn.Conv2d(channels, wider, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(wider)]
