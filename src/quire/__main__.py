"""`python -m quire` is `quire`."""

from quire.cli import main

main()
