"""The parts of `benchmarks/gpu_evidence.py`."""
