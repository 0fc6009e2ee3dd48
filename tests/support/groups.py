"""Which tests run in one process, one after the other, and what a free process takes next."""

import re
from pathlib import Path

from xdist.scheduler import LoadFileScheduling, LoadScopeScheduling

from support.jobs import FRAMEWORKS

# Tests of faults that run in turn with those of the other folders: they use the same pools, torchrun's port,
# or look at the shared memory of the whole machine.
IN_TURN = ("test_mistakes.py", "test_requeued.py", "test_reader_faults.py")
# Files of the other folders that use that port or that memory, or prepare what tests of both frameworks need.
UNDIVIDED = (
    "test_ema.py", "test_images_task.py", "test_launchers.py", "test_reading.py", "test_resume_anywhere.py",
)  # fmt: skip
# Files of the other folders that run anywhere: their tests launch jobs of their own, or run in the process of
# the tests, and use few pools or none.
APART = (
    "test_bench.py", "test_launch.py", "test_model_twins.py", "test_notebook.py", "test_parity.py",
    "test_profile.py", "test_prove_jobs.py", "test_search.py", "test_tracking.py",
)  # fmt: skip
POOLS, POOLS_OF_TENSORFLOW = "pools", "pools of TensorFlow"
# Seconds on two idle cores, roughly, of what takes longer than the number of its tests tells
SECONDS = {
    POOLS: 1600,
    POOLS_OF_TENSORFLOW: 1000,
    "faults/test_elastic_jobs": 70,
    "faults/test_jobs_end": 70,
    "faults/test_killed_while_saving": 60,
    "faults/test_liveness": 80,
    "faults/test_never_arrives": 50,
    "faults/test_object_store_jobs": 130,
    "faults/test_one_worker_fails": 90,
    "faults/test_stopped": 70,
    "faults/test_strangers": 20,
    "faults/test_tracked_elastic": 20,
    "faults/test_worlds": 50,
    "parallel/test_bench": 160,
    "parallel/test_launch": 90,
    "parallel/test_notebook": 20,
    "parallel/test_profile": 65,
    "parallel/test_prove_jobs": 170,
    "parallel/test_search": 130,
    "parallel/test_tracking": 95,
    "contract/test_parity": 60,
    "elastic/test_client": 13,
    "horovod_build/test_keyed_rendezvous": 12,
    "stores/test_run_store": 12,
    "unit/test_job_resumes": 17,
    "unit/test_object_urls": 38,
    "unit/test_portable_layers": 25,
    "unit/test_portable_optimizers": 27,
    "unit/test_requirements": 25,
}
_SECONDS_OF_A_TEST = {"unit": 0.08, "elastic": 0.08, "horovod_build": 0.08, "stores": 0.08}
_SECONDS_OF_A_JOB = 1.5


def group_of(test_id: str) -> str:
    """Return the group of a test of jobs; those of one group run in one process.

    All tests that share pools are one group, those of each other file too. No pool has both frameworks, so
    that tests of TensorFlow alone may run beside the others. Most tests of faults wait for processes that
    were killed or stopped, so that others may run beside them.
    """
    path = Path(test_id.partition("::")[0])
    if path.name in APART or (path.parent.name == "faults" and path.name not in IN_TURN):
        return f"{path.parent.name}/{path.stem}"
    params = set(re.split(r"[\[\]-]", test_id))
    is_divided = path.parent.name != "faults" and path.name not in UNDIVIDED
    return POOLS_OF_TENSORFLOW if is_divided and params.intersection(FRAMEWORKS) == {"tf"} else POOLS


def seconds_of(group: str, count: int) -> float:
    """Return how long a group of so many tests takes, roughly; its name may be a file's path."""
    name = "/".join(Path(group).with_suffix("").parts[-2:])
    folder = name.partition("/")[0]
    return SECONDS.get(name, count * _SECONDS_OF_A_TEST.get(folder, _SECONDS_OF_A_JOB))


class LongestFirst(LoadScopeScheduling):
    """What takes long begins early, so that no process does it alone at the end."""

    def _assign_work_unit(self, node):
        if self.config.option.loadscopereorder:
            queue = self.workqueue
            queue.move_to_end(max(queue, key=lambda name: seconds_of(name, len(queue[name]))), last=False)
        super()._assign_work_unit(node)


class Files(LongestFirst, LoadFileScheduling):
    """Tests of one file run in one process."""


class Groups(LongestFirst):
    """Tests of one group run in one process."""

    def _split_scope(self, nodeid):
        return group_of(nodeid)
