"""What the backends of both frameworks share of a worker that has a stage of a split model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hvdtrain.backends.pipeline.groups import Layout
from hvdtrain.backends.pipeline.pipeline import check_enough, cut, given_cuts
from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.config import Config
from hvdtrain.errors import HvdtrainError, TaskError
from hvdtrain.workers.agreement import Workers, run_on_rank_zero
from hvdtrain.workers.user_errors import where_raised

Form = tuple[tuple[str, ...], tuple[str, ...]]
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, and what a framework computes with them to divide them.

    Attributes:
        blocks: the blocks, in order.
        call: returns what the model is called with for a micro-batch; None if there is none, or if the
            parameters have no values.
        check: checks that the blocks compute what the model does, if that is not known; notes what differs.
        seconds: returns how long the forward pass of each block takes for a micro-batch, and both passes.
        sizes: returns the bytes of each block's parameters.
    """

    blocks: Sequence[Any]
    call: Callable[[], Call | None]
    check: Callable[[Call], None]
    seconds: Callable[[Call], tuple[Sequence[float], Sequence[float]]]
    sizes: Callable[[], Sequence[float]]

    def firsts(self, config: Config, workers: Workers) -> list[int]:
        """Collective. Return the first block of each stage, as rank 0 chooses them.

        Raises:
            ConfigError: If the config's own division does not fit.
            TaskError: If there are too few blocks, or they do not compute what the model does.
        """
        check_enough(len(self.blocks), config.stages)

        def choose() -> list[int]:
            try:
                return cuts()
            except HvdtrainError:
                raise
            except Exception as error:  # of the task's code
                where = where_raised(error, own_only=True)
                problem = f"the first batch of the training data fails in the model's blocks: {where}"
                remedy = "With stages, a block can use what the one before returns, and nothing else of it."
                raise TaskError(problem, remedy) from error

        def cuts() -> list[int]:
            call = self.call()
            if call is not None:
                self.check(call)
            if config.stage_cuts is not None:
                return given_cuts(config.stage_cuts, len(self.blocks), config.stages)
            if config.stage_balance == "memory" or call is None:
                return cut(self.sizes(), config.stages)
            forward, both = self.seconds(call)
            # all stages but the last compute each forward pass twice
            return cut([one + two for one, two in zip(forward, both, strict=True)], config.stages, both)

        return run_on_rank_zero(workers, choose, "measuring the blocks of the model")

    def of_stages(self, firsts: Sequence[int]) -> list[Sequence[Any]]:
        """Return the blocks of each stage.

        Args:
            firsts: the first block of each.
        """
        ends = [*firsts[1:], len(self.blocks)]
        return [self.blocks[first:end] for first, end in zip(firsts, ends, strict=True)]


def several_calls() -> TaskError:
    """Return the error of a loss that calls the model more than once."""
    return TaskError("the task's loss calls the model several times", "With stages, it has to call it once.")


def no_call() -> TaskError:
    """Return the error of a loss that does not call the model."""
    return TaskError("the task's loss does not call the model", "With stages, it has to call it once.")


class FirstCall(BaseException):
    """What a model was called with; no error, and none that a task may catch."""

    def __init__(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments
        self.named = named


def raise_call(*arguments: Any, **named: Any) -> NoReturn:
    """Raise what a model is called with: it stands for the model."""
    raise FirstCall(arguments, named)


def has_no_part(name: str, model_has_it: bool) -> Exception:
    """Return the error of a loss that uses something of the model but its call.

    If the model does not have it, the error is that of the model, so that a loss may ask whether it is there.
    """
    problem = f"the loss uses the model's {name}"
    if not model_has_it:
        return AttributeError(f"{problem}, which it does not have")
    return TaskError(
        f"{problem}; with stages, no worker has the whole model, and the loss can only call it once",
        "Let the model return what the loss needs, or train without --stages.",
    )


class SharedUpdate:
    """The update of a step of a split model: this worker updates the parameters of its stage.

    Their gradients are summed over the replicas of the stage. Those of weights that several stages share are
    summed over the workers of all of them, which then update them alike.

    Args:
        layout: the place of this worker.
        shared: by the path of a parameter that several stages have: what sums it, and whether this is the
            first of these stages.
        *arguments: those of the framework's ``Update``; the reducer is that of the other parameters.
        **options: likewise.
    """

    _reducer: GradientReducer

    def __init__(
        self,
        layout: Layout,
        shared: Mapping[str, tuple[GradientReducer, bool]],
        *arguments: Any,
        **options: Any,
    ) -> None:
        self._layout = layout
        self._shared = dict(shared)
        super().__init__(*arguments, **options)

    def _parts_of(self, parameters: Iterable[Any]) -> list[tuple[GradientReducer, list[Any]]]:
        """Return what sums gradients with its parameters: those of this stage alone first."""
        parts: dict[int, tuple[GradientReducer, list[Any]]] = {id(self._reducer): (self._reducer, [])}
        for one in parameters:
            reducer = self._shared.get(one.path, (self._reducer, True))[0]
            parts.setdefault(id(reducer), (reducer, []))[1].append(one)
        return [(reducer, own) for reducer, own in parts.values() if own]
