"""The import of tasks that version 0.2 of ``grpo-pl new`` wrote; removed in 0.4. Import from ``grpo_pl.rewards``."""

from grpo_pl.rewards.completion_text import boxed_or_block as boxed_or_block
