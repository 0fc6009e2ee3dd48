"""Jobs in a run directory at a URL whose files a test writes, and what the store has of them then."""

import json

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.remote.stored_checkpoints import StoredCheckpoints
from hvdtrain.checkpoints.remote.uploader import Retention, Uploader
from hvdtrain.storage.urls import Patience
from support.states import make_record, saved

ONCE = Patience(stall_seconds=5, tries=1)


class Job:
    """A job in a run directory at a URL, whose files a test writes."""

    def __init__(self, store, folder, resume="", *, start=0, keep_last=None, goal=None, spared=()):
        self.folder, self.notes = folder, []
        folder.mkdir(parents=True, exist_ok=True)
        self.uploader = Uploader(
            store.url, folder, Retention(keep_last, goal, spared), self.notes.append, ONCE
        )
        try:
            self.begun = self.uploader.begin(resume)
        except Exception:
            self.uploader.close()
            raise
        if start is not None:
            self.uploader.start(start)

    def save(self, step, value=1.0, url="faulty://bucket/run", **fields):
        config = make_record().config | {"run_dir": url}
        with (self.folder / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"step": step}) + "\n")
        return saved(self.folder / "checkpoints", step, value, config=config, **fields)

    def killed(self):
        self.uploader.claim.release()
        self.uploader.copy.unlock()

    def end(self):
        self.uploader.round(is_last=True)
        self.uploader.close()


def stored(store):
    """Return the steps of the checkpoints in the store that verify."""
    found = StoredCheckpoints(store.url)
    return [int(name[5:]) for name in found.names() if found.manifest(name) is not None]


def verified(store, folder):
    """Download all checkpoints that have a manifest; each must be whole."""
    for step in stored(store):
        StoredCheckpoints(store.url).fetch(storage.name_of(step), folder)
    return stored(store)
