"""The command ``prove``: a user's own task, held against a plain loop of its framework."""

import os
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.config import Config, Layer
from hvdtrain.errors import EXIT_DONE, EXIT_ENVIRONMENT, UsageError
from hvdtrain.host.environment import for_children
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.host.launcher import stated_launch
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.opening.start import check_may_be_elastic, settle
from hvdtrain.storage.text import counted
from hvdtrain.tools.launch import LARGER_LIMIT, horovodrun, layers_to_json, run_module
from hvdtrain.tools.output import check_writable, said_if_interrupted, say, show_found
from hvdtrain.tools.parity.phases import MANY, train

EXIT_DIFFERENT = 1
# what rounds, averages or draws on purpose, or has nothing to do with what a step computes
_LEFT_OUT: dict[str, Any] = {
    "precision": "fp32", "compression": "none", "sync_every": None, "stages": 1, "stage_cuts": None,
    "accumulate": 1, "mixup": 0.0, "cutmix": 0.0, "ema_decay": None, "compile": False,
    "checkpoint_activations": False, "lr_schedule": "constant", "warmup_epochs": 0.0, "warmup_steps": None,
    "early_stopping": None,
}  # fmt: skip
_SILENTLY: dict[str, Any] = {
    "epochs": None, "save_every": 1, "keep_last": None, "keep_best": None, "log_every": 1, "eval_every": None,
    "profile": None, "resume": None, "track": [], "track_checkpoints": False,
    "trace_indices": False, "check_replicas_every": 1, "on_save_error": "stop", "sync_batch_norm": True,
}  # fmt: skip
DEFAULT_STEPS, _LEAST_STEPS = 4, 2
_OF_LAUNCHERS = (
    *("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "TORCHELASTIC_", "MPI_"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),  # of torchrun
)
# what is equal in all processes of a job, and in no other job
_OF_JOB = (
    *("PMIX_NAMESPACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT"),
)


def run_prove(layers: list[Layer], json_path: Path | None, limit_seconds: float) -> int:
    """Collective. Prove a task, show what was found, and return the exit code: 1 on rank 0 if runs differ.

    Under a launcher its workers do the part of all workers, and end well; rank 0 does the rest by a process
    of its own. Without one, two workers are launched. ``layers`` are the job's config values, weakest first.
    """
    check_may_be_elastic(None)
    begun = time.monotonic()
    launch = stated_launch()
    is_launched = launch is not None and launch.size > 1
    workers, rank = (launch.size, launch.rank) if launch is not None and is_launched else (2, 0)
    if rank == 0:
        check_writable(json_path, layers=layers)
    config = settle(layers)[1]
    check(Job(config, command="prove"))
    is_given = "steps" in config.model_fields_set and config.steps is not None
    steps: Any = config.steps if is_given else DEFAULT_STEPS
    if steps < _LEAST_STEPS:
        problem = "prove stops a run in the middle, for which one step is too few"
        raise UsageError(problem, "Give --steps 4.", everywhere=True)
    # workers compare the name of the run directory
    job = repr([(name, os.environ.get(name)) for name in _OF_JOB]) if is_launched else str(os.getpid())
    folder = Path(tempfile.gettempdir(), f"hvdtrain-prove-{os.getuid()}-{zlib.crc32(job.encode()):08x}")
    values = {"layers": layers_to_json([*layers, _changed(config, steps, workers)]), "folder": str(folder),
              "workers": workers, "steps": steps, "parent": os.getpid()}  # fmt: skip
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        say(f"training {steps} steps with {workers} workers ...")
    try:
        with said_if_interrupted():
            if is_launched:
                timer = threading.Timer(limit_seconds, _end, [limit_seconds, folder, rank])
                timer.daemon = True
                timer.start()
                train([*layers, _changed(config, steps, workers)], folder / MANY)
                timer.cancel()
                if rank:
                    return EXIT_DONE
            else:
                _run(values, MANY, horovodrun(workers, f"localhost:{workers}", None), limit_seconds)
            say("a plain loop, one worker, and a resumed run ...")
            kept = [one for one in for_children() if not one.startswith(_OF_LAUNCHERS) or "_ALLOW_" in one]
            unset = ["env", *(word for name in os.environ if name not in kept for word in ("-u", name))]
            document = _run(values, "alone", unset, max(limit_seconds - (time.monotonic() - begun), 1.0))
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if left_out := [name for name, value in _LEFT_OUT.items() if getattr(config, name) != value]:
        document["notes"].insert(0, f"left out of the comparison: {', '.join(left_out)}")
    document |= {"workers": workers, "steps": steps, "seconds": round(time.monotonic() - begun, 1)}
    show_found(describe(document), document, json_path)
    return EXIT_DONE if document["proved"] else EXIT_DIFFERENT


def _changed(config: Config, steps: int, workers: int) -> Layer:
    """Return the config values of the jobs that are not the user's."""
    own = config.batch_size * config.accumulate
    together = config.global_batch_size
    sizes = {
        "global_batch_size": together or own * workers,
        "base_batch_size": config.base_batch_size or together or own,
        "eval_batch_size": config.eval_batch_size or config.batch_size,
    }
    return Layer("prove", {**_LEFT_OUT, **_SILENTLY, **sizes, "steps": steps})


def _run(values: Mapping[str, Any], phase: str, start: list[str], seconds: float) -> Any:
    """Run a part in processes of its own, and return what it found."""
    name, folder = "the job" if phase == MANY else "the proof", Path(values["folder"])
    environ, values = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, {**values, "phase": phase}
    module = "hvdtrain.tools.parity.phases"
    return run_module(name, start, module, values, folder, seconds, environ, LARGER_LIMIT)


def _end(seconds: float, folder: Path, rank: int) -> None:
    if rank == 0:
        say(f"the job did not end within {seconds:.0f} s and is ended; give a larger --limit")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where workers would say that another one is missing
    time.sleep(5.0 if rank else 1.0)  # the launcher ends the others with rank 0
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(EXIT_ENVIRONMENT)


def describe(found: Mapping[str, Any]) -> str:
    """Return what was found, on one screen."""
    amounts = {"step": found["steps"], "worker": found["workers"], "sample": found["batch"]}
    steps, workers, samples = (counted(amount, noun) for noun, amount in amounts.items())
    title = FRAMEWORKS[found["framework"]].title
    lines = [f"prove: {found['task']} with {title}, {steps} of {samples}, {workers}"]
    width = max(len(row["what"]) for row in found["rows"])
    for row in found["rows"]:
        word = {True: "equal", False: "DIFFERENT", None: "-"}[row["ok"]]
        kinds = ("loss", "parameters", "buffers")
        numbers = ", ".join(f"{name} {row[name]:.0e}" for name in kinds if name in row)
        lines.append(f"  {row['what']:<{width}}  {word:<9}  {numbers or row['text']}".rstrip())
        if numbers and row["ok"] is not True:
            lines.append(f"    first difference: {row['text']}")
        if row["cause"] and f"    cause: {row['cause']}" not in lines:
            lines.append(f"    cause: {row['cause']}")
    lines += [f"note: {note}" for note in found["notes"]]
    end = "proved: what could be compared is equal but for rounding" if found["proved"] else ""
    if left := "; ".join(row["what"].strip() for row in found["rows"] if row["ok"] is None):
        end += f"; not compared: {left}" * found["proved"]
    return "\n".join([*lines, f"{end or 'not proved: see above'} ({found['seconds']:.0f} s)"])
