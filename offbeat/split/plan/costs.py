"""What blocks cost: seconds, bytes of parameters and activations, and bytes at each cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SharedTensor:
    """What of a block's cost is in modules that several processes can share; bytes are of wholes.

    `summed` and `joined` are what they exchange on the way, `returned` what they sum on the way
    back.
    """

    time: float = 0.0  # as a share of the block's seconds
    parameters: int = 0
    trained: int = 0
    summed: int = 0
    joined: int = 0
    returned: int = 0


@dataclass(frozen=True)
class BlockCost:
    """One block's cost of one microbatch; bytes are of what a process with the block holds."""

    name: str
    forward: float  # seconds
    backward: float  # seconds
    parameters: int = 0  # bytes
    trained: int = 0  # bytes of those parameters that get a gradient
    kept: int = 0  # bytes kept for the backward pass, without the block's input
    input: int = 0  # bytes
    output: int = 0  # bytes that cross a cut behind the block
    returned: int = 0  # bytes of gradients that come back over it
    shared: SharedTensor = SharedTensor()
    exchanged: int = 0  # bytes that a process sends to those that share the block with it

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def divided(self, count: int, bandwidth: float) -> "BlockCost":
        """The block's cost for one of `count` processes that share it.

        Each sends its part to all others, so that an exchange takes as long as count - 1 messages.
        """
        mine, others = self.shared, count - 1
        onward, back = (mine.summed + mine.joined // count) * others, mine.returned * others
        time = 1 - mine.time + mine.time / count
        return replace(
            self,
            forward=self.forward * time + onward / bandwidth,
            backward=self.backward * time + back / bandwidth,
            parameters=self.parameters - mine.parameters + mine.parameters // count,
            trained=self.trained - mine.trained + mine.trained // count,
            exchanged=onward + back,
        )


@dataclass(frozen=True)
class Profile:
    """The blocks of a model in order, measured on microbatches of `samples`."""

    blocks: tuple[BlockCost, ...]
    samples: int

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def times(self) -> tuple[float, ...]:
        return tuple(block.seconds for block in self.blocks)

    def divided(self, count: int, bandwidth: float) -> "Profile":
        """What one of `count` processes has of it that share every block."""
        return replace(self, blocks=tuple(b.divided(count, bandwidth) for b in self.blocks))

    def activations(self, first: int, last: int) -> int:
        """Bytes that a stage of the blocks `first` to `last` - 1 keeps for one microbatch."""
        inside = sum(block.kept for block in self.blocks[first:last])
        return self.blocks[first].input + inside


@dataclass(frozen=True)
class Machines:
    """The processes of a replica in the order of the stages, and the link between neighbours.

    A process of speed 2 computes twice as fast as where the profile was made; `memory` is the
    most bytes one may hold.
    """

    speeds: tuple[float, ...]
    bandwidth: float = float("inf")  # bytes a second
    memory: float | None = None

    def transfer(self, count: int) -> float:
        """Seconds to send `count` bytes to a neighbour."""
        return count / self.bandwidth


@dataclass(frozen=True)
class HeldBytes:
    """Bytes in the memory of a process."""

    parameters: int = 0  # with buffers
    gradients: int = 0
    state: float = 0.0  # of the optimiser
    activations: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.state + self.activations


def held(
    profile: Profile, first: int, last: int, state_copies: float = 0.0, in_flight: int = 0
) -> HeldBytes:
    """What the blocks `first` to `last` - 1 make a process hold, with microbatches `in_flight`."""
    blocks: Sequence[BlockCost] = profile.blocks[first:last]
    trained = sum(block.trained for block in blocks)
    return HeldBytes(
        sum(block.parameters for block in blocks),
        trained,
        state_copies * trained,
        in_flight * profile.activations(first, last),
    )
