"""Over Gloo, nothing of a job listens beyond the network that its hosts share, and strangers get nothing."""

import pytest
from hosts import Cluster, Host
from support.jobs import LIMIT_SECONDS


@pytest.mark.parametrize(
    ("used", "network", "from_host"), [("h1:2", "127.0.0.1", "h1"), ("h1:1,h2:1", "10.83.0.", "h2")]
)
def test_a_gloo_job_listens_on_its_own_network_only(tmp_path, used, network, from_host):
    log = tmp_path / "run" / "metrics.jsonl"
    launcher = ["horovodrun", "--gloo", "-np", "2", "-H", used]
    training = ["python", "-m", "hvdtrain", "--framework", "torch", "--steps", "1000000", "--log-every", "1"]
    with Cluster({"h1": 2, "h2": 1}, shared=tmp_path) as cluster:
        before = {name: listening(host) for name, host in cluster.hosts.items()}
        with cluster.head.started([*launcher, *training, "--run-dir", str(log.parent)], cwd=tmp_path) as job:
            job.until(lambda: log.exists() and log.read_text().count("\n") >= 3)
            found = {name: listening(host) - before[name] for name, host in cluster.hosts.items()}
            answers = [
                stranger(cluster.hosts[from_host], found["h1"], request)
                for request in ("GET /global/0", "PUT /global/1", "DELETE /global/0", "HEAD /")
            ]
            steps = log.read_text().count("\n")
            job.until(lambda: log.read_text().count("\n") >= steps + 3)
            job.process.terminate()
            ended = job.wait(LIMIT_SECONDS)
            assert ended.returncode == 75
    assert all("403 Forbidden" in answer for answer in answers), answers
    assert ended.output.count("The rendezvous server refused a request from") == 1, ended.output
    assert len(found["h1"]) == 1, found  # the rendezvous
    assert all(address.startswith(network) for address in found["h1"]), found
    assert not found["h2"]


def stranger(host: Host, listeners: set[str], request: str) -> str:
    """Send a request without the job's key, as a user without privileges, and return the first line."""
    address, _, port = next(iter(listeners)).rpartition(":")
    text = f"{request} HTTP/1.1\\r\\nContent-Length: 1\\r\\n\\r\\nx"
    script = f"exec 3<>/dev/tcp/{address}/{port}; printf '{text}' >&3; head -1 <&3"
    return host.namespaces.succeed("setpriv", "--reuid=65534", "--clear-groups", "bash", "-c", script)


def listening(host: Host) -> set[str]:
    """Give the addresses and ports that something on a host listens on."""
    sockets = host.namespaces.succeed("ss", "--listening", "--tcp", "--numeric", "--no-header")
    return {line.split()[3] for line in sockets.splitlines()} if sockets else set()
