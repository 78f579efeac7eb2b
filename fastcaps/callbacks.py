"""The callbacks of a training run, under the name they had before: see :mod:`fastcaps.training.callbacks`."""

from fastcaps.training.callbacks import COLUMNS, CheckpointWriter, MetricsWriter, Report, read_metrics

__all__ = ["COLUMNS", "CheckpointWriter", "MetricsWriter", "Report", "read_metrics"]
