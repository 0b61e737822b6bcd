"""The engine of AdLoCo: a list of trainers that merge, and batches that grow with gradient noise.

In: a method with a batch policy (`rules.batching`), perhaps trainers (`rules.trainers`), and a
source of samples. Out: `engine.AdaptiveEngine`, which runs every trainer as an ordinary
`TrainState` of an ordinary `lc.Engine`, an `AdaptiveState` and a `History`.

- `setup`: the settings of the engine;
- `step_plan`: the microbatches of a step, and the largest that fits into memory;
- `probe`: measures a trainer's gradient noise;
- `merge`: the list after a merge, and the merged state; `history`: what rows tell of trainers;
- `job_trainers`: trainers of a job that is one region of several, and what regions agree on;
- `learning_rate`: by samples consumed and batch.
"""
