"""The resolved plan of a run, in words: what rank 0 prints before training."""

import math
import os
from collections import Counter
from collections.abc import Mapping

import hvdtrain
from hvdtrain.config import Config
from hvdtrain.report import counted
from hvdtrain.session import Layout, Session
from hvdtrain.starting import Start
from hvdtrain.threads import threads_per_worker

_WIDTH = 14


def plan_in_words(
    session: Session,
    layout: Layout,
    *,
    hosts: list[str],
    build: str,
    settings: Mapping[str, str],
    own_optimizer: bool,
    start: Start,
    found: str = "",
) -> str:
    """Say what the run is going to do.

    Args:
        session: the run.
        layout: what follows from its number of workers.
        hosts: the host of each worker.
        build: the Horovod build, in words.
        settings: environment variables that hvdtrain set, which the user had not.
        own_optimizer: whether the task brings its optimizer.
        start: where it starts from.
        found: the data in the task's own words, if it has some.
    """
    config = session.config
    lines = {
        "workers": _workers(session, hosts),
        "starts from": start.origin,
        "changed": ", ".join(start.changes),
        "model": _model(session, start),
        "data": found or _data(session),
        "batch": _batch(config, layout),
        "batch norm": _batch_norm(session, layout),
        "length": _length(session, layout),
        "learning rate": _learning_rate(config, layout),
        "optimizer": _optimizer(config, own_optimizer),
        "regularised": _regularised(config),
        "stops early": _stops_early(config),
        "precision": _precision(config),
        "gradients": "fp32, sent " + ("uncompressed" if config.compression == "none" else "as fp16"),
        "checkpoints": _checkpoints(config),
        "Horovod": build,
        "set for you": _set_for_you(session, settings),
        "run directory": str(session.run_dir),
    }
    title = f"hvdtrain {hvdtrain.__version__}: {config.task} with {session.backend.describe()}"
    return "\n".join([title, *(f"  {name:<{_WIDTH}} {text}" for name, text in lines.items() if text)])


def _set_for_you(session: Session, settings: Mapping[str, str]) -> str:
    said = [f"{name}={value}" for name, value in settings.items()]
    workers = session.backend.workers
    if session.config.threads is None and "OMP_NUM_THREADS" not in os.environ:
        said.append(f"{counted(threads_per_worker(workers.local_size), 'compute thread')} per worker")
    return ", ".join(said)


def _workers(session: Session, hosts: list[str]) -> str:
    size, per_host = len(hosts), Counter(hosts)
    if size == 1:
        return f"1 on {hosts[0]}"
    places = ", ".join(f"{host}: {count}" for host, count in list(per_host.items())[:8])
    more = ", ..." if len(per_host) > 8 else ""
    controller = session.backend.workers.controller
    return f"{size} on {counted(len(per_host), 'host')} ({places}{more}), coordinated by {controller}"


def _model(session: Session, start: Start) -> str:
    sizes = [math.prod(shape) for shape in session.backend.parameter_shapes().values()]
    said = f"{counted(sum(sizes), 'parameter')} in {counted(len(sizes), 'tensor')}"
    if start.origin:
        return said
    if session.config.initial_parameters == "portable":
        origin = f"drawn by name from seed {session.config.seed}"
    else:
        origin = f"as the task made them, seed {session.config.seed}"
    return f"{said}; initial values {origin}"


def _data(session: Session) -> str:
    evaluation = f", {len(session.eval_data):,} to evaluate" if session.eval_data is not None else ""
    readers = session.config.read_workers
    read = f"; {counted(readers, 'reader')} per worker" if readers else ""
    return f"{counted(session.data_size, 'sample')} to train{evaluation}{read}"


def _batch(config: Config, layout: Layout) -> str:
    batch = layout.batch
    parts = f"{batch.micro_batch} per worker x {counted(batch.workers, 'worker')}"
    if batch.accumulate > 1:
        parts += f" x {batch.accumulate} micro-batches"
    padded = "" if batch.is_even else ", the shorter parts padded with weight 0"
    return (
        f"{batch.global_batch} a step = {parts}{padded}"
        if batch.is_even
        else (f"{batch.global_batch} a step, at most {parts}{padded}")
    )


