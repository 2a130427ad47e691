"""A run as one self-contained page, finished or not. Torch-free."""

from phalanx.report.page import write_report

__all__ = ["write_report"]
