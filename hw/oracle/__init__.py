"""The oracle: does a kernel read and write what its trace says? Asked of the hardware, over all of memory."""
