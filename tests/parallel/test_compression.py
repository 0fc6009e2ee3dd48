"""fp16 compression: half the bytes, nearly the same losses, the same accuracy."""

import re

import numpy as np
import pytest
from support.jobs import FRAMEWORKS, Run, train
from support.pool import controller_of

BYTES = {"float16": 2, "float32": 4}
# what Horovod's timeline says when the all-reduce of a tensor ends
_REDUCED = re.compile(r'"dtype": "(float\d+)", "shape": "\[([\d, ]*)\]"')


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Gives a finished run of digits and the timeline that rank 0 wrote, each made once."""
    made: dict[tuple, tuple[Run, str]] = {}

    def run(framework: str, compression: str) -> tuple[Run, str]:
        key = (framework, compression)
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            finished = train(
                2, controller_of(framework, 2), "--framework", framework, "--compression", compression,
                "--steps", "10", "--eval-every", "null",
                cwd=folder, HOROVOD_TIMELINE=str(folder / "timeline.json"), OMP_NUM_THREADS="1",
            )  # fmt: skip
            made[key] = finished, (folder / "timeline.json").read_text()
        return made[key]

    return run


def bytes_per_step(run: Run, timeline: str) -> float:
    """Give the bytes that each worker gave to all-reduces of floats, per step."""
    total = 0
    for dtype, shape in _REDUCED.findall(timeline):
        total += BYTES[dtype] * int(np.prod([int(n) for n in shape.split(",") if n.strip()]))
    return total / run.summary["steps"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_compression_halves_the_bytes_sent(framework, runs):
    plain = bytes_per_step(*runs(framework, "none"))
    compressed = bytes_per_step(*runs(framework, "fp16"))
    assert plain > 4 * 151_306
    assert compressed / plain == pytest.approx(0.5, abs=0.001)
