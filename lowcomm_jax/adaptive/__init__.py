"""Several trainers, batches that grow, and the engine that runs them."""
