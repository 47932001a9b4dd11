"""Killable worker processes for untrusted answers: the only place of the rewards that starts processes."""
