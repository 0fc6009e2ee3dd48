"""Host files and -H lists: what is read, and what is refused."""

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.host.hostfile import HostSlots, parse_host_list, read_host_file


def test_a_host_file_is_read(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("# a cluster\n\nhost1 slots=2  # the head\n10.0.0.2 slots = 1\n")
    assert read_host_file(path) == [HostSlots("host1", 2), HostSlots("10.0.0.2", 1)]
    assert parse_host_list("host1:2, 10.0.0.2:1") == read_host_file(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h1 slots=2\nh2\n", "line 2: 'h2' is not a host"),
        ("h1 slots=two\n", "line 1: h1 has 'two' slots"),
        ("h1 slots=0\n", "h1 has '0' slots"),
        ("h1;reboot slots=1\n", "'h1;reboot' is not the name"),
        ("h1 slots=1\nh1 slots=2\n", "names h1 twice"),
        ("# none\n", "names no host"),
    ],
)
def test_a_wrong_host_file_is_refused_with_its_line(text, said, tmp_path):
    (tmp_path / "hosts.txt").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_host_file(tmp_path / "hosts.txt")
