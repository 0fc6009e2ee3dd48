"""Checkpoints on disk: what is written is what is read, or damaged and never taken for good or deleted."""

import errno
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.states import FILES, contents, equal, make_record, names, saved

from hvdtrain.checkpoints import manifest as manifests
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import CorruptCheckpoint
from hvdtrain.errors import CheckpointError, EnvironmentFault

VALUES = np.asarray([[0, 1, 2], [3, 0, 5]])


def round_trip(folder, state):
    return storage.verify(storage.write(folder, state, make_record())).read()


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "int64", "int32", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 3, 2, 1)], ids=str)
def test_an_array_is_read_as_it_was_written(tmp_path, kind, shape):
    state = {"model/a/kernel": VALUES.astype(kind).reshape(shape)}
    assert equal(round_trip(tmp_path, state), state)


@pytest.mark.parametrize(
    "view",
    [lambda a: a.T, lambda a: a[::-1, ::2], lambda a: np.broadcast_to(a[0, 1], (2, 3)), lambda a: a[0, 1]],
)
def test_an_array_is_written_by_its_values_however_it_lies_in_memory(tmp_path, view):
    array = view(np.arange(12, dtype=np.float32).reshape(3, 4))
    np.testing.assert_array_equal(round_trip(tmp_path, {"model/a": array})["model/a"], array)


def test_an_array_takes_memory_when_it_is_used_and_can_be_written_to(tmp_path):
    state = {"model/a": np.zeros((1 << 20, 16), np.float32), "optimizer/step": np.asarray(3)}  # 64 MB
    path = storage.write(tmp_path, state, make_record())
    checkpoint = storage.verify(path)
    before = psutil.Process().memory_info().rss
    found = checkpoint.read()
    assert psutil.Process().memory_info().rss - before < 32 << 20
    found["model/a"][0] = 7
    assert (found["model/a"][0] == 7).all()
    assert not storage.verify(path).read()["model/a"][0].any()


def test_the_folder_is_made_but_not_a_run_directory_that_is_gone(tmp_path):
    assert storage.write(tmp_path / "checkpoints", {}, make_record()).is_dir()
    with pytest.raises(FileNotFoundError):
        storage.write(tmp_path / "run" / "checkpoints", {}, make_record())
    assert not (tmp_path / "run").exists()


def test_the_manifest_is_json_with_size_and_checksum_of_the_other_files(tmp_path):
    path = saved(tmp_path, step=120, metrics={"loss": 0.5, "recall": None})
    values = json.loads((path / "trainer.json").read_text())
    own = values.pop("sha256")
    assert own == hashlib.sha256((json.dumps(values, indent=2) + "\n").encode()).hexdigest()
    expected = make_record(120, metrics={"loss": 0.5, "recall": None}).model_dump(mode="json")
    files = {
        name: {
            "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest(),
            "bytes": (path / name).stat().st_size,
        }
        for name in FILES[:2]
    }
    assert values == {"format": 1, **expected, "files": files}


@pytest.mark.parametrize("name", ["step-00000120", "step-00000120/more/deep.txt"])
def test_what_stands_in_the_way_of_a_step_is_replaced(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    storage.verify(saved(tmp_path, step=120))
    storage.verify(saved(tmp_path, step=121))


def test_what_a_killed_writer_left_is_removed_and_what_is_of_another_name_is_left_alone(tmp_path):
    others = ["notes.txt", "set-aside-step-00000001", "step-12", "step-000000001x", "best"]
    for name in (".new-step-00000120", ".new-step-00000007", ".removed-step-00000120", *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    saved(tmp_path)
    assert names(tmp_path) == sorted([*others, "step-00000120"])
    storage.retain(tmp_path, set())
    assert names(tmp_path) == sorted(others)


@pytest.mark.parametrize("fail_at", [0, 3])
def test_an_error_in_the_middle_leaves_nothing(tmp_path, monkeypatch, fail_at):
    """Three files and their directory are synced before the checkpoint gets its name."""
    saved(tmp_path, step=100)
    before, calls, sync = contents(tmp_path), [], os.fsync

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == fail_at + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(storage.os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        saved(tmp_path)
    assert contents(tmp_path) == before
    assert names(tmp_path) == ["step-00000100"]


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(storage.os, "fsync", fsync)
    saved(tmp_path)
    unfinished = str(Path(synced[0]).parent)
    assert unfinished.startswith(str(tmp_path / ".new-step-00000120-"))
    assert synced == [*(f"{unfinished}/{name}" for name in FILES), unfinished, str(tmp_path)]


def damage_of(path: Path) -> str:
    """Give what is said of a damaged checkpoint; it must be called damaged by name, too."""
    with pytest.raises(CorruptCheckpoint) as caught:
        storage.verify(path)
    with pytest.raises(CheckpointError) as refused:
        storage.locate(path)
    assert refused.value.problem == f"checkpoint {path} is damaged: {caught.value}"
    assert storage.newest_verified(path.parent) is None
    return str(caught.value)


@given(data=st.data())
def test_no_edit_verifies(tmp_path_factory, data):
    """Bytes replaced, put in or taken out, anywhere."""
    path = saved(tmp_path_factory.mktemp("c"))
    file = path / data.draw(st.sampled_from(FILES))
    content = file.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 40)))
    edited = content[:start] + data.draw(st.binary(max_size=40)) + content[end:]
    file.write_bytes(edited)
    if edited == content:
        storage.verify(path)
    else:
        damage_of(path)


