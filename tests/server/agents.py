"""Requests of coding agents and of an agent library, in the form in which they send them.

Written by hand from what Codex 0.171, Claude Code 2.1 and openai-agents 0.20 send to a server of
their own choice; prompts and descriptions are shortened. Each is a conversation turn by turn.
"""

from __future__ import annotations


def _object(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT = {"type": "string"}

# --- Codex: /v1/responses, streamed, nothing stored ----------------------------------------------


def _codex_tool(name, description, parameters):
    return {
        "type": "function",
        "name": name,
        "description": description,
        "strict": False,
        "parameters": parameters,
    }


CODEX_TOOLS = [
    _codex_tool(
        "exec_command",
        "Runs a command in a PTY.",
        _object(["cmd"], cmd=TEXT, workdir=TEXT, yield_time_ms={"type": "number"}),
    ),
    _codex_tool(
        "write_stdin",
        "Writes characters to an existing session.",
        _object(["session_id"], session_id={"type": "number"}, chars=TEXT),
    ),
    _codex_tool("view_image", "View a local image file.", _object(["path"], path=TEXT)),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Use the `apply_patch` tool to edit files.",
        "format": {
            "type": "grammar",
            "syntax": "lark",
            "definition": 'start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?\nhunk: /.+/ LF\n',
        },
    },
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Tools for spawning and managing sub-agents.",
        "tools": [
            _codex_tool("spawn_agent", "Spawn an agent.", _object(["message"], message=TEXT)),
            _codex_tool("wait_agent", "Wait for agents.", _object(["ids"], ids={"type": "array"})),
        ],
    },
    {
        "type": "namespace",
        "name": "mcp__files__",
        "description": "Files of the team.",
        "tools": [_codex_tool("lookup", "Look up a file.", _object(["name"], name=TEXT))],
    },
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": True},
]
CODEX = {
    "model": "tiny",
    "instructions": "You are Codex, based on a large language model.",
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2236f-a913-7812-8521-49e3e6b10c6b",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "d57384ef"},
}


def _codex_said(role, text, kind="input_text"):
    content = [{"type": kind, "text": text}]
    return {"type": "message", "id": f"msg_{len(text)}", "role": role, "content": content}


CODEX_HEAD = [
    _codex_said("developer", "<permissions instructions>Commands need no approval."),
    _codex_said("developer", "<skills_instructions>There are none."),
    _codex_said("user", "<environment_context><cwd>/work</cwd></environment_context>"),
    _codex_said("user", "say hello in a file"),
]
CODEX_CALLS = [
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "first look around"}],
        "encrypted_content": None,
    },
    {**_codex_said("assistant", "Looking.", "output_text"), "phase": "commentary"},
    {
        "type": "function_call",
        "status": "completed",
        "id": "fc_1",
        "name": "exec_command",
        "arguments": '{"cmd":"ls"}',
        "call_id": "call_1",
    },
    {
        "type": "function_call",
        "id": "fc_2",
        "name": "spawn_agent",
        "namespace": "multi_agent_v1",
        "arguments": '{"message":"watch',
        "call_id": "call_2",
    },
    {"type": "function_call_output", "call_id": "call_1", "output": "Output:\na.txt\n"},
    {
        "type": "function_call_output",
        "call_id": "call_2",
        "output": [{"type": "input_text", "text": "failed to parse"}],
    },
]
CODEX_PATCH = [
    {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "status": "completed",
        "call_id": "call_3",
        "name": "apply_patch",
        "input": "*** Begin Patch\n*** Add File: b.txt\n+hello\n*** End Patch",
    },
    {"type": "custom_tool_call_output", "call_id": "call_3", "output": "Success."},
    {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "call_4",
        "status": "completed",
        "action": {"type": "exec", "command": ["cat", "b.txt"], "env": {}},
    },
    {"type": "local_shell_call_output", "id": "call_4", "output": '{"output":"hello"}'},
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "hello"},
    },
    {
        "type": "tool_search_call",
        "call_id": "call_5",
        "execution": "client",
        "arguments": {"query": "files"},
    },
    {
        "type": "tool_search_output",
        "call_id": "call_5",
        "execution": "client",
        "status": "completed",
        "tools": [CODEX_TOOLS[5]],
    },
    {**_codex_said("assistant", "Done.", "output_text"), "phase": "final_answer"},
    _codex_said("user", "thanks, and now?"),
]
CODEX_TURNS = [
    {**CODEX, "input": CODEX_HEAD},
    {**CODEX, "input": [*CODEX_HEAD, *CODEX_CALLS]},
    {**CODEX, "input": [*CODEX_HEAD, *CODEX_CALLS, *CODEX_PATCH]},
]

# --- Claude Code: /v1/messages, streamed ---------------------------------------------------------

EPHEMERAL = {"type": "ephemeral"}


def _claude_tool(name, about, /, **properties):
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_object((), **properties),
    }
    return {"name": name, "description": about, "input_schema": schema}


