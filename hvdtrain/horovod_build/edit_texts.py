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
    try:
        workers = _workers_of(p)
    except psutil.NoSuchProcess:
        return

    # Terminate the workers gracefully.
    for worker in workers:
        try:
            if not (spare_ssh and _is_ssh(worker)):
                worker.send_signal(signum)
        except psutil.NoSuchProcess:
            pass

    # Wait for graceful termination.
    alive = _wait_without_reaping(workers, grace_s)

    # The shell ends by itself, with the exit status of its command, unless it has more to do.
    if not alive and not _wait_without_reaping([p], 1):
        return

    # Freeze the process to prevent it from spawning any new children.
    try:
        p.send_signal(signal.SIGSTOP)
    except psutil.NoSuchProcess:
        pass
"""

MIDDLEMAN_OLD = """\
    os.setsid()

    executor_shell = subprocess.Popen(command, shell=True, env=env,
                                      stdout=stdout_w, stderr=stderr_w)
"""

MIDDLEMAN_NEW = """\
    os.setsid()

    # Some schedulers signal every process of a job. This one has the worker's exit code to report.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda signum, frame: None)

    executor_shell = subprocess.Popen(command, shell=True, env=env,
                                      stdin=None if stdin_data is None else subprocess.PIPE,
                                      stdout=stdout_w, stderr=stderr_w)

    def write_stdin():
        try:
            with executor_shell.stdin as stdin:
                stdin.write(stdin_data.encode())
        except OSError:
            pass  # the command has ended before it has read all

    if stdin_data is not None:
        in_thread(write_stdin)
"""

PARENT_OLD = """\
    def kill_executor_children_if_parent_dies():
        # This read blocks until the pipe is closed on the other side
        # due to parent process termination (for any reason, including -9).
        os.read(r.fileno(), 1)
        terminate_executor_shell_and_children(executor_shell.pid)

    in_thread(kill_executor_children_if_parent_dies)
"""

PARENT_NEW = """\
    def follow_parent():
        # The parent writes numbers of signals. The pipe is closed on the other side
        # due to parent process termination (for any reason, including -9).
        while True:
            number = os.read(r.fileno(), 1)
            if not number:
                break
            in_thread(_pass_signal_on, args=(executor_shell.pid, number[0]))
        terminate_executor_shell_and_children(executor_shell.pid, grace_s=GRACEFUL_TERMINATION_TIME_S)

    in_thread(follow_parent)
"""

PIPES_OLD = """\
def _create_event(ctx):
"""

PIPES_NEW = '''\
_worker_pipes = set()


def pass_on(signum):
    """Passes a signal on to every worker that runs, through its middleman."""
    for pipe in list(_worker_pipes):
        _tell(pipe, signum)


def _tell(pipe, signum):
    try:
        os.write(pipe.fileno(), bytes([signum]))
    except OSError:
        pass  # the middleman has ended


def _create_event(ctx):
'''

EVENTS_OLD = """\
    for event in events:
        on_event(event, exit_event.set, stop=stop, silent=True)

    try:
        middleman.join()
"""

EVENTS_NEW = """\
    if index is not None:  # a worker, not a command that looks something up
        _worker_pipes.add(w)

    def end(event):
        # An event may name the signal that asks for the end; without one, something has failed.
        signum = getattr(event, 'signum', None)
        if signum is None:
            exit_event.set()
        else:
            _tell(w, signum)

    for event in events:
        on_event(event, end, args=(event,), stop=stop, silent=True)

    try:
        middleman.join()
"""

JOINED_OLD = """\
    finally:
        stop.set()

    stdout_fwd.join()
"""

JOINED_NEW = """\
    finally:
        stop.set()
        _worker_pipes.discard(w)

    stdout_fwd.join()
"""

SHUTDOWN_OLD = """\
    def set_event_on_signal(signum, frame):
        event.set()

    signal.signal(signal.SIGINT, set_event_on_signal)
    signal.signal(signal.SIGTERM, set_event_on_signal)
    return event
"""

SHUTDOWN_NEW = """\
    def set_event_on_signal(signum, frame):
        asked = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        if not event.is_set():
            event.signum = asked
            event.set()
        elif asked == signal.SIGINT:  # somebody does not want to wait until the workers are ready
            safe_shell_exec.pass_on(asked)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, set_event_on_signal)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
        signal.signal(signal.SIGHUP, set_event_on_signal)
    signal.signal(signal.SIGUSR1, lambda signum, frame: safe_shell_exec.pass_on(signum))
    return event
