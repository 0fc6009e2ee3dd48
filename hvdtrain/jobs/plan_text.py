"""The resolved plan of a run, as text: what rank 0 prints before training."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence

import hvdtrain
from hvdtrain.backends.memory import mebibytes
from hvdtrain.backends.pipeline.pipeline import bubble
from hvdtrain.backends.records import ModelInfo, OwnRates
from hvdtrain.config import Config
from hvdtrain.data.eval_sets import sets_of
from hvdtrain.data.numeric import TARGETS
from hvdtrain.data.order import Draws, Lengths
from hvdtrain.data.stream import number_words, samples_words
from hvdtrain.host.cores import threads_per_worker
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.compatibility import shown_value
from hvdtrain.jobs.opening.data_sets import known_size, promises
from hvdtrain.jobs.opening.dry_run import Dry, memory_limit
from hvdtrain.jobs.opening.setup import TrainingRun, names_of_batch
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.session import Session
from hvdtrain.storage.text import counted
from hvdtrain.storage.urls import shown
from hvdtrain.training_plan import TrainingPlan, most_workers

_WIDTH, _CHECK_WIDTH = 14, 11
INDENT = 3 + _WIDTH  # columns before the text of a line
_USUAL_REDUCTION = "fp32, sent uncompressed"
_MUCH = 0.5  # part of the memory that a worker may take, from which on the plan has what it takes
_SHARDED = {"optimizer": "the optimizer's state", "gradients": "the optimizer's state and the gradients"}
_NAMED = 8  # hosts and parameter groups that a line names
_IN_OTHER_LINES = {
    *("framework", "task", "task_options", "run_dir", "resume", "init", "initial_parameters", "seed"),
    *("epochs", "steps", "batch_size", "global_batch_size", "accumulate", "eval_every", "sync_batch_norm"),
    *("learning_rate", "lr_scaling", "base_batch_size", "lr_schedule", "lr_final_fraction", "warmup_epochs"),
    *("warmup_steps", "optimizer", "momentum", "weight_decay", "parameter_groups", "clip_norm", "precision"),
    *("compile", "checkpoint_activations", "shard", "stages", "compression", "read_workers"),
}


def describe_plan(run: TrainingRun, session: Session, start: ResumePoint) -> str:
    """Return what the run is going to do, as text."""
    config, plan, model = session.config, session.plan(), run.model
    workers, own, services = session.backend.workers.size, model.own_rates, session.services
    memory, limit = session.services.largest_memory, memory_limit(session.backend)
    has_much = memory is not None and limit and memory.total_bytes > _MUCH * limit
    copy = f" (local copy {services.run_dir} until all of it is there)" if session.is_remote else ""
    alone = "one worker, which keeps all of it: sharding changes nothing"
    kept = "optimizer" if config.framework == "tf" else config.shard  # TensorFlow keeps whole gradients
    sharded = alone if workers == 1 else f"{_SHARDED.get(kept)}, over {workers} workers"
    clipped = f", gradient clipped to norm {config.clip_norm:g}" if config.clip_norm else ""
    precision = _precision(config, model)
    lines = {
        "workers": _workers(session, run.hosts),
        "starts from": start.origin,
        "weights": start.weights,
        "changed": ", ".join(start.changes),
        "model": _model(config, model, start),
        "data": _data(run, session),
        "stream": promises(session, start.manifest),
        "evaluation": _eval_sets(session),
        "batch": _batch(session, plan),
        "batch norm": _batch_norm(session, model, plan),
        "state": session.backend.replica_state.describe(),
        "length": _length(session, plan),
        "learning rate": _learning_rate(session, plan, own),
        "optimizer": (_built_in(config) if own is None else f"the task's own, {own.optimizer}") + clipped,
        "groups": "; ".join(model.groups),
        "precision": "" if precision == "fp32" else precision,
        "gradients": "" if model.reduction == _USUAL_REDUCTION else model.reduction,
        "memory": memory.describe() if memory is not None and has_much else "",
        "sharded": "" if config.shard == "none" else sharded,
        "stages": _stages(config, workers, model.stages),
        "options": _options(config),
        "run directory": shown(session.location_of(services.run_dir)) + copy,
    }
    title = f"hvdtrain {hvdtrain.__version__}: {config.task} with {session.backend.info.description}"
    return _table(title, lines.items(), _WIDTH)


def describe_check(run: TrainingRun, session: Session, found: Dry, seconds: float, peak: int) -> str:
    """Return what was found before the first step, as text; no worker has had more memory than ``peak``."""
    config, backend, model = run.config, run.backend, run.model
    memory, most = session.services.largest_memory, memory_limit(backend)
    assert memory is not None  # the dry run has measured it
    lines = [
        ("model", describe_model(model)),
        ("stages", _stages(config, backend.workers.size, model.stages)),
    ]
    for one in found.passes:  # the first micro-batch of each data set on rank 0
        name = one.what.removesuffix(" data").removeprefix("evaluation set ").strip("'")
        values = ", ".join(f"{metric} {value:.4f}" for metric, value in one.means().items())
        outputs = [f"outputs {text}" for text in filter(None, [one.describe_outputs()])]
        lines.append((name, "\n".join([one.describe_data(), *outputs, values])))
    limit = "how much memory a GPU has is not known" if most is None else f"a GPU has {mebibytes(most)}"
    if backend.device_memory() is None:
        limit = f"each worker of this host may take {mebibytes(most or 0)}"
    had = f"the largest worker has had {mebibytes(peak)} of the host's until now, all included"
    settings = [f"{name}={value}" for name, value in run.job.settings.items()]
    if config.threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = threads_per_worker(backend.workers.local_size)
        settings.append(f"{counted(threads, 'compute thread')} per worker")
    if "torch" in backend.info.versions:
        settings.append("subnormal numbers are 0 (torch.set_flush_denormal)")
    lines += [
        ("precision", _precision(config, model)),
        ("gradients", model.reduction),
        ("memory", f"{memory.describe()}\n{had}\n{limit}"),
        ("Horovod", run.job.build or "none"),
        ("set for you", ", ".join(settings)),
        ("time", f"{found.seconds:.2f} s for the dry run, {seconds:.2f} s with data and model"),
        *(("note", note) for note in found.notes),
    ]
    of_workers = counted(backend.workers.size, "worker")
    title = f"check passed: {config.task} with {backend.info.description}, {of_workers}; nothing was trained"
    return _table(title, lines, _CHECK_WIDTH)


def _table(title: str, lines: Iterable[tuple[str, str]], width: int) -> str:
    rows = [(name, text.replace("\n", f"\n  {'':<{width}} ")) for name, text in lines if text]
    return "\n".join([title, *(f"  {name:<{width}} {text}" for name, text in rows)])


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_NAMED]) + (", ..." if len(texts) > _NAMED else "")


def describe_model(model: ModelInfo) -> str:
    """Return the number of the model's parameters, and of those that are trained, as text."""
    sizes = [math.prod(shape) for shape in model.parameter_shapes.values()]
    trained, tensors = sum(sizes), counted(len(sizes), "tensor")
    if not model.frozen_parameters:
        return f"{counted(trained, 'parameter')} in {tensors}"
    total = counted(trained + model.frozen_parameters, "parameter")
    return f"{total}, {trained:,} of them trained, in {tensors}"


