"""Windows: a context that can be edited. What was computed in it stays, whatever else leaves, returns or moves."""

from looseleaf.window.window import Page, Window

__all__ = ["Page", "Window"]
