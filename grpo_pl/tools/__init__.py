"""Tools around training: doctor, memory plan, new tasks, watch for reward hacking, live view, comparisons."""
