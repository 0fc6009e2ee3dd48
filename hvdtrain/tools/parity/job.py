"""The job: PyTorch in one half of its processes and TensorFlow in the other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.portable.names import check_state
from hvdtrain.backends.records import PortableState
from hvdtrain.config import Layer
from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.opening.limits import with_learning_rate
from hvdtrain.jobs.opening.setup import open_together
from hvdtrain.jobs.opening.start import JobSpec, prepare, started
from hvdtrain.jobs.signals import Signals, interruptible
from hvdtrain.tools.parity.findings import MISSING_BIAS, Finding, different_beginnings, different_values
from hvdtrain.tools.parity.observation import Observation
from hvdtrain.tools.parity.side import FIRST, Exchange, Role, Side, parity_config
from hvdtrain.tools.parity.verdict import Comparison, Verdict, judge
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.seeding import seeded_frameworks

_BIASES = ("bias", "beta")


@dataclass(frozen=True)
class Unmatched:
    """A parameter that the other framework does not have in this form."""

    name: str  # its portable name
    left: tuple[int, ...] | None  # its shape in PyTorch; None if it is not there
    right: tuple[int, ...] | None  # the same in TensorFlow

    @property
    def is_missing_bias(self) -> bool:
        """Whether only one framework has it, and it is a bias, without which the rest can be compared."""
        return (self.left is None) != (self.right is None) and self.name.rpartition("/")[2] in _BIASES


@dataclass(frozen=True)
class Match:
    """How the parameters of two models fit together."""

    start: PortableState  # the values that both start from: PyTorch's, of what both have
    unmatched: Sequence[Unmatched]  # what does not fit
    findings: Sequence[Finding]  # what differs and can be compared with all the same
    remedy: str = ""  # how to make the names fit, if that is known

    @property
    def can_compare(self) -> bool:
        """Whether the models can be compared."""
        return all(one.is_missing_bias for one in self.unmatched)


def match(left: PortableState, right: PortableState, own: Sequence[PortableState] = ()) -> Match:
    """Return how the parameters of PyTorch's model and of TensorFlow's fit together.

    Args:
        left: PyTorch's initial values.
        right: TensorFlow's.
        own: the values of both that their own initializers give, if these are to be compared.
    """
    unmatched = []
    for name in [*left, *(name for name in right if name not in left)]:
        shapes = [tuple(side[name].shape) if name in side else None for side in (left, right)]
        if shapes[0] != shapes[1]:
            unmatched.append(Unmatched(name.removeprefix("model/"), *shapes))
    start = {name: left[name] for name in left if name in right and left[name].shape == right[name].shape}
    if not all(one.is_missing_bias for one in unmatched):
        return Match(start, unmatched, [], _remedy(left, right))
    findings = [
        Finding(
            MISSING_BIAS,
            one.name.rpartition("/")[0],
            f"{'TensorFlow' if one.right is None else 'PyTorch'} has no {one.name}, "
            f"{'PyTorch' if one.right is None else 'TensorFlow'} has it: give both a bias, or neither",
        )
        for one in unmatched
    ]
    begin = list(different_beginnings(*own)) if own else []
    return Match(start, unmatched, [*findings, *begin, *_together(list(different_values(left, right)))])


def _together(findings: list[Finding]) -> list[Finding]:
    """Return one finding for initial values, of the first layer that differs."""
    if len(findings) < 2:
        return findings
    first = findings[0]
    text = (
        f"{first.text}; so do {len(findings) - 1} others. For equal values: initial_parameters: "
        "portable, or --init"
    )
    return [Finding(first.suspect, first.layer, text)]


def _remedy(left: PortableState, right: PortableState) -> str:
    """Return a line of ``state_names`` that makes the names fit; empty if there is none."""
    try:
        check_state({name: tuple(array.shape) for name, array in left.items()}, right, "torch")
    except TaskError as error:
        return error.remedy
    return ""


DEFAULT_STEPS = 100
# of a comparison; the user's values take precedence
_DEFAULTS: dict[str, Any] = {"steps": DEFAULT_STEPS, "initial_parameters": "portable"}


@dataclass(frozen=True)
class Result:
    """What the comparison found."""

    match: Match  # how the parameters fit together
    verdict: Verdict | None  # what differs; None if the models cannot be compared
    notes: Sequence[str]  # what to tell the user
    workers: int  # number of workers of each framework
    task: str  # the task's name

    @property
    def has_parity(self) -> bool:
        """Whether the models compute the same but for rounding."""
        return self.verdict is not None and self.verdict.has_parity


def parity_job(layers: list[Layer], role: Role) -> Result | bool:
    """Collective. Compare the two models of a task.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        role: what this process does.

    Returns:
        The result on rank 0; on other ranks whether there is parity.

    Raises:
        HvdtrainError: as training would raise it.
    """
    given, layers = layers, layers_for(layers, role.framework)
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers)
        check_task(job.task_class, job.config.task)
        config, left_out = parity_config(job.config)
        job = replace(job, config=config, notes=(*job.notes, *left_out))
        return _compare(job, role, signals, keeps_initial_values(given, job.task_class))


def layers_for(layers: list[Layer], framework: str) -> list[Layer]:
    """Return the config values of one framework's side."""
    return [Layer("parity", _DEFAULTS), *layers, Layer("parity", {"framework": framework})]


