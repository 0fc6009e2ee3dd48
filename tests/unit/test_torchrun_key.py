"""How the workers of torchrun get the key of their job."""

import os
import socket
import threading

import pytest

from hvdtrain.backends import torchrun as torchrun_key
from hvdtrain.backends.torchrun import offer_key, take_key
from hvdtrain.errors import EnvironmentFault
from hvdtrain.workers.world import KEY_VARIABLE

ONE_HOST = {"GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "3", "RANK": "1"}


def test_on_one_host_the_key_is_handed_to_the_same_user_and_not_written_to_the_store():
    key, told = offer_key(ONE_HOST)
    assert key not in str(told)
    assert [take_key(told, ONE_HOST), take_key(told, ONE_HOST)] == [key, key]


def test_every_job_has_a_key_of_its_own():
    alone = {**ONE_HOST, "LOCAL_WORLD_SIZE": "1"}
    assert offer_key(alone)[0] != offer_key(alone)[0]


@pytest.mark.parametrize(
    ("thread", "message"),
    [("MainThread", f"user {os.geteuid() + 1} offers the key"), ("rendezvous-key", "does not hand out")],
)
def test_another_user_gets_no_key_and_can_offer_none(monkeypatch, thread, message):
    two = {**ONE_HOST, "LOCAL_WORLD_SIZE": "2"}
    key, told = offer_key(two)

    def user(connection: socket.socket) -> int:
        return os.geteuid() + (threading.current_thread().name == thread)

    with monkeypatch.context() as patched:
        patched.setattr(torchrun_key, "_peer_user", user)
        with pytest.raises(EnvironmentFault, match=message):
            take_key(told, two)
    if thread == "rendezvous-key":  # it goes on to wait for the worker
        assert take_key(told, two) == key


def test_between_hosts_the_key_goes_through_the_store_unless_the_user_set_one():
    hosts = {**ONE_HOST, "GROUP_WORLD_SIZE": "2"}
    key, told = offer_key(hosts)
    assert take_key(told, hosts) == key
    own = {**hosts, KEY_VARIABLE: "mine"}
    assert offer_key(own) == ("mine", {})
    assert take_key({}, own) == "mine"
    with pytest.raises(EnvironmentFault, match=f"{KEY_VARIABLE} is set for rank 0 and not for rank 1"):
        take_key({}, hosts)


@pytest.mark.parametrize("told", [{"key": "a stranger's"}, {"key_socket": "a stranger's"}])
def test_a_key_in_the_store_does_not_displace_the_users(told):
    with pytest.raises(EnvironmentFault, match=f"{KEY_VARIABLE} is set for rank 1 and not for rank 0"):
        take_key(told, {**ONE_HOST, KEY_VARIABLE: "mine"})


def test_on_one_host_no_key_is_taken_from_the_store():
    with pytest.raises(EnvironmentFault, match="where no worker of a job on one host writes it"):
        take_key({"key": "a stranger's"}, ONE_HOST)
