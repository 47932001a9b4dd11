"""A worker of an engine's child process that takes its time and needs no model."""

import time
from collections.abc import Callable


class Sleeper:
    def generate(self, *, progress: Callable[[int, int], None], should_stop: Callable[[], bool]) -> None:
        for second in range(300):
            progress(second, 0)
            time.sleep(1.0)
