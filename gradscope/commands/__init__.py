"""One file per command of the command line: the composition root.

Only these files may import train, probes or figures, and only inside the body of the command that needs them.
"""
