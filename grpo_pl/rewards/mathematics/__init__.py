"""From two texts to a verdict, in this order.

1. ``boxes`` finds the answer in a completion.
2. ``canonical`` writes it and the gold answer in one spelling.
3. ``written_numbers``, ``words``, ``units`` (with ``measures`` and ``nouns``) and ``notation`` read what
   needs no algebra.
4. ``answer_rules`` decides by them, or makes a ``Job`` for math-verify in a worker process (``sandbox/math_judge.py``),
   and reviews the worker's verdict.
5. ``math_reward`` does this for a batch, so that equal pairs are judged once and a costly gold answer costs little.

``second_opinion`` has a stricter and a more lenient rule to check ``MathReward`` against.
"""
