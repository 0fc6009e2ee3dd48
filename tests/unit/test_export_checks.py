"""Exporting, without a framework: comparisons, places, what is refused."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.backends.portable.names import check_fit
from hvdtrain.backends.portable.program import compare
from hvdtrain.backends.records import Exported
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.jobs.serving import models as export

ONE = np.array([[1.0, -4.0], [0.0, 2.0]])


def test_outputs_are_compared_by_their_largest_difference_relative_to_their_own_numbers():
    lacking = np.where(ONE == 2, np.nan, ONE)
    infinite = ([ONE[:1]], [ONE, ONE], [lacking])
    for found, difference in (([ONE + 0.5], 0.5), *((one, np.inf) for one in infinite)):
        done = compare([ONE], found)
        assert (done.difference, done.scale) == (difference, 4.0)
    for factor, share in ((100, 0.01 / 4), (1e6, 0.01 / 4e3)):
        assert compare([factor * ONE, ONE], [factor * ONE, ONE + 0.01]).relative == pytest.approx(share)
    array = np.array([np.nan, np.inf, -np.inf, 2.0])  # equal to themselves
    assert compare([array], [array.copy()]).difference == 0.0
    assert compare([np.zeros(2)], [np.full(2, 1e-3)]).relative == pytest.approx(1e-3), "absolutely"


@pytest.mark.parametrize(("difference", "good"), [(4e-4, True), (4.1e-4, False), (np.nan, False)])
def test_more_than_rounding_is_a_failure(difference, good):
    with nullcontext() if good else pytest.raises(EnvironmentFault, match="Nothing was written"):
        export._check_difference(Exported(difference, 4.0), "onnx")


def test_weights_that_do_not_fit_are_listed_with_the_closest():
    expected = {"a.weight": (3, 4), "b.bias": (3,), "c": (2,)}
    found = {"a_.weight": (3, 4), "c": (5,), "z": (1,)}
    with pytest.raises(CheckpointError) as caught:
        check_fit(Path("w.pt"), expected, found)
    said = caught.value.problem.splitlines()
    assert said[1:3] == ["  missing: a.weight (3, 4); closest: a_.weight", "  missing: b.bias (3,)"]
    assert said[4:] == ["  unexpected: z (1,)", "  misshapen: c must be (2,), is (5,)"]


def test_what_was_there_is_replaced_whole(tmp_path):
    output = tmp_path / "x"
    for name in ("old", "new"):
        with export.written_beside(output) as written:
            written.mkdir()
            (written / name).touch()
            written.with_name("x.data").write_text(name)
            export.put_into_place(written, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.data"]
    assert ((tmp_path / "x.data").read_text(), [p.name for p in output.iterdir()]) == ("new", ["new"])


def test_what_failed_leaves_nothing(tmp_path):
    def fail() -> None:
        with export.written_beside(tmp_path / "x") as written:
            written.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_what_is_written_is_removed_and_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / ".new-model.pt").symlink_to(tmp_path / "outside")
    with export.written_beside(tmp_path / "model.pt") as written:
        written.write_text("")
        assert not list((tmp_path / "outside").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
