"""The longer texts of the edits for several hosts: what stands in Horovod's source, and what is to."""

REMOTE_OLD = """\
SSH_COMMAND_PREFIX = 'ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no'
"""

REMOTE_NEW = """\
# Nobody is there to answer questions. A host that goes away ends the connection within 30 seconds.
SSH_COMMAND_PREFIX = 'ssh -o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=3'
"""

CHECK_OLD = """\
        if exit_code != 0:
            print('ssh not successful for host {host}:\\n{msg_output}'
                  .format(host=host_addresses[index],
                          msg_output=output_msg))

            ssh_successful_to_all_hosts = False
"""

CHECK_NEW = """\
        if exit_code != 0:
            host = host_addresses[index]
            said = ' '.join(line.strip() for line in output_msg.splitlines() if line.strip(' @\\r\\n'))
            hint = ''
            if 'Host key verification failed' in output_msg:
                hint = ('\\n  Its key is not known here, or has changed. Compare it with the one that '
                        'the host shows, then: ssh-keyscan {host} >> ~/.ssh/known_hosts'.format(host=host))
            print('horovodrun: no ssh to host {host}: {said}{hint}'.format(host=host, said=said, hint=hint),
                  file=sys.stderr)

            ssh_successful_to_all_hosts = False
"""

TASKS_OLD = """\
    def _exec_command(command):
        host_output = io.StringIO()
        try:
            exit_code = safe_shell_exec.execute(command,
                                                stdout=host_output,
                                                stderr=host_output)
            if exit_code != 0:
                print(
                    'Launching horovod task function was not '
                    'successful:\\n{host_output}'
                    .format(host_output=host_output.getvalue()))
                os._exit(exit_code)
"""

TASKS_NEW = """\
    def _exec_command(command, host_name):
        host_output = io.StringIO()
        try:
            exit_code = safe_shell_exec.execute(command,
                                                stdout=host_output,
                                                stderr=host_output,
                                                stdin_data=codec.dumps_base64(settings))
            if exit_code != 0:
                said = [line for line in host_output.getvalue().splitlines() if line.strip()]
                if not settings.verbose:  # without the traceback's places, and names of modules
                    said = [re.sub(r'^[\\w.]+\\.(\\w+: )', r'\\1', line) for line in said
                            if not line.startswith((' ', 'Traceback'))]
                print('horovodrun: host {host}: Horovod cannot start there (exit code {code}):\\n  {said}\\n'
                      '  Hosts by number: {hosts}. All run {python}. {doctor}'
                      .format(host=host_name, code=exit_code, python=sys.executable, doctor=DOCTOR,
                              hosts=', '.join('{} {}'.format(*pair) for pair in enumerate(all_host_names)),
                              said='\\n  '.join(said if settings.verbose else said[-3:])),
                      file=sys.stderr)
                sys.stderr.flush()
                os._exit(3)
"""

PROBE_OLD = """\
    try:
        return _run_probe(driver, settings, num_hosts)
    finally:
"""

PROBE_NEW = """\
    try:
        return _run_probe(driver, settings, num_hosts)
    except timeout.TimeoutException as error:
        late = [name for index, name in enumerate(all_host_names)
                if index not in driver.task_indices()]
        raise RuntimeError(
            '{what} cannot connect to this host, or to one another; waited {seconds} s. Is there a firewall, '
            'or no route? Hosts of a job must reach one another on all ports.'
            .format(what='host ' + ', '.join(late or all_host_names),
                    seconds=settings.start_timeout._timeout)) from error
    except Exception as error:
        numbers = ', '.join('{} = {}'.format(*pair) for pair in enumerate(all_host_names))
        raise RuntimeError('{} (hosts by number: {})'.format(error, numbers)) from error
    finally:
"""

