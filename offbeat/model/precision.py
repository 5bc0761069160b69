"""Computing in fewer bits: autocast, and losses made larger so that small gradients survive it."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import RunError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST = 2.0**16
LEAST = 2.0**-14
PATIENT = 2000  # good steps before a larger scale is tried


def autocast(precision: str, device: str = "cpu") -> AbstractContextManager[Any]:
    """Modules on `device` compute in `precision`; parameters stay as they are."""
    dtype = DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


@dataclass
class Scale:
    """What a loss is multiplied by before the backward pass, and its gradients divided by after.

    float16 has no numbers below 6e-8, so the scale is as large as it can be without an overflow. It
    follows from the steps of one incarnation alone, so all processes of a replica have the same,
    and a replay too. Powers of two change no digit.
    """

    value: float = FIRST
    good: int = 0  # steps since it last changed

    def begin(self) -> float:
        """The scale of the step that begins."""
        if self.good >= PATIENT:
            self.value, self.good = 2 * self.value, 0
        self.good += 1
        return self.value

    def overflowed(self) -> None:
        """A contribution was not finite, and is left out."""
        self.value, self.good = self.value / 2, 0
        if self.value < LEAST:
            raise RunError(
                f"the gradient is not finite even if the loss is multiplied by {LEAST}: lower the "
                "rate, clip the gradient, or write precision=bf16"
            )

    def state(self) -> Tensor:
        return torch.tensor([self.value, self.good], dtype=torch.float64)

    def load_state(self, state: Tensor) -> None:
        self.value, self.good = float(state[0]), int(state[1])


def new_scale(precision: str) -> Scale | None:
    """A scale where one is needed: bf16 has the range of float32."""
    return Scale() if precision == "fp16" else None
