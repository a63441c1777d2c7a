"""Splits what a model says into text, reasoning and tool calls; knows strings, neither tokens' ids nor requests.

detect(chat_template) -> Detected(tool_format, reasoning_format, why)          # detect.py
needs_special_tokens(tool_format, reasoning_format) -> bool                    # stream.py
make_parser(tool_format, reasoning_format, prompt_text=..., tools=...)         # stream.py
new_call_id(tool_format, name, index) -> str                                   # stream.py
grammar_for(tool_format, tools, tool_choice=..., parallel=..., reasoning_format=..., reasoning_open=..., answer=...,
            special_tokens={text: id}) -> llguidance grammar                   # grammar.py
reasoning_is_open(reasoning_format, prompt_text, special_tokens) -> bool       # stream.py
"""
