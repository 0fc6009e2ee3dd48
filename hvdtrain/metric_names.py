"""Names that hvdtrain writes itself to metrics.jsonl and evaluations.jsonl: no metric can have them."""

from collections.abc import Iterable

from hvdtrain.errors import TaskError

# what each line of metrics.jsonl says of its step
LINE_FIELDS = frozenset({"phase", "step", "samples", "epoch", "workers", "seconds"})
# numbers that stand beside the metrics
_MEASURES = frozenset({"loss", "learning_rate", "samples_per_second", "data_wait_fraction"})
# what else a line of evaluations.jsonl says
_EVALUATION_FIELDS = frozenset(
    {"checkpoint", "averaged_weights", "task", "framework", "eval_samples", "bad_samples", "time"}
)
RESERVED = LINE_FIELDS | _MEASURES | _EVALUATION_FIELDS


def check_metric_names(names: Iterable[str], source: str) -> None:
    """Check that no metric would replace a number that hvdtrain writes itself.

    Args:
        names: names of metrics.
        source: where they come from, for the message.

    Raises:
        TaskError: naming the first such metric. The same on every worker.
    """
    if RESERVED.isdisjoint(names):
        return
    name = next(name for name in names if name in RESERVED)
    raise TaskError(
        f"{source}: {name!r} is the name of a number that hvdtrain logs itself",
        f"Choose another name, such as 'my_{name}'. Reserved: {', '.join(sorted(RESERVED))}.",
        everywhere=True,
    )
