"""Damaged checkpoints: never taken for good, never the end of a job, never deleted."""

import json
import os
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.states import FILES, contents, equal, make_record, make_state, names, saved

from hvdtrain.activity import ACTIVITY
from hvdtrain.checkpoints import manifest, storage, verification
from hvdtrain.checkpoints.manifest import CorruptCheckpoint
from hvdtrain.errors import CheckpointError, EnvironmentFault


def damage_of(path: Path) -> str:
    """Give what is said of a damaged checkpoint; it must be called damaged by name, too."""
    with pytest.raises(CorruptCheckpoint) as caught:
        verification.verify(path)
    with pytest.raises(CheckpointError) as refused:
        verification.locate(path)
    assert refused.value.problem == f"checkpoint {path} is damaged: {caught.value}"
    assert verification.newest_verified(path.parent) is None
    return str(caught.value)


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_was_cut_short_is_damage(tmp_path, file):
    path = saved(tmp_path)
    content = (path / file).read_bytes()
    for length in np.linspace(0, len(content) - 1, 20, dtype=int):
        (path / file).write_bytes(content[:length])
        assert file in damage_of(path)


@pytest.mark.parametrize("file", FILES)
def test_a_file_with_more_at_its_end_is_damage(tmp_path, file):
    path = saved(tmp_path)
    for more in (b"\0", b"\n", b" ", b"}", b"x" * 5000):
        content = (path / file).read_bytes()
        (path / file).write_bytes(content + more)
        assert file in damage_of(path)
        (path / file).write_bytes(content)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["byte", "bit"])
def test_a_changed_byte_is_damage(tmp_path, file, kind):
    path = saved(tmp_path)
    content = (path / file).read_bytes()
    chosen = random.Random(0)
    for place in chosen.sample(range(len(content)), 50):
        changed = bytearray(content)
        changed[place] ^= 0xFF if kind == "byte" else 1 << chosen.randrange(8)
        (path / file).write_bytes(changed)
        assert file in damage_of(path)


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
        verification.verify(path)
    else:
        damage_of(path)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_damage(tmp_path, file):
    path = saved(tmp_path)
    (path / file).unlink()
    assert damage_of(path) == f"{file} is missing"


@pytest.mark.parametrize("file", FILES)
def test_a_folder_in_the_place_of_a_file_is_damage(tmp_path, file):
    path = saved(tmp_path)
    (path / file).unlink()
    (path / file).mkdir()
    assert file in damage_of(path)


@pytest.mark.parametrize("file", FILES)
def test_a_link_to_nothing_is_damage(tmp_path, file):
    path = saved(tmp_path)
    (path / file).unlink()
    (path / file).symlink_to(tmp_path / "nowhere")
    assert damage_of(path) == f"{file} is missing"


def test_two_files_that_changed_places_are_damage(tmp_path):
    state = {"model/kernel": np.ones(4, np.float32), "optimizer/ab": np.ones(4, np.float32)}
    path = storage.write(tmp_path, state, make_record())
    model, optimizer = (path / name for name in FILES[:2])
    assert model.stat().st_size == optimizer.stat().st_size
    model.rename(path / "between")
    optimizer.rename(model)
    (path / "between").rename(optimizer)
    assert damage_of(path) == "the content of model.safetensors has changed"


def test_the_files_of_another_checkpoint_are_damage(tmp_path):
    path, other = saved(tmp_path, value=1.0), saved(tmp_path / "other", value=2.0)
    shutil.copy(other / FILES[0], path)
    assert damage_of(path) == "the content of model.safetensors has changed"


def test_the_manifest_of_another_checkpoint_is_damage(tmp_path):
    path, other = saved(tmp_path, value=1.0), saved(tmp_path / "other", value=2.0)
    shutil.copy(other / FILES[2], path)
    assert damage_of(path) == "the content of model.safetensors has changed"


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "3", '"x"', "[]", "[1, 2]", "{}", "NaN", "Infinity", '{"format": 1}', '{"step": NaN}',
        '{"format": 1, "sha256": "00"}',
        "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000,
        "9" * 10_000, '{"step": ' + "9" * 10_000 + "}", '"\\ud800"', "{", "\ufeff{}", "{} {}",
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_other_json_in_the_place_of_the_manifest_is_damage(tmp_path, text, encoding):
    path = saved(tmp_path)
    (path / "trainer.json").write_text(text, encoding=encoding)
    assert damage_of(path) == "trainer.json is not as it was written"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-32"])
def test_the_manifest_in_another_encoding_is_damage(tmp_path, encoding):
    path = saved(tmp_path)
    text = (path / "trainer.json").read_text()
    (path / "trainer.json").write_text(text, encoding=encoding)
    assert damage_of(path) == "trainer.json is not as it was written"


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_the_manifest_in_another_layout_is_damage(tmp_path, indent):
    """A tool that rewrites it may have changed a number, too."""
    path = saved(tmp_path)
    values = json.loads((path / "trainer.json").read_text())
    (path / "trainer.json").write_text(json.dumps(values, indent=indent))
    assert damage_of(path) == "trainer.json is not as it was written"