"""

SAID_OLD = """\
            if exit_code != 0:
                print('Process {idx} exit with status code {ec}.'.format(idx=index, ec=exit_code))
"""

SAID_NEW = """\
            if exit_code not in (0, STOPPED):
                print('Process {idx} exit with status code {ec}.'.format(idx=index, ec=exit_code))
"""

REMAINING_OLD = """\
        if exit_code != 0 and terminate_all_event:
            if not any(ev.is_set() for ev in all_events):
                print('Terminating remaining workers after failure of Process {idx}.'.format(idx=index))
            terminate_all_event.set()
"""

REMAINING_NEW = """\
        if exit_code != 0 and terminate_all_event and not any(ev.is_set() for ev in all_events):
            if exit_code == STOPPED:
                terminate_all_event.signum = signal.SIGTERM  # in order, and with time for it
            else:
                print('Terminating remaining workers after failure of Process {idx}.'.format(idx=index))
            terminate_all_event.set()
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


def terminate_executor_shell_and_children(pid):
"""

GRACE_NEW = '''\
_GRACE = os.environ.get('HOROVOD_GRACEFUL_TERMINATION_SECONDS')
# Where a worker is to stop because the user or a scheduler said so, and where another one failed.
GRACEFUL_TERMINATION_TIME_S = float(_GRACE or 30)
FAILURE_TERMINATION_TIME_S = float(_GRACE or 5)


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


def _workers_of(p):
    """
    The processes that run the command of the shell p. Some shells replace themselves with the
    last command: then p is the worker, not its parent.
    """
    is_shell = p.cmdline()[:2] == ['/bin/sh', '-c']
    return (p.children() if is_shell else []) or [p]


def _is_ssh(process):
    try:
        return process.name() == 'ssh'
    except psutil.NoSuchProcess:
        return False


def _pass_signal_on(pid, signum):
    """
    Does in a middleman what a signal to the launcher asks for. The ssh client of a worker on
    another host would end of a signal, and take the worker's exit code with it: it is left
    alone as long as the worker may end by itself, because the others were told.
    """
    if signum == signal.SIGINT:
        terminate_executor_shell_and_children(pid, signum)
    elif signum == signal.SIGTERM:
        terminate_executor_shell_and_children(pid, signum, GRACEFUL_TERMINATION_TIME_S, spare_ssh=True)
    else:
        try:
            for worker in _workers_of(psutil.Process(pid)):
                if not _is_ssh(worker):
                    worker.send_signal(signum)
        except psutil.NoSuchProcess:
            pass


def terminate_executor_shell_and_children(pid, signum=signal.SIGTERM,
                                          grace_s=FAILURE_TERMINATION_TIME_S, spare_ssh=False):
'''

FAILURE_CLASS = '''\
# The exit code of a worker that stopped because it was asked to, so that it can go on later.
STOPPED = 75


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

FAILED_ON_HOST = """\
            raise WorkerFailedError('{} on {}'.format(name, host_alloc_plan[name].hostname), exit_code)
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
    # Python's own notice, where this process ends at once, is of no use to a person.
    sys.warnoptions.append('ignore:resource_tracker')
    # SIGUSR1 asks workers to save. It must not end a launcher that has no workers yet.
    signal.signal(signal.SIGUSR1, lambda signum, frame: None)
    try:
        _run(args)
    except WorkerFailedError as failure:
        if failure.exit_code == STOPPED:
            said = f'the workers stopped on request, to go on later (exit code {STOPPED}).'
        else:
            said = f'worker {failure.name} was the first to fail, with exit code {failure.exit_code}.'
        if failure.exit_code == 255:  # no program's, but that of ssh
            said += (' That is ssh: it lost the host, or the worker there was killed by a signal. '
                     + driver_service.DOCTOR)
        print(f'horovodrun: {said}', file=sys.stderr)
        sys.exit(3 if failure.exit_code == 255 else failure.exit_code)
    except Exception as error:
        if args.verbose:
            traceback.print_exc()
        wrong_usage = isinstance(error, ValueError)
        hint = '' if wrong_usage else '\\n  ' + driver_service.DOCTOR
        print(f'horovodrun: {error}{hint}', file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if wrong_usage else 3)  # threads and processes that wait for a host do not hold this up


