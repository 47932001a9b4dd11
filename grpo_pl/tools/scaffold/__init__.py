"""What ``grpo-pl new`` writes: templates, and what is read of the user's data to fill them."""
