"""One base on several processes: sharded, divided by tensor parallelism, or in the stages of a pipeline."""
