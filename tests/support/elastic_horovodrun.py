"""`horovodrun` with patch launcher/0016, whichever Horovod is installed."""

from horovod.runner import launch

from hvdtrain.elastic.launch import run_elastic

if __name__ == "__main__":
    launch._run_elastic = run_elastic
    launch._is_elastic = lambda args: True
    launch.run_commandline()