def _batch_norm(session: Session, layout: Layout) -> str:
    layers, batch = session.backend.batch_norm_layers(), layout.batch
    is_synchronised = session.config.sync_batch_norm
    if not layers:
        return "the model has none, so --sync-batch-norm changes nothing" if is_synchronised else ""
    together = batch.global_batch // batch.accumulate
    if is_synchronised:
        return (
            f"{counted(layers, 'layer')} over the {counted(together, 'sample')} of all workers' micro-batches"
        )
    if batch.workers == 1:
        return ""
    return (
        f"warning: {counted(layers, 'layer')} over each worker's {counted(batch.micro_batch, 'sample')}, not "
        f"the {together} of all, so the curve depends on the number of workers; see --sync-batch-norm"
    )


def _length(session: Session, layout: Layout) -> str:
    epochs = layout.last_sample / session.data_size
    cadence = session.config.eval_every
    evaluates = f", evaluation {cadence.in_words() if cadence else 'at the end'}" if session.eval_data else ""
    said = counted(epochs, "epoch") if epochs == round(epochs, 6) else f"{epochs:.3f} epochs"
    done = session.progress.step
    left = f", {counted(max(0, layout.steps - done), 'step')} to go" if done else ""
    return f"{counted(layout.steps, 'step')} = {said}{left}{evaluates}"


def _precision(config: Config) -> str:
    said = "fp32" if config.precision == "fp32" else f"{config.precision}, weights fp32"
    if config.precision == "fp16":
        said += ", loss scaled"
    if config.checkpoint_activations:
        said += "; activations of repeated blocks computed twice"
    if config.compile:
        said += "; compiled"
    return said


def _checkpoints(config: Config) -> str:
    said = f"{config.save_every.in_words()} and at the end" if config.save_every else "at the end"
    kept = "all" if config.keep_last is None else f"the last {config.keep_last}"
    best = f" and the one with the best {config.keep_best.metric}" if config.keep_best else ""
    return f"{said}, keeping {kept}{best}"


def _regularised(config: Config) -> str:
    said = []
    if config.label_smoothing:
        said.append(f"label smoothing {config.label_smoothing:g} in training, none in evaluation")
    if config.ema_decay is not None:
        said.append(f"evaluation by a moving average of the weights, decay {config.ema_decay:g}")
    return "; ".join(said)


def _stops_early(config: Config) -> str:
    if config.early_stopping is None:
        return ""
    patience = counted(config.early_stopping_patience, "evaluation")
    way = "higher" if config.early_stopping.highest else "lower"
    return f"after {patience} in a row without a {way} {config.early_stopping.metric}"


def _learning_rate(config: Config, layout: Layout) -> str:
    rate = layout.learning_rate
    said = f"{rate.peak:g}"
    if rate.peak != config.learning_rate:
        said += (
            f" = {config.learning_rate:g} x {rate.peak / config.learning_rate:g} ({config.lr_scaling} rule: "
            f"global batch {layout.batch.global_batch}, quoted for {layout.base_batch})"
        )
    if rate.warmup_epochs:
        said += f", after a warm-up of {counted(rate.warmup_epochs, 'epoch')}"
    lowest = f"{rate.peak * rate.final_fraction:g}"
    after = {
        "constant": "constant",
        "cosine": f"cosine to {lowest}",
        "step": f"x {rate.step_factor:g} at epochs {', '.join(f'{e:g}' for e in rate.step_epochs)}",
        "cyclic": f"cycles of {counted(rate.cycle_epochs, 'epoch')} down to {lowest}",
    }
    return f"{said}, {after[rate.schedule]}"


def _optimizer(config: Config, own: bool) -> str:
    said: str = "the task's own" if own else config.optimizer
    if not own and config.optimizer in ("sgd", "lars") and config.momentum:
        said += f", momentum {config.momentum:g}"
    if not own and config.optimizer == "lars":
        said += f", trust coefficient {config.lars_trust_coefficient:g}"
    if not own and config.optimizer == "lamb":
        said += f", betas {config.adam_beta1:g} and {config.adam_beta2:g}"
    if not own and config.weight_decay:
        said += f", weight decay {config.weight_decay:g}"
    if config.clip_norm:
        said += f", gradient clipped to norm {config.clip_norm:g}"
    return said
