"""Which parameters a run trains: those of its beginning, so a script that adds some is stopped."""

from torch import nn

from offbeat.errors import ConfigError


class Trained:
    """The parameters of a model when its run began, and which of them were trainable."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.names = dict(model.named_parameters())
        self.each = list(self.names.values())
        self.frozen = [name for name, p in self.names.items() if not p.requires_grad]

    def check(self) -> None:
        """Refuse parameters that the run does not know; cheap enough for every step."""
        now = list(self.model.parameters())
        same = len(now) == len(self.each)
        if not same or any(a is not b for a, b in zip(now, self.each, strict=True)):
            self._refuse_others()
        for name in self.frozen:
            if self.names[name].requires_grad:
                raise ConfigError(
                    f"parameter {name!r} was frozen when the run began and requires a gradient "
                    "now, but the run trains what was trainable at run.batches(...): unfreeze it "
                    "before that; to let it rest at first, give it a group with a schedule of its "
                    "own, or set its gradient to None until then"
                )

    def _refuse_others(self) -> None:
        now = dict(self.model.named_parameters())
        new = [name for name, p in now.items() if self.names.get(name) is not p]
        gone = [name for name in self.names if name not in now]
        what = f"{new[0]!r} is new" if new else f"{gone[0]!r} is gone"
        raise ConfigError(
            f"the model has other parameters than when the run began: {what}, and the run would "
            "not train it: build the whole model before run.replica(model), and change it no more"
        )
