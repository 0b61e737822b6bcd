"""The rules of a method: what a fragment's payloads do to the anchor, and the anchor to a region.

- `merge`: how the payloads of those who took part become one direction;
- `outer`: how the anchor moves along it;
- `landing` (with `taylor`): how a region adopts the anchor;
- `topology`: who averages with whom, where not all do;
- `batching`: how many samples an inner step takes; `trainers`: which trainers merge;
- `consensus`: how far regions with anchors of their own are apart, predicted and measured.

Outer and landing rules are Optax transforms in fp32 (`precision`). Programs reach the rooms as
`lowcomm_jax.outer`, `lowcomm_jax.landing`, and so on.
"""
