"""What pools run for test_data_identity.py: jobs of the tasks in noise_tasks.py, without ending Horovod."""

from pathlib import Path

import hvdtrain
from hvdtrain.backends import load_backend
from hvdtrain.config import Layer
from hvdtrain.errors import HvdtrainError
from hvdtrain.jobs.opening.setup import opened as opened_run
from hvdtrain.jobs.opening.start import prepare
from hvdtrain.workers.seeding import seeded_frameworks

TASKS = Path(__file__).with_name("noise_tasks.py")


def opened(framework: str, tasks: list[str]) -> dict[str, list]:
    """Open the data of tasks; return exit code and text of its error, or nothing, by class."""
    found: dict[str, list] = {}
    for name in tasks:
        fields = {"framework": framework, "task": f"{TASKS}:{name}", "device": "cpu"}
        with seeded_frameworks():
            job = prepare([Layer("options", fields)])
            backend = load_backend(job.config)
            try:
                opened_run(job, backend)
                found[name] = []
            except HvdtrainError as error:
                found[name] = [error.exit_code, str(error)]
    return found


def accuracies(framework: str, tasks: list[str]) -> list[float]:
    """Train tasks; return the accuracy on the evaluation data of each."""
    return [
        hvdtrain.train(f"{TASKS}:{name}", framework=framework, run_dir=f"{name}").final["accuracy"]
        for name in tasks
    ]