def _stages(config: Config, workers: int, stages: Sequence[str]) -> str:
    """Return how the model is divided, and how long the stages wait, in lines; empty if it is not."""
    if config.stages == 1:
        return ""
    idle = bubble(config.stages, config.accumulate)
    first = (
        f"{counted(workers // config.stages, 'replica')} of {config.stages} stages; with "
        f"{counted(config.accumulate, 'micro-batch')} in a step, each stage waits {idle:.0%} of it if all "
        "take equally long; with a larger --accumulate, less"
    )
    return "\n".join([first, *stages])


def _workers(session: Session, hosts: Sequence[str]) -> str:
    workers, most = session.backend.workers, most_workers(session.backend.workers)
    elastic = "" if most is None else f"; elastic: at least {workers.least}, at most {most}"
    if len(hosts) == 1:
        return f"1 on {hosts[0]}{elastic}"
    per_host = Counter(hosts)
    places = _some([f"{host}: {count}" for host, count in per_host.items()])
    of_hosts = f"{len(hosts)} on {counted(len(per_host), 'host')} ({places})"
    return f"{of_hosts}, coordinated by {workers.coordination}{elastic}"


def _model(config: Config, model: ModelInfo, start: ResumePoint) -> str:
    text = describe_model(model) + ("; the rest" if start.weights else "")
    if start.origin and not start.weights:
        return text
    origin = "drawn by name from" if config.initial_parameters == "portable" else "as the task made them,"
    return f"{text}, {origin} seed {config.seed}"


