"""What all APIs share that ask the engine for text: fields of requests, ids of answers, the run itself, token counts.

Knows no API's shapes: OpenAI's and Anthropic's stand above it and do not know each other.
"""
