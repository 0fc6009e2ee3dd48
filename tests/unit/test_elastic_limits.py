"""What cannot be elastic says so before training, and the plan says what an elastic job does."""

from dataclasses import replace

import pytest
from support.fakes import FakeWorkers, make_session

from hvdtrain.jobs.plan_text import describe_plan
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.schedule import Rescale
from hvdtrain.training_plan import Progress


def workers(size: int = 2, most: int = 8, is_elastic: bool = True) -> FakeWorkers:
    made = FakeWorkers(0, ["alpha"] * size, None, [])
    made.is_elastic, made.least, made.most = is_elastic, 1, most
    return made


def plan(
    norms: int = 0, rescale: Rescale | None = None, samples: int = 0, **fields: object
) -> dict[str, str]:
    """Give the lines of the plan of an elastic job that has 2 of 8 workers, by their names."""
    session = make_session("runs/x", workers(), **{"train_size": 1000, **fields})
    session.state.rescale, session.state.progress = rescale, Progress(samples // 64, samples)
    text = describe_plan(
        session,
        session.plan(),
        model=replace(session.backend.model_info(), batch_norm_layers=norms),
        hosts=["alpha", "alpha"],
        build="0.28.1",
        settings={},
        start=ResumePoint(),
    )
    return {line[2:16].strip(): line[17:] for line in text.splitlines()[1:]}


@pytest.mark.parametrize(
    ("line", "fields", "said"),
    [
        ("workers", {}, "2 on 1 host (alpha: 2), coordinated by MPI; elastic: at least 1, at most 8"),
        (
            "batch",
            {"global_batch_size": 64},
            "64 a step = 8 per worker x 2 workers x 4 micro-batches; micro-batches of 8 with any number of "
            "workers up to 8, larger ones with a lower --max-np",
        ),
        (
            "batch",
            {},
            "64 a step = 32 per worker x 2 workers; with other workers, another number a step and of steps",
        ),
        (
            "batch norm",
            {"norms": 3, "global_batch_size": 64},
            "warning: 3 layers over each micro-batch of 8 samples, with any number of workers; with 3, "
            "5, 6, 7 workers padding (a repeated sample) counts in the statistics; see --sync-batch-norm",
        ),
        (
            "batch norm",
            {"norms": 3},
            "3 layers over each micro-batch of 32 samples, with any number of workers",
        ),
        (
            "batch norm",
            {"norms": 3, "sync_batch_norm": True},
            "warning: 3 layers over the micro-batches of 32 samples of as many workers as there are, up to "
            "8, so the curve depends on their number",
        ),
    ],
)
def test_the_plan_of_an_elastic_job(line, fields, said):
    assert plan(**fields)[line] == said


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ", constant; it follows the number of workers at once"),
        ({"rescale_epochs": 2}, ", constant; it follows the number of workers over 2 epochs"),
        ({"global_batch_size": 64}, ", constant"),
        ({"lr_scaling": "none"}, ", constant"),
        (
            {"rescale_epochs": 2, "rescale": Rescale(peak=0.01, samples=640), "samples": 640},
            ", constant; the peak is on its way from 0.01 until epoch 2.64; it follows the number of workers "
            "over 2 epochs",
        ),
    ],
)
def test_how_the_rate_follows_the_workers(fields, end):
    assert plan(**fields)["learning rate"].endswith(end)
