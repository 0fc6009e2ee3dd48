"""A worker of a trial: it trains as the command line does, and tells the study of its evaluations."""

from pathlib import Path
from typing import Any

from hvdtrain.bench.worker import layers_from_json, run_worker
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.jobs.train import run_job
from hvdtrain.search.pruning import StudyCallback


def work(specification: dict[str, Any]) -> None:
    """Collective. Train, from the trial's newest checkpoint if it has one."""
    callback = StudyCallback(
        Path(specification["folder"]),
        specification["storage"],
        specification["pruner"],
        specification["number"],
        MetricGoal.parse(specification["metric"]),
    )
    run_job(layers_from_json(specification["layers"]), callbacks=[callback])


if __name__ == "__main__":
    run_worker(work)
