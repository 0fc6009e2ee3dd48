"""Checkpoints that are damaged, never taken for good or deleted; and the one that a user names."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.states import FILES, contents, names, saved

from hvdtrain.checkpoints import manifest, storage
from hvdtrain.checkpoints.manifest import CorruptCheckpoint
from hvdtrain.errors import CheckpointError, EnvironmentFault


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
    values["sha256"] = manifest.checksum(values)
    (path / "trainer.json").write_bytes(manifest.canonical_json(values))
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
