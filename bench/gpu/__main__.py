"""`python -m bench.gpu`: all measurements that need a GPU, most valuable first, within a time limit."""

import sys

from bench.gpu import packages


def main() -> None:
    """Name missing packages, without importing any; otherwise run the command."""
    missing = packages.missing()
    if "--check" in sys.argv[1:] or missing:
        lines = packages.report() + packages.indirect() + packages.optional()
        print("\n".join(dict.fromkeys(lines)) or "Every package is here, in a version that the project is written for.")
        absent = list(dict.fromkeys(line.split()[1].rstrip(",") for line in lines if line.startswith("missing")))
        if absent:
            print(packages.way_out(absent))
        sys.exit(f"error: bench.gpu cannot run without {', '.join(missing)}" if missing else 0)

    from bench.gpu.command import command
    from rlhf.cli import guarded

    guarded(command)


if __name__ == "__main__":
    main()
