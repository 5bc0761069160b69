"""What a folder holds: its run, its format, and a checksum of each file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from offbeat.errors import CheckpointError
from offbeat.folder.disk import checksum, read_json, write_json

NAME = "manifest.json"
FORMAT = 2  # 1 had no manifest


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """Sealed with a checksum of itself, so that a changed digit anywhere is found."""

    run: str  # whose folder it is
    files: dict[str, str]  # checksums by name
    log: dict[str, int | str] = {}  # of a finished run: its length and checksum
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        told = msgspec.to_builtins(self)
        write_json(folder / NAME, told | {"checksum": _seal(told)})

    def check(self, file: Path, remedy: str = "") -> None:
        """CheckpointError unless `file` is as it was written."""
        end = f": {remedy}" if remedy else ""
        try:
            found = checksum(file)
        except FileNotFoundError:
            raise CheckpointError(f"{file} does not exist{end}") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}{end}") from None
        if self.files.get(file.name) != found:
            raise CheckpointError(f"{file} is damaged or cut short{end}")


def _seal(told: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(told, sort_keys=True).encode())


def read_manifest(folder: Path, remedy: str = "") -> Manifest:
    """The manifest of a folder, if it is whole."""
    path = folder / NAME
    told, end = read_json(path, remedy), f": {remedy}" if remedy else ""
    seal = told.pop("checksum", None) if isinstance(told, dict) else None
    if seal is None or seal != _seal(told):
        raise CheckpointError(f"{path} is damaged or cut short{end}")
    if told.get("format") != FORMAT:
        raise CheckpointError(f"{path} was written by another version of offbeat{end}")
    try:
        return msgspec.convert(told, Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is not a manifest ({error}){end}") from None