def spoil_byte(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


def test_a_damaged_newest_one_is_named_and_set_aside_whole_for_the_one_before(tmp_path):
    good, newest = saved(tmp_path, 100), saved(tmp_path, 120)
    spoil_byte(newest)
    before = contents(tmp_path)
    found, notes = storage.newest_good(tmp_path)
    assert found.path == good
    said = "the content of model.safetensors has changed; set aside as set-aside-step-00000120"
    assert notes == [f"checkpoint {newest} is damaged: {said}"]
    assert contents(tmp_path) == {
        name.replace("step-00000120", "set-aside-step-00000120"): content for name, content in before.items()
    }


def test_an_older_damaged_one_is_left_alone(tmp_path):
    spoil_byte(saved(tmp_path, 100))
    saved(tmp_path, 120)
    assert storage.newest_good(tmp_path)[1] == []
    assert names(tmp_path) == ["step-00000100", "step-00000120"]


@pytest.mark.parametrize("name", ["trainer.json", "model.safetensors", ""])
@pytest.mark.parametrize("find", [storage.newest_good, storage.locate], ids=["newest_good", "locate"])
def test_what_cannot_be_read_is_the_environments_fault_and_stays(tmp_path, monkeypatch, name, find):
    saved(tmp_path)
    before = contents(tmp_path)
    open_it = os.open

    def refuse(path, *arguments, **options):
        if name and Path(path).name != name:
            return open_it(path, *arguments, **options)
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "open") if name else (Path, "iterdir")), refuse)
        with pytest.raises(
            EnvironmentFault,
            match=rf"^cannot read the checkpoint {tmp_path}.*: Permission denied\nNothing was",
        ):
            find(tmp_path)
        assert storage.newest_verified(tmp_path) is None
    assert contents(tmp_path) == before


def test_another_format_is_refused_and_stays(tmp_path):
    path = saved(tmp_path)
    values = json.loads((path / "trainer.json").read_text()) | {"format": 2}
    del values["sha256"]
    values["sha256"] = manifests.checksum(values)
    (path / "trainer.json").write_bytes(manifests.canonical_json(values))
    said = rf"checkpoint {path} has format 2; this version of hvdtrain reads 1\nUse the version that wrote it"
    for find in (storage.newest_good, storage.locate):
        with pytest.raises(EnvironmentFault, match=said):
            find(tmp_path)
    assert names(tmp_path) == ["step-00000120"]


@pytest.mark.parametrize("named", ["run", "run/checkpoints", "run/checkpoints/step-00000120"])
def test_a_checkpoint_is_found_by_its_directory_its_folder_or_its_run(tmp_path, named):
    saved(tmp_path / "run" / "checkpoints", 100)
    saved(tmp_path / "run" / "checkpoints", 120)
    assert storage.locate(tmp_path / named).manifest.step == 120


def test_a_run_gives_its_newest_good_one_and_sets_nothing_aside(tmp_path):
    good = saved(tmp_path / "checkpoints", 100)
    (saved(tmp_path / "checkpoints", 120) / "model.safetensors").unlink()
    found = storage.locate(tmp_path)
    assert found.path == good
    (note,) = found.notes()
    assert note.startswith("this is not the run's newest checkpoint, which is damaged: step-00000120: ")
    assert note.endswith("; step-00000100 is used")
    assert storage.locate(good).notes() == []
    assert names(tmp_path / "checkpoints") == ["step-00000100", "step-00000120"]


def test_what_holds_no_checkpoint_is_named_with_what_would(tmp_path):
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}\nGive the directory"):
        storage.locate(tmp_path)
