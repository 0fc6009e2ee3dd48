"""What the plan says of an elastic job: the parts that follow the number of workers."""

from hvdtrain.reporting.console import counted
from hvdtrain.session import Session
from hvdtrain.training_plan import TrainingPlan, most_workers


def workers(session: Session) -> str:
    """Return how many there may be, to stand after their number; empty if that is fixed."""
    most = most_workers(session.backend.workers)
    return "" if most is None else f"; elastic: at least {session.backend.workers.least}, at most {most}"


def batch(session: Session, plan: TrainingPlan) -> str:
    """Return what the batch does when the number of workers changes; empty if that is fixed."""
    most = most_workers(session.backend.workers)
    if most is None:
        return ""
    if session.config.global_batch_size is None:
        return "; with other workers, another number a step and of steps"
    return (
        f"; micro-batches of {plan.batch.micro_batch} with any number of workers up to {most}, larger ones "
        "with a lower --max-np"
    )


def learning_rate(session: Session, plan: TrainingPlan) -> str:
    """Return how the learning rate follows the number of workers; empty if it does not."""
    rate, config, epoch, text = plan.learning_rate, session.config, session.epoch, ""
    if rate.ramp is not None and rate.peak_at(epoch) != rate.peak:
        text = f"; the peak is on its way from {rate.peak_at(epoch):g} until epoch {rate.ramp.end:g}"
    is_elastic = most_workers(session.backend.workers) is not None
    if not is_elastic or config.global_batch_size or config.lr_scaling == "none":
        return text
    length = f"over {counted(config.rescale_epochs, 'epoch')}" if config.rescale_epochs else "at once"
    return f"{text}; it follows the number of workers {length}"


def batch_norm(layers: int, micro_batch: int, most: int, is_synchronised: bool) -> str:
    """Return which samples batch norm takes together.

    Args:
        layers: number of its layers.
        micro_batch: samples of a micro-batch.
        most: the most workers that the job may have.
        is_synchronised: whether layers take the samples of all workers together.
    """
    samples = counted(micro_batch, "sample")
    if not is_synchronised:
        return f"{counted(layers, 'layer')} over each micro-batch of {samples}, with any number of workers"
    return (
        f"warning: {counted(layers, 'layer')} over the micro-batches of {samples} of as many workers as "
        f"there are, up to {most}, so the curve depends on their number"
    )
