"""The state of one stage of a split model, gathered into a whole and given out again, in either framework."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.backends.base import PendingState, PortableState, Shapes, StateArrays
from hvdtrain.backends.pipeline.groups import StageGroups
from hvdtrain.backends.pipeline.layout import Layout
from hvdtrain.backends.pipeline.messages import Messenger
from hvdtrain.backends.pipeline.state import gather_arrays, scatter_arrays
from hvdtrain.backends.portable.ema import has_ema
from hvdtrain.backends.portable.spool import Spool
from hvdtrain.backends.portable.training_state import CommonState
from hvdtrain.workers.agreement import Workers


class StateOfStage(CommonState):
    """Model and optimizer of one stage as a part of a portable state; it stands before ``TrainingState``.

    Args:
        layout: the place of this worker.
        workers: the job's workers.
        messenger: what passes messages between them.
        groups: the workers that have what this one has.
        owners: the stages that have a tensor, by its path.
        *arguments: those of ``TrainingState``.
    """

    def __init__(
        self,
        layout: Layout,
        workers: Workers,
        messenger: Messenger,
        groups: StageGroups,
        owners: dict[str, list[int]],
        *arguments: Any,
    ) -> None:
        super().__init__(*arguments)
        self._layout = layout
        self._workers = workers
        self._messenger = messenger
        self._groups = groups
        self._owners = owners

    def gather(self, kept: PortableState, folder: Path | None, is_root: bool) -> PendingState | None:
        """Collective. Copy the state of all stages to rank 0, one array after the other.

        Args:
            kept: what else belongs to the state, as arrays: nothing with stages.
            folder: where the copy lies; in memory if None.
            is_root: whether this is rank 0.
        """
        spool = Spool(folder if is_root else None)
        return gather_arrays(self.arrays(), self._layout, self._workers, self._messenger, spool)

    def scatter(self, state: PortableState | None) -> None:
        """Collective. Check rank 0's whole state, and load this worker's part of it.

        Raises:
            TaskError: On every worker, if it does not fit.
        """
        with_ema = self._workers.broadcast_object(has_ema(state or {}))
        self._scatter(state, self.shapes(with_ema), self.load)

    def scatter_weights(self, weights: PortableState | None, is_part: bool) -> None:
        """Collective. Check rank 0's weights, which may be a part, and load this worker's part of them.

        Raises:
            TaskError: On every worker, if they do not fit.
        """
        shapes = self.weight_shapes()
        self._scatter(weights, shapes, lambda found: self.load_weights(found, is_part), is_part)

    def _scatter(
        self,
        state: PortableState | None,
        shapes: Shapes,
        load: Callable[[StateArrays], None],
        is_part: bool = False,
    ) -> None:
        scatter_arrays(
            state,
            shapes,
            self.private_names(),
            self.own_names(),
            load=load,
            is_part=is_part,
            framework=self.framework,
            workers=self._workers,
            messenger=self._messenger,
        )

    def check_fits(self, shapes: Shapes, state: StateArrays) -> None:
        """Do nothing: rank 0 has checked the whole state."""
