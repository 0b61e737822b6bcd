"""Codecs of leaves, one a file: what travels of an array, and what receivers make of it.

A file's `NAMES` are the names under which `compression.make`, configs, plans and benches find its
codecs, with their settings; `FEEDBACK` the names with error feedback, NAME_ef, and its decay. A new
codec is a new file here, or, outside, `module:NAME`.
"""
