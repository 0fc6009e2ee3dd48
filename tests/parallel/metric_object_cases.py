"""What pools run for test_metric_objects.py."""

from pathlib import Path
from unittest import mock

import metric_cases
import numpy as np
from metric_object_tasks import Answers

Values = dict[str, dict[str, float]]

TASKS = Path(__file__).with_name("metric_object_tasks.py")


def evaluated(framework: str, tasks: list[str]) -> tuple[Values, Values]:
    """Evaluate the untrained models of tasks twice.

    Returns:
        The metrics of each; and on rank 0, what one object gives for the rows of all samples.
    """
    with mock.patch.object(metric_cases, "TASKS", TASKS):
        found = metric_cases.evaluated(framework, tasks)
    if not all(Path(f"{name}.npz").exists() for name in tasks):
        return found, {}
    rows = {name: dict(np.load(f"{name}.npz")) for name in tasks}
    expected = expected_of_torch(rows) if framework == "torch" else expected_of_keras(rows)
    return found, {name: {key: float(v) for key, v in of.items()} for name, of in expected.items()}


def expected_of_torch(rows):
    import torch
    import torchmetrics as library

    outputs, answers = (torch.from_numpy(rows["Answers"][key]) for key in ("outputs", "targets"))
    inputs = torch.from_numpy(Answers.data[0][:, 0])

    def value(metric, preds, target):
        metric.update(preds, target)
        return metric.compute()

    return {
        "Answers": {
            "auroc": value(library.classification.BinaryAUROC(), outputs[:, 0], answers.long()),
            "rank": value(library.regression.PearsonCorrCoef(), outputs[:, 0], inputs),
        },
    }


def expected_of_keras(rows):
    import keras

    outputs, answers = (rows["Answers"][key] for key in ("outputs", "targets"))

    def value(metric, targets, preds):
        metric.update_state(targets, preds)
        return metric.result()

    return {
        "Answers": {
            "auroc": value(keras.metrics.AUC(num_thresholds=50), answers, 1 / (1 + np.exp(-outputs[:, 0]))),
            "rank": np.abs(outputs[:, 0] - Answers.data[0][:, 0]).mean(),
        },
    }
