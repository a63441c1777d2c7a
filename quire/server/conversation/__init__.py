"""The conversion core of all conversational endpoints: a Conversation in, events of its answer out.

Knows templates, formats and grammars; knows no endpoint's JSON. Chat, Responses and Messages translate between their
own shapes and this one, and none of them reads a model's output itself.
"""
