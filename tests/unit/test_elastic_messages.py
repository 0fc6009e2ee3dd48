"""Messages of elastic jobs: what is sent arrives as it was; anything else is dropped."""

from support.elastic_driver import world

from hvdtrain.elastic.messages import EnterWorld, Ready, encode, from_driver, from_worker
from hvdtrain.workers.world import Change, MemberInfo, TrainingPosition, world_key

ROOT = MemberInfo(worker="w0", rank=0, host="h1", pid=7, place=TrainingPosition(12, 2))
CHANGE = Change(left=("rank 2 on h2: killed",), why="a worker was lost", since_seconds=0.25)
WORLD = world(3, 1, source="root", members=(ROOT,), change=CHANGE)


def test_a_message_arrives_as_it_was():
    ready = Ready(generation=2, place=TrainingPosition(12, 1), valid=True, digest="d1", stall_timeout=120.0)
    assert from_worker(encode(ready)) == ready
    entered = from_driver(encode(EnterWorld(world=WORLD)))
    assert entered.world == WORLD
    assert entered.world.root == TrainingPosition(12, 2)


def test_what_is_no_message_of_a_worker_is_dropped():
    nonsense = (b'Formed {"generation": "two"}', b"Formed \xff\xfe", b"Formed " + b"[" * 100_000)
    for line in (b"", b"NoSuchMessage {}", *nonsense):
        assert from_worker(line) is None


def test_each_world_has_a_key_of_its_own():
    parts = [("job", 1, "a"), ("job", 2, "a"), ("job", 1, "b"), ("b", 1, "a")]
    assert len({world_key(*one) for one in parts}) == 4
    variables = WORLD.environment("job")
    assert variables["HOROVOD_RENDEZVOUS_KEY"] == world_key("job", 3, "salt")
    assert (variables["HOROVOD_RANK"], variables["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("1", "4321")
