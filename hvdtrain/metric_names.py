"""Names of metrics: those that hvdtrain writes itself, and what stands between a set and its metric."""

from collections.abc import Iterable, Mapping, Sequence

from hvdtrain.errors import TaskError

# what each line of metrics.jsonl says of its step
LINE_FIELDS = frozenset({"phase", "step", "samples", "epoch", "workers", "seconds"})
# how many samples could not be read and were skipped, if any
BAD_SAMPLES = "bad_samples"
# the most memory that a worker has had, in MiB: its process, and tensors on its GPU
PEAK_MEMORY, PEAK_DEVICE_MEMORY = "peak_memory_mib", "peak_device_memory_mib"
# numbers that stand beside the metrics
MEASURES = frozenset(
    {
        *("learning_rate", "samples_per_second", "data_wait_fraction", "slowest_rank", "wait_fraction"),
        *(PEAK_MEMORY, PEAK_DEVICE_MEMORY),
    }
)
# what else a line of evaluations.jsonl says
_EVALUATION_FIELDS = frozenset(
    {"checkpoint", "averaged_weights", "task", "framework", "eval_samples", BAD_SAMPLES, "time"}
)
# between the name of an evaluation set and that of its metric: "noisy/accuracy"
SEPARATOR = "/"
RESERVED = LINE_FIELDS | MEASURES | {"loss"} | _EVALUATION_FIELDS


def metrics_by_set(metrics: Mapping[str, float], sets: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the metrics of an evaluation by the names of the sets.

    Args:
        metrics: by name; those of sets other than the first begin with the name of their set.
        sets: the names, in order; one name, which may be empty, if there is one set.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in sets}
    for name, value in metrics.items():
        of_set, separator, plain = name.rpartition(SEPARATOR)
        found.setdefault(of_set if separator else sets[0], {})[plain] = value
    return found


def check_metric_names(names: Iterable[str], source: str) -> None:
    """Check that no metric has the name of another number: one that hvdtrain writes, or another set's metric.

    Args:
        names: names of metrics.
        source: where they come from, for the message.

    Raises:
        TaskError: naming the first such metric. The same on every worker.
    """
    names = list(names)
    if name := next((name for name in names if SEPARATOR in str(name)), None):
        raise TaskError(
            f"{source}: the name {name!r} holds {SEPARATOR!r}, which stands between an evaluation set and "
            "its metric",
            f"Choose another name, such as {str(name).replace(SEPARATOR, '_')!r}.",
            everywhere=True,
        )
    if RESERVED.isdisjoint(names):
        return
    name = next(name for name in names if name in RESERVED)
    raise TaskError(
        f"{source}: {name!r} is the name of a number that hvdtrain logs itself",
        f"Choose another name, such as 'my_{name}'. Reserved: {', '.join(sorted(RESERVED))}.",
        everywhere=True,
    )