def check_task(task_class: Any, name: str) -> None:
    """Check that a task has what is compared, in both frameworks. No framework is loaded.

    Raises:
        TaskError: naming what it lacks, or has and cannot be compared.
    """
    rows = FRAMEWORKS.values()
    if not isinstance(task_class, type):
        return
    missing = [row.model_method for row in rows if not hasattr(task_class, row.model_method)]
    if missing:
        raise TaskError(
            f"task {name} has no {missing[0]}(): parity compares the models of both frameworks",
            "Write it, with the same layers and the same names.",
            everywhere=True,
        )
    own = [row.step_method for row in rows if hasattr(task_class, row.step_method)]
    if own:
        raise TaskError(
            f"task {name} has {own[0]}: parity compares losses and gradients, which its own step computes",
            "Leave it out for the comparison, and give the task a loss.",
            everywhere=True,
        )


def keeps_initial_values(layers: list[Layer], task_class: Any) -> bool:
    """Return whether training would start from what the models' own initializers give.

    Args:
        layers: the user's config values.
        task_class: the task's class.
    """
    sources = [getattr(task_class, "defaults", {}), *(layer.values for layer in layers)]
    return not any(name in values for values in sources for name in ("initial_parameters", "init"))


def _compare(job: JobSpec, role: Role, signals: Signals, keeps_initial_values: bool) -> Result | bool:
    with started(job, signals, ranks=role.ranks) as backend, signals.signals_take_precedence():
        exchange = Exchange(role) if role.is_leader else None
        task_data, model, _ = open_together(job, backend)
        config = with_learning_rate(job.config, model.own_rates)
        side = Side(config, backend, task_data, keeps_initial_values)
        notes = [*job.notes, *task_data.notes]
        ACTIVITY.enter("comparing the parameters", is_long=True)
        fits, start = _agree_on_start(side, exchange)
        goes_on, start = _share(backend, start)
        if not goes_on:
            return _told(backend, exchange, _unmatched(fits, notes, job, role))
        usual = side.observe(start)
        fp64 = side.observe_in_fp64(start)
        if exchange is None:
            return bool(backend.workers.broadcast_object(None))
        ACTIVITY.enter("waiting for the other framework", is_long=True)
        if role.framework != FIRST:
            exchange.send((usual, fp64))
            return bool(backend.workers.broadcast_object(exchange.receive()))
        others = exchange.receive()
        assert fits is not None  # of the first leader
        verdict, more = compare((usual, others[0]), (fp64, others[1]), fits, config.precision)
        return _told(backend, exchange, Result(fits, verdict, [*notes, *more], len(role.ranks), config.task))


def _agree_on_start(side: Side, exchange: Exchange | None) -> tuple[Match | None, PortableState | None]:
    """Collective. Return how the parameters fit together, on rank 0, and what both start from, on leaders.

    There is no start if the models cannot be compared.
    """
    own = side.own_initial()
    initial = side.initial()
    if exchange is None:
        return None, None
    if side.config.framework != FIRST:
        exchange.send((initial, own))
        start: PortableState | None = exchange.receive()
        return None, start
    other, others_own = exchange.receive()
    fits = match(initial, other, (own, others_own))
    start = dict(fits.start) if fits.can_compare else None
    exchange.send(start)
    return fits, start


def _share(backend: Backend, start: PortableState | None) -> tuple[bool, PortableState]:
    """Collective. Return whether the models can be compared, and the start on rank 0 of the framework."""
    return bool(backend.workers.broadcast_object(start is not None)), start or {}


def _unmatched(fits: Match | None, notes: list[str], job: JobSpec, role: Role) -> Result | None:
    return None if fits is None else Result(fits, None, notes, len(role.ranks), job.config.task)


def _told(backend: Backend, exchange: Exchange | None, result: Result | None) -> Result | bool:
    """Collective. Tell all processes whether there is parity; return the result on rank 0."""
    if result is not None and exchange is not None:
        exchange.send(result.has_parity)
        backend.workers.broadcast_object(result.has_parity)
        return result
    has_parity = exchange.receive() if exchange is not None else None
    return bool(backend.workers.broadcast_object(has_parity))


def compare(
    usual: tuple[Observation, Observation],
    fp64: tuple[Observation | str, Observation | str],
    fits: Match,
    precision: str,
) -> tuple[Verdict, list[str]]:
    """Return the verdict on two models, and notes.

    Args:
        usual: what both do in the job's precision.
        fp64: what both do in fp64, or why they cannot.
        fits: how their parameters fit together.
        precision: the job's.
    """
    notes = []
    for found, title in zip(fp64, ("PyTorch", "TensorFlow"), strict=True):
        if isinstance(found, str):
            notes.append(f"not repeated in fp64, so rounding is a guess: {title}: {found}")
    wide = None
    if not isinstance(fp64[0], str) and not isinstance(fp64[1], str):
        wide = Comparison.of(fp64[0], fp64[1])
    verdict = judge(Comparison.of(*usual), wide, fits.start, fits.findings, precision=precision)
    return verdict, notes
