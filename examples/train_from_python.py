"""Train from a Python script. A launcher starts the script on every worker.

    horovodrun -np 2 python examples/train_from_python.py torch
    horovodrun -np 2 python examples/train_from_python.py tf

The keyword arguments are config fields; docs/config.md lists them.
"""

import sys

from tumors import Tumors

import hvdtrain


def main():
    framework = sys.argv[1] if len(sys.argv) > 1 else "torch"
    summary = hvdtrain.train(Tumors, framework=framework, epochs=5, learning_rate=0.05)
    # all workers have the same metrics, so all of them exit with the same code
    if summary.final["accuracy"] < 0.9:
        sys.exit(f"accuracy {summary.final['accuracy']:.3f} is below 0.9; see {summary.run_dir}")


if __name__ == "__main__":
    main()