if __name__ == '__main__':
"""

MPIRUN_FUNCTION = '''\
def _terminal_signals_all():
    """Whether Ctrl-C goes to this process and its children alike: in the foreground of a terminal."""
    try:
        terminal = os.open('/dev/tty', os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _end_with_this_process(process):
    """
    Starts a shell that sends the process a SIGTERM when this process is gone, for whatever reason.
    Returns the shell, and what must be kept open meanwhile.
    """
    r, w = os.pipe()
    watcher = subprocess.Popen(['/bin/sh', '-c', 'read -r nothing; kill -TERM "$0"', str(process.pid)],
                               stdin=r, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    os.close(r)
    return watcher, w


def _end_without_daemon(process):
    """
    Ends mpirun 12 seconds after the ssh to one of its daemons ended, if it does not end by itself.
    It may wait for a host that is gone for ever.

    :param process: mpirun
    :return: a list that then holds the names of these hosts
    """
    gone, commands = [], {}

    def clients():
        children = psutil.Process(process.pid).children()
        return {child.pid: child for child in children
                if child.name() == 'ssh' and child.status() != psutil.STATUS_ZOMBIE}

    def follow():
        try:
            while True:
                time.sleep(1)
                running = clients()
                commands.update({pid: client.cmdline() for pid, client in running.items()
                                 if pid not in commands})
                if commands.keys() - running.keys():
                    break
            time.sleep(12)
            left = clients()
            gone.extend(_unreachable(commands.values()) or ['?'])
            process.kill()
            for client in left.values():
                client.kill()
        except psutil.Error:
            pass  # mpirun has ended, or is about to

    threading.Thread(target=follow, daemon=True).start()
    return gone


def _unreachable(commands):
    """The hosts, of some ssh commands, that ssh cannot get to now."""
    takes_value, probes = set('BbcDEeFIiJLlmOopQRSWw'), {}
    for words in commands:
        at = 1
        while words[at].startswith('-'):
            at += 2 if len(words[at]) == 2 and words[at][1] in takes_value else 1
        probe = [words[0], '-o', 'ConnectTimeout=4', *words[1:at + 1], 'true']
        probes[words[at]] = subprocess.Popen(probe, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                             stderr=subprocess.DEVNULL)
    return [host for host, probe in probes.items() if probe.wait() != 0]


def _run_and_pass_signals_on(command, env):
    """
    Runs mpirun as this process would have run it: in its place at the terminal, with its files.

    SIGTERM becomes SIGUSR2, which mpirun passes on to the workers. Of a SIGTERM it kills them within
    fractions of a second. Only where they do not end in time, mpirun gets one.

    :param command: the shell command
    :param env: its environment
    :return: its exit code, 128 + n where signal n ended it
    """
    signals = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    asked = []
    harder = [signal.SIGTERM, signal.SIGKILL]

    def stop(signum, frame):
        if not asked:
            asked.append(signum)
            process.send_signal(signal.SIGUSR2)
            signal.setitimer(signal.ITIMER_REAL, max(safe_shell_exec.GRACEFUL_TERMINATION_TIME_S, 0.001))

    def insist(signum, frame):
        process.send_signal(harder.pop(0))
        if harder:
            signal.setitimer(signal.ITIMER_REAL, 5)

    def interrupt(signum, frame):
        # A second SIGINT makes mpirun leave its workers behind: one must not come twice.
        if not _terminal_signals_all():
            process.send_signal(signum)

    def pass_on(signum, frame):
        process.send_signal(signum)

    parent = os.getpid()
    prctl = getattr(ctypes.CDLL(None), 'prctl', None)  # Linux has it

    def in_child():
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if prctl is not None:
            pdeathsig = 1
            prctl(pdeathsig, ctypes.c_ulong(signal.SIGTERM))
            if os.getppid() != parent:
                os._exit(1)

    # What comes before there is an mpirun waits until there is one.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    process = subprocess.Popen(['/bin/sh', '-c', 'exec ' + command], env=env, close_fds=False,
                               preexec_fn=in_child)
    signal.signal(signal.SIGALRM, insist)
    for number, handler in zip(signals, (stop, interrupt, stop, pass_on, pass_on)):
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    watcher, kept_open = (None, None) if prctl is not None else _end_with_this_process(process)
    gone = _end_without_daemon(process)
    exit_code = process.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    if gone:
        print('horovodrun: no connection to host {}; mpirun, which waited for it, was ended.'
              .format(', '.join(gone)), file=sys.stderr)
        exit_code = 3
    elif exit_code == 255:  # no program's, but mpirun's own: it lost a host
        exit_code = 3
    if watcher is not None:
        watcher.kill()
        watcher.wait()
        os.close(kept_open)
    if exit_code == -signal.SIGUSR2 and asked:
        return 128 + asked[0]  # it came before mpirun was ready for it
    return exit_code if exit_code >= 0 else 128 - exit_code


def mpi_run(settings, nics, env, command, stdout=None, stderr=None):
'''
