"""One job, from its configuration to its summary: what every way of starting one goes through."""

import platform
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import hvdtrain
from hvdtrain import environment
from hvdtrain.backends import load_backend
from hvdtrain.backends.base import Backend, initial_value
from hvdtrain.checkpoint import newest_verified
from hvdtrain.cluster import agree, on_root
from hvdtrain.config import Config, Layer, resolve
from hvdtrain.data.datasets import as_dataset, signature
from hvdtrain.ending import Signals, answer_expected, close_in_time, end_if_uncaught, interruptible
from hvdtrain.errors import (
    ConfigError,
    DataError,
    HvdtrainError,
    Interrupted,
    SaveError,
    Stopped,
    TaskError,
    WorkerFailure,
)
from hvdtrain.horovod_build import require_horovod
from hvdtrain.loop import run
from hvdtrain.metrics import Window
from hvdtrain.plan import plan_in_words
from hvdtrain.rundir import CHECKPOINTS, open_run
from hvdtrain.saving import BackgroundSaver
from hvdtrain.session import Layout, Session
from hvdtrain.starting import Start, find_start, with_nan
from hvdtrain.summary import Summary
from hvdtrain.task import load_task_class, make_task, task_spec, where_raised

_FIRST_ANSWER_SECONDS = 30
_LAST_SAVE_SECONDS = 30  # how long a worker that ends early waits for the checkpoint being written


def train(task: Any = "digits", *, framework: str, **fields: Any) -> Summary:
    """Train a task; the same as ``python -m hvdtrain``, from a script that a launcher starts.

    Collective: every worker of the job calls it.

    Args:
        task: the task's class, or its name or path as ``--task`` takes it.
        framework: "torch" or "tf".
        fields: config fields, such as ``epochs=3``; docs/config.md lists them.

    Returns:
        How the run ended.

    Raises:
        Stopped: where a signal stopped training at a step and its state is saved.
        HvdtrainError: as ``hvdtrain.errors`` lists them. One that the script does not catch ends
            it as the command line would: said once among all workers, without a traceback, with
            its exit code.
    """
    end_if_uncaught()
    given = Layer("train()", {"task": task_spec(task), "framework": framework, **fields})
    return run_job([given], None if isinstance(task, str) else task)


@dataclass(frozen=True)
class Job:
    """What is known before the workers meet: local to each of them.

    Attributes:
        config: the resolved config.
        task_class: the task's class, or a function that makes a task.
        build: the Horovod build, in words.
        settings: environment variables that hvdtrain set.
    """

    config: Config
    task_class: Any
    build: str
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Material:
    """A worker's task and its data.

    Attributes:
        task: the task.
        train_data: the training data, a Dataset.
        eval_data: the evaluation data, or None.
        facts: what of the data must be equal on all workers.
    """

    task: Any
    train_data: Any
    eval_data: Any
    facts: Mapping[str, Any]


def run_job(layers: list[Layer], task_class: Any = None) -> Summary:
    """Resolve the configuration, make the task and train it.

    Collective. After a good end Horovod stays: a script may train again, and MPI starts only once.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        task_class: the task's class where the caller has it; found by its name otherwise.
    """
    with interruptible() as signals:
        job = prepare(layers, task_class)
        backend = load_backend(job.config)
        try:
            return _train(job, backend, signals)
        except BaseException:
            close_in_time(backend.close)  # workers that wait for this one learn of it
            raise


def prepare(layers: list[Layer], task_class: Any = None) -> Job:
    """Do what needs neither another worker nor the user's code: find the task, settle the config."""
    merged = {name: value for layer in layers for name, value in layer.values.items()}
    spec = str(merged.get("task") or Config.model_fields["task"].default)
    task_class = task_class or load_task_class(spec)
    defaults = getattr(task_class, "defaults", {})
    if not isinstance(defaults, Mapping):
        raise TaskError(f"the defaults of task {spec} must be a mapping, found {defaults!r}")
    config = resolve([Layer(f"defaults of task {spec}", defaults), *layers])
    build = require_horovod(config.framework)
    return Job(config, task_class, build.describe(), environment.prepare())


