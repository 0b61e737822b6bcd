"""The engine of AdLoCo: several trainers that merge, and batches that grow with gradient noise.

In: a method with a batch policy (`batching`), trainers, or both, and a source of samples. Out:
`engine.AdaptiveEngine`, which runs every trainer as an ordinary `TrainState` of one ordinary
`lc.Engine`, an `AdaptiveState` and an `AdaptiveHistory`.

- `noise_measurement`: measures a trainer's gradient noise and decides its next batch;
- `step_memory`: what a step needs on a device, by the compiler;
- `trainer_merge`: which trainers merge, and the merged state;
- `job_trainers`: trainers of a job that is one region of several, and what regions agree on;
- `lr_scaling`: the learning rate by samples consumed and batch; `checks`: refusals.
"""
