"""Exporting, without a framework: comparisons, places, what is refused."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.backends.base import Exported
from hvdtrain.backends.portable.files import check_fit, compare
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.data.bad_samples import LocalFetch
from hvdtrain.data.datasets import ArrayDataset
from hvdtrain.errors import CheckpointError, EnvironmentFault, TaskError, UsageError
from hvdtrain.jobs import export
from hvdtrain.jobs.export_formats import EXPORT_FORMATS

ONE = np.array([[1.0, -4.0], [0.0, 2.0]])


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ([ONE], 0.0),
        ([ONE + 0.5], 0.5),
        ([ONE[:1]], np.inf),
        ([], np.inf),
        ([ONE, ONE], np.inf),
        ([np.where(ONE == 2, np.nan, ONE)], np.inf),
    ],
)
def test_outputs_are_compared_by_their_largest_difference(found, difference):
    done = compare([ONE], found)
    assert (done.difference, done.scale) == (difference, 4.0)


def test_each_output_is_compared_relative_to_its_own_numbers():
    large, small = 100 * ONE, ONE
    assert compare([large, small], [large, small + 0.01]).relative == pytest.approx(0.01 / 4)
    assert compare([1e6 * ONE, small], [1e6 * ONE, small + 0.01]).relative == pytest.approx(0.01 / 4e3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_equal_themselves(value):
    array = np.where(ONE == 2, value, ONE)
    assert compare([array], [array.copy()]).difference == 0.0


def test_a_model_that_gives_zeros_is_compared_absolutely():
    zeros = np.zeros((2, 2), np.float32)
    assert compare([zeros], [zeros + 1e-3]).relative == pytest.approx(1e-3)


@pytest.mark.parametrize(("difference", "good"), [(0, True), (4e-4, True), (4.1e-4, False), (np.inf, False)])
def test_more_than_rounding_is_a_failure(difference, good):
    done = Exported(difference, 4.0)
    if good:
        export._check_difference(done, "onnx")
    else:
        with pytest.raises(EnvironmentFault, match="Nothing was written"):
            export._check_difference(done, "onnx")


def test_a_difference_that_is_no_number_is_a_failure():
    with pytest.raises(EnvironmentFault):
        export._check_difference(Exported(np.nan, 4.0), "onnx")


def test_weights_that_fit_are_taken():
    check_fit(Path("w.pt"), {"a": (3, 4)}, {"a": (3, 4)})


def test_weights_that_do_not_fit_are_listed_with_the_closest():
    expected = {"a.weight": (3, 4), "b.bias": (3,), "c": (2,)}
    found = {"a_.weight": (3, 4), "c": (5,), "z": (1,)}
    with pytest.raises(CheckpointError) as caught:
        check_fit(Path("w.pt"), expected, found)
    assert caught.value.problem.splitlines() == [
        "w.pt does not fit the model:",
        "  c: the model's is (2,), the file's (5,)",
        "  missing: a.weight (3, 4); the file has a_.weight (3, 4)",
        "  missing: b.bias (3,)",
        "  unexpected: a_.weight (3, 4)",
        "  unexpected: z (1,)",
    ]


def test_a_long_list_is_cut():
    with pytest.raises(CheckpointError, match="and 20 more"):
        check_fit(Path("w.pt"), {f"x{i}": (1,) for i in range(30)}, {})


@pytest.mark.parametrize("format_name", EXPORT_FORMATS)
def test_an_output_that_exists_is_refused_without_force(format_name, tmp_path):
    output = tmp_path / f"x{EXPORT_FORMATS[format_name].suffix}"
    export._check_output(output, format_name, force=False)
    output.touch()
    with pytest.raises(UsageError, match="exists"):
        export._check_output(output, format_name, force=False)
    export._check_output(output, format_name, force=True)


def test_force_replaces_no_directory_but_a_saved_model(tmp_path):
    for format_name in ("saved-model", "pt"):
        output = tmp_path / f"x{EXPORT_FORMATS[format_name].suffix}"
        output.mkdir()
        with pytest.raises(UsageError, match="--force does not replace it"):
            export._check_output(output, format_name, force=True)
    (tmp_path / "x" / "saved_model.pb").touch()
    export._check_output(tmp_path / "x", "saved-model", force=True)


def test_the_ending_is_the_formats():
    with pytest.raises(UsageError, match=r"a file of --to keras ends with \.keras"):
        export._check_output(Path("x.h5"), "keras", force=False)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_was_there_is_replaced_whole(kind, tmp_path):
    output = tmp_path / "x"
    for name, text in (("old", "1"), ("new", "2")):
        with export.written_beside(output) as written:
            if kind == "folder":
                written.mkdir()
            (written / name if kind == "folder" else written).write_text(text)
            written.with_name("x.data").write_text(name)
            export.put_into_place(written, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.data"]
    assert (tmp_path / "x.data").read_text() == "new"
    assert [p.name for p in output.iterdir()] == ["new"] if kind == "folder" else output.read_text() == "2"


def test_what_failed_leaves_nothing(tmp_path):
    def fail() -> None:
        with export.written_beside(tmp_path / "x") as written:
            written.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(EnvironmentFault, match=r"cannot write .*x: "),
        export.written_beside(tmp_path / "file" / "x"),
    ):
        raise AssertionError("there is no such folder")


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if "onnx" in name else object())
    monkeypatch.setattr(export.sys, "modules", {})
    with pytest.raises(EnvironmentFault, match=r"missing: onnx, .*\npip install onnx onnxscript onnxrunt"):
        export._check_packages("onnx")
    export._check_packages("safetensors")


def failing(error: Exception) -> SimpleNamespace:
    def raise_it(*_: object) -> None:
        raise error

    return SimpleNamespace(export=raise_it)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            RuntimeError("one\n\ntwo\nthree\nfour"),
            TaskError,
            "as pt: RuntimeError: one\n  two\n  three\nOther",
        ),
        (OSError(28, "No space left on device"), EnvironmentFault, "cannot write x.pt: No space left on dev"),
        (TaskError("known"), TaskError, "^known$"),
    ],
)
def test_what_a_framework_raises_is_said_in_few_lines(error, kind, said):
    job = SimpleNamespace(config=SimpleNamespace(task="digits", framework="torch"))
    with pytest.raises(kind, match=said):
        export._write(job, failing(error), "pt", Path("x.pt"), [])


def test_batches_are_of_real_samples_again_from_the_start_if_there_are_few():
    data = ArrayDataset({"inputs": np.array([0.0, 10.0, 20.0])})
    batches = export._batches(LocalFetch(data), 5)
    found = [batch.arrays["inputs"].tolist() for batch in batches]
    assert found == [[[0, 10, 20, 0, 10]], [[10, 20, 0, 10, 20]], [[10, 20]], [[10]]]
    assert batches[0].weights.shape == (1, 5)


def test_the_first_batch_has_two_samples_at_least():
    batches = export._batches(LocalFetch(ArrayDataset({"inputs": np.zeros(1)})), 1)
    assert [batch.indices.shape for batch in batches] == [(1, 2), (1, 2), (1, 2), (1, 1)]


def loading(format_name: str, arguments: tuple[str, ...], *, is_plain: bool) -> str:
    exported = Exported(0.0, 1.0, arguments=arguments, is_plain=is_plain)
    return export.Export(None, False, format_name, Path("x/y"), exported)._loading()


@pytest.mark.parametrize("format_name", EXPORT_FORMATS)
def test_the_line_that_loads_has_the_path(format_name):
    assert '"x/y"' in loading(format_name, ("inputs",), is_plain=True)


def test_the_line_that_loads_has_the_inputs():
    names = ("ids", "mask")
    assert loading("torch-export", names, is_plain=False).endswith(".module()(ids=ids, mask=mask)")
    assert loading("torch-export", ("inputs",), is_plain=True).endswith(".module()(inputs)")
    assert loading("onnx", names, is_plain=False).endswith('.run(None, {"ids": ids, "mask": mask})')
    assert loading("saved-model", names, is_plain=False).endswith('["serving_default"](ids=ids, mask=mask)')


def test_a_checkpoint_does_not_decide_how_many_samples_are_compared():
    data = LocalFetch(ArrayDataset({"inputs": np.zeros(9, np.float32)}))
    assert max(len(batch.indices[0]) for batch in export._batches(data, 10**12)) == 1024


def checkpoint_in(run_dir: Path) -> Checkpoint:
    return Checkpoint(run_dir / "checkpoints" / "step-00000003", SimpleNamespace())


def test_exports_do_not_follow_a_link_out_of_the_run_directory(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exports").symlink_to(tmp_path)
    with pytest.raises(UsageError, match=r"exports: it is a link that leads out of .*\nGive an --output"):
        export._default_output(checkpoint_in(tmp_path / "run"), SimpleNamespace(task="digits"), "pt")


def test_a_link_in_the_place_of_what_is_written_is_removed_and_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / ".new-model.pt").symlink_to(tmp_path / "outside")
    with export.written_beside(tmp_path / "model.pt") as written:
        written.write_text("")
        assert not list((tmp_path / "outside").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
