"""The longer texts of the edits for signals and the ends of workers: before and after."""

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
