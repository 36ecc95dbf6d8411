"""`python -m cgru` is the same as `cgru`."""

from cgru.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
