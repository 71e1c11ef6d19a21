"""`python -m lmpool`: the `lmpool` command, where scripts of an environment are not on the path."""

from lmpool.cli import main

if __name__ == "__main__":
    main()
