"""Reports of run folders: a table for the terminal, or one HTML page."""

from fewbytes.report.choice import Choice, caveats, choices
from fewbytes.report.folder import RunFolder
from fewbytes.report.page import write_report
from fewbytes.report.reading import read_run, read_runs
from fewbytes.report.table import summary_table

__all__ = ["Choice", "RunFolder", "caveats", "choices", "read_run", "read_runs", "summary_table", "write_report"]
