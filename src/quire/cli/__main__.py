"""`python -m quire.cli` is `quire`."""

from quire.cli import main

main()
