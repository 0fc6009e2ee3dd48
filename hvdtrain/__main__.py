"""``python -m hvdtrain``."""

from hvdtrain.cli import main


def run() -> None:
    """Run the command line, and let this process end soon although threads are left."""
    main()

    from hvdtrain.host.process_end import limit_wait_for_threads

    limit_wait_for_threads()


if __name__ == "__main__":
    run()
