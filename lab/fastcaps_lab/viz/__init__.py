"""Pictures of trainings and routings, drawn by matplotlib."""

from fastcaps_lab.viz.charts import bars, learning_curve, lines
from fastcaps_lab.viz.listening import listening, listening_map
from fastcaps_lab.viz.routes import descent, route_maps

__all__ = ["bars", "descent", "learning_curve", "lines", "listening", "listening_map", "route_maps"]
