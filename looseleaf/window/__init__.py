"""Windows: a context that can be edited. What was computed in it stays, whatever else leaves, returns or moves."""

from looseleaf.window.page import Page
from looseleaf.window.window import Window

__all__ = ["Page", "Window"]
