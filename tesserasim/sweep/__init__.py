"""Many experiments, kept: what to run, who runs it, where results lie, and what they say together."""