def open_material(job: Job) -> Material:
    """Make the task and open its data, with the checks of both. Local: no collective.

    The backend has started: the device is bound before the user's code can use it, and workers
    that take long over their data hold up no start of Horovod, which waits for seconds only.
    """
    config = job.config
    task = make_task(job.task_class, config.task, config.task_options, config.framework)
    train_data, train_facts = _open_data(task, config, "train_data", "training data")
    eval_data, eval_facts = _open_data(task, config, "eval_data", "evaluation data")
    if train_data is None:
        raise DataError(f"train_data() of task {config.task} gave None")
    return Material(task, train_data, eval_data, {**train_facts, **eval_facts})


def _open_data(task: Any, config: Config, method: str, what: str) -> tuple[Any, dict[str, Any]]:
    """Open one of the task's data sets and check that it can be read."""
    try:
        source = getattr(task, method)()
        if source is None:
            return None, {f"size of the {what}": 0}
        dataset = as_dataset(source)
        facts = {f"{key} of the {what}": kind for key, kind in signature(dataset, what).items()}
        return dataset, {f"size of the {what}": len(dataset), **facts}
    except HvdtrainError:
        raise
    except Exception as error:
        raise TaskError(f"{method}() of task {config.task} failed: {where_raised(error)}") from error


def open_together(job: Job, backend: Backend) -> tuple[Material, list[str]]:
    """Collective. Agree, open the data and build the model.

    Returns:
        The task with its data, and the host of each worker.
    """
    workers = backend.workers
    with answer_expected(_FIRST_ANSWER_SECONDS, workers.rank, workers.host):
        hosts = workers.allgather_object(workers.host)
    agree(workers, _facts(job, backend))
    material = open_material(job)
    agree(workers, material.facts)
    Layout.of(job.config, workers.size, len(material.train_data))  # raises before anything is written
    _check_best(job.config, material)
    _build(job.config, material.task, backend)
    agree(workers, {f"shape of {name}": shape for name, shape in backend.parameter_shapes().items()})
    return material, hosts


def _train(job: Job, backend: Backend, signals: Signals) -> Summary:
    """Collective. Agree, build, take up where a checkpoint stands, train."""
    material, hosts = open_together(job, backend)
    start = on_root(backend.workers, lambda: find_start(job.config, backend, len(material.train_data)))
    session = _open_session(job, backend, material, start)
    status, problem = "failed", None
    try:
        backend.broadcast_state(0)
        _say_plan(job, session, start, hosts, hasattr(material.task, f"{job.config.framework}_optimizer"))
        with signals.go_first(), signals.at_a_step():
            run(session, signals.requests)
            session.saver.finish()
        status, problem = _status(session, signals)
    except Interrupted as interruption:
        status, problem = "stopped", f"interrupted by {interruption}"
        newest = session.saver.newest
        goes_on = f"; --resume goes on from {newest.name}" if newest else ""
        session.report.say(f"{problem} {_where_it_stood(session)}{goes_on}")
        raise
    except HvdtrainError as error:
        problem = error.problem
        raise
    except Exception as error:
        problem = f"training failed {_where_it_stood(session)}: {where_raised(error)}"
        raise WorkerFailure(problem) from error
    finally:
        summary = _summarise(session, status, problem)
        session.report.finish(summary)
        session.report.close()
        session.saver.finish(_LAST_SAVE_SECONDS)
    return _end_together(session, summary)


def _open_session(job: Job, backend: Backend, material: Material, start: Start) -> Session:
    """Collective. Open the run directory and put together what the loop is given."""
    config = job.config
    report, run_dir = open_run(config, backend.workers, start.resumed_step)
    session = Session(
        config, backend, material.train_data, material.eval_data, report, run_dir, progress=start.progress
    )
    if backend.workers.rank == 0:
        session.saver = BackgroundSaver(
            run_dir / CHECKPOINTS,
            report,
            keep_last=config.keep_last,
            best=config.keep_best,
            stop_on_error=config.on_save_error == "stop",
            newest=start.newest,
            values=start.values,
        )
    session.best_value = start.best_value(config)
    if (record := start.record) is not None:
        session.seconds_before = record.seconds
        session.last_eval = with_nan(record.last_metrics)
        session.last_eval_step = record.step if record.metrics else None
        weight = record.window_weight
        session.window = Window(with_nan(record.window), weight, untimed_weight=weight)
    return session


def _say_plan(job: Job, session: Session, start: Start, hosts: list[str], own_optimizer: bool) -> None:
    plan = plan_in_words(
        session,
        session.layout(),
        hosts=hosts,
        build=job.build,
        settings=job.settings,
        own_optimizer=own_optimizer,
        start=start,
    )
    session.report.say(plan)
    for note in start.notes:
        session.report.note(note)


