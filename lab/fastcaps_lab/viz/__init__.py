"""Pictures of trainings, routings and capsules, drawn by matplotlib (of the extra ``demo``)."""

from fastcaps_lab.viz.charts import bars, learning_curve, lines
from fastcaps_lab.viz.diagnosing import diagnosis
from fastcaps_lab.viz.listening import last_votes, listening, listening_map
from fastcaps_lab.viz.maps import places
from fastcaps_lab.viz.perturbing import perturbation_map, perturbations
from fastcaps_lab.viz.routes import coefficient_map, coefficients, descent, parse_tree

__all__ = [
    "bars", "coefficient_map", "coefficients", "descent", "diagnosis", "last_votes", "learning_curve", "lines",
    "listening", "listening_map", "parse_tree", "perturbation_map", "perturbations", "places",
]  # fmt: skip
