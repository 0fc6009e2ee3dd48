"""Runs and checkpoints in an object store, for those who read them from elsewhere."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from support.object_store import client_environment, object_store
from support.states import equal, make_state, saved
from support.stored_runs import SUMMARY, evaluation, lines_of, make_run, window

from hvdtrain.checkpoints.remote import fetched
from hvdtrain.checkpoints.remote.fetched import FetchedRun
from hvdtrain.cli import cli
from hvdtrain.errors import CheckpointError, UsageError
from hvdtrain.jobs.serving.checkpoint import chosen_checkpoint
from hvdtrain.jobs.serving.outputs import (
    check_not_there,
    local_file,
    place_of,
    put_into_place,
    size_of,
    written_beside,
)
from hvdtrain.storage import urls as object_lines
from hvdtrain.storage import urls as object_urls
from hvdtrain.storage.text import printable
from hvdtrain.storage.urls import ChangedObjectError, append_line
from hvdtrain.tools.report.followed_run import FollowedRun, Kind

pytest.importorskip("s3fs")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def server():
    with object_store() as store, client_environment(store):
        object_urls.entries(store.url("nothing"))  # its thread is there before those of tests are counted
        yield store


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    yield server
    server.proxy.heal()


@pytest.fixture
def url(store, request, tmp_path):
    """Return the URL of a run with three checkpoints."""
    run = make_run(tmp_path / "made", window(1), evaluation(2))
    for step in (1, 2, 3):
        saved(run / "checkpoints", step, value=step, metrics={"loss": abs(step - 2) + 0.5})
    store.put_folder(run, request.node.name)
    return store.url(request.node.name)


def key(url):
    return url.partition("://bucket/")[2]


@pytest.mark.parametrize("named", ["", "/checkpoints", "/checkpoints/step-00000003"])
def test_a_checkpoint_is_fetched_and_verified(url, named):
    found = fetched.locate(url + named)
    assert found.manifest.step == 3
    assert equal(found.read(), make_state(3))
    assert printable(f"of {found.path}") == f"of {url}/checkpoints/step-00000003"
    assert fetched.run_place_of(found) == url


def test_the_best_one_is_chosen(url):
    assert chosen_checkpoint(url, "loss") == f"{url}/checkpoints/step-00000002"
    assert chosen_checkpoint(url, False) == url
    with pytest.raises(CheckpointError, match="nothing"):
        chosen_checkpoint(url, "nothing")


def test_one_without_a_manifest_does_not_exist_and_a_damaged_one_is_passed_over(store, url):
    object_urls.remove(f"{url}/checkpoints/step-00000003/trainer.json")
    store.put(f"{key(url)}/checkpoints/step-00000002/model.safetensors", b"damaged")
    found = fetched.locate(url)
    assert found.manifest.step == 1
    assert "step-00000002" in found.damaged[0]
    assert len(found.damaged) == 1
    for named in ("3", "2"):
        with pytest.raises(CheckpointError, match=f"step-0000000{named}"):
            fetched.locate(f"{url}/checkpoints/step-0000000{named}")


def test_a_run_of_elsewhere_is_compared_and_reported(store, url, tmp_path):
    store.put_folder(make_run(tmp_path / "second", window(1), evaluation(5)), f"{key(url)}-runs/b")
    store.put_folder(make_run(tmp_path / "third", window(1), evaluation(4)), f"{key(url)}-runs/a")
    store.put(f"{key(url)}-runs/other/file", b"")
    shown = CliRunner().invoke(cli, ["compare", url, f"{url}-runs", "--csv"])
    assert shown.exit_code == 0, shown.output
    rows = shown.stdout.splitlines()
    assert [row.partition(",")[0] for row in rows[1:]] == [key(url), "a", "b"]
    assert "0.8000" not in rows[0]
    assert "0.8" in rows[3]
    store.put(f"{key(url)}/provenance.jsonl", b'{"step": 2, "time": "2026-01-02T03:04:05+00:00"}\n')
    page = tmp_path / "report.html"
    shown = CliRunner().invoke(cli, ["report", url, "-o", str(page)])
    assert shown.exit_code == 0, shown.output
    text = page.read_text()
    assert url in text
    assert "step-00000003" in text
    assert "not checked" in text
    assert "resumed after step 2" in text
    assert str(tmp_path / "cache") not in text


def test_a_run_is_followed_while_it_grows_is_cut_back_and_ends(store, url):
    copy = FetchedRun(url)
    followed = FollowedRun(copy.path, copy)
    object_urls.remove(f"{url}/summary.json")
    assert followed.poll().kind is Kind.RUNNING
    assert followed.progress.step == 2
    log = f"{key(url)}/metrics.jsonl"
    store.put(log, lines_of(window(1), evaluation(2), window(3)).encode())
    followed.poll()
    assert (followed.progress.step, followed.cut_step) == (3, None)
    store.put(log, lines_of(window(1), window(2, loss=7.0)).encode())
    followed.poll()
    assert followed.progress.step == 2
    assert followed.cut_step == 1
    store.put(f"{key(url)}/summary.json", json.dumps(SUMMARY).encode())
    assert followed.poll().kind is Kind.ENDED


def test_outputs_are_uploaded_whole_and_replace_nothing(store, request):
    url = place_of(store.url(request.node.name, "model.npz/"))
    check_not_there(url, force=False)
    with written_beside(url) as path:
        path.write_bytes(b"1" * 10)
        path.with_name("model.npz.data").write_bytes(b"22")
        put_into_place(path, url)
    assert not path.parent.exists()
    folder = key(url).rpartition("/")[0]
    assert store.objects(folder) == {f"{folder}/model.npz": b"1" * 10, f"{folder}/model.npz.data": b"22"}
    assert size_of(url) == 10
    with pytest.raises(UsageError, match="exists"):
        check_not_there(url, force=False)
    check_not_there(url, force=True)
    with pytest.raises(UsageError, match="directory"):
        check_not_there(store.url(folder), force=True)


def test_a_folder_takes_the_place_of_an_older_one(store, request):
    url = store.url(request.node.name, "model")
    for names in (("saved_model.pb", "variables/old"), ("saved_model.pb", "variables/new")):
        with written_beside(url) as path:
            for name in names:
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(name.encode())
            put_into_place(path, url)
    assert {name.rpartition("/")[2] for name in store.objects(key(url))} == {"saved_model.pb", "new"}
    assert size_of(url) == len("saved_model.pb") + len("variables/new")
    check_not_there(url, force=True, may_be_folder=True)


def test_lines_that_are_appended_at_once_are_all_there(store, request):
    url, lines = store.url(request.node.name), [f"line {number}\n".encode() for number in range(12)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda line: append_line(url, line), lines))
    found = store.objects(key(url))[key(url)]
    assert sorted(found.splitlines(keepends=True)) == sorted(lines)


def test_a_line_whose_answer_is_lost_is_there_once(store, request, monkeypatch):
    url, before, lost = store.url(request.node.name), object_lines.write, []

    def lose_the_first_answer(*arguments, **options):
        before(*arguments, **options)
        if not lost:
            lost.append(1)
            raise ChangedObjectError("the request was sent again")

    append_line(url, b"one\n")
    monkeypatch.setattr(object_lines, "write", lose_the_first_answer)
    append_line(url, b"two\n")
    assert lost
    assert store.objects(key(url)) == {key(url): b"one\ntwo\n"}


def test_a_file_of_weights_is_fetched_for_a_while(store, request, tmp_path):
    store.put("weights/model.weights.h5", b"weights")
    with local_file(store.url("weights/model.weights.h5")) as path:
        assert path.name == "model.weights.h5"
        assert path.read_bytes() == b"weights"
    assert not path.exists()
    with pytest.raises(CheckpointError, match=r"nothing\.h5"), local_file(store.url("nothing.h5")):
        pass
    with local_file(tmp_path) as path:
        assert path == tmp_path
