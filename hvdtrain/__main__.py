"""``python -m hvdtrain``."""

from hvdtrain.host.output import open_closed_files


def run() -> None:
    """Run the command line, and let this process end soon although threads are left."""
    open_closed_files()  # before anything else opens a file
    from hvdtrain.cli import main

    main()

    from hvdtrain.host.start_reports import limit_wait_for_threads

    limit_wait_for_threads()


if __name__ == "__main__":
    run()
