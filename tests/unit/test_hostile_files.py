"""Files that a stranger made: neither waited for, nor followed to other files, nor allowed to fill memory."""

import os
from pathlib import Path

import pytest

from hvdtrain.config.layers import read_file
from hvdtrain.errors import EnvironmentFault
from hvdtrain.reporting.records import IndexTrace, cut_log
from hvdtrain.storage.files import check_link


def test_a_log_that_is_a_link_is_not_cut(tmp_path):
    (tmp_path / "mine").write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "log").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="it is a link, which is not followed"):
        cut_log(tmp_path / "log", 1)
    assert (tmp_path / "mine").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_config_that_a_shell_passes_is_read():
    reader, writer = os.pipe()
    os.write(writer, b"seed: 3\n")
    os.close(writer)
    assert read_file(Path(f"/dev/fd/{reader}")).values == {"seed": 3}
    os.close(reader)


@pytest.fixture
def run_dir(tmp_path):
    """A run directory that is reached over a link, as it is on many clusters, and a folder outside."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    return tmp_path / "run"


def test_a_folder_that_leads_out_of_the_run_directory_is_not_written_to(run_dir):
    (run_dir / "indices").symlink_to(run_dir.parent / "outside")
    with (
        pytest.raises(EnvironmentFault, match=f"it is a link that leads out of {run_dir}"),
        IndexTrace(lambda: (run_dir, 0, 0, 0)),
    ):
        pass
    assert not list((run_dir.parent / "outside").iterdir())


@pytest.mark.parametrize("inside", [None, "elsewhere"])
def test_a_folder_in_a_run_directory_that_is_itself_a_link_is_written_to(run_dir, inside):
    if inside:
        (run_dir / inside).mkdir()
        (run_dir / "indices").symlink_to(inside)
    check_link(run_dir / "indices", run_dir)
    with IndexTrace(lambda: (run_dir, 0, 0, 0)):
        pass
    assert (run_dir / "indices" / "rank-0000.jsonl").is_file()
