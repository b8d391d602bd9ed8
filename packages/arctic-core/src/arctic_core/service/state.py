"""Which state each engine is in, and what may be done in it.

    awake ── sleep(1) ──▶ asleep(1) ── wake ──▶ awake
    awake ── sleep(2) ──▶ asleep(2) ── wake ──▶ awake, stale      (sampler: its weights are gone)
    stale ── sync_weights ──▶ fresh                               (generate is refused while stale)
    awake ── pause ──▶ paused ── resume ──▶ awake
    any   ── process lost ──▶ dead

Transitions are idempotent: putting a sleeping engine to sleep at the same level does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from arctic_core.errors import EngineDiedError, InvalidStateError
from arctic_core.protocol import EngineName


@dataclass
class EngineState:
    """Mutable state of one engine (all its ranks together)."""

    name: EngineName
    sleep_level: int = 0
    paused: bool = False
    stale: str = ""
    """Why the sampler's weights must not be used, or empty."""
    dead: str = ""
    """What killed the engine, or empty."""
    policy_version: int = 0

    def __str__(self) -> str:
        if self.dead:
            return "dead"
        if self.sleep_level:
            return "asleep"
        if self.stale:
            return "stale"
        return "paused" if self.paused else "awake"

    def require_alive(self, op: str) -> None:
        """Raise unless the engine's processes are there."""
        if self.dead:
            raise EngineDiedError(
                f"{op} needs the {self.name}, which is gone: {self.dead}",
                where=self.name,
                remedy="start a new job; load_checkpoint restores its last saved state",
            )

    def require_awake(self, op: str) -> None:
        """Raise unless the engine is alive and holds its memory."""
        self.require_alive(op)
        if self.sleep_level:
            raise InvalidStateError(
                f"{op} needs the {self.name}, which sleeps at level {self.sleep_level}",
                where=self.name,
                remedy=f'call wake("{self.name}") first',
            )

    def require_fresh(self, op: str) -> None:
        """Raise unless the engine is awake and its weights are valid."""
        self.require_awake(op)
        if self.stale:
            raise InvalidStateError(f"{op} is refused: {self.stale}", where=self.name, remedy="call sync_weights() first")
