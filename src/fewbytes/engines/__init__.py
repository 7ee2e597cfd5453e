"""The parts that all engines share, and the local engine, which runs handlers in worker processes."""
