"""`python -m hw validate RUNS.toml`: what the simulator says of the plans that the hardware has replayed.

Runs here need no GPU: measured rates come from the journals of `python -m hw replay`, kernel times from traces of
each device (`--profile`, another process than the runs), hops from `--links`. Nothing is fitted to a plan. Every
combination of plan and depth belongs to the calibration or to the held-out part of a split that was fixed before
the first run; tables give both.

`runs.py` reads what is named, `bench.py` runs the simulator on it, `plans.py` what policies make of it, `timeline.py`
sees use of devices in timelines of either, `rows.py` puts measured and simulated side by side, `table.py` keeps the
rows as files, `command.py` prints.
"""

from hw.validate.bench import MeasuredTimes, Prediction, Unit, bench, predict, simulate
from hw.validate.command import validate, write_policy_plans
from hw.validate.plans import policy_plans
from hw.validate.rows import rows, summary
from hw.validate.runs import Runs, read_runs
from hw.validate.table import read_table

__all__ = [
    "MeasuredTimes", "Prediction", "Runs", "Unit", "bench", "policy_plans", "predict", "read_runs", "read_table",
    "rows", "simulate", "summary", "validate", "write_policy_plans",
]  # fmt: skip
