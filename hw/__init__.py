"""The hardware side: captures traces on real GPUs. Imports tesserasim and torch; never imported by it."""
