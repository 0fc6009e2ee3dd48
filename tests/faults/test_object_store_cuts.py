"""Connections to an object store are cut at random bytes: each checkpoint there is right, none is lost."""

import math
import os
import random
import signal
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest
from support.jobs import started
from support.object_store import ObjectStore
from support.resuming import kill
from support.stored_jobs import (
    CLAIM,
    Bucket,
    Host,
    Saved,
    await_in,
    command_for,
    ended,
    logged,
    metrics_in,
    saved_in,
)

PREFIX = "run"
CUTS = 50
KILLS = (17, 34)  # cuts after which all is killed; the second time, another host resumes
MOST_BYTES = {"cut_after_sent_bytes": 200_000, "cut_after_answered_bytes": 60_000}
KEEP_LAST = 4
STEP_SECONDS = 0.08
OPTIONS = ("--save-every", "2", "--set", "task_options.hidden=2000")  # 150 KB a checkpoint


@dataclass
class Cut:
    """What was seen of a run in a store whose connections were cut again and again.

    Args:
        bucket: the bucket.
        looks: number of looks at the run.
        newest: step of the newest checkpoint at each cut; 0 if there is none.
        saved: all checkpoints that were seen, by step.
        wrong: steps whose checkpoints were not always the same.
        lost: what was whole and was gone with fewer newer ones there than are to be kept.
        steps: steps at the end.
    """

    bucket: Bucket
    looks: int = 0
    newest: list[int] = field(default_factory=list)
    saved: dict[int, Saved] = field(default_factory=dict)
    wrong: set[int] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    steps: int = 0
    _last: dict[int, Saved] = field(default_factory=dict)

    def look(self) -> bool:
        """Look at all checkpoints that are there; return False."""
        found = self.bucket.saved(PREFIX)
        self.looks += 1
        for step, saved in found.items():
            if self.saved.setdefault(step, saved) != saved:
                self.wrong.add(step)
        for step in self._last.keys() - found.keys():
            if sum(newer > step for newer in found) < KEEP_LAST:
                self.lost.append(f"step {step} at look {self.looks}: {sorted(self._last)} -> {sorted(found)}")
        self._last = found
        return False

    def is_beyond(self, step: int) -> bool:
        """Look at all checkpoints; return whether one is newer than that step."""
        self.look()
        return max(self.saved, default=0) > step


def train(steps: int, *options: str, run_dir: str) -> list[str]:
    options = ("--steps", str(steps), *OPTIONS, *options)
    return command_for(1, "none", "torch", "Stored", *options, run_dir=run_dir)


@pytest.fixture(scope="module")
def cut(store) -> Cut:
    """Cut connections at random bytes of requests and answers; stop the job in order at last."""
    seen, moments = Cut(Bucket(store)), random.Random("cuts")
    options = ("--keep-last", str(KEEP_LAST), "--resume")
    command = train(100_000, *options, run_dir=store.url(PREFIX))
    host = Host(store.environ)
    bounds = [0, *KILLS, CUTS]
    for first, last in pairwise(bounds):
        with host.start(command, STEP_SECONDS) as job:
            await_in(job, partial(seen.is_beyond, max(seen.newest, default=0)))
            for _ in range(first, last):
                cut_once(store, seen, job, moments)
            if last in KILLS:
                kill(job)
                seen.look()
                store.proxy.heal()
            else:
                os.kill(job.process.pid, signal.SIGTERM)
                ended(job, returncode=75)
        if last == KILLS[-1]:
            host = Host(store.environ)
            seen.bucket.remove(f"{PREFIX}/{CLAIM}")  # in place of waiting until it is too old
    seen.look()
    seen.steps = seen.bucket.summary(PREFIX)["steps"]
    print(f"{store.proxy.cuts} cuts, {seen.looks} looks, {len(seen.saved)} checkpoints, {seen.steps} steps")
    print(f"newest at each cut: {seen.newest}")
    return seen


def cut_once(store: ObjectStore, seen: Cut, job: started, moments: random.Random) -> None:
    """Cut a connection after a random number of bytes of requests or of answers."""
    direction = moments.choice(sorted(MOST_BYTES))
    size = math.floor(math.exp(moments.uniform(0, math.log(MOST_BYTES[direction]))))
    before = store.proxy.cuts
    store.proxy.cut_after_sent_bytes = store.proxy.cut_after_answered_bytes = None
    store.proxy.cuts_left = 1
    setattr(store.proxy, direction, size)
    await_in(job, lambda: store.proxy.cuts > before or seen.look())
    seen.look()
    seen.newest.append(max(seen.saved, default=0))


@pytest.fixture(scope="module")
def local(cut):
    """Train on a disk, and keep all checkpoints."""
    host = Host()
    host.run(train(cut.steps, "--set", "keep_last=null", run_dir="run"))
    return host.folder / "run"


def test_connections_are_cut_while_checkpoints_are_uploaded(cut):
    assert len(cut.newest) == CUTS
    assert len(set(cut.newest)) >= 6


def test_each_checkpoint_that_verifies_is_right(cut, local):
    expected = saved_in(local)
    assert cut.wrong == set()
    assert [step for step, saved in cut.saved.items() if saved != expected[step]] == []


def test_none_that_was_whole_is_lost(cut):
    assert cut.lost == []


def test_the_last_ones_are_there_at_the_end(cut):
    found = sorted(cut.bucket.saved(PREFIX))
    assert found[-1] == cut.steps
    assert len(found) == KEEP_LAST


def test_every_step_is_logged_once(cut, local):
    expected = metrics_in((local / "metrics.jsonl").read_bytes())
    found, expected = (
        [line for line in logged(lines) if line["phase"] == "train"]
        for lines in (cut.bucket.metrics(PREFIX), expected)
    )
    assert [line["step"] for line in found] == list(range(1, cut.steps + 1))
    assert found == expected
