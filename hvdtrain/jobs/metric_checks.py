"""Checks of the metrics that a config names, before anything is trained."""

from typing import Any

from hvdtrain.backends.objective.metric_objects import logged_names
from hvdtrain.backends.objective.objective import REGULARIZATION_LOSS
from hvdtrain.config import Config
from hvdtrain.data.eval_sets import metric_prefixes
from hvdtrain.errors import ConfigError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.metric_names import SEPARATOR


def check_metrics(config: Config, task: Any, eval_data: Any) -> None:
    """Check early what would else come out at the first evaluation, or never.

    Args:
        config: the config.
        task: the task.
        eval_data: its evaluation data; None if it has none.

    Raises:
        ConfigError: If a metric that the config names cannot be there, or is there only at the end.
    """
    otherwise = {name: f"leave {name} out" for name in ("keep_best", "early_stopping")}
    otherwise["plateau_metric"] = "use another lr_schedule than plateau"
    for field, best in (
        ("keep_best", config.keep_best),
        ("early_stopping", config.early_stopping),
        ("plateau_metric", config.plateau_goal),
    ):
        if best is None:
            continue
        _check_metric(field, best.metric, config, task, eval_data, otherwise=f", or {otherwise[field]}")
        if field != "keep_best" and config.eval_every is None:
            raise ConfigError(
                f"{field}: eval_every is null, so the only evaluation comes when training is done",
                f"Set eval_every, such as 1epoch or a number of steps, or {otherwise[field]}.",
                everywhere=True,
            )


def _check_metric(
    field: str, metric: str, config: Config, task: Any, eval_data: Any, *, otherwise: str = ""
) -> None:
    """Check that an evaluation gives a metric, as far as that is known before.

    Args:
        field: what names the metric, for messages.
        metric: its name.
        config: the config.
        task: the task.
        eval_data: its evaluation data; None if it has none.
        otherwise: what else can be done if there are none, in words that end a sentence.

    Raises:
        ConfigError: If it does not.
    """
    if eval_data is None:
        raise ConfigError(
            f"{field}: {metric} is a metric of the evaluation, and the task has no evaluation data",
            f"Give the task eval_data(){otherwise}.",
            everywhere=True,
        )
    _check_is_known(field, metric, config, task, eval_data)


def _check_is_known(field: str, metric: str, config: Config, task: Any, eval_data: Any) -> None:
    """Check that an evaluation gives a metric, as far as that is known before.

    Raises:
        ConfigError: If it does not.
    """
    # an own loss names its metrics when it is called
    own_loss = hasattr(task, FRAMEWORKS[config.framework].loss_method)
    named = [] if own_loss else logged_names(getattr(task, "metrics", {}), task, config.framework)
    known = ["loss", *named]
    if config.framework == "tf":  # if the model adds losses, which is known when it is called
        known.append(REGULARIZATION_LOSS)
    set_name, separator, plain = metric.rpartition(SEPARATOR)
    prefixes = metric_prefixes(eval_data).values()
    if f"{set_name}{separator}" in prefixes and (own_loss or plain in known):
        return
    remedy = [] if own_loss else [f"The task has {', '.join(known)}."]
    if others := [prefix for prefix in prefixes if prefix]:
        remedy.append(
            f"Metrics of the first set have plain names, those of the others begin with {', '.join(others)}."
        )
    elif own_loss:
        remedy.append(f"Names of metrics hold no {SEPARATOR!r}: the evaluation data are one set.")
    raise ConfigError(f"{field}: there is no metric {metric!r}", " ".join(remedy), everywhere=True)
