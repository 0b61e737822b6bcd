"""The inner steps: the training of one region between two exchanges.

In: a loss function, an inner optimizer and batches. Out: one region's pure train step and the
compiled program that runs it in all regions (`inner_step`), blocks of batches on the device
(`batch_blocks`), and batches that stay cut over a region's devices (`batch_sharding`).
"""
