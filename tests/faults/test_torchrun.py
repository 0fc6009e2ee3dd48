"""Jobs of torchrun that are stopped or fail: it ends with 1, and the workers do as under other launchers."""

import signal

from endings import command_for, ended, run_to_end, steps_logged, wait_until
from support.jobs import started


def test_after_sigterm_the_workers_save(tmp_path):
    with started(command_for(2, "torchrun", "Slow", "--framework", "torch"), tmp_path) as job:
        wait_until(lambda: steps_logged(tmp_path) >= 3)
        job.process.send_signal(signal.SIGTERM)
        ending = ended(job, tmp_path)
        assert not job.pids()
    assert ending.returncode == 1
    assert ending.output.count("SIGTERM came at step") == 1
    assert ending.summary["status"] == "stopped"
    assert ending.summary["checkpoint"] == f"run/checkpoints/step-{ending.summary['steps']:08}"


def test_tensorflow_is_refused_with_the_launcher_that_starts_it(tmp_path):
    ending = run_to_end(command_for(2, "torchrun", "Sound", "--framework", "tf"), tmp_path)
    assert ending.returncode == 1
    assert ending.output.count("hvdtrain: rank ") == 1
    assert "torchrun starts workers of PyTorch alone" in ending.output
    assert "horovodrun -np 2" in ending.output


def test_after_torchrun_was_killed_its_workers_save_and_end(tmp_path):
    with started(command_for(2, "torchrun", "Slow", "--framework", "torch"), tmp_path) as job:
        wait_until(lambda: steps_logged(tmp_path) >= 3)
        job.process.kill()
        ending = ended(job, tmp_path)
        assert not job.pids()
    assert ending.summary["status"] == "stopped"
    assert ending.summary["checkpoint"] == f"run/checkpoints/step-{ending.summary['steps']:08}"
