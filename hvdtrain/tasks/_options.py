"""The types of the options of the built-in tasks and their check, and what several tasks train with."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ParamSpec

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, validate_call

from hvdtrain.errors import TaskError

P = ParamSpec("P")

Count = Annotated[int, Field(ge=1, le=1 << 31)]
Classes = Annotated[int, Field(ge=2, le=1 << 31)]
Layers = Annotated[int, Field(ge=1, le=1000)]  # and attention heads
Seed = Annotated[int, Field(ge=0, le=(1 << 32) - 2)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]

# what may be a list, or one value for all
Listed = BeforeValidator(lambda value: [value] if isinstance(value, str | int | float) else value)
Sides = Annotated[Sequence[Count], Listed, Field(min_length=1, max_length=2)]

# what the tasks with images train with
IMAGE_DEFAULTS = {
    "epochs": 15,
    "batch_size": 32,
    "learning_rate": 0.03,
    "weight_decay": 5e-4,
    "warmup_epochs": 1,
    "clip_norm": 1.0,
    "lr_schedule": "cosine",
    "initial_parameters": "portable",
}
# what those with text train with
TEXT_DEFAULTS = {
    "optimizer": "adamw",
    "learning_rate": 1e-3,
    "lr_scaling": "sqrt",
    "lr_schedule": "cosine",
    "weight_decay": 0.01,
    "clip_norm": 1.0,
    "initial_parameters": "portable",
}


def checked(constructor: Callable[P, None]) -> Callable[P, None]:
    """Have the arguments of a task's constructor checked by their types, without conversions."""
    check = validate_call(config=ConfigDict(strict=True))(constructor)

    @functools.wraps(constructor)
    def wrapper(*args: P.args, **named: P.kwargs) -> None:
        try:
            check(*args, **named)
        except ValidationError as error:
            raise TaskError("\n".join(dict.fromkeys(map(_describe, error.errors())))) from None

    return wrapper


def _describe(detail: Any) -> str:
    name, *place = detail["loc"]
    rule = re.sub("^(Input|Value) should", "must", detail["msg"]).replace("an instance of Sequence", "a list")
    item = "".join(f"[{part}]" for part in place if isinstance(part, int))
    return f"task_options.{name}{item} {rule}, found {detail['input']!r}"
