"""What a search for a learning rate found: suggestions that can be typed, in words and as a document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.search.curve import Curve, Rise, edge, smoothed

VERSION = 1
_ROWS = 16
_DIGITS = 3
_OF_DIVERGENCE = 0.1
STEEPEST, TENTH = "where the loss falls fastest", "a tenth of where it diverges"


@dataclass(frozen=True)
class BatchScale:
    """For which batch a learning rate is quoted, and what becomes of it.

    Attributes:
        global_batch: samples of a step over all workers.
        base_batch: samples that ``learning_rate`` is quoted for.
        rule: the config's ``lr_scaling``.
        factor: the peak learning rate by the quoted one.
        workers: number of workers.
    """

    global_batch: int
    base_batch: int
    rule: str
    factor: float
    workers: int


@dataclass(frozen=True)
class Suggestion:
    """A learning rate to try.

    Attributes:
        reason: why.
        learning_rate: what to give as ``--learning-rate``.
        peak: the peak that the job has then.
    """

    reason: str
    learning_rate: float
    peak: float


@dataclass(frozen=True)
class LearningRates:
    """What ``lr_find`` found. The same on every worker.

    Attributes:
        task: the task's name or path.
        device: what it was computed on, in words.
        scale: the batch that the rates are quoted for.
        rates: learning rates of the steps, as the optimizer had them.
        losses: the loss of each step, before its update.
        diverged: the rate at which the loss diverged; None if it did not.
        steepest: the rate at which the smoothed loss fell fastest; None if it never fell.
        highest: the last rate that would have been tried.
        notes: what the user should know.
    """

    task: str
    device: str
    scale: BatchScale
    rates: Sequence[float]
    losses: Sequence[float]
    diverged: float | None
    steepest: float | None
    highest: float
    notes: Sequence[str] = field(default=())

    @classmethod
    def of(
        cls, curve: Curve, rise: Rise, scale: BatchScale, *, task: str, device: str, notes: Sequence[str]
    ) -> "LearningRates":
        """Return what a curve says."""
        steepest = curve.steepest()
        notes = [*notes, *_notes_of_ends(steepest, rise)]
        return cls(
            task, device, scale, curve.rates, curve.losses, curve.diverged, steepest, rise.highest, notes
        )

    @property
    def suggestions(self) -> list[Suggestion]:
        """Rates to try, the first being the first choice; empty if the curve has none."""
        found = []
        if self.steepest is not None:
            found.append(self._suggestion(STEEPEST, self.steepest))
            if self.diverged is not None:
                found.append(self._suggestion(TENTH, _OF_DIVERGENCE * self.diverged))
        return found

    @property
    def suggestion(self) -> float | None:
        """What to give as ``learning_rate``: the first of ``suggestions``; None if there is none."""
        return self.suggestions[0].learning_rate if self.suggestions else None

    def _suggestion(self, reason: str, peak: float) -> Suggestion:
        quoted = float(f"{peak / self.scale.factor:.{_DIGITS}g}")
        return Suggestion(reason, quoted, quoted * self.scale.factor)

    def describe(self) -> str:
        """Return it as the text that is shown."""
        scale = self.scale
        lines = [f"lr-find: {self.task} with {self.device}, global batch {scale.global_batch}"]
        lines += [f"  {'peak rate':>10}  {'loss':>10}  smoothed"]
        means = smoothed(self.losses)
        every = max(1, -(-len(self.rates) // _ROWS))
        for at in range(0, len(self.rates), every):
            lines.append(f"  {self.rates[at]:>10.3g}  {self.losses[at]:>10.4g}  {means[at]:.4g}")
        if self.diverged is None:
            lines.append(
                f"the loss did not diverge up to {self.highest:g}: raise --highest-rate to find where"
            )
        else:
            lines.append(f"the loss diverged at a peak rate of {self.diverged:.3g}")
        if not self.suggestions:
            lines.append(
                "no suggestion: the loss did not fall by more than it scatters; lower --lowest-rate, take "
                "more --rising-steps or a larger batch, or check the task"
            )
        else:
            lines.append(
                f"for a global batch of {scale.global_batch} (base_batch_size {scale.base_batch}, lr_scaling "
                f"{scale.rule}: the peak is {scale.factor:g} times --learning-rate):"
            )
        for one in self.suggestions:
            lines.append(f"  --learning-rate {one.learning_rate:<9g} peak {one.peak:<9.3g} {one.reason}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "version": VERSION,
            "task": self.task,
            "device": self.device,
            "workers": self.scale.workers,
            "global_batch": self.scale.global_batch,
            "base_batch_size": self.scale.base_batch,
            "lr_scaling": self.scale.rule,
            "peak_by_learning_rate": self.scale.factor,
            "diverged_at": self.diverged,
            "suggestions": [
                {"reason": one.reason, "learning_rate": one.learning_rate, "peak": one.peak}
                for one in self.suggestions
            ],
            "curve": [
                {"rate": rate, "loss": loss, "smoothed": mean}
                for rate, loss, mean in zip(self.rates, self.losses, smoothed(self.losses), strict=True)
            ],
            "notes": list(self.notes),
        }


def _notes_of_ends(steepest: float | None, rise: Rise) -> list[str]:
    """Return a note if the loss falls fastest so close to an end that the means of more losses would tell."""
    where, close = "the loss falls fastest at an end of what was tried", edge(rise.steps)
    if steepest is None:
        return []
    if steepest <= rise.rate(close):
        return [f"{where}: give a lower --lowest-rate"]
    if steepest >= rise.rate(rise.steps - 1 - close):
        return [f"{where}: give a higher --highest-rate"]
    return []


def draw_rates(figure: Any, document: Mapping[str, Any]) -> None:
    """Draw the curve of a document of ``LearningRates``.

    Args:
        figure: matplotlib's figure.
        document: the document.
    """
    axes = figure.add_subplot()
    rates = [one["rate"] for one in document["curve"]]
    axes.plot(rates, [one["loss"] for one in document["curve"]], alpha=0.35, label="loss")
    axes.plot(rates, [one["smoothed"] for one in document["curve"]], label="smoothed")
    for style, one in zip(("--", ":"), document["suggestions"], strict=False):
        label = f"{one['reason']}: --learning-rate {one['learning_rate']:g}"
        axes.axvline(one["peak"], color="black", linestyle=style, label=label)
    axes.set_xscale("log")
    axes.set_xlabel(f"peak learning rate, global batch {document['global_batch']}")
    axes.set_ylabel("loss")
    axes.set_title(f"{document['task']}, {document['device']}")
    axes.legend()
