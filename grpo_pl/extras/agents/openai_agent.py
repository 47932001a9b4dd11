"""``AgentEnvironment``: a program that speaks OpenAI's API is played as it is; its calls are answered by the policy."""

from __future__ import annotations

import inspect
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from grpo_pl.environment import Blame, EpisodeEnded, Observation, Status, Step, resolved
from grpo_pl.extras.agents import fork_server
from grpo_pl.extras.agents.agent_session import MODEL, AgentCall, AgentSession
from grpo_pl.extras.agents.tool_calls import CallsTools
from grpo_pl.processes.child_process import exit_name
from grpo_pl.processes.resource_limits import forbid_inspection, kill_with_parent, set_limit

_LONGEST_TOOLS = fork_server.LONGEST_INFO - 8192  # which warnings and numbers may take
_LONGEST_RESULT = 1 << 15  # bytes, which a pipe takes without a reader


@dataclass(kw_only=True)
class AgentEnvironment(CallsTools):
    """An agent is a function ``run(task, base_url, api_key)``, or a program of any language; it asks the policy by
    ``POST {base_url}/chat/completions``, whole or streamed, with or without tools.

    The first call is the prompt, what later ones add are observations, and the policy's actions are the answers. The
    tokens that were drawn stay as they are. A call that continues none before is the prompt of a further segment of the
    same sample (``on_rewrite``). ``temperature``, ``seed`` and the like have no effect.

    A program reads the task as JSON from its standard input and finds ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` among
    its variables. It runs with the rights of the user, see SECURITY.md.
    """

    agent: str | Callable[..., Any] = ""
    """``path/to/file.py:run`` or ``package.module:run``; ``run`` may be ``async``. ``task`` is a dictionary with the
    columns of the problem, ``question`` and ``answer`` among them, and ``seed``."""
    command: Sequence[str] = ()
    """In place of ``agent``: a program and its arguments, such as ``[node, agent.js]``."""
    rewarded_by: Literal["rewards", "agent"] = "rewards"
    """By default the rewards of the run judge what the policy wrote, and what the agent says about a reward is ignored.
    With ``agent`` the reward is what ``run`` returns, or what is sent as ``POST {base_url}/reward {"reward": 1.0}``
    with the reward key; a session without one has no value. ``run`` gets the key where it has an argument
    ``reward_key``; a program reads it from the descriptor that GRPO_PL_REWARD_FD names, before it runs anything."""
    on_agent_error: Literal["zero", "leave_out"] = "zero"
    """An agent that raises, dies or hangs after the policy's first answer: the session counts 0, so that malformed
    answers do not escape; or it leaves the loss, for agents that are known to be flaky."""
    on_rewrite: Literal["segment", "zero", "leave_out"] = "segment"
    """A call after the policy's first answer that continues no conversation before, since the agent edits or compacts
    its history, asks a sub-agent, or calls twice at once: it begins a further segment of the sample; or it ends the
    session, which counts 0 or leaves the loss."""
    python: str = ""
    """Interpreter of the agent, such as ``/path/of/a/venv/bin/python``, where its libraries clash with those of the
    training; it needs pydantic. Empty takes the one of the training."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the agent, beside PATH, HOME and the like. They stand in the run's ``config.yaml``: no
    place for a secret."""
    passed: Sequence[str] = ()
    """Names of variables that the agent gets from the environment of the training, such as a key."""
    blame: Blame = field(default="environment", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.agent) == bool(self.command):
            raise ValueError("give either agent, a function, or command, a program and its arguments.")
        if isinstance(self.command, str):
            raise ValueError(f"command must be a list such as [node, agent.js], got {self.command!r}.")
        if self.python and self.command:
            raise ValueError(f"python is for an agent that is a function; put {self.python!r} first in command.")
        if self.python and not (os.path.isfile(self.python) and os.access(self.python, os.X_OK)):
            raise ValueError(f"python: there is no interpreter {self.python!r}.")
        if isinstance(self.passed, str):
            raise ValueError(f"passed must be a list of names of variables, got {self.passed!r}.")
        for name, known in (
            ("rewarded_by", ("rewards", "agent")),
            ("on_agent_error", ("zero", "leave_out")),
            ("on_rewrite", ("segment", "zero", "leave_out")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, got {getattr(self, name)!r}.")
        if self.isolation != "process":
            raise ValueError(f"isolation must be process, because agents are killed, got {self.isolation!r}.")
        self.blame = "policy" if self.on_agent_error == "zero" else "environment"
        self._session: AgentSession  # these from reset on
        self._process: AgentProcess
        self._waiting: AgentCall

    @property
    def writes_prompt(self) -> bool:
        return True

    @property
    def interpreter(self) -> str:
        return self.python

    @property
    def pays(self) -> bool:
        return self.rewarded_by == "agent"

    def access(self, session: AgentSession) -> dict[str, str]:
        """The variables by which an agent finds the policy."""
        return {"OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.key}

    def prepare(self) -> None:
        """Imports the agent, from whose process all sessions are forked.

        Raises:
            ValueError: there is no such function or program.
        """
        if self.command:
            from shutil import which

            if which(self.command[0]) is None:
                raise ValueError(
                    f"command: there is no program {self.command[0]!r} (PATH is {os.environ.get('PATH')})."
                )
            return
        os.environ.update(self.variables)
        signature = inspect.signature(resolved(self.agent))
        taken = list(signature.parameters)
        try:
            signature.bind({}, "", "", **({"reward_key": ""} if self.pays and "reward_key" in taken else {}))
        except TypeError as error:
            raise ValueError(
                f"agent {self.agent!r} must take (task, base_url, api_key), and takes {taken}: {error}."
            ) from error
        if "openai" in sys.modules:
            # its first request imports and builds much, which each session would do again; nobody answers there
            with suppress(Exception):
                client = sys.modules["openai"].OpenAI(base_url="http://127.0.0.1:9", api_key="-", max_retries=0)
                client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": ""}])

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        branches = self.on_rewrite == "segment"
        session = self._session = AgentSession(self.parser, takes_reward=self.pays, branches=branches)
        forbid_inspection()  # of a function's process as well, which is a fork of this one and holds the keys
        self._process = AgentProcess(self, session, {**row, "seed": seed})
        session.serve()
        observation, _, ended, _, info = self._next()
        if ended:
            raise EpisodeEnded("no_reward", "the agent ended without a call.", "environment")
        return observation, info

    def step(self, action: str, drawn: Mapping[str, Any] | None = None) -> Step:
        malformed = self._session.answer(self._waiting, action, drawn or {})
        observation, reward, terminated, truncated, info = self._next()
        return observation, reward, terminated, truncated, {**info, "invalid_action": malformed}

    def finish(self) -> float:
        self._session.end("the session has reached its limit on turns or tokens.")
        if not self.pays:
            return 0.0
        while isinstance(self._session.events.get(), AgentCall):
            pass  # it came before the limit was known, and was refused
        return self._reward()

    def close(self) -> None:
        if hasattr(self, "_process"):
            self._process.kill()
        if hasattr(self, "_session"):
            self._session.close()

    def _next(self) -> Step:
        """Waits for the agent's next call, or its end."""
        session = self._session
        event = session.events.get()
        if not isinstance(event, AgentCall):
            return "", self._reward(), True, False, {"warnings": session.warnings}
        self._waiting = event
        try:
            observation = session.observation(event.request)
            info = self._offered() if session.begins else {}
        except EpisodeEnded as end:
            if session.answers and self.on_rewrite != "leave_out":
                end.blame = "policy"
            raise
        if session.warnings:
            info["warnings"] = session.warnings
            session.warnings = []
        if session.conversation:
            info["segment"] = session.conversation
        if event.request.length is not None:
            info["max_tokens"] = event.request.length
        if event.request.stop:
            info["stop"] = event.request.stop
        return observation, 0.0, False, False, info

    def _offered(self) -> dict[str, Any]:
        """The tools of a conversation that begins, and their description.

        Raises:
            EpisodeEnded: they are too long, or the parser cannot write them.
        """
        offered = self._session.tools
        try:
            self.parser.check({tool["function"]["name"]: tool for tool in offered})
            info = {"tools": offered, "told_tools": self.parser.told(offered) if offered else ""}
        except ValueError as error:
            raise EpisodeEnded("malformed", f"the agent's tools: {error}", "environment") from error
        if len(json.dumps(info)) > _LONGEST_TOOLS:
            told = f"its tools and their description take over {_LONGEST_TOOLS} characters."
            raise EpisodeEnded("too_long", told, "environment")
        return info

    def _reward(self) -> float:
        """The reward of an agent that has ended.

        Raises:
            EpisodeEnded: it failed, or there is none.
        """
        session = self._session
        status, detail, value = self._process.result()
        if status != "ok" and session.reward is None:
            if session.unsupported:  # the agent's own request, whatever the policy had written
                raise EpisodeEnded(status, f"{detail} after {session.unsupported}", "environment")
            raise EpisodeEnded(status, detail, self.blame if session.answers else "environment")
        if not self.pays:
            return 0.0
        if value is not None:
            try:
                session.pay(value)
            except ValueError as error:
                if session.reward is None:
                    raise EpisodeEnded("no_reward", f"run: {error}", "environment") from error
        if session.reward is None:
            raise EpisodeEnded("no_reward", "the agent ended without a reward.", "environment")
        return session.reward


class AgentProcess:
    """The process of one agent: a fork of this one that calls the function, or a program."""

    def __init__(self, environment: AgentEnvironment, session: AgentSession, task: Mapping[str, Any]) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this process
        self._results, results = os.pipe()
        self._status: int | None = None  # until it has ended
        variables = {**os.environ, **environment.variables, **environment.access(session)}
        if environment.command:
            self.pid = self._started(environment, session, json.dumps(task, default=str), variables)
        else:
            function = resolved(environment.agent)  # found before the fork, so that it is known there
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    kill_with_parent()
                    self._leave_behind(session)
                    os.environ.update(variables)
                    random.seed(task["seed"])
                    _call(function, dict(task), session, results)
                finally:
                    os._exit(1)
        os.close(results)
        threading.Thread(target=self._watch, args=(session,), daemon=True).start()

    def _leave_behind(self, session: AgentSession) -> None:
        """Closes what only the process of the session may use, and redirects output."""
        for descriptor in fork_server.OURS:
            os.close(descriptor)
        session._server.socket.close()
        os.close(self._results)
        for stream in (1, 2):
            os.dup2(self._output.fileno(), stream)

    def _started(
        self, environment: AgentEnvironment, session: AgentSession, task: str, variables: Mapping[str, str]
    ) -> int:
        given = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        given.write(task.encode())
        given.seek(0)
        descriptors: tuple[int, ...] = ()
        if environment.pays:
            secret, writer = os.pipe()
            os.write(writer, session.reward_key.encode())
            os.close(writer)
            descriptors, variables = (secret,), {**variables, "GRPO_PL_REWARD_FD": str(secret)}
        self._program = subprocess.Popen(
            list(environment.command),
            env=dict(variables),
            stdin=given,
            stdout=self._output,
            stderr=self._output,
            pass_fds=descriptors,
            preexec_fn=_limit_program,
        )
        for descriptor in descriptors:
            os.close(descriptor)
        given.close()
        return self._program.pid

    def _watch(self, session: AgentSession) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        _, status = os.waitpid(self.pid, 0)
        self._status = os.waitstatus_to_exitcode(status)
        session.events.put(None)

    def result(self) -> tuple[Status, str, Any]:
        """Status, detail, and what the function returned, once the process has ended."""
        os.set_blocking(self._results, False)  # what it left behind may hold the other end
        try:
            written = os.read(self._results, _LONGEST_RESULT)
        except BlockingIOError:
            written = b""
        try:
            answer = json.loads(written) if written else {}
        except ValueError:
            answer = {}
        if "raised" in answer:
            return "raised", str(answer["raised"]), None
        assert self._status is not None
        if self._status == 0:
            return "ok", "", answer.get("returned")
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - 400))
        printed = self._output.read().decode(errors="replace").strip()
        how = f"the agent ended with {exit_name(self._status)}" + (f": … {printed}" if printed else "")
        return ("killed" if self._status < 0 else "raised"), how, None

    def kill(self) -> None:
        if self._status is None:  # else its number may be that of another process by now
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _limit_program() -> None:
    """In the process of a program: its memory is limited by what it writes to, not by its address space, of which some
    runtimes (Node's) reserve far more than they use."""
    kill_with_parent()
    if sys.platform != "linux":
        return
    allowed, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    set_limit(resource.RLIMIT_DATA, allowed)


def _call(function: Callable[..., Any], task: dict[str, Any], session: AgentSession, results: int) -> None:
    """Calls the agent, writes what it returns or raises, and ends the process."""
    arguments = {"task": task, "base_url": session.base_url, "api_key": session.key}
    names = inspect.signature(function).parameters
    further = {"reward_key": session.reward_key} if "reward_key" in names and session.takes_reward else {}
    try:
        returned = function(*arguments.values(), **further)
        if inspect.iscoroutine(returned):
            import asyncio

            returned = asyncio.run(returned)
        answer: dict[str, Any] = {}
        if session.takes_reward and returned is not None:
            try:
                answer["returned"] = float(returned)
            except (TypeError, ValueError):
                answer["returned"] = f"{returned!r:.80}"  # refused where it is paid out
    except BaseException as error:  # somebody else's code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        where = next(
            (f" ({Path(f.filename).name}:{f.lineno})" for f in reversed(frames) if "site-packages" not in f.filename),
            "",
        )
        answer = {"raised": f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000] + where}
    with suppress(OSError):
        os.write(results, json.dumps(answer).encode()[:_LONGEST_RESULT])
    sys.stdout.flush()
    os._exit(0)
