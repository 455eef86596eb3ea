"""`python -m kvist`: the same commands as the installed `kvist`. Knows nothing but the command line's entry point."""

from kvist.cli import main

if __name__ == "__main__":
    main()
