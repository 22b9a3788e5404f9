"""`python -m gradscope` is the same as the `gradscope` command."""

from gradscope.cli import main

main()
