"""One job per region on this machine: `python -m experiments launch`."""