NO_ADDRESS_OLD = """\
                'Horovod was unable to connect to {service_name} on any '
                'of the following addresses: {addresses}.\\n\\n'
                'One possible cause of this problem is that '
                'horovod currently requires every host to have at '
                'least one routable network interface with the same '
                'name across all of the hosts. '
                'You can run \\"ifconfig -a\\" '
                'on every host and check for the common '
                'routable interface. '
                'To fix the problem, you can rename interfaces on '
                'Linux.'.format(service_name=service_name, addresses=addresses))
"""

NO_ADDRESS_NEW = """\
                'host {host} is unable to connect to {service_name} at {addresses}. It has {own} itself. All '
                'hosts of a job need a network interface of the same name that reaches the others, on all '
                'ports.'.format(
                    host=socket.gethostname(), service_name=service_name, addresses=_in_words(addresses),
                    own=_in_words({name: [(one.address,) for one in found if one.family == socket.AF_INET]
                                   for name, found in psutil.net_if_addrs().items()})))
"""

IN_WORDS_OLD = """\
class NoValidAddressesFound(Exception):
    pass
"""

IN_WORDS_NEW = """\
class NoValidAddressesFound(Exception):
    pass


def _in_words(addresses):
    return ', '.join('{} {}'.format(name, address[0]) for name, found in addresses.items()
                     for address in found if name != 'lo') or 'loopback only'
"""

EXECUTE_OLD = """\
def execute(command, env=None, stdout=None, stderr=None, index=None, events=None,
            prefix_output_with_timestamp=False):
"""

EXECUTE_NEW = """\
def execute(command, env=None, stdout=None, stderr=None, index=None, events=None,
            prefix_output_with_timestamp=False, stdin_data=None):
"""

MIDDLEMAN_OLD = """\
                                                          (stderr_r, stderr_w),
                                                          (r, w)))
"""

MIDDLEMAN_NEW = """\
                                                          (stderr_r, stderr_w),
                                                          (r, w), stdin_data))
"""

WORKER_OLD = """\
        host_address = network.resolve_host_address(host_name)
        local_addresses = network.get_local_host_addresses()
        if host_address not in local_addresses:
            local_command = quote('cd {pwd} > /dev/null 2>&1 ; {command}'
                                  .format(pwd=os.getcwd(), command=command))
"""

WORKER_NEW = """\
        host_address = network.resolve_host_address(host_name)
        local_addresses = network.get_local_host_addresses()
        worker_env, stdin_data = env, None
        if host_address not in local_addresses:
            worker_env = None
            local_command, stdin_data = _remote_worker(command, host_name, env)
"""

EXECUTED_OLD = """\
            exit_code = safe_shell_exec.execute(command,
                                                index=index,
"""

EXECUTED_NEW = """\
            exit_code = safe_shell_exec.execute(command,
                                                env=worker_env,
                                                stdin_data=stdin_data,
                                                index=index,
"""

EXEC_FN_OLD = """\
def _exec_command_fn(settings):
    \"\"\"
"""

EXEC_FN_NEW = """\
def _remote_worker(command, host_name, env):
    \"\"\"
    Gives the words that ssh is to run, and what they read: the environment. On a command line,
    every user of both hosts could see it.
    \"\"\"
    folder = quote(os.getcwd())
    said = quote('horovodrun: host {} has no folder {}, or it may not be entered'
                 .format(host_name, os.getcwd()))
    enter = 'cd {} 2> /dev/null || {{ echo {} >&2; exit 3; }}; '.format(folder, said)
    given = {key: value for key, value in env.items()
             if env_util.is_exportable(key) and re.fullmatch(r'[A-Za-z_][A-Za-z0-9_]*', key)}
    if env_util.is_kubeflow_mpi():  # its remote command reads nothing
        words = ' '.join('%s=%s' % (key, quote(value)) for key, value in given.items())
        return quote(enter + 'env ' + words + ' ' + command), None
    exports = ''.join('export %s=%s\\n' % (key, quote(value)) for key, value in given.items())
    script = enter + 'eval "$(cat)"; exec ' + command
    return quote('exec /bin/sh -c ' + quote(script)), exports


def _exec_command_fn(settings, env):
    \"\"\"
"""

