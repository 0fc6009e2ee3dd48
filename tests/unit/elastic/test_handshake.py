"""A worker and the driver of its job prove to each other that they know the job's key."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.elastic_driver import accept_worker

from hvdtrain.elastic.links import DriverHandshake, prove_to_driver, receive_line


@pytest.fixture
def ends():
    first, second = socket.socketpair()
    with first, second:
        yield first, second


def test_a_worker_without_the_key_is_not_accepted(ends):
    driver, worker = ends
    with ThreadPoolExecutor(1) as pool:
        proved = pool.submit(prove_to_driver, worker, "another key", "w7")
        with pytest.raises(OSError, match="does not know this job's key"):
            accept_worker(driver, "the key")
        driver.shutdown(socket.SHUT_RDWR)
        with pytest.raises(OSError, match="closed"):
            proved.result(10)


def test_a_driver_without_the_key_is_not_trusted(ends):
    driver, worker = ends
    with ThreadPoolExecutor(1) as pool:
        proved = pool.submit(prove_to_driver, worker, "the key", "w7")
        driver.sendall(DriverHandshake("another key").opening)
        sent = json.loads(receive_line(driver))
        driver.sendall(json.dumps({"proof": sent["proof"]}).encode() + b"\n")  # the worker's own, sent back
        with pytest.raises(OSError, match="does not know this job's key"):
            proved.result(10)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'{"worker": 1, "nonce": "", "proof": ""}',
        b'{"worker": "w1", "nonce": "", "proof": "\\ud800"}',
        b"\xff",
        b"[" * 1000,
    ],
)
def test_what_is_no_proof_is_none(line):
    assert DriverHandshake("the key").answer(line) is None
