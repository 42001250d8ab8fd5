"""The oracle: verdicts on any kernel's output, and the inputs that bring faults to light."""

from megamoe.reference.case import Inputs
from megamoe.reference.compare import Yardstick, judge, yardstick
from megamoe.reference.honest import Honest
from megamoe.reference.inputs import CLASSES, saturated
from megamoe.reference.report import Finding, Report
from megamoe.reference.synthetic import normal_tokens

__all__ = [
    "CLASSES",
    "Finding",
    "Honest",
    "Inputs",
    "Report",
    "Yardstick",
    "judge",
    "normal_tokens",
    "saturated",
    "yardstick",
]
