"""Scripted faults: on a mesh, of real jobs, and done again from what happened to them."""
