"""The longer texts of the edits for mpirun, failures and exit codes: before and after."""

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
