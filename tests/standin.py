"""An accelerator that there is not: it computes as the CPU does, in memory that is not the CPU's.

PyTorch's place for devices of others (PrivateUse1) gets a fallback that is written here: an
operation on tensors of this device is made by the CPU over the same bytes, and one that is given
tensors of both is refused, as on any device. So what works here takes no tensor for one of the CPU,
and the numbers are those of the CPU to the bit. As with CUDA, a process that has begun on it is of
no use after a fork, and it has a generator of its own.

A process has it for good, and can then no longer fork what computes: tests have it in processes of
their own.
"""

import ctypes
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME, COUNT = "standin", 1  # autograd of PyTorch takes one of such a device
_CPU, _EXTENSION = 1, 12  # kinds of devices, as DLPack numbers them
_ON_BOTH = ("aten::_copy_from", "aten::copy_")
# What PyTorch asks of devices of others in place of its own convolution, and what is that.
_CONVOLUTION = "aten::convolution_overrideable"
_CONVOLUTION_BACK = "aten::convolution_backward_overrideable"


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Array(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Device)]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _as(tensor: Tensor, kind: int, index: int) -> Tensor:
    """The same bytes as a tensor of another kind of device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    array = _Array.from_address(_pointer(capsule, b"dltensor"))
    array.device.kind, array.device.index = kind, index
    return torch._C._from_dlpack(capsule)


class Module:
    """`torch.standin`, as `torch.cuda` is for CUDA."""

    def __init__(self) -> None:
        self.begun = self.forked = False
        self.current = 0
        self.generators = [torch.Generator() for _ in range(COUNT)]
        self.operations: dict[str, int] = {}  # how often each was made
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self.forked = self.begun

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.begun

    def _is_in_bad_fork(self) -> bool:
        return self.forked

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: Any) -> None:
        self.begin()
        self.current = torch.device(device).index if not isinstance(device, int) else device

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def manual_seed(self, seed: int) -> None:
        self.generators[self.current].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.generators[device.index].get_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.generators[device.index].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    # ------------------------------------------------------------ operations

    def begin(self) -> None:
        if self.forked:
            raise RuntimeError(f"{NAME} cannot begin again in a forked process")
        self.begun = True

    def operate(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        """Have the CPU do it over the same bytes."""
        self.begin()
        name = operation._schema.name
        self.operations[name] = self.operations.get(name, 0) + 1
        index = self._index(name, tree.tree_leaves((args, kwargs)))
        named = dict(zip((a.name for a in operation._schema.arguments), args, strict=False))
        named |= kwargs
        if name == "aten::_copy_from":
            self._lowered(named["dst"]).copy_(self._lowered(named["self"]))
            return named["dst"]
        if name == "aten::is_set_to":
            one, other = named["self"], named["tensor"]
            same = (one.data_ptr(), one.shape, one.stride(), one.dtype)
            return same == (other.data_ptr(), other.shape, other.stride(), other.dtype)
        made, lowered = operation, tree.tree_map(self._lowered, named)
        if name == _CONVOLUTION:
            made = torch.ops.aten.convolution.default
        elif name == _CONVOLUTION_BACK:
            made = torch.ops.aten.convolution_backward.default
            lowered["bias_sizes"] = None
        lowered |= self._chance(made, lowered, index)
        with torch.no_grad():
            found = made(**lowered)
        return self._raised(operation._schema, found, named, index)

    def _index(self, name: str, leaves: Sequence[Any]) -> int:
        """Which of the devices it is on; one with arguments of several is refused."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # Plain numbers may lie on the CPU, as for every device.
        places = {t.device for t in tensors if t.dim() or t.device.type == NAME}
        if len(places) > 1 and name not in _ON_BOTH:
            raise RuntimeError(f"{name} has tensors on {' and '.join(sorted(map(str, places)))}")
        asked = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        mine = [place.index for place in (*asked, *places) if place.type == NAME]
        index = self.current if not mine or mine[0] is None else int(mine[0])
        if index >= COUNT:
            raise RuntimeError(f"there is no {NAME}:{index}")
        return index

    def _lowered(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == NAME:
            return _as(value, _CPU, 0)
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    def _chance(self, operation: Any, named: dict[str, Any], index: int) -> dict[str, Any]:
        """Random numbers come from this device's generator."""
        takes = any(a.name == "generator" for a in operation._schema.arguments)
        given = named.get("generator")
        return {"generator": self.generators[index]} if takes and given is None else {}

    def _raised(self, schema: Any, found: Any, named: dict[str, Any], index: int) -> Any:
        def back(result: Any, value: Any) -> Any:
            if result.alias_info is not None and result.alias_info.is_write:
                for argument in schema.arguments:
                    info = argument.alias_info
                    if info is not None and info.before_set == result.alias_info.before_set:
                        return named[argument.name]
            return tree.tree_map(
                lambda one: _as(one, _EXTENSION, index) if isinstance(one, Tensor) else one, value
            )

        if len(schema.returns) == 1:
            return back(schema.returns[0], found)
        if not schema.returns:
            return None
        return tuple(back(r, one) for r, one in zip(schema.returns, found, strict=True))


def install() -> Module:
    """Give this process the device, and say what it is."""
    module = Module()
    _setup_privateuseone_for_python_backend(NAME, module)
    global _library  # it lasts as long as this
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(module.operate, "PrivateUse1")
    return module


# ---------------------------------------------------------------- tests in processes of their own


def run(function: Callable[[], None]) -> None:
    """Run a function of a test module in a fresh process that has the device."""
    words = f"from tests.standin import main; main({function.__module__!r}, {function.__name__!r})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", words],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def main(module: str, function: str) -> None:
    torch.set_num_threads(1)
    install()
    getattr(importlib.import_module(module), function)()