RUN_OLD = """\
    exec_command = _exec_command_fn(settings)
    launch_gloo(command, exec_command, settings, nics, env, server_ip)
"""

RUN_NEW = """\
    exec_command = _exec_command_fn(settings, env)
    launch_gloo(command, exec_command, settings, nics, {}, server_ip)
"""

RUN_ELASTIC_OLD = """\
    exec_command = _exec_command_fn(settings)
    rendezvous = RendezvousServer(settings.verbose)
    return launch_gloo_elastic(command_or_func, exec_command, settings, env, get"""

RUN_ELASTIC_NEW = """\
    exec_command = _exec_command_fn(settings, env)
    rendezvous = RendezvousServer(settings.verbose)
    return launch_gloo_elastic(command_or_func, exec_command, settings, {}, get"""

RENDEZVOUS_OLD = """\
    def start(self, handler_cls=RendezvousHandler):
        self._httpd, port = find_port(
            lambda addr: RendezvousHTTPServer(
                addr, handler_cls, self._verbose))
"""

RENDEZVOUS_NEW = """\
    def start(self, handler_cls=RendezvousHandler, address=''):
        self._httpd, port = find_port(
            lambda addr: RendezvousHTTPServer(
                (address, addr[1]), handler_cls, self._verbose))
"""

KEEPALIVE_OLD = """\
    # we need the driver's PATH and PYTHONPATH in env to run mpirun,
"""

KEEPALIVE_NEW = """\
    # Open MPI's daemons take five minutes and more to notice that the host of mpirun is gone.
    # 50 seconds leave the workers and ssh, which notice it sooner, the time to say so: of a lost
    # daemon, mpirun ends with exit code 0.
    for prefix in ('PRTE_MCA_', 'OMPI_MCA_') if mpi == _OMPI_IMPL else ():  # Open MPI 5 and 4
        for name, value in (('time', '20'), ('intvl', '15'), ('probes', '2')):
            env = {prefix + 'oob_tcp_keepalive_' + name: value, **env}

    if ssh_args and mpi == _OMPI_IMPL:  # Open MPI 5 does not know plm_rsh_args
        env = {**env, 'PRTE_MCA_plm_ssh_args': ' '.join([env.get('PRTE_MCA_plm_ssh_args', ''), *ssh_args])}

    # we need the driver's PATH and PYTHONPATH in env to run mpirun,
"""

SSH_ARGS_OLD = """\
    ssh_args = []
    if settings.ssh_port:
"""

SSH_ARGS_NEW = """\
    ssh_args = []
    if mpi == _OMPI_IMPL and env.get('OMPI_MCA_plm_rsh_agent', 'ssh') == 'ssh':
        ssh_args = [env['OMPI_MCA_plm_rsh_args']] if env.get('OMPI_MCA_plm_rsh_args') else []
        ssh_args += ['-o BatchMode=yes', '-o ServerAliveInterval=10', '-o ServerAliveCountMax=3']
    if settings.ssh_port:
"""

HOSTFILE_OLD = """\
            line = line.rstrip()
            hostname = line.split()[0]
            slots = line.split('=')[1]
"""

HOSTFILE_NEW = """\
            line = line.partition('#')[0].strip()
            if not line:
                continue
            slots_words = r'(?:\\s+slots\\s*=\\s*(\\d+)|:(\\d+))?(?:\\s+max[-_]slots\\s*=\\s*\\d+)?'
            match = re.fullmatch(r'(\\S+?)' + slots_words, line)
            if match is None:
                raise ValueError('hostfile {}: a line must be of the form "host slots=4", found: {}'
                                 .format(filename, line))
            hostname, slots = match[1], match[2] or match[3] or '1'
"""
