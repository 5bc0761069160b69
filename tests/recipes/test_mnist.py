"""idx files: read right, plain or gzip, and refused by name when anything is off."""

import gzip
import struct
from pathlib import Path

import pytest
import torch

from offbeat.errors import ConfigError
from offbeat.recipes import mnist

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(*sizes: int, values: bytes) -> bytes:
    return bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, count in (("train", 6), ("t10k", 3)):
        pixels = bytes([0, 255]) * (count * 392)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(count, 28, 28, values=pixels))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(count, values=bytes(range(count))))
    return tmp_path


def test_shapes_scale_and_labels(folder: Path) -> None:
    task = mnist(folder)
    images, labels = task.data.tensors
    assert images.shape == (6, 1, 28, 28)
    assert images.dtype == torch.float32
    expected = torch.tensor([-0.1307 / 0.3081, (1 - 0.1307) / 0.3081])
    torch.testing.assert_close(images[0, 0, 0, :2], expected)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert labels.dtype == torch.int64
    assert len(task.test) == 3
    assert task.model(images).shape == (6, 10)


def test_gzip_and_plain_hold_the_same(folder: Path) -> None:
    plain = mnist(str(folder)).data.tensors
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    for one, other in zip(plain, mnist(folder).data.tensors, strict=True):
        assert torch.equal(one, other)


def test_limit_takes_the_first(folder: Path) -> None:
    task = mnist(folder, limit=2)
    assert task.data.tensors[1].tolist() == [0, 1]
    assert len(task.test) == 2
    assert len(mnist(folder, limit=99).data) == 6
    with pytest.raises(ConfigError, match="limit must be a whole number of at least 1"):
        mnist(folder, limit=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TRAIN_IMAGES, b"", "starts with nothing"),
        (TRAIN_IMAGES, b"\x00\x00\x08\x01" + bytes(40), "starts with 00 00 08 01"),
        (TRAIN_IMAGES, b"\x00\x00\x0d\x03" + bytes(40), "starts with 00 00 0d 03"),
        (TRAIN_IMAGES, b"\x00\x00\x08\x03\x00\x00", "truncated within its header"),
        (TRAIN_IMAGES, idx(6, 28, 28, values=bytes(6 * 784 - 1)), "4704 bytes .* holds 4703"),
        (TRAIN_IMAGES, idx(6, 28, 28, values=bytes(6 * 784 + 1)), "4704 bytes .* holds 4705"),
        (TRAIN_IMAGES, idx(6, 8, 8, values=bytes(6 * 64)), "images of 8 by 8 pixels"),
        (TRAIN_IMAGES, idx(5, 28, 28, values=bytes(5 * 784)), "5 images but .* 6 labels"),
        (TRAIN_LABELS, idx(0, values=b""), "announces no data"),
        (TRAIN_LABELS, idx(6, values=bytes([0, 1, 2, 3, 4, 10])), "the label 10"),
    ],
)
def test_a_bad_file_is_named(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        mnist(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "not gzip", "flipped"])
def test_damaged_gzip_is_named(folder: Path, damage: str) -> None:
    good = gzip.compress((folder / TRAIN_IMAGES).read_bytes())
    bad = {
        "cut": good[:-12],
        "not gzip": b"plain text",
        "flipped": good[:-8] + bytes([good[-8] ^ 1]) + good[-7:],
    }[damage]
    (folder / TRAIN_IMAGES).unlink()
    (folder / f"{TRAIN_IMAGES}.gz").write_bytes(bad)
    with pytest.raises(ConfigError, match=rf"{TRAIN_IMAGES}\.gz cannot be read"):
        mnist(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / TRAIN_LABELS).unlink()
    with pytest.raises(ConfigError, match=rf"neither {TRAIN_LABELS} nor {TRAIN_LABELS}\.gz"):
        mnist(folder)


@pytest.mark.parametrize("wrong", ["nowhere", 7])
def test_no_folder(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ConfigError, match="is not a folder; write folder="):
        mnist(tmp_path / wrong if isinstance(wrong, str) else wrong)
