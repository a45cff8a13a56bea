"""From a published model configuration to traces and a mix: shapes by rule, times by model, nothing measured.

    config.py       a Hugging Face config.json -> `Model`, or one line that says what is wrong with it
    model.py        what a model is: layers, their attention and feed-forward, parameters, KV bytes
    shard.py        what one rank of a tensor-parallel group holds of it
    unit.py         kernels, buffers and accesses of one unit, in launch order
    layers.py, mla.py, experts.py    which kernels a layer runs
    times.py        times on a reference GPU, through tesserasim.costs
    collectives.py  what an all-reduce costs
    run.py          the grid, the files, the document that `derive --json` prints

The origin of everything made here is `derived`; no result of it is a measurement.
"""
