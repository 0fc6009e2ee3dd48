"""Which tests of jobs `make test` runs: all others have the mark `full`, and are left to `.ci/run`.

A promise of which a user would miss the failure most is kept in one framework and one launcher: the contract,
half of the zoo, curves, resuming, commands, and how jobs end.
"""

import re

# parts of test ids, below contract, conformance, parallel and faults
KEPT = (
    r"test_conformance\.py::.*-torch-",
    r"test_conformance\.py::.*\[(linear|looks|state|tables)\..*-tf-",
    r"test_contract\.py::test_backends_keep.*\[(backend-(torch|tf)-2|(transaction|local_steps)-torch)",
    r"test_model_twins\.py::test_parameters_are",
    r"test_parity\.py::test_a_planted.*(epsilon|initial)",
    r"test_bench\.py::test_a_job",
    r"test_callbacks\.py::test_other_workers",
    r"test_curves\.py::test_curve_does.*(torch-mpi|tf-gloo)-2-48\]",
    r"test_curves\.py::test_both_frameworks.*sgd",
    r"test_data_identity\.py::test_data",
    r"test_digits\.py::.*\[torch",
    r"test_dry_run\.py::.*torch",
    r"test_ema\.py::.*torch-2",
    r"test_evaluate\.py::test_(metrics.*torch-torch|a_users)",
    r"test_export\.py::test_(every.*torch|an_export)",
    r"test_import\.py::.*torch",
    r"test_large_batch\.py::.*torch-3",
    r"test_launch\.py::test_the_error",
    r"test_launchers\.py::test_a_(script|task_file.*mpirun)",
    r"test_local_steps\.py::test_another",
    r"test_own_step\.py::test_(a_plain.*torch|mistakes|slots.*torch|sharpness.*torch)",
    r"test_predict\.py::.*torch",
    r"test_resume_anywhere\.py::.*torch-tf-torch",
    r"test_resume_exact\.py::.*torch",
    r"test_sharded\.py::test_sharded_state.*torch-2",
    r"test_stages\.py::test_(stages_draw.*tf|what_would.*OwnForward)",
    r"test_streams\.py::test_(dealt|what_a_stream)",
    r"test_damage\.py",
    r"test_one_worker_fails\.py::test_(options|a_parameter|an_error.*mpi-DataRaises)",
    r"test_elastic_jobs\.py::test_workers_are_killed.*evaluation",
    r"test_jobs_end\.py::test_a_(worker.*gloo|full.*disk)",
    r"test_liveness\.py::test_a_frozen.*torch",
    r"test_mistakes\.py",
    r"test_requeued\.py::test_(max_time.*torch|sigusr2.*mpirun)",
    r"test_stopped\.py::(.*torch-gloo|.*torch-none|test_an_error)",
    r"test_wrong_numbers\.py::.*nan",
)
_PATTERN = re.compile("|".join(KEPT))


def is_left_out(test_id: str) -> bool:
    """Return whether `make test` leaves a test of jobs out."""
    return _PATTERN.search(test_id) is None
