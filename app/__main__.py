"""``python -m app``: the same as the console script ``graftserve``."""

from app.cli import main

if __name__ == "__main__":
    main()
