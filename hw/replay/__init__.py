"""Replays of units under a placement: captured graphs on GPUs, operators on any device."""
