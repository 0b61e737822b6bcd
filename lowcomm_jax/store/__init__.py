"""What regions that are separate jobs share: a key-value store, and a way for payload bytes.

In: records and bytes of one region. Out: those of the others, and who is alive. Nothing here knows
what a round is. What to open for what:

- Keys: `kv`. What stands there (docs/wire.md): `records`, signed by `secret`, created once by
  `slots`; `commits`: those of a round; payloads as files: `wire`.
- Who is alive: `heartbeat`; whom a round waits for: `wait_list`, `timing`.
- How payload bytes travel: `transport`, then `peers_transport` (`serving`, `pulling`).
- What all rounds of a region have: `context`; their threads: `background`; what they raise:
  `errors`.
"""
