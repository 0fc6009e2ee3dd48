"""Build Horovod 0.28.1 for the installed frameworks, and read what is installed. See docs/horovod.md."""
