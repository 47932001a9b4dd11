"""One whole run, for all tests that only read what it printed and left behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CommandLine, Outcome


@dataclass(frozen=True)
class WholeRun:
    """Four rollouts with validations at 0, 2 and 4, a profile, and tables after every second rollout."""

    commands: CommandLine
    config: Path
    outcome: Outcome
    tables: list[Any]
    """What a logger with tables got: key, columns, data, step."""

    @property
    def folder(self) -> Path:
        return self.commands.runs / "whole"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, cold_starts: Path) -> WholeRun:
    commands = CommandLine(tmp_path_factory.mktemp("whole"), cold_starts)
    config = commands.config("whole", samples={"every_n_rollouts": 2, "groups": 1})
    outcome = commands.done("fit", "--config", config, "--profile", "--trainer.logger=user_parts.TableLogger")
    import user_parts

    tables = list(user_parts.TABLES)
    user_parts.TABLES.clear()
    return WholeRun(commands, config, outcome, tables)
