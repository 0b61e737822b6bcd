"""Tables, pictures and the HTML page of runs: `python -m experiments report`."""
