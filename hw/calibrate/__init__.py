"""`python -m hw calibrate`: times of about 300 kernels on this machine's GPU, as a table that `costs fit` reads."""
