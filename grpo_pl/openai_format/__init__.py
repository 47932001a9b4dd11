"""The format of OpenAI's API: messages, tools, checks of requests, answers and stream chunks, without a server."""
