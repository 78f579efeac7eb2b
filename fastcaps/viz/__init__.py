"""Pictures of trainings, routings and capsules, drawn by matplotlib (of the extra ``demo``)."""

from fastcaps.checks import suggest
from fastcaps.viz.charts import bars, learning_curve, lines
from fastcaps.viz.diagnosing import diagnosis
from fastcaps.viz.listening import last_votes, listening, listening_map
from fastcaps.viz.maps import places
from fastcaps.viz.perturbing import perturbation_map, perturbations
from fastcaps.viz.routes import coefficient_map, coefficients, descent, parse_tree

__all__ = [
    "bars", "coefficient_map", "coefficients", "descent", "diagnosis", "last_votes", "learning_curve", "lines",
    "listening", "listening_map", "parse_tree", "perturbation_map", "perturbations", "places",
]  # fmt: skip
suggest(__name__)
