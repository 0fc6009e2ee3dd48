"""The state of one stage of a split model in Keras, copied among those that have the same."""

from typing import Any

from hvdtrain.backends.pipeline.groups import group_of
from hvdtrain.backends.pipeline.staged_state import StateOfStage
from hvdtrain.backends.tensorflow.reduction.broadcast import broadcast_variables
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState


class StagedState(StateOfStage, TrainingState):
    """Model and optimizer of one stage as a part of a portable state; the arguments are its bases'."""

    def broadcast(self, others: list[Any]) -> None:
        """Collective. Copy what the first of those workers has that have the same to the others.

        Args:
            others: variables that belong to no parameter, such as counts of steps.
        """
        by_owners: dict[tuple[int, ...], list[Any]] = {(self._layout.stage,): list(others)}
        for field in [*self.model.fields, *self.ema.fields, *self._slots]:
            having = tuple(self._owners.get(field.path, [self._layout.stage]))
            by_owners.setdefault(having, []).append(field.variable)
        for having, variables in sorted(by_owners.items()):
            group = self._groups.of(having)
            if group.size > 1:
                first = self._layout.ranks_of_stage(having[0])[0]
                label = f"stage.{'.'.join(map(str, having))}"
                broadcast_variables(variables, first, group_of(group), label)
