"""What a reader of the algorithm never needs: doctor, memory plan, new tasks, watch for reward hacking, comparisons."""
