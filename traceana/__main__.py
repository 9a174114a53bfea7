"""`python -m traceana` is the same as the `traceana` command."""

from traceana.cli import main

if __name__ == "__main__":
    main()
