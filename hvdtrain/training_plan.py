"""What follows from the config, the number of workers and the size of the data."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.config import Config
from hvdtrain.data.order import BatchPlan
from hvdtrain.errors import ConfigError
from hvdtrain.metrics import StepInfo
from hvdtrain.schedule import Cadence, LearningRate, TrainingProgress
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.wire_types import travels


@travels
@dataclass(frozen=True)
class Progress:
    """Where training stands."""

    step: int = 0  # steps done
    samples: int = 0  # samples seen: the position in the endless stream of training data


@dataclass(frozen=True)
class TrainingPlan:
    """How large a step is, when training ends and which learning rate a step has."""

    batch: BatchPlan  # how a global batch of training is sharded
    eval_batch: BatchPlan  # likewise for evaluation
    base_batch: int  # samples that the learning rate is quoted for
    learning_rate: LearningRate  # the learning rate as a function of progress
    data_size: int  # samples in the training data
    last_sample: int  # position in the stream where training ends
    steps: int  # number of steps of the whole training
    sync_every: int = 1  # after how many steps the workers synchronise; 1 unless the job has local steps
    # whether the end and the learning rate go by steps, because steps may have fewer samples than the global
    # batch
    by_steps: bool = False

    @classmethod
    def of(
        cls,
        config: Config,
        workers: int,
        data_size: int,
        progress: Progress = Progress(),
        *,
        most: int | None = None,
        is_dealt: bool = False,
        rate_factor: Callable[[TrainingProgress], float] | None = None,
    ) -> "TrainingPlan":
        """Work it out."""
        batch = batch_plan(config, workers, most)
        global_batch = batch.global_batch
        # of a local step, the optimizer sees one worker's samples
        scaled_batch = global_batch if config.sync_every is None else -(-global_batch // workers)
        base_batch = config.base_batch_size or (
            scaled_batch if config.global_batch_size else config.batch_size * config.accumulate
        )
        ratio = scaled_batch / base_batch
        factor = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[config.lr_scaling]
        if config.steps is not None:
            last_sample = progress.samples + max(0, config.steps - progress.step) * global_batch
        else:
            last_sample = max(1, round((config.epochs or 0) * data_size))
        warmup_epochs = config.warmup_epochs
        if config.warmup_steps is not None:
            warmup_epochs = config.warmup_steps * global_batch / data_size
        by_steps = is_dealt and config.steps is not None
        local_eval_batch = config.eval_batch_size or batch.micro_batch
        is_same = config.eval_batch_size is None and batch.accumulate == 1 and batch.micro is None
        return cls(
            batch=batch,
            # the same samples side by side at any number of workers, for losses that compare them
            eval_batch=batch if is_same else BatchPlan(local_eval_batch * workers, workers),
            base_batch=base_batch,
            learning_rate=LearningRate(
                peak=config.base_learning_rate * factor,
                schedule=config.lr_schedule,
                total_epochs=((config.steps or 0) * global_batch if by_steps else last_sample) / data_size,
                warmup_epochs=warmup_epochs,
                final_fraction=config.lr_final_fraction,
                step_epochs=config.lr_step_epochs,
                step_factor=config.lr_step_factor,
                cycle_epochs=config.lr_cycle_epochs,
                factor=rate_factor,
            ),
            data_size=data_size,
            last_sample=last_sample,
            steps=progress.step + max(0, -(-(last_sample - progress.samples) // global_batch)),
            sync_every=config.sync_every or 1,
            by_steps=by_steps,
        )

    def samples_after(self, samples: int) -> int:
        """Return the position in the stream after the step that starts at ``samples``."""
        return min(samples + self.batch.global_batch, self.last_sample)

    def learning_rate_at(self, progress: Progress, plateau_fraction: float = 1.0) -> float:
        """Return the learning rate of the next step: the schedule's value at the step's middle."""
        # So neither the first step of a warm-up nor the last of a decay is wasted on a rate of 0.
        first = self._position(progress)
        end = first + self.batch.global_batch if self.by_steps else self.samples_after(first)
        middle = (first + end) / 2
        return self.learning_rate.at(middle / self.data_size, plateau_fraction)

    def _position(self, progress: Progress) -> int:
        """Return where a step begins for the learning rate: with ``by_steps``, as if all steps were full."""
        return progress.step * self.batch.global_batch if self.by_steps else progress.samples

    @property
    def warmup_samples(self) -> float:
        """Position in the stream at which the learning rate has risen to its peak."""
        return round(self.learning_rate.warmup_epochs * self.data_size, 3)

    def in_warmup(self, step: int, samples: int) -> bool:
        """Return whether the learning rate is still rising to its peak after so many steps and samples."""
        return self._position(Progress(step, samples)) < self.warmup_samples

    def is_due(self, cadence: Cadence | None, step: StepInfo) -> bool:
        """Return whether something is due after a step: by its cadence, and at the end of training."""
        due = cadence is not None and cadence.due(
            step.step, step.samples_before, step.samples, self.data_size, step.steps
        )
        return due or self.is_done(step)

    def is_done(self, at: StepInfo | Progress) -> bool:
        """Return whether training is done."""
        return at.samples >= self.last_sample or (self.by_steps and at.step >= self.steps)


def most_workers(workers: Workers) -> int | None:
    """Return the most workers that an elastic job may have; None if their number is fixed."""
    return workers.most if workers.is_elastic else None


def batch_plan(config: Config, workers: int, most: int | None) -> BatchPlan:
    """Return how a step is sharded."""
    slots = (most or workers) * config.accumulate
    if config.global_batch_size is None:
        return BatchPlan(config.batch_size * workers * config.accumulate, workers, config.accumulate)
    if config.global_batch_size < slots:
        if most is None:
            what, remedy = f"workers x accumulate = {workers}", "or fewer workers"
        else:
            what, remedy = f"most workers x accumulate = {most}", "or a lower --max-np"
        raise ConfigError(
            f"global_batch_size {config.global_batch_size} is smaller than {what} x {config.accumulate}; "
            "each worker needs a sample for each micro-batch",
            f"Use a global batch of at least {slots}, {remedy}.",
            everywhere=True,
        )
    if most is None:
        return BatchPlan(config.global_batch_size, workers, config.accumulate)
    micro = BatchPlan(config.global_batch_size, most, config.accumulate).micro_batch
    return BatchPlan.of_size(config.global_batch_size, workers, micro)
