"""The resolved plan of a run, as text: what rank 0 prints before training."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import hvdtrain
from hvdtrain.backends.pipeline.pipeline import bubble
from hvdtrain.backends.records import ModelInfo
from hvdtrain.config import Config
from hvdtrain.data.eval_sets import sets_of
from hvdtrain.data.order import Draws
from hvdtrain.data.stream import number_words, size_words
from hvdtrain.host.cores import threads_per_worker
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.opening import plan_parts
from hvdtrain.jobs.opening.data_sets import known_size, promises, roles_of
from hvdtrain.jobs.opening.setup import TrainingRun, names_of_batch
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.jobs.run_directory.folder import note_on_links
from hvdtrain.session import Session
from hvdtrain.storage.text import counted
from hvdtrain.storage.urls import shown
from hvdtrain.training_plan import TrainingPlan, most_workers

_WHAT = {"optimizer": "the optimizer's state", "gradients": "the optimizer's state and the gradients"}


def describe_sharding(config: Config, workers: int) -> str:
    """Return how the state is divided among the workers; empty if it is not."""
    if config.shard == "none":
        return ""
    if workers == 1:
        return "one worker, which keeps all of it: sharding changes nothing"
    return f"{_WHAT[config.shard]}, over {workers} workers"


_LOW = 0.2  # part of a step in which a stage waits, from which on more micro-batches are proposed


def describe_stages(config: Config, workers: int, stages: Sequence[str]) -> str:
    """Return how the model is divided, and how long the stages wait, in lines; empty if it is not."""
    if config.stages == 1:
        return ""
    idle = bubble(config.stages, config.accumulate)
    replicas = counted(workers // config.stages, "replica")
    micro_batches = "1 micro-batch" if config.accumulate == 1 else f"{config.accumulate:,} micro-batches"
    more, advice = 4 * config.stages, ""
    if idle > _LOW and config.accumulate < more:
        advice = f"; with --accumulate {more}, {bubble(config.stages, more):.0%}"
    first = (
        f"{replicas} of {config.stages} stages; with {micro_batches} in a step, each stage waits {idle:.0%} "
        f"of it if all take equally long{advice}"
    )
    return "\n".join([first, *stages])


_WIDTH = 14


def describe_plan(
    session: Session,
    plan: TrainingPlan,
    *,
    model: ModelInfo,
    hosts: list[str],
    build: str,
    settings: Mapping[str, str],
    start: ResumePoint,
    found: str = "",
    roles: str = "",
) -> str:
    """Return what the run is going to do, as text.

    Args:
        session: the run.
        plan: what follows from its number of workers.
        model: what the backend knows of the model.
        hosts: the host of each worker.
        build: the Horovod build, as text.
        settings: environment variables that hvdtrain set, which the user had not.
        start: where it starts from.
        found: the data in the task's own words, if it has some.
        roles: what columns of the data are used for that the user may not have meant.
    """
    config = session.config
    copy = f" (local copy {session.services.run_dir} until all of it is there)" if session.is_remote else ""
    lines = {
        "workers": _workers(session, hosts) + plan_parts.workers(session),
        "starts from": start.origin,
        "weights": _indented(start.weights),
        "changed": ", ".join(start.changes),
        "model": _model(session, model, start),
        "data": "; ".join(filter(None, [found or _data(session), roles])),
        "stream": promises(session, start.manifest),
        "evaluation": _eval_sets(session),
        "batch": _batch(config, plan) + plan_parts.batch(session, plan),
        "batch norm": _batch_norm(session, model, plan),
        "state": session.backend.replica_state.describe(),
        "length": _length(session, plan),
        "learning rate": plan_parts.describe_learning_rate(
            config, plan, model.own_rates, session.state.plateau
        )
        + plan_parts.learning_rate(session, plan),
        "optimizer": plan_parts.describe_optimizer(config, model.own_rates),
        "groups": "; ".join(model.groups),
        "regularised": _regularised(config),
        "stops early": _stops_early(config),
        "precision": _precision(config, model),
        "gradients": model.reduction,
        "memory": "" if session.memory.heaviest is None else session.memory.heaviest.describe(),
        "sharded": describe_sharding(config, session.backend.workers.size),
        "stages": _indented(describe_stages(config, session.backend.workers.size, model.stages)),
        "local steps": plan_parts.describe(config, plan),
        "checkpoints": _checkpoints(config),
        "Horovod": build,
        "set for you": _set_for_you(session, settings),
        "run directory": shown(session.location_of(session.services.run_dir)) + copy,
    }
    title = f"hvdtrain {hvdtrain.__version__}: {config.task} with {session.backend.info.description}"
    return "\n".join([title, *(f"  {name:<{_WIDTH}} {text}" for name, text in lines.items() if text)])


def _indented(text: str) -> str:
    """Return a text of several lines as the plan shows it, behind a name."""
    return text.replace("\n", f"\n  {'':<{_WIDTH}} ")


def describe_model(model: ModelInfo) -> str:
    """Return the number of the model's parameters, and of those that are trained, as text."""
    sizes = [math.prod(shape) for shape in model.parameter_shapes.values()]
    trained, tensors = sum(sizes), counted(len(sizes), "tensor")
    if not model.frozen_parameters:
        return f"{counted(trained, 'parameter')} in {tensors}"
    total = counted(trained + model.frozen_parameters, "parameter")
    return f"{total}, {trained:,} of them trained, in {tensors}"


