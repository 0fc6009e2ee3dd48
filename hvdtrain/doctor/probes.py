"""Load native libraries in child processes, since loading them may crash the process."""

import json
import os
import signal
import sys
from typing import Any

from hvdtrain.host.processes import run_limited

_PREFIX = "hvdtrain-probe:"
# Each one sets `info`, which is printed after the prefix; what the framework itself prints is ignored.
_CODE = {
    "torch": """
import json, torch, horovod.torch
info = {"version": torch.__version__}
if torch.cuda.is_available():
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    info["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
    info["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    info["no_peer_access"] = [p for p in pairs if not torch.cuda.can_device_access_peer(*p)]
""",
    "tf": """
import json, tensorflow, horovod.tensorflow
info = {"version": tensorflow.__version__}
gpus = tensorflow.config.list_physical_devices("GPU")
if gpus:
    info["gpus"] = [gpu.name for gpu in gpus]
""",
    "mpi4py": """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
info = {"version": MPI.Get_library_version().split(",")[0].strip()}
""",
}
# With the launcher's variables, the probe would join the launcher's job.
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HOROVOD_", "SLURM_")


def probe(name: str, seconds: float) -> dict[str, Any]:
    """Load a framework with Horovod's extension for it ("torch", "tf"), or "mpi4py".

    Returns:
        Its version and what it reports about GPUs, or ``{"error": why it cannot be loaded}``.
    """
    return run_probe(_CODE[name], seconds)


def run_probe(code: str, seconds: float) -> dict[str, Any]:
    """Run code that imports json and sets ``info`` to a mapping, in a child process.

    Returns:
        The mapping, or ``{"error": why the process did not get there}``.
    """
    code = f"{code}\nprint({_PREFIX!r} + json.dumps(info), flush=True)"
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHER_PREFIXES)}
    environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        done = run_limited([sys.executable, "-c", code], seconds, environ)
    except OSError as error:
        return {"error": f"{sys.executable} cannot be started: {error.strerror}"}
    if done.code is None:
        return {"error": f"loading it took longer than {seconds:.0f} s"}
    for line in done.output.splitlines():
        if line.startswith(_PREFIX):
            info: dict[str, Any] = json.loads(line.removeprefix(_PREFIX))
            return info
    if done.code < 0:
        return {"error": f"loading it ended with {signal.Signals(-done.code).name}"}
    lines = [line.strip() for line in done.errors.splitlines() if line.strip()]
    return {"error": lines[-1][:300] if lines else f"loading it ended with exit code {done.code}"}
