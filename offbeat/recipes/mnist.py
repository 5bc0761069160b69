"""MNIST from a folder of idx files: a small convolutional network with batch norm."""

import gzip
import math
import struct
import zlib
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from offbeat.config.task import Task
from offbeat.errors import ConfigError
from offbeat.recipes.common import from_seed, whole

SIDE, CLASSES = 28, 10
# Mean and deviation of the training pixels, on the scale from 0 to 1.
MEAN, DEVIATION = 0.1307, 0.3081
UNSIGNED_BYTE = 0x08


def mnist(folder: str | PathLike[str], seed: int = 0, limit: int | None = None) -> Task:
    """The images in `folder`, at most `limit` for training and as many for the test."""
    if limit is not None:
        whole("limit", limit, least=1)
    model = from_seed(seed, ConvNet)
    if not isinstance(folder, (str, PathLike)) or not Path(folder).is_dir():
        raise ConfigError(
            f"{str(folder)!r} is not a folder; write folder= with the path of the folder that "
            "holds train-images-idx3-ubyte.gz and the three files that go with it"
        )
    return Task(
        model=model,
        data=_read_pair(Path(folder), "train", limit),
        loss=functional.cross_entropy,
        test=_read_pair(Path(folder), "t10k", limit),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        batch_size=64,
    )


class ConvNet(nn.Module):
    """Two convolutions, each with batch norm and pooling, then one linear layer."""

    # In the order they run, for models split over processes.
    layout_blocks = ("features", ("classify", "head"))

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*_block(1, 16), *_block(16, 32))
        self.head = nn.Linear(32 * (SIDE // 4) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images))

    def classify(self, features: Tensor) -> Tensor:
        """Logits from all channels of all places."""
        logits: Tensor = self.head(features.flatten(1))
        return logits


def _block(channels: int, wider: int) -> list[nn.Module]:
    # Batch norm subtracts the mean, so a bias before it would have no effect.
    convolution = nn.Conv2d(channels, wider, kernel_size=3, padding=1, bias=False)
    # Pooling before the activation gives the same values from a quarter of the work.
    return [convolution, nn.BatchNorm2d(wider), nn.MaxPool2d(2), nn.ReLU()]


def _read_pair(folder: Path, part: str, limit: int | None) -> TensorDataset:
    images_path = _find(folder, f"{part}-images-idx3-ubyte")
    labels_path = _find(folder, f"{part}-labels-idx1-ubyte")
    images = read_idx(images_path, dimensions=3)
    labels = read_idx(labels_path, dimensions=1)
    if images.shape[1:] != (SIDE, SIDE):
        rows, columns = images.shape[1:]
        raise ConfigError(
            f"{images_path} holds images of {rows} by {columns} pixels; "
            f"this recipe needs {SIDE} by {SIDE}"
        )
    if len(images) != len(labels):
        raise ConfigError(
            f"{images_path} holds {len(images)} images but {labels_path} holds {len(labels)} "
            "labels; take both files from the same copy of the data"
        )
    if int(labels.max()) >= CLASSES:
        raise ConfigError(
            f"{labels_path} holds the label {int(labels.max())}; "
            f"this recipe needs labels from 0 to {CLASSES - 1}"
        )
    pixels = images[:limit].unsqueeze(1).float() / 255
    return TensorDataset((pixels - MEAN) / DEVIATION, labels[:limit].long())


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ConfigError(f"{folder} holds neither {name} nor {name}.gz; put one of them there")


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The unsigned bytes of the idx file at `path`, plain or gzip, in its `dimensions`."""
    content = _content(path)
    # Two zero bytes, the element type and the number of dimensions, then one size for each.
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, UNSIGNED_BYTE, dimensions]):
        raise ConfigError(
            f"{path} is not an idx file of unsigned bytes in {dimensions} dimension(s): it starts "
            f"with {content[:4].hex(' ') or 'nothing'}, not 00 00 08 {dimensions:02x}; "
            "fetch the file again"
        )
    if len(content) < header:
        raise ConfigError(f"{path} is truncated within its header; fetch the file again")
    sizes = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(sizes):
        raise ConfigError(
            f"{path} announces {math.prod(sizes)} bytes of data and holds "
            f"{len(content) - header}: it is truncated or damaged; fetch the file again"
        )
    if math.prod(sizes) == 0:
        raise ConfigError(f"{path} is empty: it announces no data; use a file with samples")
    # torch wants a buffer that it may write to.
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).reshape(sizes)


def _content(path: Path) -> bytes:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as stream:
                return stream.read()
        return path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read ({error}); fetch the file again") from error
