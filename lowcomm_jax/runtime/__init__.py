"""Regions as separate jobs: payloads between programs that share nothing but a key-value store.

In: what a region's training sends. Out: what all regions sent, agreed in one record an exchange,
although regions die, return, or lose the store. `connect` makes an exchange, `remote` is its face,
and `job_delivery` is what an engine's loop calls.
"""
