"""Pictures of trainings and routings, drawn by matplotlib."""

from fastcaps_lab.viz.charts import learning_curve
from fastcaps_lab.viz.listening import listening, listening_map
from fastcaps_lab.viz.routes import descent, route_maps

__all__ = ["descent", "learning_curve", "listening", "listening_map", "route_maps"]
