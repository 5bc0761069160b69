"""Actors as processes of a launcher: what is watched, ended, and asked for last words."""

import os
import signal
import threading
from typing import Any

from offbeat.engine.spawn import LastWords


class ActorHandle:
    """An actor that works, or waits until Ray has a place for it."""

    pid = 0  # it is another host's

    def __init__(self, ray: Any, actor: Any, assignment: Any, spare: list[Any] | None):
        """One that has failed and is as good as new goes to the `spare` ones, if there are any."""
        self.ray, self.actor, self.spare = ray, actor, spare
        self.handle = os.eventfd(0, os.EFD_CLOEXEC)
        self.open, self.lock = True, threading.Lock()
        self.status: int | None = None
        self.well = False
        self.why = ""  # it is gone, as Ray has it
        self.node = ""  # where it is, once it is somewhere
        actor.node.remote().future().add_done_callback(self._is_placed)
        self.end = actor.work.remote(assignment).future()
        self.end.add_done_callback(self._has_ended)

    def _is_placed(self, told: Any) -> None:
        """In a thread of Ray's."""
        if told.exception() is None:
            self.node = told.result()

    def _has_ended(self, _: Any) -> None:
        """In a thread of Ray's."""
        with self.lock:
            if self.open:
                os.eventfd_write(self.handle, 1)

    def kill(self) -> None:
        if self.status is None:
            self.status = -signal.SIGKILL
            self._release()
            self._has_ended(None)

    def _release(self) -> None:
        """Whether or not its host can be reached: the store asks nobody who has been given up."""
        if self.actor is not None:
            self.ray.kill(self.actor)
            self.actor = None

    def forget(self) -> None:
        with self.lock:
            if self.open:
                self.open = False
                os.close(self.handle)

    def reap(self) -> LastWords | None:
        self.forget()
        if self.status is not None:
            return None
        try:
            words: LastWords | None = self.end.result()
        except Exception as error:  # of many kinds: killed, its host is gone, it could not begin
            self.why = str(error)
            self.status = -signal.SIGKILL
            self._release()
            return None
        self.status, self.well = int(words is not None), words is None
        if words is not None and self.spare is not None:
            self.spare.append(self.actor)
        else:
            self._release()
        return words
