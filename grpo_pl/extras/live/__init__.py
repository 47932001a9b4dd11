"""A held-out problem answered again and again while the policy learns."""