CLAUDE = {
    "model": "tiny",
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.123;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
        {
            "type": "text",
            "text": "\nYou help with software engineering.",
            "cache_control": {**EPHEMERAL, "ttl": "1h"},
        },
    ],
    "tools": [
        _claude_tool("Bash", "Executes a command.", command=TEXT, description=TEXT),
        _claude_tool("Read", "Reads a file.", file_path=TEXT, limit={"type": "integer"}),
        {**_claude_tool("WebFetch", "Fetches a page.", url=TEXT), "defer_loading": True},
        _claude_tool("ToolSearch", "Finds tools.", query=TEXT),
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": '{"device_id":"5bb5","session_id":"189c"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CLAUDE_HEAD = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "<system-reminder>\nToday is a day.\n</system-reminder>\n\n"},
            {"type": "text", "text": "say hello"},
        ],
    },
    {"role": "system", "content": "Available agent types: claude, Explore."},
]
CLAUDE_CALLS = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "look at it", "signature": "milepost"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"file_path": "/a"}},
            {"type": "tool_use", "id": "toolu_3", "name": "ToolSearch", "input": {"query": "web"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "content": "<tool_use_error>no such file</tool_use_error>",
                "is_error": True,
            },
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "a.txt"}, {"type": "text", "text": "b.txt"}],
            },
            {
                "type": "tool_result",
                "tool_use_id": "toolu_3",
                "content": [{"type": "tool_reference", "tool_name": "WebFetch"}],
                "cache_control": EPHEMERAL,
            },
        ],
    },
]
CLAUDE_SEARCH = [
    {
        "role": "assistant",
        "content": [
            {"type": "redacted_thinking", "data": "EmwKAhgB"},
            {
                "type": "server_tool_use",
                "id": "srvtoolu_1",
                "name": "web_search",
                "input": {"query": "hello"},
            },
            {
                "type": "web_search_tool_result",
                "tool_use_id": "srvtoolu_1",
                "content": [{"type": "web_search_result", "url": "http://a", "title": "greetings"}],
            },
            {"type": "text", "text": "Hello it is."},
        ],
    },
    {"role": "user", "content": [{"type": "text", "text": "and now?", "cache_control": EPHEMERAL}]},
]
CLAUDE_TURNS = [
    {**CLAUDE, "messages": CLAUDE_HEAD},
    {**CLAUDE, "messages": [*CLAUDE_HEAD, *CLAUDE_CALLS]},
    {**CLAUDE, "messages": [*CLAUDE_HEAD, *CLAUDE_CALLS, *CLAUDE_SEARCH]},
]

# --- openai-agents: an agent with a tool, a handoff and an output type ---------------------------

WEATHER = _object(["city", "days"], city=TEXT, days={"default": 1, "type": "integer"})
HANDOFF = "Handoff to the Refunds agent to handle the request."
OUTPUT = _object(["ok"], ok={"type": "boolean"})
AGENTS_FUNCTIONS = [
    {"name": "get_weather", "description": "Tells the weather.", "parameters": WEATHER},
    {"name": "transfer_to_refunds", "description": HANDOFF, "parameters": _object()},
]
AGENTS_RESPONSES = {
    "model": "tiny",
    "include": [],
    "instructions": "Be brief.",
    "text": {
        "format": {"type": "json_schema", "name": "final_output", "schema": OUTPUT, "strict": True}
    },
    "tools": [
        {"type": "function", "strict": True, **AGENTS_FUNCTIONS[0]},
        {"type": "web_search", "filters": None, "search_context_size": "medium"},
        {"type": "function", "strict": True, **AGENTS_FUNCTIONS[1]},
    ],
}
AGENTS_ITEMS = [
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"text": "ask", "type": "reasoning_text"}],
        "status": "completed",
    },
    *(
        {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": f"call_{number}",
            "name": "get_weather",
            "arguments": f'{{"city": "{city}", "days": 1}}',
            "status": "completed",
        }
        for number, city in enumerate(("Bern", "Uster"))
    ),
    {"type": "function_call_output", "call_id": "call_0", "output": "sunny"},
    {"type": "function_call_output", "call_id": "call_1", "output": "cloudy"},
]
AGENTS_ASK = {"role": "user", "content": "what is the weather?"}
AGENTS_RESPONSES_TURNS = [
    {**AGENTS_RESPONSES, "input": [AGENTS_ASK]},
    {**AGENTS_RESPONSES, "input": [AGENTS_ASK, *AGENTS_ITEMS]},
]
AGENTS_CHAT = {
    "model": "tiny",
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "final_output", "strict": True, "schema": OUTPUT},
    },
    "tools": [{"type": "function", "function": {**f, "strict": True}} for f in AGENTS_FUNCTIONS],
}
AGENTS_MESSAGES = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "arguments": f'{{"city": "{city}", "days": 1}}',
                },
            }
            for number, city in enumerate(("Bern", "Uster"))
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_1", "content": "cloudy"},
]
AGENTS_CHAT_HEAD = [{"role": "system", "content": "Be brief."}, AGENTS_ASK]
AGENTS_CHAT_TURNS = [
    {**AGENTS_CHAT, "messages": AGENTS_CHAT_HEAD},
    {**AGENTS_CHAT, "messages": [*AGENTS_CHAT_HEAD, *AGENTS_MESSAGES]},
]