def _set_for_you(session: Session, settings: Mapping[str, str]) -> str:
    parts = [f"{name}={value}" for name, value in settings.items()]
    workers = session.backend.workers
    if session.config.threads is None and "OMP_NUM_THREADS" not in os.environ:
        parts.append(f"{counted(threads_per_worker(workers.local_size), 'compute thread')} per worker")
    if "torch" in session.backend.info.versions:
        parts.append("subnormal numbers are 0 (torch.set_flush_denormal)")
    return ", ".join(parts)


def _workers(session: Session, hosts: list[str]) -> str:
    size, per_host = len(hosts), Counter(hosts)
    if size == 1:
        return f"1 on {hosts[0]}"
    places = ", ".join(f"{host}: {count}" for host, count in list(per_host.items())[:8])
    more = ", ..." if len(per_host) > 8 else ""
    controller = session.backend.workers.coordination
    return f"{size} on {counted(len(per_host), 'host')} ({places}{more}), coordinated by {controller}"


def _model(session: Session, model: ModelInfo, start: ResumePoint) -> str:
    text = describe_model(model)
    if start.origin and not start.weights:
        return text
    is_drawn = session.config.initial_parameters == "portable"
    origin = f"{'drawn by name from' if is_drawn else 'as the task made them,'} seed {session.config.seed}"
    of_the_rest = " of the rest" if start.weights else ""
    return f"{text}; initial values{of_the_rest} {origin}"


def _data(session: Session) -> str:
    sets = sets_of(session.data.evaluation)
    # named sets have a line of their own
    evaluation = f", {number_words(len(sets['']))} to evaluate" if "" in sets else ""
    readers = session.config.read_workers
    read = f"; {counted(readers, 'reader')} per worker" if readers else ""
    is_drawn = isinstance(getattr(session.data.training, "draws", None), Draws)
    drawn = ", drawn by sample_probabilities()" if is_drawn else ""
    return f"{size_words(session.data.training)} to train{drawn}{evaluation}{read}"


def _eval_sets(session: Session) -> str:
    """Return the named sets of evaluation data with their sizes; empty if they have no names."""
    sets = sets_of(session.data.evaluation)
    if "" in sets or not sets:
        return ""
    sizes = [f"{name} ({size_words(dataset)})" for name, dataset in sets.items()]
    first = f"; metrics of {next(iter(sets))} have plain names" if len(sets) > 1 else ""
    return f"{', '.join(sizes)}{first}"


def _batch(config: Config, plan: TrainingPlan) -> str:
    batch = plan.batch
    holder = "worker" if config.stages == 1 else "replica"
    parts = f"{batch.micro_batch} per {holder} x {counted(batch.workers, holder)}"
    if batch.accumulate > 1:
        parts += f" x {batch.accumulate} micro-batches"
    if batch.is_even:
        return f"{batch.global_batch} a step = {parts}"
    return f"{batch.global_batch} a step, at most {parts}, the shorter parts padded with weight 0"


