"""`python -m elastic_agent`: the program `elastic-agent`, with this Python for its workers."""

from .run import main

main()
