"""What both frameworks share of how gradients and parameters become one."""

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.backends.records import PortableState


class GradientReducer:
    """Sums gradients over workers. Each gradient is this worker's part of the mean already.

    Attributes:
        clock: measures how long this worker is busy; None if nobody does.
    """

    clock: Any = None

    def attach(self, parameters: Mapping[str, Any]) -> None:
        """Watch the parameters, by name, whose gradients will be reduced. Local: no collective.

        Called again, it forgets whatever a step that failed has begun.
        """
        raise NotImplementedError

    def expect(self, passes: int) -> None:
        """Say how many backward passes complete the gradients of PyTorch's next step. Local: no collective.

        Called before each step, while no parameter has a gradient: the reducer may give them some of its own.
        """

    def follow(self, in_warmup: bool) -> None:
        """Say whether the next step lies in the learning rate's warm-up. Local: no collective."""

    def finish(self, gradients: Any) -> list[Any]:
        """Collective. Return the sum of each gradient over workers; the tensors given may be overwritten.

        TensorFlow calls it while a step is traced.

        Args:
            gradients: one for each attached parameter, in the same order; dense in TensorFlow. The list may
                be emptied, so that memory of gradients is freed that are copied.
        """
        raise NotImplementedError

    def finish_with(self, gradients: Any, vector: Any) -> tuple[list[Any], Any]:
        """Collective. As ``finish``; return the sum of a short vector, too, which is not compressed.

        Args:
            gradients: as for ``finish``.
            vector: what else a step sums; it may be overwritten, and have another length in each step.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        raise NotImplementedError

    def state(self) -> PortableState:
        """Collective. Return what it keeps from step to step, which is saved."""
        return {}

    def load(self, state: PortableState) -> None:
        """Go on from what ``state`` returned; without a state, from the beginning."""

    def to_broadcast(self) -> Sequence[Any]:
        """Return what it keeps from step to step as Horovod broadcasts it."""
        return []
