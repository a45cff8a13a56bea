"""GPUs, links and prices: the machines a plan is made for."""
