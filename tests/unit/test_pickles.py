"""Where Python's pickles are read: by a worker's own reader processes, over what only they have open."""

import ast
from pathlib import Path

import numpy as np
import psutil

import hvdtrain
from hvdtrain.data.datasets import ArrayDataset
from hvdtrain.data.readers import Readers

PACKAGE = Path(hvdtrain.__file__).parent
SERIALIZERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "copyreg", "joblib", "multiprocessing"}
# a worker and its readers; launch() and its workers, with the job's key; the class of torch.load's error
ALLOWED = {"data/serialization.py", "data/readers.py", "jobs/launch.py"}
ALLOWED |= {"backends/torch/export.py"}
ALLOWED |= {"host/start_reports.py"}  # multiprocessing's Finalize and parent_process, which read nothing
# Horovod's functions that unpickle what another worker sends
OF_HOROVOD = {
    *("broadcast_object", "broadcast_object_fn", "allgather_object", "broadcast_optimizer_state"),
    *("elastic", "run", "BroadcastGlobalVariablesCallback", "TorchState", "TensorFlowKerasState"),
}
# mpi4py's, which pickle what is no buffer; those for buffers have a capital letter
OF_MPI = {"send", "isend", "recv", "irecv", "bcast", "gather", "allgather", "scatter", "alltoall", "sendrecv"}


def imported(node):
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def test_no_other_module_loads_a_serializer_or_calls_what_unpickles_what_another_process_sends():
    owners = {"hvd": OF_HOROVOD, "self._hvd": OF_HOROVOD, "self.world": OF_MPI, "MPI.COMM_WORLD": OF_MPI}
    load, call = set(), []
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if SERIALIZERS & imported(node):
                load.add(name)
            if isinstance(node, ast.Attribute) and node.attr in OF_HOROVOD | OF_MPI:
                call += [name] if node.attr in owners.get(ast.unparse(node.value), ()) else []
    assert load == ALLOWED
    assert not call


def test_readers_have_no_socket_and_no_memory_that_another_process_can_open():
    data = {"train_data": ArrayDataset({"inputs": np.zeros((40_000, 3), np.float32)})}
    before = psutil.Process().net_connections("all")
    with Readers(data, processes=2) as readers:
        for _ in readers.pids:
            readers.fetch_from("train_data")(np.arange(3), None)
        processes = [psutil.Process(), *map(psutil.Process, readers.pids)]
        sockets = [one for process in processes for one in process.net_connections("all")]
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in readers.pids]
    assert len(sockets) - len(before) == 4  # a pair for each
    assert {one.laddr for one in sockets if one.laddr} == {one.laddr for one in before if one.laddr}
    assert all("/memfd:hvdtrain" in text for text in maps)
    assert not any("/dev/shm/" in text for text in maps)
