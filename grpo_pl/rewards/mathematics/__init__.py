"""Is an answer the same mathematics as the gold one?"""
