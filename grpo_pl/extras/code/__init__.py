"""Rewards for programs: suites of tests, and the isolation in which programs run."""
