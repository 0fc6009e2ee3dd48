"""Jobs in a run directory at a URL whose files a test writes, and what the store has of them then."""

import json

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.remote.run_store import RunStore
from hvdtrain.checkpoints.remote.stored_checkpoints import fetch, manifest_of, names_in
from support.states import make_record, saved


class Stepped(RunStore):
    """Uploads when a test calls ``round``, without threads."""

    def work(self):
        pass

    def beat(self, claim):
        pass


class Job:
    """A job in a run directory at a URL, whose files a test writes."""

    def __init__(self, store, folder, resumes=False, *, start=0, keep_last=None, goal=None):
        self.folder = folder
        self.uploader = Stepped(store.url, folder, keep_last, goal)
        try:
            self.notes = self.uploader.begin(resumes)
        except Exception:
            self.uploader.close(0.0)
            raise
        if start is not None:
            self.uploader.start(start)

    def round(self, **options):
        """Do what the thread does again and again."""
        try:
            self.uploader.round(**options)
        finally:
            self.notes += self.uploader.notes()

    def save(self, step, value=1.0, url="faulty://bucket/run", **fields):
        config = make_record().config | {"run_dir": url}
        with (self.folder / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"step": step}) + "\n")
        return saved(self.folder / "checkpoints", step, value, config=config, **fields)

    def killed(self):
        self.uploader.claim.release()

    def end(self):
        self.round(is_last=True)
        assert self.uploader.close(0.0)


def stored(store):
    """Return the steps of the checkpoints in the store that verify."""
    folder = f"{store.url}/checkpoints"
    return [int(name[5:]) for name in names_in(folder) if manifest_of(f"{folder}/{name}") is not None]


def verified(store, folder):
    """Download all checkpoints that have a manifest; each must be whole."""
    for step in stored(store):
        fetch(f"{store.url}/checkpoints/{storage.name_of(step)}", folder)
    return stored(store)
