"""Capture: run a unit as a CUDA graph, name its kernels, time them, and write a trace."""
