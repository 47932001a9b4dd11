"""Warns of reward hacking: judges that training does not use, and forms that were not there at first."""
