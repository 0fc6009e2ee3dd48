"""The edits that Horovod 0.28.1 needs to compile and to behave on today's frameworks.

Each is as small as it can be. The same table, for readers, is in docs/horovod.md; a test
compares the names.
"""

from hvdtrain.horovod_build import edit_ending_texts as ending
from hvdtrain.horovod_build import edit_launcher_texts as launcher
from hvdtrain.horovod_build import edit_texts as texts
from hvdtrain.horovod_build.edit_hosts import HOST_EDITS
from hvdtrain.horovod_build.edits import Edit

EDITS: tuple[Edit, ...] = (
    Edit(
        name="C++17",
        file="CMakeLists.txt",
        find="set(CMAKE_CXX_STANDARD 14)",
        replacement="set(CMAKE_CXX_STANDARD 17)",
        why="The headers of PyTorch from 2.1 on, and those of TensorFlow, are C++17.",
        upstream="horovod/horovod#3996, fixed after the last release by horovod/horovod#3998",
    ),
    Edit(
        name="C++17 for PyTorch",
        file="horovod/torch/CMakeLists.txt",
        find="    set(CMAKE_CXX_STANDARD 14)",
        replacement="    set(CMAKE_CXX_STANDARD 17)",
        why="The part for PyTorch sets the standard a second time.",
        upstream="horovod/horovod#3996, fixed after the last release by horovod/horovod#3998",
    ),
    Edit(
        name="no XLA operation",
        file="horovod/tensorflow/CMakeLists.txt",
        find='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        replacement="",
        why="It includes headers that TensorFlow's package no longer has. It only serves an "
        "all-reduce inside an XLA cluster, which is off unless asked for.",
        upstream="tensorflow/tensorflow#90026, horovod/horovod#4302",
    ),
    Edit(
        name="streams of TensorFlow",
        file="horovod/tensorflow/mpi_ops.cc",
        find=texts.TF_STREAM_OLD,
        replacement=texts.TF_STREAM_NEW,
        why="With NCCL, the extension asked TensorFlow's library for a function that is gone, and could "
        "not be loaded.",
        upstream="none found",
    ),
    Edit(
        name="cstdint",
        file="CMakeLists.txt",
        find="-pthread -fPIC -Wall -ftree-vectorize",
        replacement="-pthread -fPIC -Wall -ftree-vectorize -include cstdint",
        why="The bundled Gloo uses uint8_t without its header, which newer GCCs do not forgive.",
        upstream="pytorch/pytorch#153933, pytorch/gloo#448",
    ),
    Edit(
        name="no debug information",
        file="CMakeLists.txt",
        find='string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
        replacement='string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
        why="Debug information is nine tenths of each extension, and takes time to write.",
        upstream="none found",
    ),
    Edit(
        name="CUDA on request",
        file="CMakeLists.txt",
        find=texts.CUDA_OLD,
        replacement=texts.CUDA_NEW,
        why="A build for CPUs must not depend on a CUDA compiler that happens to be installed.",
        upstream="none found",
    ),
    Edit(
        name="CUDA for PyTorch on request",
        file="horovod/torch/CMakeLists.txt",
        find="elseif (Pytorch_CUDA AND NOT HAVE_CUDA)",
        replacement="elseif (FALSE)",
        why="Beside a CUDA build of PyTorch, CUDA code was compiled without being asked for.",
        upstream="none found",
    ),
    Edit(
        name="relative library paths",
        file="CMakeLists.txt",
        find="create_metadata()\n",
        replacement="create_metadata()\n\nset(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\n"
        'set(CMAKE_INSTALL_RPATH "$ENV{HVDTRAIN_RPATH}")\n',
        why="The extensions held the absolute path of the environment that they were built in, "
        "so that a wheel worked in no other one.",
        upstream="none found",
    ),
    Edit(
        name="record of the build",
        file="CMakeLists.txt",
        find=texts.METADATA_OLD,
        replacement=texts.METADATA_NEW,
        why="What a build can do is written beside it, for horovodrun and hvdtrain to read.",
        upstream="none found",
    ),
    Edit(
        name="reading the record",
        file="horovod/common/util.py",
        find=texts.CHECK_EXTENSION,
        replacement=texts.RECORDED + texts.CHECK_EXTENSION + texts.ASK_RECORD,
        why="horovodrun imported TensorFlow in a child process to see which controllers there "
        "are: seconds, and lines of log, before anything starts. And --check-build said that "
        "PyTorch is available where it is not.",
        upstream="none found",
    ),
    Edit(
        name="sysconfig",
        file="horovod/torch/CMakeLists.txt",
        find="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        replacement="import sysconfig; print(sysconfig.get_paths()['include'])",
        why="Python 3.12 has no distutils.",
        upstream="none found",
    ),
    Edit(
        name="shutil.which",
        file="horovod/runner/js_run.py",
        find="from distutils.spawn import find_executable\n",
        replacement="from shutil import which as find_executable\n",
        why="Python 3.12 has no distutils; without setuptools, horovodrun did not start.",
        upstream="none found",
    ),
    Edit(
        name="two dashes",
        file="horovod/runner/mpi_run.py",
        find="_NO_BINDING_ARGS = ['-bind-to none', '-map-by slot']",
        replacement="_NO_BINDING_ARGS = ['--bind-to none', '--map-by slot']",
        why="Open MPI 5 does not know long options with one dash. Open MPI 4 takes both.",
        upstream="open-mpi/ompi#10480",
    ),
    Edit(
        name="imports for mpirun",
        file="horovod/runner/mpi_run.py",
        find="import copy\nimport os\nimport sys\n",
        replacement="import copy\nimport ctypes\nimport os\nimport signal\nimport subprocess\nimport sys\n"
        "import threading\nimport time\n\nimport psutil\n",
        why="For the next edits.",
        upstream="none found",
    ),
    Edit(
        name="running mpirun",
        file="horovod/runner/mpi_run.py",
        find="def mpi_run(settings, nics, env, command, stdout=None, stderr=None):\n",
        replacement=launcher.MPIRUN_FUNCTION,
        why="mpirun kills its workers 0.3 seconds after a SIGTERM, which is too soon to save, and no "
        "setting changes it. But it passes SIGUSR2 on.",
        upstream="none found",
    ),
    Edit(
        name="mpirun as a child",
        file="horovod/runner/mpi_run.py",
        find="os.execve('/bin/sh', ['/bin/sh', '-c', mpirun_command], env)",
        replacement="sys.exit(_run_and_pass_signals_on(mpirun_command, env))",
        why="horovodrun became a shell that waits for mpirun. SIGTERM ended the shell and left "
        "mpirun and the workers running.",
        upstream="none found (the shell came with horovod/horovod#931)",
    ),
    Edit(
        name="a worker's failure",
        file="horovod/runner/gloo_run.py",
        find="def _pad_rank(rank, size):\n",
        replacement=launcher.FAILURE_CLASS,
        why="The exit code of the worker that failed was only in the text of a RuntimeError.",
        upstream="none found (the error came with horovod/horovod#1376)",
    ),
    Edit(
        name="a worker's failure, elastic",
        file="horovod/runner/gloo_run.py",
        find=launcher.FAILURE_ELASTIC,
        replacement="                raise WorkerFailedError(name, exit_code)\n",
        why="As above, in elastic jobs.",
        upstream="none found",
    ),
    Edit(
        name="a worker's failure, fixed size",
        file="horovod/runner/gloo_run.py",
        find=launcher.FAILURE_STATIC,
        replacement=launcher.FAILED_ON_HOST,
        why="As above, in jobs of a fixed size.",
        upstream="none found",
    ),
    Edit(
        name="exit code import",
        file="horovod/runner/launch.py",
        find="from horovod.runner.gloo_run import gloo_run, gloo_run_elastic\n",
        replacement="from horovod.runner.gloo_run import STOPPED, WorkerFailedError, gloo_run, "
        "gloo_run_elastic\n",
        why="For the next edits.",
        upstream="none found",
    ),
    Edit(
        name="signal import",
        file="horovod/runner/launch.py",
        find="import os\nimport sys\nimport textwrap\n",
        replacement="import os\nimport signal\nimport sys\nimport textwrap\nimport traceback\n",
        why="For the next edit.",
        upstream="none found",
    ),
    Edit(
        name="exit code",
        file="horovod/runner/launch.py",
        find="    _run(args)\n\n\nif __name__ == '__main__':\n",
        replacement=launcher.RUN_COMMANDLINE,
        why="horovodrun --gloo ended with a traceback and exit code 1 whatever the worker's was.",
        upstream="none found",
    ),
    Edit(
        name="signals over Gloo",
        file="horovod/runner/gloo_run.py",
        find=ending.SHUTDOWN_OLD,
        replacement=ending.SHUTDOWN_NEW,
        why="SIGUSR1 and SIGUSR2 ended horovodrun, and Ctrl-C reached the workers as SIGTERM.",
        upstream="none found",
    ),
    Edit(
        name="a worker that stopped",
        file="horovod/runner/gloo_run.py",
        find=ending.SAID_OLD,
        replacement=ending.SAID_NEW,
        why="A worker that stops on request ends with exit code 75, which is no failure.",
        upstream="none found",
    ),
    Edit(
        name="the others of a worker that stopped",
        file="horovod/runner/gloo_run.py",
        find=ending.REMAINING_OLD,
        replacement=ending.REMAINING_NEW,
        why="They stop as well, and need the time for it; where all were asked, nobody is asked again.",
        upstream="none found",
    ),
    Edit(
        name="grace time",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find=ending.GRACE_OLD,
        replacement=ending.GRACE_NEW,
        why="Five seconds may be too few for a worker that is asked to stop to save its state; for "
        "the others of one that failed they are enough.",
        upstream="none found",
    ),
    Edit(
        name="SIGTERM for the worker",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find=ending.TERMINATE_OLD,
        replacement=ending.TERMINATE_NEW,
        why="Where the shell had replaced itself with the worker (bash does), the worker never "
        "got a SIGTERM; and its exit status could be lost to a second waiter.",
        upstream="none found (the code came with horovod/horovod#1915)",
    ),
    Edit(
        name="SIGKILL for the shell",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find=ending.KILL_OLD,
        replacement=ending.KILL_NEW,
        why="The stopped shell was sent a SIGTERM, which a stopped process does not take, and "
        "five seconds passed before the SIGKILL.",
        upstream="none found (the code came with horovod/horovod#1915)",
    ),
    Edit(
        name="a deaf middleman",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find=ending.MIDDLEMAN_OLD,
        replacement=ending.MIDDLEMAN_NEW,
        why="Where a scheduler signalled all processes, the one between horovodrun and the worker ended "
        "first, and the worker's exit code was lost.",
        upstream="none found",
    ),
    Edit(
        name="the middleman's orders",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find=ending.PARENT_OLD,
        replacement=ending.PARENT_NEW,
        why="A middleman could only be told to end its worker, with one signal and one grace time for "
        "all reasons.",
        upstream="none found",
    ),
    Edit(
        name="orders for middlemen",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find=ending.PIPES_OLD,
        replacement=ending.PIPES_NEW,
        why="As above: the part of horovodrun.",
        upstream="none found",
    ),
    Edit(
        name="orders by event",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find=ending.EVENTS_OLD,
        replacement=ending.EVENTS_NEW,
        why="As above: a user's or scheduler's wish is told from a failure.",
        upstream="none found",
    ),
    Edit(
        name="no orders after the end",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find=ending.JOINED_OLD,
        replacement=ending.JOINED_NEW,
        why="As above: a middleman that has ended is told nothing.",
        upstream="none found",
    ),
    *HOST_EDITS,
)
