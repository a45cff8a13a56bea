"""`python -m hw validate RUNS.toml`: what the simulator says of the plans that the hardware has replayed.

Runs here need no GPU: measured rates come from the journals of `python -m hw replay`, kernel times from traces of
each device (`--profile`, another process than the runs), hops from `--links`. Nothing is fitted to a plan. Every
combination of plan and depth belongs to the calibration or to the held-out part of a split that was fixed before
the first run; tables give both.

`runs.py` reads what is named, `bench.py` runs the simulator on it, `timeline.py` what is seen in timelines of either,
`rows.py` puts measured and simulated side by side, `command.py` prints and writes.
"""

from hw.validate.bench import MeasuredTimes, Prediction, Unit, bench, policy_plans, predict, simulate
from hw.validate.command import validate, write_policy_plans
from hw.validate.rows import rows, summary
from hw.validate.runs import Runs, read_runs

__all__ = [
    "MeasuredTimes", "Prediction", "Runs", "Unit", "bench", "policy_plans", "predict", "read_runs", "rows", "simulate",
    "summary", "validate", "write_policy_plans",
]  # fmt: skip
