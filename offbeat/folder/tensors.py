"""Files of named tensors in the format of safetensors, written from where the tensors lie."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
import xxhash
from torch import Tensor

from offbeat.errors import CheckpointError
from offbeat.folder.disk import fresh, readable, sync, write_all

KINDS = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
    torch.bool: "BOOL",
    torch.complex128: "F64",  # pairs, whose names the header has: the format has no word for them
}
_PAIRS = "complex128"


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors from where they lie, and make sure that they are on disk.

    In the format of safetensors, whose own functions need all of them a second time in memory.
    Returns a checksum.
    """
    own = {name: _plain(tensor.detach().cpu()) for name, tensor in tensors.items()}
    pairs = [name for name, tensor in tensors.items() if tensor.dtype is torch.complex128]
    # The widest first, so that each begins at a multiple of its width.
    order = sorted(own, key=lambda name: (-own[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {_PAIRS: json.dumps(pairs)}} if pairs else {}
    offset = 0
    for name in order:
        end = offset + own[name].numel() * own[name].element_size()
        about = {"dtype": KINDS[own[name].dtype], "shape": list(own[name].shape)}
        header[name] = about | {"data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    total = xxhash.xxh3_128()
    with fresh(path) as file:
        for piece in (len(head).to_bytes(8, "little"), head, *(raw(own[name]) for name in order)):
            write_all(file, piece)
            total.update(piece)
    sync(path)
    return total.hexdigest()


def _plain(tensor: Tensor) -> Tensor:
    """The numbers in order, with nothing that is only noted beside them."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous()


def replace_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Put a file of tensors in the place of another, in one move."""
    draft = path.with_name(f".{path.name}")
    found = save_tensors(draft, tensors)
    draft.replace(path)
    return found


def raw(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file; they are read from it when they are looked at."""
    try:
        readable(path).close()
        with safetensors.safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            pairs = json.loads((file.metadata() or {}).get(_PAIRS, "[]"))
            return found | {name: torch.view_as_complex(found[name]) for name in pairs}
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged or cut short: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
