"""What a trained run is used for: `python -m experiments sample` and `export`."""
