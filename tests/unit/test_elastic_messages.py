"""Messages of elastic jobs: what is sent arrives as it was; anything else is dropped."""

import pytest

from hvdtrain.elastic.messages import EnterWorld, Ready, encode, from_driver, from_worker
from hvdtrain.workers.world import Change, MemberInfo, TrainingPosition, World, world_key

MEMBERS = tuple(
    MemberInfo(worker=f"w{rank}", rank=rank, host="h1", pid=7 + rank, place=TrainingPosition(12, 2))
    for rank in (0, 1)
)
WORLD = World(
    generation=3,
    rank=1,
    size=2,
    local_rank=1,
    local_size=2,
    cross_rank=0,
    cross_size=1,
    host="h1",
    store=("127.0.0.1", 4000),
    one_host=True,
    salt="5a17",
    source="root",
    members=MEMBERS,
    change=Change(left=("rank 2 on h2: killed",), why="a worker was lost", since_seconds=0.25),
)


def test_a_message_arrives_as_it_was():
    ready = Ready(generation=2, place=TrainingPosition(12, 1), valid=True, digest="d1", stall_timeout=120.0)
    assert from_worker(encode(ready)) == ready
    entered = from_driver(encode(EnterWorld(world=WORLD)))
    assert entered.world == WORLD
    assert entered.world.root == TrainingPosition(12, 2)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"NoSuchMessage {}",
        b'Formed {"generation": "two"}',
        b"Formed \xff\xfe",
        b"Formed " + b"[" * 100_000,
    ],
)
def test_what_is_no_message_of_a_worker_is_dropped(line):
    assert from_worker(line) is None


def test_each_world_has_a_key_of_its_own():
    keys = {
        world_key("job", 1, "a"),
        world_key("job", 2, "a"),
        world_key("job", 1, "b"),
        world_key("b", 1, "a"),
    }
    assert len(keys) == 4
    variables = WORLD.environment("job")
    assert variables["HOROVOD_RENDEZVOUS_KEY"] == world_key("job", 3, "5a17")
    assert (variables["HOROVOD_RANK"], variables["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("1", "4000")
