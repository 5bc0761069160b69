"""The live page: a listener in the launcher, and a web server of its own that shows the run."""

from offbeat.watch.feed import Watch

__all__ = ["Watch"]
