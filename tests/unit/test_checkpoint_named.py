"""The checkpoint that a user names: found by its directory or a run's, or refused with what is there."""

import pytest
from support.states import names, saved

from hvdtrain.checkpoints import verification
from hvdtrain.errors import CheckpointError


@pytest.mark.parametrize("named", ["run", "run/checkpoints", "run/checkpoints/step-00000120"])
def test_a_checkpoint_is_found_by_its_directory_its_folder_or_its_run(tmp_path, named):
    saved(tmp_path / "run" / "checkpoints", 100)
    saved(tmp_path / "run" / "checkpoints", 120)
    assert verification.locate(tmp_path / named).manifest.step == 120


def test_a_run_gives_its_newest_good_one_and_sets_nothing_aside(tmp_path):
    good = saved(tmp_path / "checkpoints", 100)
    (saved(tmp_path / "checkpoints", 120) / "model.safetensors").unlink()
    found = verification.locate(tmp_path)
    assert found.path == good
    (note,) = found.notes()
    assert note.startswith("this is not the run's newest checkpoint, which is damaged: step-00000120: ")
    assert note.endswith("; step-00000100 is used")
    assert verification.locate(good).notes() == []
    assert names(tmp_path / "checkpoints") == ["step-00000100", "step-00000120"]


@pytest.mark.parametrize("make", ["folder", "file"])
def test_what_holds_no_checkpoint_is_named_with_what_would(tmp_path, make):
    path = tmp_path / "x"
    path.mkdir() if make == "folder" else path.write_text("x")
    with pytest.raises(CheckpointError, match=f"no checkpoint in {path}\nGive a run directory"):
        verification.locate(path)
