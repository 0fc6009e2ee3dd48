"""The longer texts of the edit table: what stands in Horovod's source, and what is to stand there."""

# The file, at the root of the source tree, that says what is being built. CMake copies it into
# horovod/metadata.json, where `installed_build` reads it.
RECORD_FILE = "hvdtrain-build.json"

METADATA_OLD = """\
file(APPEND "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/metadata.json" "\\"dummy\\": \\"none\\"\\n}")"""

METADATA_NEW = """\
set(HVD_METADATA "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/metadata.json")
foreach(HVD_PART MPI GLOO NCCL DDL CCL)
    set(HVD_BUILT "false")
    if(HAVE_${HVD_PART})
        set(HVD_BUILT "true")
    endif()
    string(TOLOWER "${HVD_PART}" HVD_PART)
    file(APPEND "${HVD_METADATA}" "\\"have_${HVD_PART}\\": ${HVD_BUILT},\\n")
endforeach()
file(READ "${PROJECT_SOURCE_DIR}/hvdtrain-build.json" HVDTRAIN_BUILD)
file(APPEND "${HVD_METADATA}" "\\"hvdtrain\\": ${HVDTRAIN_BUILD},\\n")
file(APPEND "${HVD_METADATA}" "\\"dummy\\": \\"none\\"\\n}")"""

CHECK_EXTENSION = '''\
def _check_extension_lambda(ext_base_name, fn, fn_desc, verbose):
    """
    Tries to load the extension in a new process.  If successful, puts fn(ext)
    to the queue or False otherwise.  Mutes all stdout/stderr.
    """
'''

RECORDED = '''\
_RECORDED = {'built with MPI': 'have_mpi', 'built with Gloo': 'have_gloo', 'built with NCCL': 'have_nccl',
             'built with DDL': 'have_ddl', 'built with CCL': 'have_ccl'}
_RECORDED_FRAMEWORKS = {'tensorflow': 'tensorflow', 'torch': 'pytorch', 'mxnet': 'mxnet'}


def _recorded(ext_base_name, fn_desc):
    """What the build wrote into metadata.json about fn_desc; None where it says nothing."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'metadata.json')
    try:
        with open(path) as f:
            metadata = json.load(f)
    except (OSError, ValueError):
        return None
    if fn_desc == 'built' and 'have_gloo' in metadata:
        return _RECORDED_FRAMEWORKS.get(ext_base_name) in metadata
    return metadata.get(_RECORDED.get(fn_desc))


'''

ASK_RECORD = """\
    recorded = _recorded(ext_base_name, fn_desc)
    if recorded is not None:
        return recorded
"""

TERMINATE_OLD = """\
    # Terminate children gracefully.
    for child in p.children():
        try:
            child.terminate()
        except psutil.NoSuchProcess:
            pass

    # Wait for graceful termination.
    gone, alive = psutil.wait_procs(p.children(), timeout=GRACEFUL_TERMINATION_TIME_S)

    # Freeze the process to prevent it from spawning any new children.
    try:
        p.send_signal(signal.SIGSTOP)
    except psutil.NoSuchProcess:
        pass
"""

TERMINATE_NEW = """\
    # Some shells replace themselves with the last command: then p is the worker, not its parent.
    try:
        is_shell = p.cmdline()[:2] == ['/bin/sh', '-c']
        workers = (p.children() if is_shell else []) or [p]
    except psutil.NoSuchProcess:
        return

    # Terminate the workers gracefully.
    for worker in workers:
        try:
            worker.terminate()
        except psutil.NoSuchProcess:
            pass

    # Wait for graceful termination.
    alive = _wait_without_reaping(workers, GRACEFUL_TERMINATION_TIME_S)

    # The shell ends by itself, with the exit status of its command, unless it has more to do.
    if not alive and not _wait_without_reaping([p], 1):
        return

    # Freeze the process to prevent it from spawning any new children.
    try:
        p.send_signal(signal.SIGSTOP)
    except psutil.NoSuchProcess:
        pass
"""

KILL_OLD = """\
    # Kill shell itself.
    try:
        p.terminate()
    except psutil.NoSuchProcess:
        pass

    try:
        p.wait(timeout=GRACEFUL_TERMINATION_TIME_S)
    except psutil.TimeoutExpired:
        try:
            p.kill()
        except psutil.NoSuchProcess:
            pass
"""

KILL_NEW = """\
    # Kill shell itself; being stopped, it would not take a SIGTERM.
    try:
        p.kill()
    except psutil.NoSuchProcess:
        pass
"""

GRACE_OLD = """\
GRACEFUL_TERMINATION_TIME_S = 5


"""

GRACE_NEW = '''\
GRACEFUL_TERMINATION_TIME_S = float(os.environ.get('HOROVOD_GRACEFUL_TERMINATION_SECONDS', 5))


def _wait_without_reaping(processes, timeout):
    """
    Waits until the processes have ended and returns those that have not. Unlike
    psutil.wait_procs, it leaves the exit status to the thread that waits for the process.
    """
    deadline = time.monotonic() + timeout

    def runs(process):
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    while True:
        processes = [process for process in processes if runs(process)]
        if not processes or time.monotonic() >= deadline:
            return processes
        time.sleep(0.02)


'''

FAILURE_CLASS = '''\
class WorkerFailedError(RuntimeError):
    """A worker ended with a non-zero exit code; horovodrun ends with the same."""

    def __init__(self, name, exit_code):
        super().__init__('Horovod detected that one or more processes exited with non-zero '
                         'status, thus causing the job to be terminated. The first process '
                         'to do so was:\\nProcess name: {name}\\nExit code: {code}\\n'
                         .format(name=name, code=exit_code))
        self.name = name
        self.exit_code = exit_code


def _pad_rank(rank, size):
'''

FAILURE_STATIC = """\
            raise RuntimeError('Horovod detected that one or more processes exited with non-zero '
                               'status, thus causing the job to be terminated. The first process '
                               'to do so was:\\nProcess name: {name}\\nExit code: {code}\\n'
                               .format(name=name, code=exit_code))
"""

FAILURE_ELASTIC = """\
                raise RuntimeError('Horovod detected that one or more processes exited with non-zero '
                                   'status, thus causing the job to be terminated. The first process '
                                   'to do so was:\\nProcess name: {name}\\nExit code: {code}\\n'
                                   .format(name=name, code=exit_code))
"""

CUDA_OLD = """\
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
"""

CUDA_NEW = """\
if(DEFINED HOROVOD_GPU_OPERATIONS)
    check_language(CUDA)
endif()
if(DEFINED HOROVOD_GPU_OPERATIONS AND NOT CMAKE_CUDA_COMPILER)
"""

RUN_COMMANDLINE = """\
    try:
        _run(args)
    except WorkerFailedError as failure:
        print(f'horovodrun: worker {failure.name} was the first to fail, with exit code {failure.exit_code}.',
              file=sys.stderr)
        sys.exit(failure.exit_code)


if __name__ == '__main__':
"""
