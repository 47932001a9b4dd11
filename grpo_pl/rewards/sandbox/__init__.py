"""Worker processes that judge untrusted answers and can be killed; no other part of the rewards starts processes."""