def rewrite_manifest(path: Path, **changes: object) -> None:
    """Change a manifest and give it the checksum that belongs to it; None takes a field out."""
    values = json.loads((path / "trainer.json").read_text()) | changes
    values = {name: value for name, value in values.items() if value is not None and name != "sha256"}
    values["sha256"] = manifest.checksum(values)
    (path / "trainer.json").write_bytes(manifest.canonical_json(values))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("samples", 10**400),
        ("data_size", 0),
        ("workers", 0),
        ("workers", "2"),
        ("seconds", 10**400),
    ],
)
def test_a_value_that_cannot_be_is_damage_and_is_named(tmp_path, field, value):
    path = saved(tmp_path)
    rewrite_manifest(path, **{field: value})
    found = repr(value) if value != 10**400 else f"1{'0' * 59}..."
    said = damage_of(path)
    assert said.startswith(f"trainer.json: {field}: Input should be ")
    assert said.endswith(f", found {found}")


@pytest.mark.parametrize("file", FILES)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, file):
    path = saved(tmp_path)
    (path / file).unlink()
    os.mkfifo(path / file)
    assert damage_of(path) == f"{file} is not a regular file"


@pytest.mark.parametrize("file", FILES)
def test_a_device_in_the_place_of_a_file_is_not_read(tmp_path, file):
    path = saved(tmp_path)
    (path / file).unlink()
    (path / file).symlink_to("/dev/zero")
    assert damage_of(path) == f"{file} is not a regular file"


