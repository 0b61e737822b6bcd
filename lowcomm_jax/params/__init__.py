"""A user's parameter pytree: named leaves with roles, cut into fragments, laid out on devices.

In: any pytree of arrays. Out:

- `layout`: a `Layout` gives every leaf a name and a role (trained, frozen, local, averaged);
- `roles`: which rows of which leaves a region trains, where regions differ;
- `fragments`: `Fragments` cuts the trained leaves into parts; one fragment travels at a time;
- `sharding`: where parameters, optimizer state and states of rules lie inside a region.
"""
