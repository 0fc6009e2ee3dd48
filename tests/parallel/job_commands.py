"""Run commands of hvdtrain in this process; for each a line with what it printed and its error."""

import contextlib
import io
import json
import sys

from hvdtrain.cli import cli
from hvdtrain.errors import HvdtrainError

for command in json.loads(sys.argv[1]):
    printed, problem = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(printed):
            cli(command, standalone_mode=False)
    except HvdtrainError as error:
        problem = f"{error.problem}\n{error.remedy}"
    print("RESULT", json.dumps([printed.getvalue(), problem]), flush=True)