def _batch_norm(session: Session, model: ModelInfo, plan: TrainingPlan) -> str:
    layers, batch = model.batch_norm_layers, plan.batch
    is_synchronised = session.config.sync_batch_norm or 0 < layers == model.synchronized_layers
    if not layers:
        return "the model has none, so --sync-batch-norm changes nothing" if is_synchronised else ""
    together = batch.global_batch // batch.accumulate
    if (most := most_workers(session.backend.workers)) is not None:
        return plan_parts.batch_norm(
            layers,
            batch,
            range(session.backend.workers.least, most + 1),
            is_synchronised,
            model.leaves_out_padding,
        )
    if is_synchronised:
        return (
            f"{counted(layers, 'layer')} over the {counted(together, 'sample')} of all workers' micro-batches"
        )
    layers -= model.synchronized_layers  # those with synchronized=True
    has_none = model.leaves_out_padding and batch.global_batch >= batch.workers * batch.accumulate
    padding = "" if batch.is_even or has_none else "; padding (a repeated sample) counts in the statistics"
    if session.data.is_sharded:
        padding = "; padding (repeated samples) of workers whose shards end first counts in the statistics"
    if batch.workers == 1:
        over = f"over each micro-batch of {counted(batch.micro_batch, 'sample')}"
        return (
            f"warning: {counted(layers, 'layer')} {over}{padding}; see --sync-batch-norm" if padding else ""
        )
    return (
        f"warning: {counted(layers, 'layer')} over each worker's {counted(batch.micro_batch, 'sample')}, not "
        f"the {together} of all, so the curve depends on the number of workers{padding}; "
        "see --sync-batch-norm"
    )


def _length(session: Session, plan: TrainingPlan) -> str:
    epochs = plan.last_sample / session.data.size
    cadence, evaluates = session.config.eval_every, ""
    if session.data.evaluation:
        evaluates = f", evaluation {cadence.describe() if cadence else 'at the end'}"
    if known_size(session.data.training) is None:
        return f"{counted(plan.steps, 'step')}{evaluates}"
    text = counted(epochs, "epoch") if epochs == round(epochs, 6) else f"{epochs:.3f} epochs"
    done = session.state.progress.step
    left = f", {counted(max(0, plan.steps - done), 'step')} to go" if done else ""
    least = "at least " if session.data.is_sharded else ""  # the last steps of an epoch have fewer samples
    return f"{least}{counted(plan.steps, 'step')} = {text}{left}{evaluates}"


def _precision(config: Config, model: ModelInfo) -> str:
    own = f"fp{model.float_bits}"
    text = own if config.precision == "fp32" else f"{config.precision}, weights {own}"
    if config.precision == "fp16":
        text += ", loss scaled"
    if config.checkpoint_activations:
        text += "; activations of repeated blocks computed twice"
    if config.compile:
        text += "; compiled"
    return text


def _checkpoints(config: Config) -> str:
    text = f"{config.save_every.describe()} and at the end" if config.save_every else "at the end"
    kept = "all" if config.keep_last is None else f"the last {config.keep_last}"
    best = f" and the one with the best {config.keep_best.metric}" if config.keep_best else ""
    return f"{text}, keeping {kept}{best}"


def _regularised(config: Config) -> str:
    parts = []
    if config.label_smoothing:
        parts.append(f"label smoothing {config.label_smoothing:g} in training, none in evaluation")
    for name, alpha in (("mixup", config.mixup), ("cutmix", config.cutmix)):
        parts += [f"{name} {alpha:g} in training"] if alpha else []
    if config.ema_decay is not None:
        parts.append(f"evaluation by a moving average of the weights, decay {config.ema_decay:g}")
    return "; ".join(parts)


def _stops_early(config: Config) -> str:
    if config.early_stopping is None:
        return ""
    patience = counted(config.early_stopping_patience, "evaluation")
    way = "higher" if config.early_stopping.highest else "lower"
    return f"after {patience} in a row without a {way} {config.early_stopping.metric}"


def show_plan(run: TrainingRun, session: Session, point: ResumePoint, found: Sequence[str]) -> None:
    """Show the plan, and what else the user should know. Local: no collective.

    Args:
        run: the training.
        session: the run, with its services.
        point: where it starts.
        found: notes of its start, and of the dry run.
    """
    config, task, plan = run.config, run.task_data.task, session.plan()
    of_directory = filter(None, [run.lock.note, note_on_links(session.services.run_dir), *run.notes_on_task])
    notes = (*point.notes, *found, *of_directory)
    row = FRAMEWORKS[config.framework]
    is_named = not callable(getattr(task, "loss", print)) and not hasattr(task, row.loss_method)
    session.services.report.say(
        describe_plan(
            session,
            plan,
            model=run.model,
            hosts=list(run.hosts),
            build=run.job.build,
            settings=run.job.settings,
            start=point,
            found=str(task.describe()) if hasattr(task, "describe") else "",
            roles=roles_of(names_of_batch(run.task_data), is_named),
        )
    )
    for note in (*notes, *run.notes_on_options(plan)):
        session.services.report.note(note)
