"""What a plan predicts, and what it refuses."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hvdtrain.backends.named_optimizers import own_optimizer_method
from hvdtrain.bench.predict import counts_for
from hvdtrain.bench.predict_options import PlanOptions
from hvdtrain.config import Config
from hvdtrain.errors import UsageError
from hvdtrain.frameworks import FRAMEWORKS
from hvdtrain.words import counted

_MEASURE = "Plan without it; bench --sweep measures such jobs."


def check_predictable(config: Config) -> None:
    """Check that a job has nothing that a plan does not predict.

    Raises:
        UsageError: naming what it has, and what to do.
    """
    problem, remedy = "", _MEASURE
    if config.global_batch_size is not None:
        problem = "with global_batch_size a worker's batch shrinks as workers are added: it is not measured"
        remedy = "Give --batch-size, that of a worker: G/N for G samples on N workers, and read their row."
    elif config.sync_batch_norm:
        problem = "sync_batch_norm sends messages in every batch-norm layer, which a plan does not predict"
    elif config.compression == "bf16":
        problem = "compression bf16 exchanges parts of gradients, of which a plan has no measured sums"
        remedy = "Plan with --compression fp16, which has as many bytes."
    elif config.shard != "none":
        problem = f"shard {config.shard} gathers parameters in every step, which a plan does not predict"
    elif config.stages > 1:
        problem = f"stages {config.stages} passes activations between workers, which a plan does not predict"
        remedy = "Plan without it; metrics.jsonl has the speed of a training with stages."
    if problem:
        raise UsageError(problem, remedy, everywhere=True)


def check_task(config: Config, task: Any) -> None:
    """Check that the messages of a task's steps are known.

    Raises:
        UsageError: If it has a training step of its own, or local steps with an optimizer of its own.
    """
    method, problem = FRAMEWORKS[config.framework].step_method, ""
    if hasattr(task, method):
        problem = f"the task's own {method} may sum gradients several times in a step, which is not predicted"
    elif config.sync_every is not None and (own := own_optimizer_method(task, config)):
        problem = f"sync_every {config.sync_every}: how much the optimizer of {own}() sends is unknown"
    if problem:
        raise UsageError(problem, "Measure it with bench --sweep.", everywhere=True)


def check_hosts(hosts: Sequence[str], local_sizes: Sequence[int]) -> None:
    """Check that there are several workers, as many on all hosts, and that hosts have names of their own.

    Args:
        hosts: by rank, the worker's host.
        local_sizes: by rank, how many workers its host has.

    Raises:
        UsageError: If not.
    """
    counts = Counter(hosts)
    if len(hosts) < 2:
        problem = "a plan is computed from sums over two workers or more, and this job has one"
        remedy = "Start more, for example: horovodrun -np 2 python -m hvdtrain plan ..."
    elif any(counts[host] != size for host, size in zip(hosts, local_sizes, strict=True)):
        problem = f"hosts have the same name ({', '.join(counts)}), so which workers share one is unknown"
        remedy = "Give each host a hostname of its own."
    elif len(set(counts.values())) > 1:
        given = ",".join(f"{host}:{number}" for host, number in counts.items())
        problem = f"hosts with different numbers of workers ({given}); a plan takes all hosts to be alike"
        alike = ",".join(f"{host}:{min(counts.values())}" for host in counts)
        remedy = f"Start as many on each, for example: -H {alike}"
    else:
        return
    raise UsageError(problem, remedy, everywhere=True)


def check_cluster(hosts: int, slots: int, options: PlanOptions) -> None:
    """Check that what the options name follows from a measurement.

    Args:
        hosts: the hosts that are measured.
        slots: the workers of each.
        options: the options.

    Raises:
        UsageError: If it does not.
    """
    wanted = options.slots or slots
    if hosts > 1 and options.link is not None:
        problem = f"--link: sums over the network of {hosts} hosts do not show what they take within a host"
        remedy = "Leave --link out to predict for that network, or measure on one host."
    elif wanted > slots or (hosts > 1 and wanted < slots):
        problem = f"--slots {wanted}: {counted(slots, 'worker')} of a host are measured here, which compute "
        problem += "and communicate differently"
        known = f"1 to {slots}" if slots > 1 and hosts == 1 else f"{slots}"
        remedy = f"Give --slots {known} or leave it out, or measure with {wanted} workers of a host."
    elif not counts_for(options.hosts, wanted, measured_network=hosts > 1):
        problem = f"--hosts {options.hosts} with {counted(wanted, 'worker')} each leave nothing to predict"
        remedy = "Give more hosts (--hosts) or more workers of a host (--slots)."
    elif options.hosts == 1 and options.link is not None:
        problem = "--link: with --hosts 1 no message takes a link between hosts"
        remedy = "Give more hosts (--hosts), or leave --link out."
    else:
        return
    raise UsageError(problem, remedy, everywhere=True)
