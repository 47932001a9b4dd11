"""Engines that draw in a process of their own, with a copy of the policy's weights."""
