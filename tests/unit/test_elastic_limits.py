"""What cannot be elastic says so before training, and the plan says what an elastic job does."""

from dataclasses import replace

import pytest
from support.fakes import FakeWorkers, make_session

from hvdtrain.errors import ConfigError, EnvironmentFault
from hvdtrain.jobs.capabilities import check_elastic
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.jobs.run_plan import describe_plan
from hvdtrain.schedule import Rescale
from hvdtrain.training_plan import Progress


def workers(size: int = 2, most: int = 8, is_elastic: bool = True) -> FakeWorkers:
    made = FakeWorkers(0, ["alpha"] * size, None, [])
    made.is_elastic, made.least, made.most = is_elastic, 1, most
    return made


@pytest.mark.parametrize(
    ("most", "environ", "uses_nccl", "kind", "said"),
    [
        (257, {}, False, ConfigError, r"at most 256 workers; this one may have 257\nLower --max-np to 256"),
        (
            8,
            {"HOROVOD_AUTOTUNE": "1"},
            False,
            EnvironmentFault,
            r"HOROVOD_AUTOTUNE=1 needs a fixed number .*\nLeave HOROVOD_AUTOTUNE out",
        ),
        (8, {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}, False, EnvironmentFault, "needs a fixed number"),
        (8, {}, True, EnvironmentFault, r"alpha: gradients on GPUs travel by NCCL.*\nUse --device cpu"),
    ],
)
def test_what_needs_a_fixed_number_of_workers_is_refused(most, environ, uses_nccl, kind, said):
    with pytest.raises(kind, match=said):
        check_elastic(workers(most=most), environ, uses_nccl)
    check_elastic(workers(most=most, is_elastic=False), environ, uses_nccl)


@pytest.mark.parametrize(
    ("compression", "said"), [("powersgd:4", "which is lost with a worker"), ("bf16", "a fixed number")]
)
def test_compression_that_needs_a_fixed_number_of_workers_is_refused(compression, said):
    with pytest.raises(
        ConfigError, match=rf"compression {compression} cannot be used in an elastic job: .*{said}"
    ):
        check_elastic(workers(most=4), {}, False, compression)
    check_elastic(workers(most=4, is_elastic=False), {}, False, compression)
    check_elastic(workers(most=4), {}, False, "fp16")


def test_an_elastic_job_without_such_settings_is_none_of_it():
    check_elastic(workers(most=256), {"HOROVOD_AUTOTUNE": "0", "HOROVOD_HIERARCHICAL_ALLGATHER": ""}, False)


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
