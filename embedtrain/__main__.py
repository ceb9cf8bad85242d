"""`python -m embedtrain COMMAND`, also under torchrun: the command that the first argument names, or `train`."""

import sys

from embedtrain.cli.entry import run_named
from embedtrain.config.commands import COMMANDS, find_command


def main() -> None:
    """Run the command."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    run_named(lambda: find_command(first) or COMMANDS["train"])


if __name__ == "__main__":
    main()
