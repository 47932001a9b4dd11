"""The HTTP server of a trained policy: chat, completions, reward scores and evaluation, in LitServe's worker processes.

- Start and end: ``settings`` (options), ``app`` (routes), ``server`` (HTTP thread and workers), ``litserve_adapter``.
- Before a route: ``protocol`` (connections, headers, time), ``middleware`` (length, key, body, sender), ``login``,
  ``json_body`` (JSON and its size), ``fields`` and ``schemas`` (fields), ``errors``.
- Routes: ``completions`` (chat, completions), ``responses``, ``tokens``, ``scoring``, ``evaluation``, ``weights``,
  ``pages``, ``metrics``.
- Prompts: ``messages``, ``conversations``, ``prompts``. Answers: ``answers``, ``call_reader``, ``json_response``,
  ``streaming``.
- To the workers and back: ``worker_client``, ``admission``, ``generator``; ``worker_channel`` has the messages.
- In the workers: ``generate_worker``, ``versions``, ``grammars``; ``score_worker``.
"""