def _status(session: Session, signals: Signals) -> tuple[str, str | None]:
    """Collective. Give how training ended, as all workers see it, and why if not by itself."""
    why = None
    if session.saver.poll():
        why = "a checkpoint could not be written, and on_save_error is stop"
    elif session.stopped and signals.number is not None:
        why = f"{signal.Signals(signals.number).name} came"
    reasons = session.backend.workers.allgather_object(why)
    why = next((reason for reason in reasons if reason), None)
    if session.stopped:
        session.report.say(f"{why}; stopped {_where_it_stood(session)}")
    return ("stopped" if session.stopped else "completed"), why


def _end_together(session: Session, summary: Summary) -> Summary:
    """Collective. Give rank 0's summary, or raise on all workers where training did not complete.

    Raises:
        Stopped: where a later job can go on from a checkpoint.
        SaveError: where there is none, or the config wants it to be an error.
    """
    summary = session.backend.workers.broadcast_object(summary)
    wanted = session.config.on_save_error == "stop"
    if summary.save_error and (wanted or (session.stopped and summary.checkpoint is None)):
        raise SaveError(
            f"the checkpoint could not be written: {summary.save_error}",
            f"Newest good one: {summary.checkpoint or 'none'}. Mend the disk, then go on with --resume.",
            everywhere=True,
        )
    if session.stopped:
        raise Stopped(summary.error)
    return summary


def _check_best(config: Config, material: Material) -> None:
    """Check early what would else come out at the first evaluation.

    Raises:
        ConfigError: where the metric that keep_best names cannot be there.
    """
    if config.keep_best is None:
        return
    metric = config.keep_best.metric
    if material.eval_data is None:
        raise ConfigError(
            f"keep_best: {metric} is a metric of the evaluation, and the task has no evaluation data",
            "Leave keep_best out, or give the task eval_data().",
            everywhere=True,
        )
    known = ["loss", *getattr(material.task, "metrics", {})]
    own_loss = hasattr(material.task, f"{config.framework}_loss")  # names its metrics when it is called
    if not own_loss and metric not in known:
        raise ConfigError(
            f"keep_best: there is no metric {metric!r}", f"The task has {', '.join(known)}.", everywhere=True
        )


def _facts(job: Job, backend: Backend) -> dict[str, Any]:
    """What must be equal on all workers before they open their data."""
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {
        "hvdtrain": hvdtrain.__version__,
        "Python": python,
        "Horovod": job.build,
        **backend.versions(),
    }
    return {
        **job.config.model_dump(mode="json"),
        **{f"version of {name}": version for name, version in versions.items()},
    }


def _build(config: Config, task: Any, backend: Backend) -> None:
    """Build the model and give it its initial values. Local: no collective."""
    try:
        backend.build(task, config, config.accumulate)
    except HvdtrainError:
        raise
    except Exception as error:
        raise TaskError(f"the model of task {config.task} cannot be built: {where_raised(error)}") from error
    if config.initial_parameters == "portable":
        state = backend.get_state()
        for name in state:
            if name.startswith("model/"):
                value = initial_value(name, state[name].shape, config.seed)
                state[name] = state[name] if value is None else value
        backend.set_state(state)


def _where_it_stood(session: Session) -> str:
    layout, progress = session.layout(), session.progress
    place = f"at step {progress.step:,} of {layout.steps:,} (epoch {session.epoch:.2f})"
    return f"{place}, run directory {session.run_dir}"


def _summarise(session: Session, status: str, problem: str | None) -> Summary:
    seconds = session.report.seconds()
    newest, failures = session.saver.newest, session.saver.failures
    if newest is not None and status != "failed" and not (problem or "").startswith("interrupted"):
        newest = newest_verified(newest.parent)
    return Summary(
        status=status,
        framework=session.config.framework,
        task=session.config.task,
        workers=session.backend.workers.size,
        steps=session.progress.step,
        samples=session.progress.samples,
        epochs=round(session.epoch, 6),
        seconds=round(seconds, 3),
        samples_per_second=round(median(session.speeds or [0.0]), 1),
        final=session.last_eval,
        run_dir=str(session.run_dir),
        checkpoint=None if newest is None else str(newest),
        failed_saves=len(failures),
        save_error=failures[-1] if failures else None,
        error=problem,
    )
