"""What Horovod gets of workers that torchrun started, and how they get the key of their job."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from hvdtrain.backends import torchrun
from hvdtrain.backends.torchrun import offer_key, take_key
from hvdtrain.errors import EnvironmentFault
from hvdtrain.workers.world import KEY_VARIABLE

pytest.importorskip("horovod.runner")


def info(group: int, local_size: int, host: str = "", **more: object) -> dict:
    return {"group": group, "local_size": local_size, "host": host or f"h{group}", **more}


def test_hosts_may_have_different_numbers_of_workers_and_ranks_are_in_their_order():
    plan = torchrun._allocate([info(0, 1), info(1, 2), info(1, 2)])
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    assert [[getattr(slot, name) for name in names] for slot in plan] == [
        [0, 3, 0, 1, 0, 2],
        [1, 3, 0, 2, 1, 2],
        [2, 3, 1, 2, 0, 1],
    ]
    with pytest.raises(EnvironmentFault, match="host by host"):
        torchrun._allocate([info(0, 2), info(1, 1), info(0, 2)])


def test_the_rendezvous_listens_on_the_address_of_the_job_only():
    server = torchrun._start_server("127.0.0.1", "k" * 64)
    try:
        assert server.server_address[0] == "127.0.0.1"
        torchrun._check_connection(info(0, 1, address="127.0.0.1", port=server.server_address[1]))
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(EnvironmentFault, match="cannot connect to rank 0 on h0"):
        torchrun._check_connection(info(0, 1, address="127.0.0.1", port=server.server_address[1]))


ONE_HOST = {"GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "3", "RANK": "1"}


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def test_on_one_host_the_key_is_in_a_file_of_the_user_and_not_in_the_store(stack):
    key, offered = offer_key(ONE_HOST, stack)
    assert key not in str(offered)
    assert [take_key(offered, ONE_HOST), take_key(offered, ONE_HOST)] == [key, key]
    assert offer_key(ONE_HOST, stack)[0] != key
    stack.close()
    assert not Path(offered["key_file"]).exists()


@pytest.mark.parametrize("how", ["mode", "user", "link", "pipe"])
def test_no_key_is_taken_from_what_is_not_a_file_of_the_user_alone(how, monkeypatch, tmp_path, stack):
    file = Path(offer_key(ONE_HOST, stack)[1]["key_file"])
    if how == "mode":
        file.chmod(0o640)
    elif how == "user":
        own = torchrun.os.geteuid()
        monkeypatch.setattr(torchrun.os, "geteuid", lambda: own + 1)
    elif how == "link":
        (tmp_path / "key").symlink_to(file)
        file = tmp_path / "key"
    else:
        file = tmp_path / "pipe"
        torchrun.os.mkfifo(file, 0o600)
    with pytest.raises(EnvironmentFault, match="does not hand out the key"):
        take_key({"key_file": str(file)}, ONE_HOST)


def test_between_hosts_the_key_goes_through_the_store_unless_the_user_set_one(stack):
    hosts = {**ONE_HOST, "GROUP_WORLD_SIZE": "2"}
    key, offered = offer_key(hosts, stack)
    assert take_key(offered, hosts) == key
    own = {**hosts, KEY_VARIABLE: "mine"}
    assert offer_key(own, stack) == ("mine", {})
    assert take_key({}, own) == "mine"


@pytest.mark.parametrize(
    ("environ", "offered", "said"),
    [
        ({**ONE_HOST, "GROUP_WORLD_SIZE": "2"}, {}, "is set for rank 0 and not for rank 1"),
        ({**ONE_HOST, KEY_VARIABLE: "mine"}, {"key": "a stranger's"}, "is set for rank 1 and not for rank 0"),
        (ONE_HOST, {"key": "a stranger's"}, "does not hand out"),
    ],
)
def test_no_other_key_is_taken_from_the_store(environ, offered, said):
    with pytest.raises(EnvironmentFault, match=said):
        take_key(offered, environ)
