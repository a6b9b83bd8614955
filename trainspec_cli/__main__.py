"""Run `trainspec` as `python -m trainspec_cli`."""

from trainspec_cli.cli.main import main as main
from trainspec_cli.cli.main import run as run

if __name__ == "__main__":
    main()