def _data(run: TrainingRun, session: Session) -> str:
    """Return the size of the data, and what columns are used for that a user may not have meant."""
    task, sets, readers = run.task_data.task, sets_of(session.data.evaluation), session.config.read_workers
    # named sets have a line of their own
    evaluation = f", {number_words(len(sets['']))} to evaluate" if "" in sets else ""
    orders = {Draws: ", drawn by sample_probabilities()", Lengths: ", similar sample_lengths() together"}
    order = orders.get(type(getattr(session.data.training, "ordering", None)), "")
    parts = [f"{samples_words(session.data.size)} to train{order}{evaluation}"]
    parts += [f"{counted(readers, 'reader')} per worker"] if readers else []
    parts = [str(task.describe())] if hasattr(task, "describe") else parts
    row = FRAMEWORKS[run.config.framework]
    has_own_loss = callable(getattr(task, "loss", print)) or hasattr(task, row.loss_method)
    names = [] if has_own_loss else names_of_batch(run.task_data)
    targets = [name for name in TARGETS if name in names]
    parts += [f"the loss compares with {targets[0]!r}, not {targets[1]!r}"] if len(targets) > 1 else []
    parts += ["'weights' weighs the samples in the loss"] if "weights" in names else []
    return "; ".join(parts)


def _eval_sets(session: Session) -> str:
    sets = sets_of(session.data.evaluation)
    sizes = [f"{name} ({samples_words(len(dataset))})" for name, dataset in sets.items() if name]
    first = f"; metrics of {next(iter(sets))} have plain names" if len(sets) > 1 else ""
    return f"{', '.join(sizes)}{first}"


def _batch(session: Session, plan: TrainingPlan) -> str:
    batch, most = plan.batch, most_workers(session.backend.workers)
    holder = "worker" if session.config.stages == 1 else "replica"
    parts = f"{batch.micro_batch} per {holder} x {counted(batch.workers, holder)}"
    if batch.accumulate > 1:
        parts += f" x {batch.accumulate} micro-batches"
    text = f"{batch.global_batch} a step = {parts}"
    if not batch.is_even:
        text = f"{batch.global_batch} a step, at most {parts}, the shorter parts padded with weight 0"
    if most is None:
        return text
    if session.config.global_batch_size is None:
        return f"{text}; with other workers, another number a step and of steps"
    return f"{text}; micro-batches of {batch.micro_batch} with any number of workers up to {most}"


