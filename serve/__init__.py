"""The LitServe application: chat, completions, reward scores and evaluation of a trained policy over HTTP."""