@pytest.mark.parametrize("kind", ["F8_E8M0", "F8_E4M3", "BF16", "F4"])
def test_a_type_that_numpy_does_not_have_is_damage(tmp_path, kind):
    path = saved(tmp_path)
    header = json.dumps({"model/a": {"dtype": kind, "shape": [16], "data_offsets": [0, 32]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors: "):
        storage.Checkpoint(path, make_record()).read_model()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": "120"}, "trainer.json: step: Input should be a valid integer"),
        ({"step": None}, "trainer.json: step: Field required"),
        ({"config": [1]}, "trainer.json: config: Input should be a valid dictionary"),
        ({"surplus": 1}, "trainer.json: surplus: Extra inputs are not permitted"),
        ({"files": {"model.safetensors": 3}}, "trainer.json: files.model.safetensors: Input should be"),
        (
            {"data": {"eval_data": {"size": 3, "samples": {"x": ["ab"]}}}},
            "trainer.json: data.eval_data: Value error, x has 1 digests, of 3",
        ),
        (
            {"data": {"eval_data": {"size": 1, "samples": {"x": ["ab 1"]}}}},
            "trainer.json: data.eval_data: Value error, x has the digest 'ab 1'",
        ),
        (
            {"data": {"eval_data": {"size": 1, "samples": {"x": [""]}}}},
            "trainer.json: data.eval_data: Value error, not enough values",
        ),
        (
            {"data": {"eval_data": {"size": 1, "samples": {"x": ["ab one two"]}}}},
            "trainer.json: data.eval_data: Value error, could not convert",
        ),
        ({"data": {"eval_data": {"size": 10**400}}}, "trainer.json: data.eval_data.size: Input should be"),
        ({"files": {}}, "trainer.json does not list model.safetensors"),
    ],
    ids=str,
)
def test_a_manifest_of_another_form_is_damage(tmp_path, changes, said):
    path = saved(tmp_path)
    rewrite_manifest(path, **changes)
    assert damage_of(path).startswith(said)


def test_the_damage_says_the_sizes(tmp_path):
    path = saved(tmp_path)
    size = (path / FILES[0]).stat().st_size
    (path / FILES[0]).write_bytes(bytes(5))
    assert damage_of(path) == f"model.safetensors has 5 bytes, of {size:,}"


def test_other_files_beside_are_ignored(tmp_path):
    path = saved(tmp_path)
    (path / "notes.txt").write_text("mine")
    (path / "more").mkdir()
    assert equal(verification.verify(path).read(), make_state())


def test_a_checkpoint_that_was_copied_or_renamed_is_good(tmp_path):
    path = saved(tmp_path)
    shutil.copytree(path, tmp_path / "best")
    assert verification.locate(tmp_path / "best").manifest.step == 120


def spoil_nothing_there(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def spoil_half_written(path: Path) -> None:
    (path / "trainer.json").unlink()
    (path / "optimizer.safetensors").unlink()
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: len(content) // 2])


def spoil_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


def spoil_byte(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


SPOILS = [
    (spoil_nothing_there, "trainer.json is missing"),
    (spoil_half_written, "trainer.json is missing"),
    (spoil_file, "trainer.json is missing"),
    (spoil_byte, "the content of model.safetensors has changed"),
]


@pytest.mark.parametrize(("spoil", "said"), SPOILS)
def test_a_damaged_newest_one_is_named_and_set_aside_whole_for_the_one_before(tmp_path, spoil, said):
    good, newest = saved(tmp_path, 100), saved(tmp_path, 120)
    spoil(newest)
    before = contents(tmp_path)
    found, notes = verification.newest_good(tmp_path)
    assert found.path == good
    assert notes == [f"checkpoint {newest} is damaged: {said}; set aside as set-aside-step-00000120"]
    assert contents(tmp_path) == {
        name.replace("step-00000120", "set-aside-step-00000120"): content for name, content in before.items()
    }


@pytest.mark.parametrize(("spoil", "said"), SPOILS)
def test_a_damaged_newest_one_is_not_reported_as_saved(tmp_path, spoil, said):
    good = saved(tmp_path, 100)
    spoil(saved(tmp_path, 120))
    before = names(tmp_path)
    assert verification.newest_verified(tmp_path) == good
    assert names(tmp_path) == before


def test_of_good_ones_the_newest_is_taken_and_nothing_said(tmp_path):
    saved(tmp_path, 100)
    newest = saved(tmp_path, 120)
    found, notes = verification.newest_good(tmp_path)
    assert (found.path, notes) == (newest, [])


def test_an_older_damaged_one_is_left_alone(tmp_path):
    spoil_byte(saved(tmp_path, 100))
    saved(tmp_path, 120)
    assert verification.newest_good(tmp_path)[1] == []
    assert names(tmp_path) == ["step-00000100", "step-00000120"]


def test_where_all_are_damaged_nothing_is_set_aside_and_nothing_begins(tmp_path):
    for step in (100, 120):
        spoil_byte(saved(tmp_path, step))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"verifies: step-00000120: .*; step-00000100: ") as caught:
            verification.newest_good(tmp_path)
    assert f"Remove {tmp_path} to train from the beginning" in caught.value.remedy
    assert names(tmp_path) == ["step-00000100", "step-00000120"]


def test_one_that_is_set_aside_again_gets_another_name(tmp_path):
    saved(tmp_path, 100)
    for _ in range(3):
        spoil_byte(saved(tmp_path))
        verification.newest_good(tmp_path)
    assert names(tmp_path)[:3] == [f"set-aside-step-00000120{suffix}" for suffix in ("", "-2", "-3")]


def test_one_that_cannot_be_set_aside_stays_and_is_said(tmp_path, monkeypatch):
    saved(tmp_path, 100)
    spoil_byte(saved(tmp_path))

    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    _, notes = verification.newest_good(tmp_path)
    assert notes[0].endswith("has changed; it stays where it is (Permission denied)")


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_where_there_is_none_there_is_none(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    assert verification.newest_good(tmp_path / folder) == (None, [])
    assert verification.newest_verified(tmp_path / folder) is None


@pytest.mark.parametrize("name", ["trainer.json", "model.safetensors", ""])
@pytest.mark.parametrize(
    "find", [verification.newest_good, verification.locate], ids=["newest_good", "locate"]
)
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
        assert verification.newest_verified(tmp_path) is None
    assert contents(tmp_path) == before


def test_a_name_that_no_system_takes_is_the_environments_fault():
    with pytest.raises(EnvironmentFault, match="File name too long"):
        verification.locate(Path("x" * 300))


def test_another_format_is_refused_and_stays(tmp_path):
    path = saved(tmp_path)
    rewrite_manifest(path, format=2)
    said = rf"checkpoint {path} has format 2; this version of hvdtrain reads 1\nUse the version that wrote it"
    for find in (verification.newest_good, verification.locate):
        with pytest.raises(EnvironmentFault, match=said):
            find(tmp_path)
    assert names(tmp_path) == ["step-00000120"]


def test_a_manifest_can_be_read_by_itself(tmp_path):
    path = saved(tmp_path, metrics={"loss": 0.25})
    (path / "model.safetensors").unlink()
    assert verification.read_manifest(path).metrics == {"loss": 0.25}


@pytest.mark.parametrize("spoil", [spoil_nothing_there, spoil_file], ids=["nothing", "file"])
def test_a_damaged_manifest_is_none(tmp_path, spoil):
    path = saved(tmp_path)
    spoil(path)
    assert verification.read_manifest(path) is None


def test_a_checkpoint_that_is_verified_and_read_shows_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_PIECE_BYTES", 64)
    path = saved(tmp_path)
    with ACTIVITY.during("reading the checkpoint", 3):
        before = ACTIVITY.current
        checkpoint = verification.verify(path)
        pieces = ACTIVITY.current.number - before.number
        assert pieces >= sum(info.bytes for info in checkpoint.manifest.files.values()) // 64
        checkpoint.read()
        now = ACTIVITY.current
        assert now.number == before.number + pieces + 2
        assert (str(now), now.is_long) == ("reading the checkpoint 3", True)
        thread = threading.Thread(target=verification.verify, args=(path,))
        thread.start()
        thread.join()
        assert ACTIVITY.current is now, "another thread changes nothing"
