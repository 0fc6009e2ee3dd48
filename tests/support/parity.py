"""Both sides of a comparison in one process, without Horovod: each framework is a worker of its own."""

from dataclasses import replace

from hvdtrain.backends.tensorflow.backend import TensorFlowBackend
from hvdtrain.backends.torch.backend import TorchBackend
from hvdtrain.config import Layer
from hvdtrain.jobs.opening.limits import learning_rate_of
from hvdtrain.jobs.opening.setup import TrainingRun, build_together, open_task_data
from hvdtrain.jobs.opening.start import JobSpec, settle
from hvdtrain.tools.parity.observation import Observation
from hvdtrain.tools.parity.parity import layers_for, observe
from hvdtrain.tools.parity.verdict import Result, judge
from hvdtrain.workers.agreement import Workers
from support.twins import keras, torch  # noqa: F401 - skips where a framework is missing


def observed(framework, task_class, start=None, **options) -> Observation:
    """Return what ``parity`` observes of one framework's model."""
    given = [Layer("options", {"device": "cpu", "threads": 1, **options})]
    task_class, config = settle(layers_for(given, framework), task_class)
    job = JobSpec(config, task_class, "", {})
    task_data = replace(open_task_data(job), eval_data=None)
    worker = Workers("here")
    backend = TorchBackend(worker, torch.device("cpu")) if framework == "torch" else None
    backend = backend or TensorFlowBackend(worker, "CPU")
    model = build_together(config, task_data.task, backend)
    run = TrainingRun(job, backend, task_data, model)
    run = run.with_config(learning_rate=learning_rate_of(config, model.own_rates))
    return observe(run, start)


def compared(task_class, **options) -> Result:
    """Return what the command ``parity`` finds of a task with these config fields."""
    left = observed("torch", task_class, **options)
    return judge(left, observed("tf", task_class, left.initial, **options))
