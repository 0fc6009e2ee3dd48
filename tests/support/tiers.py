"""Which tests of jobs are left to `.ci/run`: they have the mark `full`, and `make test` deselects it.

What `make test` keeps of a file has every promise in at least one framework and one launcher. Left out are
the other cells of the same tests, pools that few tests use, pages of the documents, what needs root, and
whole files that take long: compression, precision, kills while saving.
"""

import re

# parts of test ids, below contract, parallel and faults
LEFT_OUT = (
    r"test_bench\.py::.*(\[tf|sweep)",
    r"test_compression\.py",
    r"test_conformance\.py::.*\[(?!keras_).*-tf-",
    r"test_contract\.py::test_(reducers|local_steps)_keep.*\[tf",
    r"test_contract\.py::test_compressed.*tf-2-gloo",
    r"test_plan\.py::.*without_a_launcher",
    r"test_parity_jobs\.py::test_under_a_launcher",
    r"test_prove_jobs\.py::.*(Keras|numpy|limit)",
    r"test_prove_finds\.py::(?!.*(peak|negatives))",
    r"test_powersgd\.py",
    r"test_data_identity\.py::test_a_split.*\[tf\]",
    r"test_curves\.py::test_(the_same_command|one_worker_on_all).*\[tf\]",
    r"test_digits\.py::.*\[tf\]",
    r"test_documented\.py",
    r"test_documented_in_order\.py",
    r"test_dry_run\.py::.*\[tf-",
    r"test_evaluate\.py::test_(a_worker_that_lacks|code_that_changed.*\[tf\])",
    r"test_examples\.py::test_(a_classifier|a_masked|models|a_sweep|a_trial)",
    r"test_export\.py::test_(several_workers|models_of_other|every_form.*\[tf\])",
    r"test_export\.py::test_a_program_takes.*\[tf-",
    r"test_fine_tuning_example\.py::.*\[tf",
    r"test_images_task\.py::test_a_wrong_label",
    r"test_launch\.py::(.*\[tf|.*error.*mpi|test_the_page)",
    r"test_notebook\.py::test_it_runs",
    r"test_launchers\.py::test_a_(worker|task_may)",
    r"test_memory\.py::.*\[tf",
    r"test_metric_examples\.py::.*\[tf-",
    r"test_metric_objects\.py::test_the_task.*\[tf\]",
    r"test_object_store_ends\.py",
    r"test_object_store_jobs\.py::.*(other_framework|missing)",
    r"test_never_arrives\.py::.*\[mpirun",
    r"test_own_rates\.py::.*tf-Lion",
    r"test_own_step\.py::test_(curves|workers_that_use|rates|what_a_traced|the_example_continues.*\[tf)",
    r"test_own_step\.py::.*(fp16|Gan-tf|return.*\[tf|Alternating-torch-2)",
    r"test_precision\.py",
    r"test_profile\.py::.*(fails|timeline)",
    r"test_predict\.py::.*\[tf\]",
    r"test_reading\.py::(?!test_by_default)",
    r"test_repeats\.py",
    r"test_resume_anywhere\.py::.*1-3-2-workers",
    r"test_resume_exact\.py::.*\[tf-2-gloo-1\]",
    r"test_sharded\.py::test_the_optimizer.*\[tf-[12]\]",
    r"test_sharded\.py::test_sharded_gradients_draw.*\[(torch-[24]|tf-3)\]",
    r"test_sharded\.py::test_(each|low_rank|sharded_gradients_travel)",
    r"test_sharded\.py::test_(the_backend.*-3\]|a_run_goes_on)",
    r"test_stages\.py::test_stages_draw.*(2-2|3-3)",
    r"test_stages\.py::test_(a_resnet|a_run_goes_on|each|blocks|keras_layers|shapes|metrics|sharded_then|a_checkpoint)",
    r"test_split_models\.py::(?!.*CountsAnew)",
    r"test_stages\.py::test_(what_cannot|a_block_that).*\[?tf",
    r"test_stages\.py::test_what_cannot.*(Undivided|Left)",
    r"test_stragglers\.py::.*tf-mpi",
    r"test_sync_batch_norm\.py::.*\[tf",
    r"test_waiting\.py",
    r"test_weights\.py::.*\[tf",
    r"test_tracked_elastic\.py",
    r"test_tracking\.py::test_(what_a_killed|a_job_without)",
    r"test_train_texts\.py::test_(texts|synthetic)",
    r"test_from_stores\.py::.*(tf-mpi|not_there)",
    r"test_full_disk\.py",
    r"test_horovod_missing\.py",
    r"test_killed_while_saving\.py",
    r"test_liveness\.py::.*\[(tf-gloo-1|torch-mpi)\]",
    r"test_reader_faults\.py::(?!.*killed_reader.*torch)",
    r"test_elastic_jobs\.py::.*(\[tf-|entered)",
    r"test_worlds\.py::.*\[tf",
    r"test_contract\.py::test_a_step_is_a_transaction\[tf",
    r"test_local_steps\.py::test_a_resumed.*\[tf",
    r"test_requeued\.py::test_(sigterm|sigusr1|an_orderly|the_same_command).*-gloo\]",
    r"test_requeued\.py::test_sigusr2.*-mpi\]",
    r"test_search\.py::.*(\[tf|documented|launcher)",
    r"test_streams\.py::test_(dealt|a_stream|files).*\[tf",
    r"test_stopped\.py::.*\[(torch-mpi|tf-gloo)\]",
    r"test_stopped\.py::test_ctrl_c.*\[(torch-mpirun)\]",
    r"test_torchrun\.py::test_after",
    r"test_worker_raises\.py::.*(DataRaises|script)",
    r"test_wrong_numbers\.py::.*(\[tf\]|drift)",
)
_PATTERN = re.compile("|".join(LEFT_OUT))


def is_left_out(test_id: str) -> bool:
    """Return whether `make test` leaves a test of jobs out."""
    return _PATTERN.search(test_id) is not None
