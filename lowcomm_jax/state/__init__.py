"""What training carries from step to step, and the names of its leaves.

`TrainState` holds all of it: private state of the regions, anchors, outer and codec states,
payloads in flight (`InFlight`), counters (`SyncCounters`). Checkpoints save
everything in it but `InFlight.brought`. The engine makes it and every step replaces it.

- `train_state`: the classes, and what each array means.
- `leaves`: names each array, for checkpoints and for regions that rejoin; splits arrays by region.
"""