def _batch_norm(session: Session, model: ModelInfo, plan: TrainingPlan) -> str:
    """Return which samples batch norm takes together; nothing where that is what a plain loop does."""
    batch, elastic, count = plan.batch, session.backend.workers.is_elastic, model.batch_norm_layers
    is_synchronised = session.config.sync_batch_norm or 0 < count == model.synchronized_layers
    if not count:
        return "the model has none, so --sync-batch-norm changes nothing" if is_synchronised else ""
    layers = counted(count, "layer")
    if is_synchronised and not elastic:
        samples = counted(batch.global_batch // batch.accumulate, "sample")
        return f"{layers} over the {samples} of all workers' micro-batches"
    if is_synchronised:
        return f"warning: {layers} over all workers' micro-batches, so the curve depends on their number"
    layers = counted(count - model.synchronized_layers, "layer")
    is_padded = session.data.is_sharded or not (batch.is_even or model.leaves_out_padding)
    is_padded |= elastic and session.config.global_batch_size is not None and not model.leaves_out_padding
    padding = "; padding (a repeated sample) counts in the statistics" if is_padded else ""
    if batch.workers == 1 or (elastic and session.config.global_batch_size is not None):
        over = f"{layers} over each micro-batch of {counted(batch.micro_batch, 'sample')}"
        return f"warning: {over}{padding}; see --sync-batch-norm" if padding else ""
    return (
        f"warning: {layers} over each worker's {counted(batch.micro_batch, 'sample')}, so the curve depends "
        f"on the number of workers{padding}; see --sync-batch-norm"
    )


def _length(session: Session, plan: TrainingPlan) -> str:
    epochs, steps = plan.last_sample / session.data.size, counted(plan.steps, "step")
    cadence, evaluates = session.config.eval_every, ""
    if session.data.evaluation:
        evaluates = f", evaluation {cadence.describe() if cadence else 'at the end'}"
    if known_size(session.data.training) is None:
        return f"{steps}{evaluates}"
    text = counted(epochs, "epoch") if epochs == round(epochs, 6) else f"{epochs:.3f} epochs"
    done = session.state.progress.step
    left = f", {counted(max(0, plan.steps - done), 'step')} to go" if done else ""
    least = "at least " if session.data.is_sharded else ""  # the last steps of an epoch have fewer samples
    return f"{least}{steps} = {text}{left}{evaluates}"


def _learning_rate(session: Session, plan: TrainingPlan, own: OwnRates | None) -> str:
    """Return the learning rate, its warm-up and schedule, and how it follows the number of workers."""
    rate, config = plan.learning_rate, session.config
    base, peak, text = config.base_learning_rate, rate.peak, f"{config.base_learning_rate:g}"
    if own is not None and own.base is not None:
        is_own = math.isclose(base, own.base, rel_tol=1e-6)
        text += " (the optimizer's own)" if is_own else f" (in place of the optimizer's default {own.base:g})"
    if peak != base:
        of_all, batch = plan.batch.global_batch, -(-plan.batch.global_batch // plan.batch.workers)
        compared = f"global batch {of_all}" if config.sync_every is None else f"each worker's batch {batch}"
        rule = f"{config.lr_scaling} rule: {compared}, quoted for {plan.base_batch}"
        text = f"{peak:g} = {text} x {peak / base:g} ({rule})"
    if rate.warmup_epochs:
        number, unit = (config.warmup_steps, "step") if config.warmup_steps else (rate.warmup_epochs, "epoch")
        text += f", after a warm-up of {counted(number, unit)}"
    lowers = rate.schedule in ("cosine", "linear", "cyclic", "cosine_restarts", "plateau")
    schedule = "times the task's learning_rate_factor" if rate.schedule == "task" else rate.schedule
    text += f", {schedule}" + (f" to {peak * rate.final_fraction:g}" if lowers else "")
    plateau = session.state.plateau
    if plateau is not None and plateau.fraction < 1:
        text += f"; lowered to {peak * max(plateau.fraction, rate.final_fraction):g} so far"
    if own is not None and set(own.factors) != {1.0}:
        groups = counted(len(own.factors), "parameter group")
        text += f"; {groups} at {_some([f'{peak * factor:g}' for factor in own.factors])}"
    is_elastic = most_workers(session.backend.workers) is not None
    if is_elastic and not config.global_batch_size and config.lr_scaling != "none":
        text += "; it follows the number of workers at once"
    return text


def _built_in(config: Config) -> str:
    parts: list[str] = [config.optimizer]
    if config.optimizer in ("sgd", "lars") and config.momentum:
        parts.append(f"momentum {config.momentum:g}")
    if config.weight_decay:
        parts.append(f"weight decay {config.weight_decay:g}")
    return ", ".join(parts)


def _precision(config: Config, model: ModelInfo) -> str:
    """Return the precision of the computation and of the weights, as text."""
    own = f"fp{model.float_bits}"
    text = own if config.precision == "fp32" else f"{config.precision}, weights {own}"
    text += ", loss scaled" if config.precision == "fp16" else ""
    text += "; activations of repeated blocks computed twice" if config.checkpoint_activations else ""
    return f"{text}; compiled" if config.compile else text


def _options(config: Config) -> str:
    """Return the options that no other line shows, where they are not at their defaults."""
    given = {name: getattr(config, name) for name in Config.model_fields if name not in _IN_OTHER_LINES}
    changed = {name: value for name, value in given.items() if value != Config.model_fields[name].default}
    depends = "; the result depends on the number of workers" if config.sync_every is not None else ""
    shown = [f"{name} {'null' if one is None else shown_value(one)}" for name, one in changed.items()]
    return ", ".join(shown) + depends


def show_plan(run: TrainingRun, session: Session, point: ResumePoint, found: Sequence[str]) -> None:
    """Show the plan, and what else the user should know, such as the notes found by then. Local."""
    folder = session.services.run_dir / CHECKPOINTS
    link = f"{folder} is a link: checkpoints go to {folder.resolve()}" if folder.is_symlink() else ""
    of_directory = filter(None, [run.lock.note, link, *run.notes_on_task])
    session.services.report.say(describe_plan(run, session, point), INDENT)
    for note in (*point.notes, *found, *of_directory, *run.notes_on_options(session.plan())):
        session.services.report.note(note)
