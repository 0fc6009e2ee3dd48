"""Both sides of a comparison in one process, without Horovod: each framework is a worker of its own."""

from dataclasses import replace

from hvdtrain.backends.reduction.local_steps import LoneWorker
from hvdtrain.backends.tensorflow.backend import TensorFlowBackend
from hvdtrain.backends.torch.backend import TorchBackend
from hvdtrain.config import Layer
from hvdtrain.jobs.opening.limits import with_learning_rate
from hvdtrain.jobs.opening.setup import build_together, open_task_data
from hvdtrain.jobs.opening.start import JobSpec, settle
from hvdtrain.tools.parity.job import Result, compare, keeps_initial_values, layers_for, match
from hvdtrain.tools.parity.side import Side, parity_config
from support.twins import keras, torch  # noqa: F401 - skips where a framework is missing


def side_of(framework, task_class, **options):
    """Return one framework's side, with the model built."""
    layers = layers_for([Layer("options", {"device": "cpu", "threads": 1, **options})], framework)
    task_class, config = settle(layers, task_class)
    config, _ = parity_config(config)
    task_data = replace(open_task_data(JobSpec(config, task_class, "", {})), eval_data=None)
    worker = LoneWorker("here")
    backend = TorchBackend(worker, torch.device("cpu")) if framework == "torch" else None
    backend = backend or TensorFlowBackend(worker, "CPU")
    model = build_together(config, task_data.task, backend)
    own = keeps_initial_values([Layer("options", options)], task_class)
    return Side(with_learning_rate(config, model.own_rates), backend, task_data, own)


def compared(task_class, **options) -> Result:
    """Return what the command ``parity`` finds of a task.

    Args:
        task_class: its class, or the name of a built-in task.
        options: config fields.
    """
    if isinstance(task_class, str):
        options, task_class = {"task": task_class, **options}, None
    sides = [side_of(framework, task_class, **options) for framework in ("torch", "tf")]
    own = [side.own_initial() for side in sides]
    fits = match(*(side.initial() for side in sides), own)
    name = sides[0].config.task
    if not fits.can_compare:
        return Result(fits, None, [], 1, name)
    usual = [side.observe(fits.start) for side in sides]
    fp64 = [side.observe_in_fp64(fits.start) for side in sides]
    verdict, notes = compare(tuple(usual), tuple(fp64), fits, sides[0].config.precision)
    return Result(fits, verdict, notes, 1, name)
